"""The command line: output streams, exit codes and imports; and the public names of the package."""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import shardconv
from shardconv.checkpoint.engine.copy import CopyJob
from shardconv.support import console, exits
from tests.support.checkpoints import contents, llama_config, write_checkpoint
from tests.support.command import ENVIRONMENT, call, finish, run, start
from tests.support.matrix import cases, each_once

COMMANDS = ["split", "merge", "reshard", "verify", "plan"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "tiny", config=llama_config(layers=1))
    shardconv.split(folder / "tiny", folder / "tiny-tp2", tp=2)
    return folder


@pytest.fixture
def commands(made, tmp_path, monkeypatch) -> dict[str, list[str]]:
    """Command to a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    source, parts = str(made / "tiny"), str(made / "tiny-tp2")
    return {
        "split": ["split", source, "--tp", "2"],
        "merge": ["merge", parts],
        "reshard": ["reshard", parts, "--tp", "4"],
        "verify": ["verify", parts],
        "plan": ["plan", source, "--tp", "2"],
    }


each_command = pytest.mark.parametrize("command", COMMANDS)
WRITING = ["split", "merge", "reshard"]
each_writing_command = pytest.mark.parametrize("command", WRITING)


# --- results --------------------------------------------------------------------------------------------------------


def test_failed_verification(commands):
    """The exit code shows the failure; the object has the differences, which are printed also with -q."""
    write_checkpoint(Path("other"), config=llama_config(layers=1), seed=1)
    result, quiet = (call(*commands["verify"], "--against", "other", option) for option in ("--json", "-q"))
    assert (result.code, bool(json.loads(result.out)["differences"])) == (3, True)
    assert (quiet.code, quiet.out, "differs: " in quiet.err) == (3, "", True)


@each_command
@pytest.mark.parametrize("option", ["-q", "--quiet"])
def test_quiet_prints_nothing(commands, command, option):
    """Results go to stdout otherwise."""
    result = call(*commands[command])
    assert (result.code, result.err, "12 tensors" in result.out) == (0, "", True)
    again = [*commands[command], *["--overwrite"] * (command in WRITING)]
    assert call(*again, option) == (0, "", "")
    assert json.loads(call(*again, option, "--json").out)


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("command", [["plan"], ["split", "--tp", 1, "-o", "split"]], ids=["plan", "split"])
def test_quiet_keeps_assumptions(made, command):
    """They are on stderr, once."""
    bare = shutil.copyfile(made / "tiny" / "model.safetensors", "bare.safetensors")
    name, *options = command
    quiet = call(name, bare, *options, "-q")
    loud = call(name, bare, *options, *(["--overwrite"] if name == "split" else []))
    assert (quiet.code, quiet.out) == (0, "")
    assert [line for line in loud.out.splitlines() if line.startswith("assumed: ")] == quiet.err.splitlines() != []


@pytest.mark.usefixtures("commands")
def test_quiet_prints_nothing_about_checksums_that_are_not_requested(made):
    assert call("split", made / "tiny", "--tp", 2, "-o", "unchecked", "--no-checksums", "-q") == (0, "", "")


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("command", [["merge", "-o", "merged"], ["verify"]], ids=["merge", "verify"])
def test_quiet_keeps_the_warning_of_skipped_checks(made, command):
    shardconv.split(made / "tiny", "unchecked", tp=2, checksums=False)
    name, *options = command
    assert "no checksums" in call(name, "unchecked", *options, "-q").err


@each_writing_command
def test_dry_run_writes_nothing(commands, tmp_path, command):
    """Its report is what the command would print. If the destination exists, a line names the option."""
    dry, shown = (call(*commands[command], "--dry-run", *options) for options in (["--json"], []))
    assert (dry.code, dry.err, shown.code, shown.err) == (0, "", 0, "")
    assert "would be written" in shown.out
    assert list(tmp_path.iterdir()) == []
    wet = json.loads(call(*commands[command], "--json").out)
    assert {**json.loads(dry.out), "seconds": 0} == {**wet, "seconds": 0, "dry_run": True}
    before = contents(tmp_path)
    for options, text in (([], "--overwrite would be needed"), (["--overwrite"], "it would be replaced")):
        again = json.loads(call(*commands[command], "--dry-run", *options, "--json").out)
        assert again == {**wet, "seconds": again["seconds"], "dry_run": True, "destination_exists": True}
        assert f"{wet['path']} exists: {text}" in call(*commands[command], "--dry-run", *options).out.splitlines()
    assert contents(tmp_path) == before


@each_writing_command
def test_overwrite_is_reported(commands, command):
    assert call(*commands[command]).code == 0
    refused = call(*commands[command])
    assert (refused.code, "exists: choose another path" in refused.err) == (1, True)
    assert json.loads(call(*commands[command], "--overwrite", "--json").out)["destination_exists"] is True


@pytest.mark.parametrize(
    ("command", "source", "name"),
    [
        (["split", "--tp", "2"], "tiny", "tiny-tp2"),
        (["split", "--tp", "2"], "tiny/model.safetensors", "model-tp2"),
        (["merge"], "tiny-tp2", "tiny-merged"),
        (["reshard", "--tp", "4"], "tiny-tp2", "tiny-tp4"),
    ],
)
def test_default_names(made, commands, tmp_path, command, source, name):
    result = call(*command, made / source, "--json")
    assert json.loads(result.out)["path"] == name
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_default_name_of_a_merge_into_a_file(made, commands, tmp_path):
    assert call("split", made / "tiny" / "model.safetensors", "--tp", "2").code == 0
    assert call("merge", "model-tp2").code == 0
    merged = tmp_path / "model-merged.safetensors"
    assert merged.read_bytes() == (made / "tiny" / "model.safetensors").read_bytes()


def test_default_name_from_inside_the_folder(made, tmp_path, monkeypatch):
    shardconv.split(made / "tiny", tmp_path / "here-tp2", tp=2)
    monkeypatch.chdir(tmp_path / "here-tp2")
    assert json.loads(call("merge", ".", "--json", "--dry-run", "-o", "../x").out)["path"] == "../x"
    refused = call("merge", ".")
    assert "here-merged: is in the source" in refused.err
    assert refused.code == 2


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "shardconv plan SRC"),
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["split"], 2, "Missing argument 'SRC'"),
        (["split", "x"], 2, "--tp is missing: shardconv plan SRC lists the supported sizes"),
        (["split", "x", "--tp", "0"], 2, "Invalid value for '--tp': got '0', expected an integer from 1"),
        (["split", "x", "--tp", "two"], 2, "Invalid value for '--tp': got 'two', expected an integer from 1"),
        (["run", "x", "--temperature", "-1"], 2, "'--temperature': got '-1', expected a number from 0"),
        (["plan", "x", "--alpha", "nan"], 2, "'--alpha': got 'nan', expected a number from 0 to 1e+09"),
        (["split", "x", "--tp", "2", "--dtype", "bfloat16"], 2, "'bfloat16' is not one of 'bf16', 'fp16', 'fp32'"),
        (["split", "x", "--tp", "2", "--treads", "1"], 2, "No such option"),
        (["verify"], 2, "Missing argument 'DIR...'"),
        (["split", "x", "--tp", "2", "-q"], 1, "x: does not exist"),
    ],
)
def test_errors_go_to_stderr(commands, arguments, code, message):
    result = call(*arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("split tiny --tp 5000", "--tp is 5000 (expected"),
        ("split tiny --tp 2 --replicate lm_haed", "--replicate lm_haed matches no tensor"),
        ("split tiny --tp 2 --replicate [", "--replicate '['"),
        ("split tiny --tp 2 -o tiny", "tiny: is the source"),
        ("split tiny --tp 2 -o tiny/out", "tiny/out: is in the source"),
        ("split tiny --tp 2 -o .", "contains the source"),
        ("verify tiny-tp2 --follow-links", "--follow-links requires --against"),
        ("verify tiny-tp2 tiny-tp2", "tiny-tp2: is given twice"),
        ("verify tiny-tp2 tiny --engine vllm", "--engine checks one folder with all ranks (got 2 folders)"),
        ("split tiny --tp 2 --layout sharded_state", "'megatron' (vLLM's sharded_state is --layout vllm)"),
        ("merge tiny-tp2 -o out.bin", "out.bin: has the suffix of a weight file that merge does not write (got .bin"),
        ("merge tiny-tp2 -o out.gguf", "(got .gguf, expected .safetensors for one file, or a folder): change -o"),
        ("split tiny out --tp 2", "unexpected extra argument (out): for the output pass -o PATH"),
        ("pad tiny out --multiple-of tp=2", "unexpected extra argument (out): for the output pass -o PATH"),
        ("plan tiny out", "unexpected extra argument (out)\nUsage: "),
        ("run tiny-tp2 other", "unexpected extra argument (other): run takes one folder"),
    ],
)
def test_wrong_options_exit_with_2(made, tmp_path, monkeypatch, command, message):
    shutil.copytree(made / "tiny", tmp_path / "tiny")
    shardconv.split(tmp_path / "tiny", tmp_path / "tiny-tp2", tp=2)
    monkeypatch.chdir(tmp_path)
    result = call(*command.split())
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny", "tiny-tp2"]


@pytest.mark.parametrize(
    ("option", "proposed"),
    [
        ("--overwrit", ["--overwrite"]),
        ("--tps", ["--tp"]),
        ("--quite", ["--quiet"]),
        ("--check", ["--check-model", "--checksums"]),
        ("--no", ["--no-checksums"]),
        ("--output-dir", ["--output"]),
        ("--modl", []),
        ("--xyz", []),
        ("-z", []),
        ("-tp", ["--tp"]),
        ("-overwrite", ["--overwrite"]),  # to click, -o verwrite
        ("--tensor-parallel-size", ["--tp"]),
        ("--pp-size", ["--pp"]),
    ],
)
def test_unknown_option_proposes_the_nearest_ones(option, proposed):
    result = call("split", "x", "--tp", 2, option, "1")
    assert result.code == 2
    named = re.findall(r"(?<=[ '(])--?[\w-]+", result.err.splitlines()[0])  # click 8.2 does not quote them
    assert named == [option, *proposed]


def test_path_after_two_dashes_may_look_like_an_option():
    assert "-overwrite: does not exist" in call("split", "--tp", 2, "--", "-overwrite").err


def test_path_may_have_the_name_of_an_option():
    assert "q: does not exist" in call("split", "q", "--tp", 2).err
    assert "tp: does not exist" in call("split", "tp", "--tp", 2).err


def test_value_may_look_like_an_option_with_one_dash():
    assert "x: does not exist" in call("run", "x", "--prompt", "-prompt").err


def raising(error: BaseException):
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted; nothing was left behind"),
        (exits.Terminated(), 143, "terminated; nothing was left behind"),
        (MemoryError(), 1, "there is not enough memory"),
        (RuntimeError("boo"), 1, "internal error: RuntimeError: boo (--debug shows the traceback; please report it)"),
    ],
)
@each_writing_command
def test_exit_codes(commands, tmp_path, monkeypatch, command, error, code, message):
    monkeypatch.setattr(CopyJob, "copy_stripe", raising(error))
    result = call(*commands[command])
    assert (result.code, result.out) == (code, "")
    assert result.err.strip() == f"shardconv: {message}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", cases([["split", "x", "--tp", "2"], ["merge", "x"]], lambda arguments: "merge" in arguments)
)
def test_only_debug_shows_the_traceback(commands, arguments):
    plain, debug = run(*arguments), run(*arguments, "--debug")
    assert "Traceback" not in plain.err
    assert debug.err.startswith("Traceback")
    assert plain.err.removeprefix("shardconv: ").strip() in debug.err
    assert plain.code == debug.code == 1


def test_version():
    assert call("--version") == (0, f"shardconv {shardconv.__version__}\n", "")


# --- appearance -----------------------------------------------------------------------------------------------------


def test_progress_without_a_terminal(commands, monkeypatch):
    """Lines on stderr, at intervals."""
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    result = call(*commands["split"], "--json")
    lines = result.err.splitlines()
    assert lines
    shape = r"split: \d+(\.\d+)? k?B of \d+(\.\d+)? kB, \S+ [kMGT]?B/s, \d+ s left"
    assert all(re.fullmatch(shape, line) for line in lines), lines
    assert json.loads(result.out)


def on_a_terminal(
    arguments: list[str], *, stream: str = "stdout", columns: int = 80, patch: str = "", **environment
) -> str:
    """Run a command with a terminal of this width as one of its streams; returns the text on it."""
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, columns))
    process = start(*arguments, patch=patch, env={"TERM": "dumb", "COLUMNS": "", **environment}, **{stream: end})
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # the other end of the terminal is closed
        while data := os.read(terminal, 2**16):
            shown += data
    os.close(terminal)
    assert finish(process).code == 0
    return shown.decode().replace("\r\n", "\n")


#: How a bar is shown, without a delay.
BAR = {
    "stream": "stderr",
    "patch": "import shardconv.support.console; shardconv.support.console.BAR_SECONDS = 0",
    "TERM": "xterm-256color",
}
COLOR = re.compile(r"\x1b\[(?:\d+;)*(?:[349]\d|10[0-7])[;\d]*m")


@pytest.mark.parametrize(("command", "has_color"), each_once(WRITING, [True, False]))
def test_bar_on_a_terminal(commands, command, has_color):
    shown = on_a_terminal(commands[command], **BAR, **({} if has_color else {"NO_COLOR": "1"}))
    assert command in shown
    assert (COLOR.search(shown) is not None) == has_color


@pytest.mark.parametrize("command", cases(COMMANDS, lambda command: command in {"split", "verify"}))
def test_no_bar_when_quiet(commands, command):
    assert on_a_terminal([*commands[command], "-q"], **BAR) == ""


def test_table_fits_a_narrow_terminal(commands):
    """Every cell is there, below the name of its tensor."""
    narrow = on_a_terminal(commands["plan"]).partition("\n\n")[2]
    wide = call(*commands["plan"]).out.partition("\n\n")[2]
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    rows = [re.split("  +", line) for line in wide.splitlines()[1:]]
    words = " ".join(narrow.split())
    for name, *cells in rows:
        assert f"{name} count {cells[0]}, dtype {cells[1]}, shape {cells[2]}, shard {cells[3]}," in words
        assert cells[-1] in words


def test_reasons_go_below_the_rows_at_110_columns(commands):
    shown = on_a_terminal(commands["plan"], columns=110).partition("\n\n")[2].splitlines()
    wide = [re.split("  +", line) for line in call(*commands["plan"]).out.partition("\n\n")[2].splitlines()]
    assert max(map(len, shown)) <= 110
    assert re.split("  +", shown[0]) == wide[0][:-1]
    for *cells, reason in wide[1:]:
        at = next(number for number, line in enumerate(shown) if re.split("  +", line) == cells)
        below = itertools.takewhile(lambda line: line.startswith("  "), shown[at + 1 :])
        assert " ".join(line.strip() for line in below) == reason


@pytest.mark.parametrize("has_color", [True, False])
def test_table_has_color_on_a_terminal(commands, has_color):
    settings = {"TERM": "xterm-256color"} | ({} if has_color else {"NO_COLOR": "1"})
    assert (COLOR.search(on_a_terminal(commands["plan"], columns=110, **settings)) is not None) == has_color


def test_table_on_a_wide_terminal(commands):
    wide = on_a_terminal(commands["plan"], columns=300)
    assert wide.splitlines() == [line.rstrip() for line in call(*commands["plan"]).out.splitlines()]


def test_narrow_pipes_do_not_truncate_the_table(commands):
    shown = run(*commands["plan"], env={"COLUMNS": "20"}).out
    assert "model.layers.*.self_attn.q_proj.weight" in shown


@pytest.mark.parametrize("options", cases([[], ["--json"], ["--all"]], lambda options: options != ["--all"]))
def test_closed_pipe(commands, options):
    """As after ``| head -1``: no traceback and no message."""
    reading, writing = os.pipe()
    process = start(*commands["plan"], *options, stdout=writing)
    os.close(reading)
    os.close(writing)
    err = finish(process).err
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize(("command", "number"), each_once(COMMANDS, [0, 1, 2]))
def test_closed_stream(commands, tmp_path, command, number):
    """As after ``>&-``: the stream is replaced by the null device, so that no file gets its descriptor."""
    patch = (
        f"import os; os.close({number}); os.execv(sys.executable, [sys.executable, '-m', 'shardconv', *sys.argv[1:]])"
    )
    result = finish(start(*commands[command], patch=f"import sys; {patch}"))
    assert result.code == 0, result
    assert "internal error" not in result.err
    assert ("12 tensors" in result.out) == (number != 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="requires /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_result_that_cannot_be_written(commands, options):
    with Path("/dev/full").open("w") as full:
        result = run(*commands["verify"], *options, stdout=full)
    assert (result.code, result.err) == (1, "shardconv: standard output: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="requires /dev/full")
@pytest.mark.parametrize("streams", [("stderr",), ("stdout", "stderr")])
def test_message_that_cannot_be_written(tmp_path, streams):
    with Path("/dev/full").open("w") as full:
        result = run("plan", tmp_path / "missing", **dict.fromkeys(streams, full))
    assert (result.code, result.out or "") == (1, "")


# --- imports --------------------------------------------------------------------------------------------------------

HEAVY = {"asyncio", "torch", "transformers", "safetensors", "numpy", "rich", "xxhash"}


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ("--help", set()),
        ("--version", set()),
        ("split", {"numpy", "xxhash"}),
        ("merge", {"numpy", "xxhash"}),
        ("reshard", {"numpy", "xxhash"}),
        ("verify", {"numpy", "xxhash"}),
        ("plan", {"numpy", "xxhash"}),
    ],
)
def test_imports_are_light(commands, command, allowed):
    patch = f"""
