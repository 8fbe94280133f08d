"""Interrupted runs that are continued with --resume: killed, interrupted, out of space, with other sources or options.

The result is that of an uninterrupted run, and stripes that were on the disk are not copied again.
"""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

import shardconv
from shardconv.checkpoint.engine.copy import CopyJob, Span
from shardconv.checkpoint.engine.shards import ShardReader, ShardWriter
from shardconv.checkpoint.output import job as job_module
from shardconv.checkpoint.output import staging
from shardconv.checkpoint.output.job import difference
from shardconv.commands import shared
from shardconv.support.errors import OutputError
from tests.support.checkpoints import contents, entries, llama_config, safetensors_bytes, write_checkpoint
from tests.support.command import Result, call, finish, start
from tests.support.damage import flip
from tests.support.faults import SLOW, STRIPE_MODULES, Job, beside, check_done, interrupt

pytestmark = pytest.mark.usefixtures("_small_stripes", "_sources_stay_as_they_are")

DATA = Path(__file__).parents[1] / "data"
STRIPE_BYTES, THREADS = 4096, 2
#: For what does not depend on the command.
OF_SPLIT = pytest.mark.parametrize("job", ["split"], indirect=True)

#: A slow disk and small stripes.
SLOW_STRIPES = f"""{SLOW}
import shardconv.checkpoint.engine.copy as engine
engine.STRIPE_BYTES = {STRIPE_BYTES}
"""


@pytest.fixture(scope="module", autouse=True)
def _small_stripes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in STRIPE_MODULES:
            patch.setattr(f"shardconv.checkpoint.{module}.STRIPE_BYTES", STRIPE_BYTES)
        yield


def journal_of(target: Path) -> Path:
    return target.parent / f".{target.name}.partial" / "journal"


def recorded(target: Path) -> set[int]:
    """The stripes of the complete records in a journal."""
    *lines, _ = journal_of(target).read_bytes().split(b"\n")
    return {json.loads(line)["stripe"] for line in lines[2:]}


class Counted:
    """The stripes and bytes that are copied while this context is open."""

    def __init__(self) -> None:
        self.stripes: set[int] = set()
        self.num_bytes = 0

    def __enter__(self) -> Self:
        put, lock = ShardWriter.put, threading.Lock()

        def counted(writer: ShardWriter, state: Any, span: Any, block: Any, scratch: Any) -> None:
            with lock:
                self.stripes.add(state.number)
                self.num_bytes += len(block)
            put(writer, state, span, block, scratch)

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(ShardWriter, "put", counted)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def resume(job: Job, target: Path) -> tuple[int, Counted]:
    """Continue a run, and check the result; returns the bytes that it kept, and what it copied."""
    with Counted() as copied:
        result = job.call(target, "--resume", "--json")
    check_done(result, job, target)
    return json.loads(result.out)["resumed_bytes"], copied


# --- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "number", "code", "message"),
    [
        ([], signal.SIGKILL, -signal.SIGKILL, ""),
        (["--resume"], signal.SIGKILL, -signal.SIGKILL, ""),
        (["--resume"], signal.SIGINT, 130, "interrupted; finished stripes are kept in "),
        (["--resume"], signal.SIGTERM, 143, "terminated; finished stripes are kept in "),
    ],
)
@OF_SPLIT
def test_signalled(job, target, options, number, code, message):
    """Stripes on the disk are kept; those of a run without the option only if it is killed."""
    process = start(*job.arguments, "-o", target, "--threads", THREADS, *options, patch=SLOW_STRIPES)
    while process.poll() is None and not (journal_of(target).exists() and len(recorded(target)) > 2):
        time.sleep(0.001)
    process.send_signal(number)
    result = finish(process)
    assert result.code == code
    expected = f"shardconv: {message}{journal_of(target).parent}: run the same command again"
    assert expected in result.err if message else result.err == ""
    before = recorded(target)
    kept_bytes, copied = resume(job, target)
    assert kept_bytes > 0
    assert not before & copied.stripes


# --- errors ---------------------------------------------------------------------------------------------------------


def test_finished_stripes_are_kept_after_an_error(job, target):
    result = interrupt(job, target, 3)
    assert result.code == 1
    assert f"Input/output error; finished stripes are kept in {journal_of(target).parent}: run" in result.err
    assert result.err.count("\n") == 1
    before = recorded(target)
    kept_bytes, copied = resume(job, target)
    assert len(before) == 3
    assert not before & copied.stripes
    with Counted() as everything:
        job.function(job.source, target.with_name("again"))
    assert kept_bytes + copied.num_bytes == everything.num_bytes


