"""Messages name options on the command line, and arguments in Python."""

import ast
import inspect
import re
from pathlib import Path

import click
import pytest

import shardconv
from shardconv.cli import cli
from shardconv.support import option_names
from shardconv.support.errors import UsageError, command_line
from shardconv.support.option_names import FLAGS, LISTS, VALUES, in_python
from tests.support.checkpoints import DEMO
from tests.support.command import call

PACKAGE = Path(shardconv.__file__).parent
#: Options that no function has: of ``shardconv run`` and ``plan``, and of other programs.
COMMANDS_ONLY = {
    "--chat", "--check", "--cost", "--engine", "--list-families", "--load-format", "--local-dir", "--max-new-tokens",
    "--multiple-of", "--nproc-per-node", "--prompt", "--prove", "--recursive", "--token-ids", "--upgrade",
}  # fmt: skip
FUNCTIONS = [one for one in (getattr(shardconv, name) for name in shardconv.__all__) if inspect.isfunction(one)]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("exists: pass --overwrite", "exists: pass overwrite=True"),
        ("another path with -o, or", "another path with dst, or"),
        ("pass --head-dim or --config FILE.", "pass head_dim or config=FILE."),
        ("use --for vllm, not --layout vllm", 'use engine="vllm", not layout="vllm"'),
        ("(--from meta)", '(source_layout="meta")'),
        ("--tp 3 is unsupported (expected", "tp=3 is unsupported (expected"),
        ("--replicate 'lm_head.weight' to", 'replicate=["lm_head.weight"] to'),
        ("--replicate model.norm.weight), or", 'replicate=["model.norm.weight"]), or'),
        ("with --ignore 'x*' --ignore y.bin.", 'with ignore=["x*", "y.bin"].'),
        ("pass --rules with a family", "pass rules with a family"),
        ("remove --pad, or", "remove pad=True, or"),
        ("run shardconv split SRC --tp 4, or pass --tp 4", "run shardconv split SRC --tp 4, or pass tp=4"),
        ("shardconv merge X -o M; shardconv split M --tp 2", "shardconv merge X -o M; shardconv split M --tp 2"),
        ("serve it with --load-format shardconv", "serve it with --load-format shardconv"),
        ("DIR: cannot be continued: remove --resume", "DIR: cannot be continued: remove resume=True"),
        ("so it cannot resume: remove --dry-run or", "so it cannot resume: remove dry_run=True or"),
        ("with --tp 8 --ranks 0,2,5-7, or", 'with tp=8 ranks="0,2,5-7", or'),
        ("had --max-file-size 20kB (got none)", 'had max_file_size="20kB" (got none)'),
        ("--ranks has rank 9 (for --tp 2): correct it", "ranks has rank 9 (for tp=2): correct it"),
        ("my --tp 2 folder/x: exists: pass --tp 2", "my --tp 2 folder/x: exists: pass tp=2"),
        (
            "x: has a tensor named '-o' (got \"--pad\"): pass --pad",
            "x: has a tensor named '-o' (got \"--pad\"): pass pad=True",
        ),
        (r"x: got 'it\'s --tp 2': pass --tp 4", r"x: got 'it\'s --tp 2': pass tp=4"),
        ("x: with transformers' model, the model's --tp 2", "x: with transformers' model, the model's tp=2"),
        ("an en--dash and x-o stay", "an en--dash and x-o stay"),
    ],
)
def test_options_become_arguments(message, expected):
    assert in_python(message) == expected
    assert in_python(expected) == expected


def test_exceptions_have_arguments_in_python_and_options_on_the_command_line():
    error = UsageError("x: exists: pass --overwrite")
    assert str(error) == "x: exists: pass overwrite=True"
    with command_line():
        assert str(error) == "x: exists: pass --overwrite"
    assert str(error) == "x: exists: pass overwrite=True"


def test_the_same_error_in_both_forms(tmp_path):
    shardconv.split(DEMO, tmp_path / "x", tp=2)
    with pytest.raises(shardconv.ShardconvError, match=r"choose another path with dst, or pass overwrite=True$"):
        shardconv.split(DEMO, tmp_path / "x", tp=2)
    result = call("split", DEMO, "-o", tmp_path / "x", "--tp", 2)
    assert result.err.endswith("choose another path with -o, or pass --overwrite\n")


#: Messages with an argument as Python code has it: calls, and arguments of functions that are not commands.
AS_CODE = {"convert/model.py", "distributed/groups.py", "distributed/new_groups.py", "engines/rank_tensor.py",
           "layers/embedding.py", "layers/linear.py", "runtime/model_config.py"}  # fmt: skip


def test_messages_name_options_and_not_their_arguments():
    """An argument in a message is shown on the command line, too, which does not have it."""
    arguments = {*VALUES.values(), *(flag.partition("=")[0] for flag in FLAGS.values())} - {"tp", "dst"}
    named = re.compile(rf"(?<![\w.(\[])({'|'.join(arguments)})=")
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "option_names.py" and any(map(named.search, texts(path)))
    }
    assert found <= AS_CODE


def test_every_option_of_the_tables_exists():
    known = {
        name
        for command in cli.commands.values()
        for option in command.params
        if isinstance(option, click.Option)
        for name in (*option.opts, *option.secondary_opts)
    }
    assert {*VALUES, *FLAGS} <= known


#: Command to the functions that have its options as arguments.
FUNCTIONS_OF = {
    "plan": ("report_plan", "make_plan", "estimate_cost"), "run": ("load",),
    **{name: (name,) for name in ("split", "merge", "reshard", "verify", "pad", "unpad")},
}  # fmt: skip


def test_every_option_that_is_an_argument_is_in_the_tables():
    assert FUNCTIONS_OF.keys() == {name for name, command in cli.commands.items() if not command.hidden}
    expected = {}
    for command, functions in FUNCTIONS_OF.items():
        arguments = {name for each in functions for name in inspect.signature(getattr(shardconv, each)).parameters}
        arguments |= shardconv.PlanOptions.__annotations__.keys() if command in {"plan", "split", "run"} else set()
        options = [option for option in cli.commands[command].params if option.name in arguments]
        names = {name: option.name for option in options for name in (*option.opts, *option.secondary_opts)}
        expected |= {name: argument for name, argument in names.items() if name.startswith("--")}
    tables = VALUES | {option: text.partition("=")[0] for option, text in FLAGS.items()}
    assert expected.items() <= tables.items()


def test_every_argument_of_the_tables_exists():
    known = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    known |= shardconv.PlanOptions.__annotations__.keys()
    assert {*VALUES.values(), *(flag.partition("=")[0] for flag in FLAGS.values())} <= known
    assert {*VALUES.values()} >= LISTS


def texts(path):
    """The strings of a module except for docstrings and comments."""
    tree = ast.parse(path.read_text("utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_every_option_in_a_message_has_an_argument_or_none_on_purpose():
    modules = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "commands" and path.name not in {"cli.py", "console.py", "error_messages.py", "exits.py"}
        and path != PACKAGE / f"{option_names.__name__.rpartition('.')[2]}.py"
    ]  # fmt: skip
    found = {
        option: path
        for path in modules
        for text in texts(path)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)
    }
    assert found.keys() - VALUES.keys() - FLAGS.keys() == COMMANDS_ONLY
