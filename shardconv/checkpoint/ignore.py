"""Glob patterns of files to leave out of a source (``--ignore``)."""

import shlex
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path, PurePosixPath

from shardconv.errors import UsageError


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a file or one of its parent folders.

    Args:
        name: relative to the folder of the source, with / as separator; names of hidden folders end with /.
        pattern: as for :func:`fnmatch.fnmatchcase`, where * matches any text; may end with /.
    """
    path = PurePosixPath(name)
    parents = [str(parent) for parent in path.parents if parent.name]
    is_in_hidden = name.endswith("/") and pattern.startswith(name)
    return is_in_hidden or any(fnmatchcase(candidate, pattern.rstrip("/")) for candidate in (str(path), *parents))


def ignored(
    folder: Path, names: Collection[str], patterns: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, str]:
    """Name to pattern of the files that patterns match.

    Args:
        folder: for messages.
        names: all files of the folder.
        patterns: patterns that must match a file.
        optional: patterns that may match nothing.

    Raises:
        UsageError: if a pattern of ``patterns`` matches nothing.
    """
    result: dict[str, str] = {}
    for pattern in patterns:
        matched = [name for name in names if matches(name, pattern)]
        if not matched:
            raise UsageError(
                f"--ignore {pattern!r}: matches no file in {folder}: pass a pattern relative to that folder, such as "
                f"'*.gguf' or 'original/*'"
            )
        result |= dict.fromkeys(matched, pattern)
    return {name: pattern for pattern in optional for name in names if matches(name, pattern)} | result


def options_for(names: Collection[str], others: Collection[str]) -> str:
    """The ``--ignore`` options, as few as possible, that match all of ``names`` and none of ``others``.

    Args:
        names: the files to leave out.
        others: all other files of the folder.
    """
    patterns: list[str] = []
    for name in names:
        path = PurePosixPath(name)
        by_suffix = escape(f"{path.parent}/" * bool(path.parent.name)) + "*" + escape(path.suffix)
        is_shared = sum(matches(other, by_suffix) for other in names) > 1
        is_safe = not any(matches(other, by_suffix) for other in others)
        if not any(matches(name, pattern) for pattern in patterns):
            patterns.append(by_suffix if is_shared and is_safe else escape(name))
    return " ".join(f"--ignore {shlex.quote(pattern)}" for pattern in patterns)
