"""The environments of other users, shells and interpreters: commands have the same results, and print no more.

Results are compared byte for byte with those of this process.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import shardconv
from tests.support.checkpoints import contents, llama_config, write_checkpoint
from tests.support.matrix import cases, needs_torch

DEMO = Path(__file__).parents[1] / "examples" / "demo-model"
PACKAGE = str(Path(shardconv.__file__).parents[1])
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"


@dataclass(frozen=True)
class Environment:
    """The environment that a process starts with.

    Attributes:
        variables: environment variables beside PATH and PYTHONPATH.
        interpreter: options of the interpreter.
        umask: of the process.
        closed: numbers of the standard streams that are closed.
        user: number of the user, without an entry in the list of users.
        name: of the folder with all files.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    interpreter: Sequence[str] = ()
    umask: int = 0o022
    closed: Sequence[int] = ()
    user: int | None = None
    name: str = "files"

    def enter(self) -> None:
        """Make a new process, before it runs Python, as it is described."""
        os.umask(self.umask)
        if self.user is not None:
            os.setgroups([])
            os.setgid(self.user)
            os.setuid(self.user)
        for number in self.closed:
            os.close(number)

    def python(self, code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run Python in a folder."""
        paths = {"PATH": PATH} if "-I" in self.interpreter else {"PATH": PATH, "PYTHONPATH": PACKAGE}
        return subprocess.run(
            [sys.executable, *self.interpreter, "-c", code, *arguments], env={**paths, **self.variables},
            preexec_fn=self.enter, cwd=folder, capture_output=True, text=True, timeout=200, check=False,
            stdin=None if 0 in self.closed else subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder."""
        path = f"import os, sys; sys.path.insert(0, os.fsdecode({os.fsencode(PACKAGE)!r}))"
        return self.python(f"{path}; from shardconv.__main__ import main; main()", *arguments, folder=folder)


ENVIRONMENTS = {
    "clean": Environment(),
    "no folder of the user": Environment({"HOME": "/nonexistent"}),
    "a folder of the user that cannot be written": Environment({"HOME": "/proc"}),
    "a temporary folder that does not exist": Environment({"HOME": "/", "TMPDIR": "/nonexistent"}),
    "a temporary folder on another disk": Environment({"TMPDIR": "/dev/shm"}),
    "C locale, ASCII": Environment({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    "Latin-1 streams": Environment({"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}),
    "dumb terminal": Environment({"TERM": "dumb"}),
    "private files": Environment(umask=0o077),
    "closed stdin": Environment(closed=(0,)),
    "a user without a name": Environment(user=54321),
    "without asserts": Environment(interpreter=("-O",)),
    "without docstrings": Environment(interpreter=("-OO",)),
    "warnings are errors": Environment(interpreter=("-W", "error")),
    "development mode": Environment(interpreter=("-X", "dev")),
    "isolated": Environment(interpreter=("-I",)),
    "safe path": Environment({"PYTHONSAFEPATH": "1"}),
    "another hash seed": Environment({"PYTHONHASHSEED": "4711"}),
    "names with spaces and other letters": Environment(name="späces % # ? 'q' \"d\" [x]* 重み"),
}
DEFAULT = {"clean", "C locale, ASCII", "closed stdin", "a user without a name", "warnings are errors", "isolated"}


def starts(environment: Environment) -> bool:
    """Whether Python imports compiled modules: a user may not read it, or ASCII not have the letters of its folder."""
    try:
        return environment.python("import xxhash", folder=Path("/")).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


@pytest.fixture
def folder(tmp_path, environment) -> Path:
    """An empty folder that the user of the environment can write."""
    if not starts(ENVIRONMENTS[environment]):
        pytest.skip("Python does not start in this environment")
    made = tmp_path / ENVIRONMENTS[environment].name
    made.mkdir()
    if (user := ENVIRONMENTS[environment].user) is not None:
        os.chown(made, user, user)
        for parent in made.parents[:3]:  # those of pytest can be read by one user only
            parent.chmod(0o755)
    return made


def run(environment: str, *arguments: object, folder: Path) -> str:
    """Run a command, which prints nothing on stderr; returns its result."""
    result = ENVIRONMENTS[environment].run(*map(str, arguments), folder=folder)
    assert (result.returncode, result.stderr) == (0, ""), result
    return result.stdout


@pytest.mark.parametrize("environment", cases(ENVIRONMENTS, lambda name: name in DEFAULT))
def test_files_have_the_same_bytes(environment, folder):
    source = folder / "tiny"
    write_checkpoint(source, config=llama_config(layers=1))
    shardconv.split(source, folder / "expected", tp=2)
    assert "12 tensors" in run(environment, "split", source, "--tp", 2, "-o", folder / "split", folder=folder)
    run(environment, "merge", folder / "split", "-o", folder / "merged", folder=folder)
    assert "correct" in run(environment, "verify", folder / "split", "--against", source, folder=folder)
    assert contents(folder / "split") == contents(folder / "expected")
    assert contents(folder / "merged") == contents(source)
    (made,) = {path.stat().st_mode & 0o777 for path in (folder / "split").iterdir()}
    assert made == 0o666 & ~ENVIRONMENTS[environment].umask


#: torch and transformers raise warnings of their own, and Latin-1 does not have the quotation marks of the text.
WITHOUT_TORCH = {"warnings are errors", "development mode", "Latin-1 streams", "C locale, ASCII"}


@needs_torch
@pytest.mark.parametrize(
    "environment",
    cases(sorted(ENVIRONMENTS.keys() - WITHOUT_TORCH), lambda name: name in {"clean", "a user without a name"}),
)
def test_generated_text_is_the_same(environment, folder):
    shardconv.split(DEMO, folder / "split", tp=2)
    options = ("--prompt", "An exception is", "--max-new-tokens", 4, "--dtype", "fp32", "-q")
    out = run(environment, "run", folder / "split", *options, folder=folder)
    assert out == " “class instance,\n"
