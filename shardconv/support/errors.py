"""The exceptions of shardconv and their exit codes.

    ShardconvError                1   base class: an error that the user can act on
    ├── UsageError                2   options or arguments of another type, contradicting, unknown or unusable
    ├── SourceError               1   the source cannot be read: a header, a source file, an index, a config
    ├── PlanError                 1   no plan: no family, no rule, or a size that does not divide
    │   ├── ConfigError           1   a field of the config is missing or unusable
    │   └── ShapeError            1   the shape of a tensor contradicts the config
    ├── SplitCheckpointError      1   the split checkpoint is incomplete or its manifest cannot be read
    │   └── IntegrityError        1   checksums, replicas, padding or indices of groups are not as expected
    ├── OutputError               1   the destination exists, is in use, or is full
    └── RunError                  1   wrong number of processes, or a model that cannot be built, loaded or run
        ├── PeerError             1   another rank failed and reported why
        └── NotHeldError          1   an engine reads elements of a tensor that are not on this rank

A message is one text: the problem, its file, tensor and rank, the values got and expected, and the remedy. An
option in it is data (:func:`option`): the command line shows ``--overwrite``, and Python ``overwrite=True``.
:class:`PlanWarning` is the only warning: a model is loaded with a plan that is based on assumptions.
"""

import json
import re
import shlex
from collections.abc import Callable

#: An option in the text of an exception, between two control characters: the JSON of its argument and value.
_OPTION = re.compile("\x1e([^\x1e\x1f]*)\x1f")
#: Arguments whose options have another name.
_FLAGS = {
    "dst": "-o", "adapters": "--adapter", "components": "--component", "engine": "--for", "source_layout": "--from",
}  # fmt: skip
_TRANSFORMERS = ("safetensors>=0.8", "torch>=2.12", "transformers>=5.5")
#: Extra of pyproject.toml to the packages that it installs.
EXTRAS = {
    "diffusers": (*_TRANSFORMERS, "diffusers>=0.42"),
    "remote": ("huggingface-hub>=1.0", "obstore>=0.11"),
    "transformers": _TRANSFORMERS,
}


def install(extra: str) -> str:
    """The command that installs the packages of an extra. It works in any folder, with and without a clone."""
    return shlex.join(["pip", "install", *EXTRAS[extra]])


def option(name: str = "", /, **values: object) -> str:
    """An option of a command in the message of an exception: ``--tp 4`` on the command line, ``tp=4`` in Python.

    Args:
        name: the argument of the Python functions, without a value.
        values: or the argument with its value: a list for an option that is repeated, True or False for a flag, and
            upper case for a placeholder.
    """
    argument, value = next(iter(values.items()), (name, None))
    value = value if isinstance(value, (bool, int, list, tuple, type(None))) else str(value)
    return f"\x1e{json.dumps([argument, value], ensure_ascii=False)}\x1f"


def _rendered(text: str, form: Callable[[str, object], str]) -> str:
    """A text with its options in some form; other text between the same control characters stays as it is."""

    def render(match: re.Match[str]) -> str:
        try:
            argument, value = json.loads(match[1])
        except (ValueError, TypeError):  # of a name in a file
            return match[0]
        return form(argument, value)

    return _OPTION.sub(render, text)


def _as_option(argument: str, value: object) -> str:
    name = str(argument).replace("_", "-")
    flag = _FLAGS.get(argument) or f"--{name}"
    if value is None or isinstance(value, bool):
        return f"--no-{name}" if value is False else flag
    return " ".join(f"{flag} {shlex.quote(str(one))}" for one in (value if isinstance(value, list) else [value]))


def _as_argument(argument: str, value: object) -> str:
    if value is None:
        return argument
    literal = f"[{', '.join(map(_literal, value))}]" if isinstance(value, list) else _literal(value)
    return f"{argument}={literal}"


def _literal(value: object) -> str:
    """A value in Python: placeholders and numbers as they are, anything else as a string."""
    is_string = isinstance(value, str) and not (value.isupper() or value.isdecimal())
    return json.dumps(value, ensure_ascii=False) if is_string else str(value)


class ShardconvError(Exception):
    """Base class of all errors that shardconv raises on purpose.

    Args:
        problem: the problem, or the whole message.
        remedy: how to fix it, where another function may know a better way.

    Attributes:
        exit_code: of a command that fails with it.
        is_repeated: whether another process raises the same error, and reports it.
    """

    exit_code = 1
    is_repeated = False

    @property
    def problem(self) -> str:
        """The problem without its remedy, for the message of another exception."""
        return str(self.args[0])

    @property
    def message(self) -> str:
        """The message with its options as data, for the message of another exception."""
        return ": ".join(map(str, self.args))

    def __str__(self) -> str:
        """The message with arguments of Python."""
        return _rendered(self.message, _as_argument)

    def with_options(self) -> str:
        """The message with options of the command line: for commands and reports."""
        return _rendered(self.message, _as_option)


class UsageError(ShardconvError):
    """Options contradict each other, are unknown, or cannot be used."""

    exit_code = 2


def check_count(value: object, name: str, maximum: int | None = None) -> int:
    """Return the value of an argument that is a positive integer.

    Args:
        value: the value.
        name: the argument.
        maximum: the largest valid value; None for any.

    Raises:
        UsageError: if it is not one.
    """
    if type(value) is int and 1 <= value <= (maximum or value):
        return value
    expected = f"an integer from 1 to {maximum}" if maximum else "a positive integer"
    raise UsageError(f"{option(name)} is {value!r:.40} (expected {expected}): correct it")


class SourceError(ShardconvError):
    """The source checkpoint cannot be read or is invalid."""


class PlanError(ShardconvError):
    """No plan is known to be correct."""


class ConfigError(PlanError):
    """A field of the config is missing or unusable. Its arguments are the problem and the remedy."""


class ShapeError(PlanError):
    """The shape of a tensor contradicts the config. Its arguments are the problem and the remedy."""


class SplitCheckpointError(ShardconvError):
    """A split checkpoint is incomplete, or its manifest cannot be read."""


class IntegrityError(SplitCheckpointError):
    """Bytes on disk differ from the bytes that were written."""


class OutputError(ShardconvError):
    """The destination cannot be written."""


class RunError(ShardconvError):
    """A model cannot be run: wrong number of processes, or it cannot be built or loaded."""


class PlanWarning(UserWarning):
    """A model is loaded with a plan that is based on assumptions or on user rules instead of a family."""


class PeerError(RunError):
    """Another rank failed and reported why."""


class NotHeldError(RunError):
    """An operation reads elements of a tensor that are not on this rank."""


class WorldSizeError(RunError):
    """The number of processes differs from the number of ranks."""


def is_connection_error(error: BaseException) -> bool:
    """Whether an error is a lost connection between ranks, so that the error of another rank is the cause."""
    lost = re.compile("gloo|[nx]ccl|[Cc]onnection|TCPStore|FileStore")
    return isinstance(error, RuntimeError) and lost.search(str(error)) is not None


def one_line(error: BaseException) -> str:
    """An error of another library in one line, without a period at its end."""
    text = " ".join((error.message if isinstance(error, ShardconvError) else str(error)).split()) or "no message"
    return f"{type(error).__name__}: {text if text.endswith('...') else text.removesuffix('.')}"
