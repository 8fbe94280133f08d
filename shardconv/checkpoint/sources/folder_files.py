"""The files in a source's folder: auxiliary files, files that are left out, and files that are refused.

Weights are left out only if the model is known not to need them: the user excluded them, they are trainer state, or
they are proven to be duplicates. All other weights are an error.
"""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from glob import escape
from pathlib import PurePosixPath
from typing import NamedTuple, NoReturn

from shardconv.checkpoint.sources.duplicates import unproven
from shardconv.files.folder import AnyPath, relative_name, walk
from shardconv.files.paths import check_link, leads_out, locked
from shardconv.files.storage.url import LOCK_NAME, is_lock
from shardconv.files.weight_formats import ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS, is_trainer_state, is_weights
from shardconv.support.errors import SourceError, UsageError, option

#: Maximum number of files in a message.
_MAX_NAMES = 5


class FolderFiles(NamedTuple):
    """The files of a folder.

    Attributes:
        kept: name relative to the folder, with / as separator, to path.
        left_out: name to reason; names of hidden folders end with /.
    """

    kept: dict[str, AnyPath]
    left_out: dict[str, str]


def list_files(folder: AnyPath, ignore: Collection[str] = (), optional: Collection[str] = ()) -> FolderFiles:
    """List the files under a folder.

    Args:
        folder: the folder.
        ignore: patterns of files to leave out; each must match a file.
        optional: further patterns, which may match nothing.

    Raises:
        SourceError: if the folder cannot be read, or a run has not finished writing it.
        UsageError: if a pattern matches nothing.
    """
    files = {}
    for path in _files(folder):
        name = relative_name(path, folder)
        files[f"{name}/" if path.name.startswith(".") and path.is_dir() else name] = path
    left_out = {name: "hidden folder" for name in files if name.endswith("/")}
    patterns = ignored_files(folder, files, ignore, optional)
    left_out |= {name: "lock of a run that has not finished" for name in files if is_lock(name)}
    left_out |= {name: f"ignored by {pattern!r}" for name, pattern in patterns.items()}
    if LOCK_NAME in files and LOCK_NAME not in patterns:
        raise SourceError(f"{folder}: {locked(folder)}")
    return FolderFiles({name: path for name, path in files.items() if name not in left_out}, left_out)


def _files(folder: AnyPath) -> list[AnyPath]:
    try:
        return list(walk(folder))
    except OSError as error:
        raise SourceError(f"{error.filename}: cannot be read: {error.strerror}") from error


def refuse_adapter(folder: AnyPath, names: Collection[str]) -> None:
    """Refuse an adapter next to its base model, to which transformers would apply it, and one without weights.

    Args:
        folder: the folder.
        names: names of the files directly in the folder.

    Raises:
        SourceError: if there are files of an adapter and of a base model, or the adapter does not have weights.
    """
    adapter = [name for name in ADAPTER_FILES if name in names]
    if adapter and holds_base(names):
        both = option(adapters=[str(folder)])
        raise SourceError(
            f"{folder}: holds a PEFT adapter ({', '.join(adapter)}) next to the base model: pass {both} to split both, "
            f"{both} {option(merge_adapter=True)} to split the model with the adapter merged, or "
            f"{ignore_options(adapter, set(names) - {*adapter})} to split the base model without it"
        )
    if adapter == [ADAPTER_CONFIG]:
        raise SourceError(
            f"{folder}: holds {ADAPTER_CONFIG} of a PEFT adapter without its weights (expected "
            f"{' or '.join(ADAPTER_WEIGHTS)}): copy them into the folder"
        )


def holds_base(names: Collection[str]) -> bool:
    """Whether files directly in a folder have weights that are not those of an adapter."""
    return any(is_weights(name) and name not in ADAPTER_FILES and not is_trainer_state(name) for name in names)


