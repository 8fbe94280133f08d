"""The identity of a copy: all that determines the bytes of the new files, so that no other run is continued.

A run with ``--resume`` continues an interrupted one if both are the same job. If they are not, :func:`difference` names
the first option or file that is another.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import xxhash
from msgspec import json, structs

from shardconv import __version__
from shardconv.checkpoint.engine.copy import Reader, StripeState
from shardconv.checkpoint.sources.stored_tensors import checksum_of_tensors
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.files.folder import AnyPath, RemotePath, file_state
from shardconv.files.input_files import InputFiles
from shardconv.layouts.choice import with_max_file_size
from shardconv.layouts.layout import NATIVE
from shardconv.plan.stages import as_option as stages_option
from shardconv.support.errors import UsageError, option
from shardconv.support.formatting import exact_size

#: Everything that determines the bytes of the new files, by names for messages.
Job = dict[str, Any]

#: Minimum number of samples of values, as a file can change without another size or time.
_NUM_SAMPLED = 64
#: Distance between sampled tensors: a prime, so that all kinds are sampled.
_STEP = 104_729
#: Setting of a job to the argument that it is from.
_ARGUMENTS = {
    "tp": "tp", "stages": "stages", "ranks": "ranks", "layout": "layout", "dtype": "dtype",
    "maximum file size": "max_file_size", "rules": "rules", "replicate": "replicate", "head_dim": "head_dim",
    "ep": "ep", "engine": "engine", "pad": "pad", "stacked layers": "stacked_layers",
    "vocabulary multiple": "make_vocab_size_divisible_by", "components": "components",
}  # fmt: skip
#: Command to the settings that come from its options; its other settings come from its source.
_CHOSEN = {
    "split": {*_ARGUMENTS},
    "reshard": {"tp", "stages", "ep", "layout", "maximum file size", "engine", "pad"},
    "pad": {"pad"},
    "merge": set[str](),
    "unpad": set[str](),
}
#: Settings that follow from the options and the source, whose differences are named first.
_DERIVED = {"plan", "sample of the source's values", "set of files"}
#: Characters of a value in a message.
_MAX_SHOWN = 100
_DIGEST = re.compile("[0-9a-f]{32}")


def settings_of(command: str, manifest: Manifest) -> Job:
    """A command, and its settings by the manifest of its result."""
    options = structs.asdict(manifest.request)
    family, plan_file = options.pop("family"), options.pop("plan_file")
    return {
        "version of shardconv": __version__,
        "command": command,
        "tp": manifest.tp,
        "stages": manifest.plan.num_layers,
        "layout": manifest.layout.name,
        "dtype": manifest.dtype,
        "maximum file size": manifest.layout.max_file_bytes,
        "rules": plan_file or family,
        **options,
        "plan": _digest([manifest.plan, manifest.layout, manifest.stripe_bytes, manifest.derived]),
    }


def options_of(command: str, options: Mapping[str, Any]) -> Job:
    """A command on a pipeline, and its options as the settings of a job."""
    values = {setting: options.get(argument) or None for setting, argument in _ARGUMENTS.items()}
    chosen = {name: one if isinstance(one, int | tuple | list | None) else str(one) for name, one in values.items()}
    size = with_max_file_size(NATIVE, options.get("max_file_size")).max_file_bytes
    return {"version of shardconv": __version__, "command": command, **chosen, "maximum file size": size}


def job_of(
    settings: Job,
    reader: Reader,
    inputs: InputFiles,
    new_files: Iterable[tuple[str, int, bytes]],
    read: Iterable[AnyPath],
) -> Job:
    """The job of a copy.

    Args:
        settings: the command and its options.
        reader: reads the full tensors.
        inputs: its files.
        new_files: name, bytes and first bytes of each new weight file.
        read: other files that the result follows from; folders are left out.

    Raises:
        SourceError: if an input file cannot be read.
    """
    return {
        **settings,
        "source": _states([*inputs.paths, *(path for path in read if not path.is_dir())]),
        "sample of the source's values": None if inputs.is_remote else _sample(reader),  # remote files have versions
        "set of files": {
            name: f"{size} bytes, header {xxhash.xxh3_128_hexdigest(prefix)}" for name, size, prefix in new_files
        },
    }


def check_versions(paths: Iterable[AnyPath]) -> None:
    """Check that changes of remote files can be detected, as a resumed run could mix two versions.

    Raises:
        UsageError: if a file does not have a version.
    """
    remote = (path for path in paths if isinstance(path, RemotePath) and path.is_file())
    if (path := next((path for path in remote if not path.file.has_version), None)) is not None:
        raise UsageError(
            f"{path}: its server sends neither an ETag nor the time of the last change, so {option(resume=True)} "
            f"cannot detect that it was replaced: remove {option(resume=True)}, or download it first"
        )


def _states(paths: Iterable[AnyPath]) -> Mapping[str, str]:
    """The location of each file to its state."""
    return {str(path.resolve()): file_state(path) for path in paths}


def _sample(reader: Reader) -> str:
    """The checksum of some values that settings do not determine; their problems are found when they are copied."""
    count = len(reader.tensors)
    chosen = {number * _STEP % count for number in range(_NUM_SAMPLED)} if count else set()
    numbers = sorted(number for number in chosen if not reader.tensors[number].is_implied)
    return checksum_of_tensors(reader, numbers, StripeState(0), -(-_NUM_SAMPLED // max(len(numbers), 1)))


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.encode(value))


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Describe the first difference of a job from the interrupted run's; None if they are the same."""
    command = new["command"]
    for name in sorted(new, key=partial(_order, command)):
        value: Any = new[name]
        other: Any = old.get(name)
        if value == other:
            continue
        if name == "source":
            return _of_files(value, other)
        if name in _CHOSEN[command]:
            return _of_option(name, value, other)
        return f"the interrupted run has another {name}{_values(value, other)}"
    return None