@OF_SPLIT
@pytest.mark.parametrize(
    ("error", "options", "code", "message"),
    [
        (KeyboardInterrupt(), ["--resume"], 130, "interrupted; no stripe was finished, and nothing was left behind"),
        (KeyboardInterrupt(), [], 130, "interrupted; nothing was left behind"),
        (OSError(errno.EIO, "damaged"), ["--resume"], 1, ""),
    ],
    ids=["signal", "signal without the option", "error"],
)
def test_nothing_is_left_before_the_first_stripe(job, target, monkeypatch, error, options, code, message):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(ShardWriter, "put", fail)
    result = job.call(target, *options)
    assert result.code == code
    assert result.err.strip().startswith(f"shardconv: {message}")
    assert beside(target) == []


def test_a_run_without_the_option_starts_over(job, target):
    interrupt(job, target, 3)
    with Counted() as copied:
        check_done(job.call(target), job, target)
    assert 0 in copied.stripes


@OF_SPLIT
def test_text_says_what_was_kept(job, target):
    assert "resumed" not in job.call(target).out
    assert "nothing to resume: all tensors were copied\n" in job.call(target.with_name("two"), "--resume").out
    shutil.rmtree(target)
    interrupt(job, target, 3)
    out = job.call(target, "--resume").out
    assert "resumed: 1" in out
    assert "kB were already written" in out


