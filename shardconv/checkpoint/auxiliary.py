"""The files of a source's folder: which are auxiliary files, which are left out and why, and which are refused.

Weights are left out only if they are known not to belong to the model: the user named them or another checkpoint of the
folder, they resume a training, or they are proven to be duplicates. All others are an error, never only a note.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from shardconv.checkpoint.duplicates import unproven
from shardconv.checkpoint.formats import ADAPTER_FILES, is_trainer_state, is_weights, merge_adapter
from shardconv.checkpoint.ignore import ignored, options_for
from shardconv.checkpoint.paths import leads_out
from shardconv.errors import SourceError

#: The most files that a message names.
_MAX_NAMES = 5


class FolderFiles(NamedTuple):
    """The files of a folder.

    Attributes:
        kept: name, with / between folders, to path.
        left_out: name, of hidden folders with a / behind, to why it is left out.
    """

    kept: dict[str, Path]
    left_out: dict[str, str]


def list_files(folder: Path, ignore: Collection[str] = (), optional: Collection[str] = ()) -> FolderFiles:
    """List the files under a folder.

    Args:
        folder: the folder.
        ignore: patterns of files that are left out; each has to match one.
        optional: patterns that need not.

    Raises:
        SourceError: if the folder cannot be read.
        UsageError: if a pattern matches nothing.
    """
    files = {}
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        files[f"{name}/" if path.name.startswith(".") and path.is_dir() else name] = path
    left_out = {name: "hidden folder" for name in files if name.endswith("/")}
    patterns = ignored(folder, files, ignore, optional)
    left_out |= {name: f"ignored by {pattern!r}" for name, pattern in patterns.items()}
    return FolderFiles({name: path for name, path in files.items() if name not in left_out}, left_out)


def _walk(folder: Path) -> Iterator[Path]:
    """Every file under a folder; for a hidden folder or a link to one itself, and nothing that is in it."""

    def refuse(error: OSError) -> NoReturn:
        raise SourceError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for root, folders, files in os.walk(folder, onerror=refuse):
        paths = [Path(root, name) for name in sorted(folders)]
        yield from (path for path in paths if path.name.startswith(".") or path.is_symlink())
        folders[:] = [path.name for path in paths if not path.name.startswith(".")]
        yield from (Path(root, name) for name in sorted(files))


def refuse_adapter(folder: Path, names: Collection[str]) -> None:
    """Refuse an adapter, which transformers would apply to the model beside it.

    Raises:
        SourceError: if one is among the files that lie right in the folder.
    """
    found = [name for name in ADAPTER_FILES if name in names]
    if not found:
        return
    has_base = any(is_weights(name) and name not in found and not is_trainer_state(name) for name in names)
    without = f"Pass {options_for(found, set(names) - {*found})} to split the base model without it. " * has_base
    raise SourceError(
        f"{folder}: holds a PEFT adapter ({', '.join(found)}){' beside the base model' * has_base}, and adapters "
        f"cannot be split. {without}{merge_adapter(folder)}"
    )


def take_auxiliary(folder: Path, files: FolderFiles, own: Collection[str], *, follow_links: bool) -> dict[str, Path]:
    """The auxiliary files: all that are kept and hold no weights.

    Raises:
        SourceError: if one is not a regular file, or a link out of the folder.
    """
    auxiliary = {name: path for name, path in files.kept.items() if name not in own and not is_weights(name)}
    for path in auxiliary.values():
        check_link(path, folder, follow_links=follow_links)
        if not path.is_file():
            raise SourceError(
                f"{path}: is not a regular file (a pipe, a link to a folder or to nowhere): remove it first"
            )
    return auxiliary


def leave_out_weights(
    folder: Path,
    files: FolderFiles,
    own: Collection[str],
    shapes: Mapping[str, tuple[int, ...]] | None,
    *,
    follow_links: bool,
) -> dict[str, str]:
    """The files with weights that are not part of the checkpoint, each with why it is left out.

    Args:
        folder: the folder.
        files: its files.
        own: the names of the checkpoint's files, its index last if it has one.
        shapes: of the checkpoint's tensors; None if the user named its index, and so no other checkpoint.
        follow_links: whether files may be links out of the folder.

    Raises:
        SourceError: if nothing is known of one.
    """
    others = {name: path for name, path in files.kept.items() if is_weights(name) and name not in own}
    if shapes is None:
        return dict.fromkeys(others, "not in the index that was named")
    reasons = {name: "trainer state" for name in others if is_trainer_state(name)}
    rest = {name: path for name, path in others.items() if name not in reasons}
    links = set() if follow_links else {name for name, path in rest.items() if leads_out(path, folder)}
    regular = {name: path for name, path in rest.items() if path.is_file() and name not in links}
    unknown = dict.fromkeys(rest.keys() - regular.keys(), "") | unproven(regular, shapes)
    if unknown:
        _refuse(folder, {name: unknown[name] for name in rest if name in unknown}, files, [*own][-1])
    return reasons | dict.fromkeys(rest, "duplicate of the checkpoint in another format")


def _refuse(folder: Path, unknown: Mapping[str, str], files: FolderFiles, own: str) -> NoReturn:
    named = [f"{name} ({why})" if why else name for name, why in unknown.items()]
    more = f" and {len(named) - _MAX_NAMES} more" if len(named) > _MAX_NAMES else ""
    raise SourceError(
        f"{folder}: holds weights that are not in {own}: {', '.join(named[:_MAX_NAMES])}{more}. If the model does not "
        f"need them, pass {options_for(unknown, files.kept.keys() - unknown.keys())}, or name {folder / own} instead "
        f"of the folder"
    )


def check_link(path: Path, folder: Path, *, follow_links: bool) -> None:
    """Refuse a link out of the folder.

    Raises:
        SourceError: if it is one, and they are not followed.
    """
    if not follow_links and leads_out(path, folder):
        raise SourceError(f"{path}: is a link out of its folder; pass --follow-links if that is meant")
