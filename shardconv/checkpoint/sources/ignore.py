"""Glob patterns of files to leave out of a source (``--ignore``)."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path, PurePosixPath

from shardconv.support.errors import UsageError, option


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a file or one of its parent folders.

    Args:
        name: path relative to the folder of the source, with / as separator. Hidden folders are listed instead of their
            files, with / at the end; a pattern of a file in one matches the folder.
        pattern: as for :func:`fnmatch.fnmatchcase`, where * matches any text; may end with /.
    """
    if name.endswith("/") and pattern.startswith(name):
        return True
    path = PurePosixPath(name)
    parents = [str(parent) for parent in path.parents if parent.name]
    return any(fnmatchcase(candidate, pattern.rstrip("/")) for candidate in (str(path), *parents))


def ignored_files(
    folder: Path, names: Collection[str], patterns: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, str]:
    """Find the files to leave out.

    Args:
        folder: the folder of the source, for messages.
        names: all files of the folder.
        patterns: patterns of the user; each must match a file.
        optional: patterns that need not match a file; those of the user take precedence.

    Returns:
        The name of each matched file, with the last pattern that matches it.

    Raises:
        UsageError: if a pattern of ``patterns`` matches no file.
    """
    found = {name: pattern for pattern in optional for name in names if matches(name, pattern)}
    for pattern in patterns:
        matched = [name for name in names if matches(name, pattern)]
        if not matched:
            raise UsageError(
                f"{option(ignore=[pattern])} matches no file in {folder}: pass a pattern relative to that folder, such "
                "as '*.gguf' or 'original/*'"
            )
        found |= dict.fromkeys(matched, pattern)
    return found


def ignore_options(names: Collection[str], others: Collection[str]) -> str:
    """Return ``--ignore`` options that match all of ``names`` and none of ``others``.

    Files with the same folder and suffix share an option, where that matches no other file.

    Args:
        names: the files to leave out.
        others: all other files of the folder.
    """
    patterns: list[str] = []
    for name in names:
        if any(matches(name, pattern) for pattern in patterns):
            continue
        path = PurePosixPath(name)
        folder = escape(f"{path.parent}/") if path.parent.name else ""
        by_suffix = f"{folder}*{escape(path.suffix)}"
        is_shared = sum(matches(other, by_suffix) for other in names) > 1
        is_safe = not any(matches(other, by_suffix) for other in others)
        patterns.append(by_suffix if is_shared and is_safe else escape(name))
    return option(ignore=patterns)