def _order(command: str, name: str) -> int:
    """The place of a setting among the others, with those first that others follow from."""
    if name in {"version of shardconv", "command"}:
        return 0
    if name in _DERIVED:
        return 3
    # the files that a split reads follow from its options, the settings of other commands from the files
    return 1 if (name == "source") == (command != "split") else 2


def _of_option(name: str, new: Any, old: Any) -> str:  # noqa: ANN401 - values of any setting
    if name == "rules":  # a family, or name and text of a plan file
        old_text, new_text = old, new
        old, new = (one if isinstance(one, str | None) else one[0] for one in (old, new))
        if old == new and old_text != new_text:
            return f"the plan file {old!r} of {option('rules')} is not as in the interrupted run"
    had = f"had {_given(name, old)}" if old else f"did not have {option(_ARGUMENTS[name])}"
    return f"the interrupted run {had} (got {_given(name, new) if new else 'none'})"


def _given(name: str, value: Any) -> str:  # noqa: ANN401 - of any setting
    """An option with a value, as the user gives it."""
    if name == "pad":
        return option(pad=True) if value == 1 else f"--multiple-of tp={value}"
    if name == "stages":
        return stages_option(value)
    if name == "maximum file size":
        return option(max_file_size=exact_size(value))
    return option(**{_ARGUMENTS[name]: value if isinstance(value, int) else _shortened(value)})


def _shortened(value: str | Sequence[str]) -> str | list[str]:
    return value[:_MAX_SHOWN] if isinstance(value, str) else [one[:_MAX_SHOWN] for one in value]


def _of_files(new: Mapping[str, str], old: Mapping[str, str]) -> str:
    """The first difference of the files that are read, by their paths and states."""
    added, removed = (sorted(one.keys() - other.keys()) for one, other in ((new, old), (old, new)))
    if added and removed:
        return f"the interrupted run read {removed[0]} (got {added[0]})"
    if added or removed:
        return f"the interrupted run {'did not read' if added else 'also read'} {(added or removed)[0]}"
    path = next(path for path in new if new[path] != old[path])
    return f"{path} is not as in the interrupted run{_values(new[path], old[path])}"


def _values(got: object, expected: object) -> str:
    shown = [", ".join(value) if isinstance(value, dict) else str(value) for value in (got, expected)]
    is_short = max(map(len, shown)) <= _MAX_SHOWN and not any(map(_DIGEST.search, shown))
    return "" if not is_short else f" (got {shown[0]}, expected {shown[1]})"
