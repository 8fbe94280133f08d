"""Files that a user names to be left out of a source, by glob patterns."""

import shlex
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path, PurePosixPath

from shardconv.errors import UsageError


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a file or a folder above it.

    Args:
        name: relative to the folder of the source, with / between folders, and behind a hidden one.
        pattern: as for :func:`fnmatch.fnmatchcase`, so * is any text; a / behind it is allowed.
    """
    path = PurePosixPath(name)
    above = [str(parent) for parent in path.parents if parent.name]
    is_in_hidden = name.endswith("/") and pattern.startswith(name)
    return is_in_hidden or any(fnmatchcase(each, pattern.rstrip("/")) for each in (str(path), *above))


def ignored(
    folder: Path, names: Collection[str], patterns: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, str]:
    """The files that patterns name, each with the pattern.

    Args:
        folder: for messages.
        names: all files of the folder.
        patterns: each has to match a file.
        optional: patterns that need not.

    Raises:
        UsageError: if a pattern matches nothing.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        here = [name for name in names if matches(name, pattern)]
        if not here:
            raise UsageError(
                f"--ignore {pattern!r}: matches no file in {folder}; patterns are relative to that folder, as "
                f"'*.gguf' or 'original/*'"
            )
        found |= dict.fromkeys(here, pattern)
    return {name: pattern for pattern in optional for name in names if matches(name, pattern)} | found


def options_for(names: Collection[str], others: Collection[str]) -> str:
    """Options that name these files and none of the others, as few as a shell command can do with.

    Args:
        names: the files to be left out.
        others: all other files of the folder.
    """
    patterns: list[str] = []
    for name in names:
        path = PurePosixPath(name)
        alike = escape(f"{path.parent}/" * bool(path.parent.name)) + "*" + escape(path.suffix)
        is_shared = sum(matches(other, alike) for other in names) > 1
        is_safe = not any(matches(other, alike) for other in others)
        if not any(matches(name, pattern) for pattern in patterns):
            patterns.append(alike if is_shared and is_safe else escape(name))
    return " ".join(f"--ignore {shlex.quote(pattern)}" for pattern in patterns)