@OF_SPLIT
def test_progress_counts_stripes_that_are_kept(job, target):
    interrupt(job, target, 3)
    calls: list[tuple[int, int]] = []
    report = job.function(job.source, target, resume=True, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > report.resumed_bytes > 0


def test_full_disk(job, mount):
    """After room was made, the run continues."""
    size = sum(map(len, job.expected.values()))
    target = mount(int(size * 0.6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "check_room", lambda *_: None)
        result = job.call(target, "--resume", "--threads", "1")
    assert f"{target}: the disk is full: free some space; finished stripes are kept in" in result.err
    before = recorded(target)
    assert job.call(target, "--resume").err.startswith(f"shardconv: {target}: the disk has too little free space")
    subprocess.run(["mount", "-o", f"remount,size={size + 400_000}", target.parent], check=True)
    kept_bytes, copied = resume(job, target)
    assert kept_bytes > 0
    assert not before & copied.stripes


@OF_SPLIT
def test_room_that_kept_stripes_take_is_not_needed_again(job, mount):
    """Beside them, the disk is too small for a whole checkpoint."""
    size = sum(map(len, job.expected.values()))
    target = mount(2 * size)
    interrupt(job, target, 15)
    kept = sum(path.stat().st_blocks * 512 for path in journal_of(target).parent.rglob("*.safetensors"))
    free = shutil.disk_usage(target.parent).free
    with (target.parent / "other").open("wb") as file:
        file.write(bytes(free - size + kept // 2))
    assert shutil.disk_usage(target.parent).free < size
    result = job.call(target, "--resume")
    assert result.code == 0, result.err
    assert contents(target) == job.expected


@OF_SPLIT
def test_read_only_folder(job, mount):
    target = mount(2_000_000)
    interrupt(job, target, 3)
    before = contents(target.parent)
    subprocess.run(["mount", "-o", "remount,ro", target.parent], check=True)
    result = job.call(target, "--resume")
    assert (result.code, "Read-only file system" in result.err, result.err.count("\n")) == (1, True, 1)
    subprocess.run(["mount", "-o", "remount,rw", target.parent], check=True)
    assert contents(target.parent) == before
    resume(job, target)


# --- another job ----------------------------------------------------------------------------------------------------


def refused(job: Job, target: Path, message: str, *options: str) -> None:
    """Check that a run is not continued, that nothing is lost, and that it can be continued or started over."""
    before = contents(target.parent)
    result = job.call(target, "--resume", *options)
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert message in result.err
    assert "remove --resume to start over" in result.err
    assert contents(target.parent) == before


def of(jobs: str, before: str, options: str, message: str) -> Iterator[Any]:
    """Cases of one difference, for each of the jobs."""
    for job in jobs.split():
        yield pytest.param(job, before.split(), options.split(), message, id=f"{job} {before} / {options}")


OTHER_OPTIONS = [
    *of("split reshard", "", "--tp 8", "had --tp {tp} (got --tp 8): repeat its command with the same source, or"),
    *of("split reshard", "", "--layout vllm", "had --layout native (got --layout vllm)"),
    *of("split reshard", "", "--max-file-size 20kB", "did not have --max-file-size (got --max-file-size 20kB)"),
    *of("split reshard", "", "--for vllm", "did not have --for (got --for vllm)"),
    *of("split", "", "--dtype fp32", "did not have --dtype (got --dtype fp32)"),
    *of("split", "", "--replicate lm_head", "did not have --replicate (got --replicate lm_head)"),
    *of("split", "", "--rules llama", "did not have --rules (got --rules llama)"),
    *of("split", "", "--ranks 1-3", "did not have --ranks (got --ranks 1-3)"),
    *of("split", "--dtype fp32", "", "had --dtype fp32 (got none)"),
    *of("split", "--dtype fp32", "--dtype bf16", "had --dtype fp32 (got --dtype bf16)"),
    *of("split", "--ranks 0-1", "--ranks 2-3", "had --ranks 0,1 (got --ranks 2,3)"),
    *of("split", "--rules llama", "--rules olmo2", "had --rules llama (got --rules olmo2)"),
    *of("split", "--replicate lm_head --replicate *.norm", "", "had --replicate lm_head --replicate '*.norm' (got"),
    *of("split", "--max-file-size 20kB", "--max-file-size 1GB", "had --max-file-size 20kB (got --max-file-size 1GB)"),
    *of("split", "--head-dim 8", "", "had --head-dim 8 (got none)"),
]


@pytest.mark.parametrize(("job", "before", "options", "message"), OTHER_OPTIONS, indirect=["job"])
def test_other_options(job, target, before, options, message):
    interrupt(job._replace(arguments=[*job.arguments, *before]), target, 3)
    refused(job, target, f"the interrupted run {message.format(tp=job.arguments[-1])}", *options)


@OF_SPLIT
def test_plan_file_that_changed(job, tmp_path, target):
    file = tmp_path / "plan.toml"
    file.write_text('[rules]\n"lm_head" = { style = "replicate" }\n')
    job = job._replace(arguments=[*job.arguments, "--rules", str(file)])
    interrupt(job, target, 3)
    file.write_text('[rules]\n"lm_head" = { style = "replicate" }\n"model.norm" = { style = "replicate" }\n')
    refused(job, target, "the plan file 'plan.toml' of --rules is not as in the interrupted run: repeat its command")


def test_other_multiple(others, target):
    job, other = (
        Job(["pad", str(others / "odd"), "--no-check-model", "--multiple-of", text], shardconv.pad, others / "odd", {})
        for text in ("tp=4", "tp=8")
    )
    interrupt(job, target, 3)
    refused(other, target, "the interrupted run had --multiple-of tp=4 (got --multiple-of tp=8)")


@OF_SPLIT
def test_message_in_python_names_arguments(job, target):
    interrupt(job._replace(arguments=[*job.arguments, "--max-file-size", "20kB"]), target, 3)
    with pytest.raises(OutputError) as caught:
        job.function(job.source, target, resume=True, dtype="fp32")
    assert 'did not have dtype (got dtype="fp32")' in str(caught.value)
    with pytest.raises(OutputError) as caught:
        job.function(job.source, target, resume=True)
    assert 'had max_file_size="20kB" (got none)' in str(caught.value)


def test_another_command(made, target):
    split = Job(["split", str(made / "source"), "--tp", "2"], shardconv.split, made / "source", {})
    interrupt(split, target, 3)
    reshard = Job(["reshard", str(made / "split"), "--tp", "2"], shardconv.reshard, made / "split", {})
    refused(reshard, target, "another command (got reshard, expected split)")


def test_another_source(job, tmp_path, target):
    """With equal names, sizes, times and contents."""
    interrupt(job, target, 3)
    other = job.on(shutil.copytree(job.source, tmp_path / "copy"))
    refused(other, target, f"the interrupted run read {job.source}/")
    resume(job, target)


@pytest.mark.parametrize("job", ["merge", "reshard"], indirect=True)
@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 4, "dtype": "fp32"}, {"tp": 4, "layout": "vllm"}], ids=str)
def test_source_that_was_split_again_is_not_named_as_an_option(job, made, tmp_path, target, options):
    """``merge`` does not have options for what the manifests of its sources differ in."""
    source = tmp_path / "source"
    shardconv.split(made / "source", source, tp=4, dtype="bf16")
    job = job.on(source)
    interrupt(job, target, 3)
    shardconv.split(made / "source", source, overwrite=True, **options)
    result = job.call(target, "--resume")
    assert (result.code, re.findall(r"--[a-z-]+", result.err)) == (1, ["--resume"])
    assert f"{source}/" in result.err


@pytest.mark.parametrize("command", ["merge", "unpad"])
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({"tp": 2}, {"tp": 4}, "has another tp (got 4, expected 2)"),
        ({"dtype": None}, {"dtype": "fp32"}, "has another dtype (got fp32, expected None)"),
        ({"head_dim": 8}, {"head_dim": 16}, "has another head_dim (got 16, expected 8)"),
        ({"pad": 0}, {"pad": 1}, "has another pad (got 1, expected 0)"),
        ({"tp": 2, "source": {"/a": "1 B"}}, {"tp": 4, "source": {"/b": "1 B"}}, "read /a (got /b)"),
    ],
)
def test_settings_without_an_option_of_the_command(command, old, new, message):
    job = {"command": command}
    assert difference(job | old, job | new) == f"the interrupted run {message}"


