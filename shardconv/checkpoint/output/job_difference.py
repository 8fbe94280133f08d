"""The difference of a run from the interrupted one that it is to continue, by the options and files of both."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from shardconv.support.errors import option
from shardconv.support.formatting import exact_size

#: Setting of a job to the argument that it is from.
_ARGUMENTS = {
    "tp": "tp", "ranks": "ranks", "layout": "layout", "dtype": "dtype", "maximum file size": "max_file_size",
    "family": "rules", "plan_file": "rules", "replicate": "replicate", "head_dim": "head_dim", "experts": "experts",
    "engine": "engine", "pad": "pad",
}  # fmt: skip
#: Command to the settings that are from its options; its other settings are those of its source.
_CHOSEN = {
    "split": {*_ARGUMENTS},
    "reshard": {"tp", "layout", "maximum file size", "engine", "pad"},
    "pad": {"pad"},
    "merge": set[str](),
    "unpad": set[str](),
}
#: Settings that follow from the options and the source, whose differences are named first.
_DERIVED = {"plan", "sample of the source's values", "set of files"}
#: Characters of a value in a message.
_MAX_SHOWN = 100
_DIGEST = re.compile("[0-9a-f]{32}")


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Describe the first difference of a job from that of the interrupted run; None if they are the same."""
    chosen = _CHOSEN[new["command"]]
    for name in sorted(new, key=partial(_order, new["command"])):
        value: Any = new[name]
        other: Any = old.get(name)
        if value == other:
            continue
        if name == "source":
            return _of_files(value, other)
        if name == "options":
            return _of_options(value, other, chosen)
        return _of_option(name, value, other) if name in chosen else _of_setting(name, value, other)
    return None


def _order(command: str, name: str) -> int:
    """The place of a setting among the others, with those first that others follow from."""
    if name in {"version of shardconv", "command"}:
        return 0
    if name in _DERIVED:
        return 3
    # the files that a split reads follow from its options, the settings of other commands from the files
    return 1 if (name == "source") == (command != "split") else 2


def _of_setting(name: str, new: object, old: object) -> str:
    return f"the interrupted run has another {name}{_values(new, old)}"


def _of_options(new: Mapping[str, Any], old: Mapping[str, Any], chosen: Collection[str]) -> str:
    """The first difference of the options that choose a plan; a family and a plan file are the same option."""
    name = next(name for name in new if new[name] != old.get(name))
    if name not in chosen:
        return _of_setting(name, new[name], old.get(name))
    if _ARGUMENTS[name] != "rules":
        return _of_option(name, new[name], old.get(name))
    had, got = ((one["plan_file"] or [one["family"]])[0] for one in (old, new))
    if had == got:
        return f"the plan file {got!r} of {option('rules')} is not as in the interrupted run"
    return _of_option("family", got, had)


def _of_option(name: str, new: object, old: object) -> str:
    had = f"had {_given(name, old)}" if old else f"did not have {option(_ARGUMENTS[name])}"
    return f"the interrupted run {had} (got {_given(name, new) if new else 'none'})"


def _given(name: str, value: Any) -> str:  # noqa: ANN401 - of any setting
    """An option with a value, as the user gives it."""
    if name == "pad":
        return option(pad=True) if value == 1 else f"--multiple-of tp={value}"
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