import atexit, sys
heavy = {sorted(HEAVY)!r}
atexit.register(lambda: print("imported", *(name for name in heavy if name in sys.modules), file=sys.stderr))
"""
    result = run(*commands.get(command, [command]), patch=patch)
    assert result.code == 0
    imported = set(result.err.split()) - {"imported"}
    assert result.err.startswith("imported")
    assert imported <= allowed


@pytest.mark.parametrize("command", ["split missing --tp 2", "plan missing", "verify missing"])
def test_error_in_the_environment_of_a_rank_needs_no_torch(tmp_path, command):
    """Schedulers set RANK and WORLD_SIZE for single processes, too."""
    environment = {"RANK": "0", "WORLD_SIZE": "1"}
    without_torch = "import sys; sys.modules['torch'] = None"
    result = run(*command.split(), patch=without_torch, env=environment, cwd=tmp_path)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("shardconv: missing: does not exist")
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: does not exist"),
        (["."], ".: is not a split checkpoint (no shardconv.json)"),
        (["tiny", "--tp", "3"], "is not a multiple of"),
        (["tiny-tp2", "--adapter", "nowhere"], "nowhere: does not exist (adapters of tiny-tp2: none)"),
    ],
)
def test_run_finds_a_wrong_path_without_torch(made, arguments, message):
    without_torch = "import sys; sys.modules['torch'] = None"
    result = run("run", *arguments, "--prompt", "x", patch=without_torch, cwd=made)
    assert (result.code, result.out) == (1, "")
    assert message in result.err


def test_importing_the_package_imports_no_modules_of_it():
    code = "import sys, shardconv; print(*(name for name in sys.modules if name.startswith('shardconv')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stdout.split() == ["shardconv"]


def test_public_names_exist():
    names = shardconv.__all__
    assert names == sorted(set(names)) == dir(shardconv)
    assert [name for name in names if getattr(shardconv, name) is None] == []


def test_plan_is_a_package_that_names_the_functions():
    with pytest.raises(TypeError, match=r"shardconv.plan is a package: use shardconv.make_plan"):
        shardconv.plan("tiny", tp=2)


def test_representation_of_a_plan_is_short(made):
    assert repr(shardconv.make_plan(made / "tiny", tp=2)) == "Plan(tp=2, family='llama', 12 tensors)"


def test_unknown_name_of_the_package_is_an_error():
    with pytest.raises(AttributeError, match="attribute 'nonsense'"):
        _ = shardconv.nonsense