def touch(path: Path) -> None:
    os.utime(path, (1, 1))


@pytest.mark.parametrize("change", [touch, lambda path: path.chmod(0o600)])
def test_source_that_changed(job, tmp_path, target, change):
    source = shutil.copytree(job.source, tmp_path / "copy")
    job = job.on(source)
    interrupt(job, target, 3)
    path = min(source.glob("*.safetensors"))
    change(path)
    refused(job, target, f"{path} is not as in the interrupted run (got ")


@OF_SPLIT
def test_another_version_of_shardconv(job, target, monkeypatch):
    interrupt(job, target, 3)
    monkeypatch.setattr(job_module, "__version__", "99.0")
    refused(job, target, "another version of shardconv (got 99.0, expected ")


@pytest.mark.parametrize(("name", "is_sampled"), [("gptq-3", False), ("gptq-4-act-order", True)])
def test_values_that_settings_determine_are_not_sampled(tmp_path, monkeypatch, name, is_sampled):
    """Checking them would import numpy before the first thread copies. The order of activations is not determined."""
    sampled, gather = set(), ShardReader.gather

    def record(self: ShardReader, state: object, span: Span, *arguments: Any) -> memoryview:
        sampled.add(self._names[span.tensor].rpartition(".")[2])
        return gather(self, state, span, *arguments)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardReader, "gather", record)
    monkeypatch.setattr(CopyJob, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        shardconv.split(DATA / "quantized" / name, tmp_path / "split", tp=2)
    assert sampled >= {"qweight", "qzeros", "scales", "weight"}
    assert ("g_idx" in sampled) is is_sampled


# --- a damaged staging folder ---------------------------------------------------------------------------------------


def staged_files(target: Path) -> list[Path]:
    return sorted(journal_of(target).parent.rglob("*.safetensors"))


@pytest.mark.parametrize("step", [64, 10**9])
def test_damaged_bytes_are_copied_again(job, target, step):
    """One byte of every stripe that the journal has, or of the first one."""
    interrupt(job, target, 8)
    before = recorded(target)
    paths = staged_files(target) if step == 64 else staged_files(target)[:1]
    for path in paths:
        data_offset = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        for offset in range(data_offset, path.stat().st_size, step):
            flip(path, offset, keeps_times=True)
    kept_bytes, copied = resume(job, target)
    assert (kept_bytes == 0, before <= copied.stripes) == (step == 64, step == 64)
    assert len(before & copied.stripes) == (len(before) if step == 64 else 1)


@OF_SPLIT
@pytest.mark.parametrize("size", [None, 0, 1000, 10**6])
def test_staged_file_of_another_size_or_missing(job, target, size):
    interrupt(job, target, 8)
    if size is None:
        staged_files(target)[0].unlink()
    else:
        os.truncate(staged_files(target)[0], size)
    resume(job, target)


DEEP = b'{"x":' * 10**5
#: Problem of a record to its change.
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a key changed": lambda line: line.replace(b"stripe", b"strike"),
    "not UTF-8": lambda line: line.replace(b'":"', b'":"\xff\xfe'),
    "nested deeply": lambda line: line[:-1] + b"," + DEEP[1:],
}