def find_auxiliary(
    folder: AnyPath, files: FolderFiles, checkpoint: Collection[str], *, follow_links: bool
) -> dict[str, AnyPath]:
    """The auxiliary files: all kept files that hold no weights and are not in ``checkpoint``.

    Raises:
        SourceError: if one is not a regular file, or a link out of the folder.
    """
    auxiliary = {name: path for name, path in files.kept.items() if name not in checkpoint and not is_weights(name)}
    for path in auxiliary.values():
        check_link(path, folder, follow_links=follow_links)
        if not path.is_file():
            raise SourceError(f"{path}: is not a regular file (a pipe, or a broken or folder link): remove it")
    return auxiliary


def leave_out_weights(
    folder: AnyPath,
    files: FolderFiles,
    checkpoint: Collection[str],
    shapes: Mapping[str, tuple[int, ...]] | None,
    *,
    follow_links: bool,
) -> dict[str, str]:
    """Name to reason of the weight files that are not part of the checkpoint and that the model does not need.

    Args:
        folder: the folder.
        files: its files.
        checkpoint: names of the checkpoint's files; the index is last.
        shapes: of the checkpoint's tensors; None if the user passed its index, which excludes other weights.
        follow_links: whether files may be links out of the folder.

    Raises:
        SourceError: if the model may need one.
    """
    others = {name: path for name, path in files.kept.items() if is_weights(name) and name not in checkpoint}
    if shapes is None:
        return dict.fromkeys(others, "not in the given index")
    reasons = {name: "trainer state" for name in others if is_trainer_state(name)}
    rest = {name: path for name, path in others.items() if name not in reasons}
    links = set() if follow_links else {name for name, path in rest.items() if leads_out(path, folder)}
    regular = {name: path for name, path in rest.items() if path.is_file() and name not in links}
    unknown = dict.fromkeys(rest.keys() - regular.keys(), "") | unproven(regular, shapes)
    if unknown:
        _refuse_adapters(folder, unknown, files, checkpoint)
        _refuse(folder, {name: unknown[name] for name in rest if name in unknown}, files, [*checkpoint][-1])
    return reasons | dict.fromkeys(rest, "duplicate of the checkpoint in another format")


def _refuse_adapters(
    folder: AnyPath, unknown: Collection[str], files: FolderFiles, checkpoint: Collection[str]
) -> None:
    """Refuse adapters in subfolders of their base model, where a merge writes them."""
    weights = [PurePosixPath(name) for name in unknown if PurePosixPath(name).name in ADAPTER_WEIGHTS]
    folders = dict.fromkeys(str(name.parent) for name in weights)
    adapters = [name for name in folders if f"{name}/{ADAPTER_CONFIG}" in files.kept]
    if not adapters or any(name in ADAPTER_FILES for name in checkpoint):
        return
    split = option(adapters=[str(folder / name) for name in adapters])
    left_out = option(ignore=[escape(name) for name in adapters])
    raise SourceError(
        f"{folder}: holds PEFT adapters in subfolders ({', '.join(adapters)}): pass {split} to split them with the "
        f"base model, or {left_out} to leave these folders out"
    )


def _refuse(folder: AnyPath, unknown: Mapping[str, str], files: FolderFiles, checkpoint: str) -> NoReturn:
    described = [f"{name} ({why})" if why else name for name, why in unknown.items()]
    more = f" and {len(described) - _MAX_NAMES} more" if len(described) > _MAX_NAMES else ""
    alone = "" if checkpoint in ADAPTER_FILES else f", or pass {folder / checkpoint} instead of the folder"
    raise SourceError(
        f"{folder}: holds weights that are not in {checkpoint}: {', '.join(described[:_MAX_NAMES])}{more}. If the "
        f"model does not need them, pass {ignore_options(unknown, files.kept.keys() - unknown.keys())}{alone}"
    )


# --- patterns of files to leave out (--ignore) ----------------------------------------------------------------------


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
    folder: AnyPath, names: Collection[str], patterns: Iterable[str], optional: Iterable[str] = ()
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