@OF_SPLIT
@pytest.mark.parametrize("damage", ["a byte torn", "30 bytes torn", *DAMAGE])
def test_damaged_last_record(job, target, damage):
    """Its stripe is copied again, and records that are written after it can be read."""
    interrupt(job, target, 3)
    path, before = journal_of(target), recorded(target)
    if damage in DAMAGE:
        change_line(path, 4, DAMAGE[damage])
    else:
        os.truncate(path, path.stat().st_size - int(damage.split()[0].replace("a", "1")))
    interrupt(job, target, 6)
    after = recorded(target)
    assert len(before - after) <= 1
    _, copied = resume(job, target)
    assert not after & copied.stripes


def change_line(path: Path, number: int, change: Callable[[bytes], bytes]) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[number] = change(lines[number])
    path.write_bytes(b"\n".join(lines))


@OF_SPLIT
@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (0, b"shardconv journal 2", "has another format (got b'shardconv journal 2', expected 'shardconv journal 1')"),
        *((1, text, "the journal of the interrupted run is damaged") for text in (b"0 {}", b'{"\xff\xfe":0}', DEEP)),
    ],
)
def test_journal_that_cannot_be_read(job, target, line, text, message):
    interrupt(job, target, 3)
    change_line(journal_of(target), line, lambda _: text)
    refused(job, target, message)
    check_done(job.call(target), job, target)


@OF_SPLIT
@pytest.mark.parametrize("size", [0, 10, 25])
def test_journal_without_a_job(job, target, size):
    """The run was killed before it copied anything."""
    interrupt(job, target, 3)
    os.truncate(journal_of(target), size)
    kept_bytes, _ = resume(job, target)
    assert kept_bytes == 0


@OF_SPLIT
def test_other_files_in_the_staging_folder_are_removed(job, target):
    interrupt(job, target, 3)
    for name in ("tokenizer.json", "extra/other.txt"):
        path = staged_files(target)[0].parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("other")
    kept_bytes, _ = resume(job, target)
    assert kept_bytes > 0


# --- destinations ---------------------------------------------------------------------------------------------------


def test_destination_that_is_complete(job, target):
    check_done(job.call(target), job, target)
    result = job.call(target, "--resume")
    assert (result.code, "exists: choose another path with -o, or pass --overwrite" in result.err) == (1, True)
    check_done(Result(0, "", ""), job, target)


def test_overwrite(job, target):
    """The old checkpoint stays until the new one is complete."""
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"old")
    interrupt(job, target, 3, "--overwrite")
    assert contents(target) == {"model.safetensors": b"old"}
    before = recorded(target)
    with Counted() as copied:
        check_done(job.call(target, "--resume", "--overwrite"), job, target)
    assert not before & copied.stripes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dry-run"], "--dry-run writes nothing, so it cannot resume: remove --dry-run or --resume"),
        (["--no-checksums"], "--resume compares existing files with checksums: remove --no-checksums"),
    ],
)
@OF_SPLIT
def test_options_that_contradict(job, target, options, message):
    result = job.call(target, "--resume", *options)
    assert (result.code, message in result.err) == (2, True)
    assert beside(target) == []


# --- everything that is written -------------------------------------------------------------------------------------


def make_finite(source: Path) -> None:
    """Let all values of a checkpoint in bf16 be less than two."""
    path = source / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:header] + (np.frombuffer(data[header:], "<u2") & 0x3FFF).tobytes())


@pytest.fixture(scope="module")
def others(tmp_path_factory, made) -> Path:
    """An adapter of the source, a split of both, one without checksums, and other models."""
    folder = tmp_path_factory.mktemp("others")
    write_checkpoint(folder / "odd", config=llama_config(layers=1, heads=6, kv_heads=6, hidden=48, intermediate=90))
    fields = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False}
    make_finite(write_checkpoint(folder / "even", config=llama_config(layers=1, vocab=128) | fields))
    adapter = folder / "adapter"
    adapter.mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    specs = entries({f"{module}.lora_A.weight": ("F32", (4, 64)), f"{module}.lora_B.weight": ("F32", (64, 4))})
    values = np.random.default_rng(0).standard_normal(512, np.float32)
    (adapter / "adapter_model.safetensors").write_bytes(safetensors_bytes(specs, values.tobytes()))
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    shardconv.split(made / "source", folder / "with-adapter", tp=2, adapters=[adapter])
    shardconv.split(made / "source", folder / "unchecked", tp=2, checksums=False)
    shardconv.pad(folder / "odd", folder / "padded", tp=4, check_model=False)
    return folder


SPLIT = ["split", "{made}/source", "--tp", "2"]
#: Commands, of which the first runs by default.
FORMS = [
    [*SPLIT, "--adapter", "{others}/adapter"],
    ["split", "{others}/even", "--tp", "2", "--adapter", "{others}/adapter", "--merge-adapter"],
    ["split", "{others}/even", "--tp", "2", "--layout", "meta"],
    [*SPLIT, "--layout", "vllm"],
    ["split", "{others}/even", "--tp", "2", "--layout", "dcp"],
    [*SPLIT, "--max-file-size", "20kB"],
    [*SPLIT, "--dtype", "fp32"],
    ["split", "{made}/source", "--tp", "8", "--pad"],
    ["merge", "{others}/with-adapter"],
    ["merge", "{made}/split", "FILE"],
    ["merge", "{others}/unchecked"],
    ["reshard", "{others}/with-adapter", "--tp", "4"],
    ["reshard", "{others}/unchecked", "--tp", "4"],
    ["pad", "{others}/odd", "--multiple-of", "tp=4", "--no-check-model"],
    ["unpad", "{others}/padded"],
]


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in FORMS])
def test_every_form(made, others, target, words):
    if words[-1] == "FILE":
        words, target = words[:-1], target.with_suffix(".safetensors")
    arguments = [word.format(made=made, others=others) for word in words]
    expected = target.parent.parent / target.name
    assert call(*arguments, "-o", expected).code == 0
    job = Job(arguments, shardconv.split, Path(arguments[1]), {})
    assert "finished stripes are kept" in interrupt(job, target, 4).err
    before = recorded(target)
    with Counted() as copied:
        result = job.call(target, "--resume", "--json")
    assert result.code == 0, result.err
    assert beside(target) == [target.name]
    assert json.loads(result.out)["resumed_bytes"] > 0
    assert len(before & copied.stripes) <= (1 if "adapter" in " ".join(words) else 0)
    read = contents if expected.is_dir() else Path.read_bytes
    assert read(target) == read(expected)


@pytest.mark.parametrize(
    "words",
    [["merge", "{made}/split"], ["reshard", "{made}/split", "--tp", "4"], *FORMS[-2:]],
    ids=lambda words: words[0],
)
def test_rate_is_that_of_the_bytes_that_are_copied(made, others, target, monkeypatch, words):
    monkeypatch.setattr(shared, "rate", lambda num_bytes, _: f"at {num_bytes} B")
    monkeypatch.setattr(shared, "size", lambda num_bytes: f"{num_bytes} B")
    arguments = [word.format(made=made, others=others) for word in words]
    job = Job(arguments, shardconv.split, Path(arguments[1]), {})
    outputs = [call(*arguments, "-o", target.parent.parent / target.name).out]
    interrupt(job, target, 4)
    outputs.append(job.call(target, "--resume").out)
    whole, rest = (int(re.search(r"at (\d+) B", text)[1]) for text in outputs)
    kept = int(re.search(r"resumed: (\d+) B", outputs[1])[1])
    assert 0 < kept < whole
    assert rest == whole - kept


def test_changed_files_of_an_adapter_that_is_merged(others, tmp_path, target):
    adapter = shutil.copytree(others / "adapter", tmp_path / "adapter")
    arguments = ["split", str(others / "even"), "--tp", "2", "--adapter", str(adapter), "--merge-adapter"]
    job = Job(arguments, shardconv.split, others / "even", {})
    interrupt(job, target, 4)
    (adapter / "README.md").write_text("the result does not follow from it")
    interrupt(job, target, 2)
    path = adapter / "adapter_config.json"
    path.write_text(path.read_text().replace("8", "9"))
    refused(job, target, f"{path} is not as in the interrupted run")


@pytest.mark.parametrize("command", ["merge", "reshard"])
def test_stripe_of_a_damaged_rank_file_is_never_kept(made, tmp_path, command):
    """It is an error in every run, as its bytes on the disk are those that were read."""
    shutil.copytree(made / "split", tmp_path / "damaged")
    flip(tmp_path / "damaged" / "rank-1-of-4.safetensors")
    arguments = [command, tmp_path / "damaged", "-o", tmp_path / "result", "--resume", "--threads", "1"]
    for _ in range(2):
        result = call(*arguments, *(["--tp", "2"] if command == "reshard" else []))
        assert result.code == 1
        assert "rank-1-of-4.safetensors: the bytes of" in result.err
        assert not (tmp_path / "result").exists()
