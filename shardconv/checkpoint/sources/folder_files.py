"""The files in a source's folder: auxiliary files, files that are left out, and files that are refused.

Weights are left out only if the model is known not to need them: the user excluded them, they are trainer state, or
they are proven to be duplicates. All other weights are an error.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from pathlib import PurePosixPath
from typing import NamedTuple, NoReturn

from msgspec import Struct

from shardconv.files import containers
from shardconv.files.containers.safetensors import TensorFile, TensorInfo, read_header
from shardconv.files.folder import AnyPath, read_json, relative_name, walk
from shardconv.files.paths import check_link, leads_out, locked
from shardconv.files.storage.url import LOCK_NAME, is_lock
from shardconv.files.weight_formats import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    ADAPTER_WEIGHTS,
    PYTORCH,
    SAFETENSORS,
    is_trainer_state,
    is_weights,
)
from shardconv.layouts import META
from shardconv.layouts.layout_file import layout_file, layout_head
from shardconv.layouts.relation import find_target
from shardconv.support.errors import SourceError, UsageError, option

#: Maximum number of files in a message.
_MAX_NAMES = 5


class SourceFolder(Struct, frozen=True, dict=True):
    """The files of a folder.

    Attributes:
        path: of the folder.
        kept: name relative to the folder, with / as separator, to path.
        left_out: name to reason; names of hidden folders end with /.
        ignore: patterns of files that the user left out.
        follow_links: whether files may be links out of the folder.
        inner: the folder in it that has the weights, with / at the end; "" if it has them itself.
    """

    path: AnyPath
    kept: dict[str, AnyPath]
    left_out: dict[str, str]
    ignore: tuple[str, ...]
    follow_links: bool
    inner: str = ""

    @cached_property
    def inner_names(self) -> list[str]:
        """The names of the files under the folder that has the weights, relative to it."""
        return [name.removeprefix(self.inner) for name in self.kept if name.startswith(self.inner)]

    @cached_property
    def names(self) -> list[str]:
        """The names of the files directly in the folder that has the weights."""
        return [name for name in self.inner_names if "/" not in name and not self.kept[f"{self.inner}{name}"].is_dir()]

    @property
    def weights_path(self) -> AnyPath:
        """The folder that has the weights."""
        return self.path / self.inner.rstrip("/") if self.inner else self.path

    def check_link(self, name: str) -> None:
        """Refuse a link out of the folder.

        Raises:
            SourceError: if it is one.
        """
        check_link(self.path / name, self.path, follow_links=self.follow_links)

    def auxiliary(self, others: Collection[str]) -> dict[str, AnyPath]:
        """The auxiliary files: all kept files that hold no weights and are not among ``others``.

        Raises:
            SourceError: if one is not a regular file, or a link out of the folder.
        """
        return self.regular_files(name for name in self.kept if name not in others and not is_weights(name))

    def regular_files(self, names: Iterable[str]) -> dict[str, AnyPath]:
        """Name to path of kept files.

        Raises:
            SourceError: if one is not a regular file, or a link out of the folder.
        """
        found = {name: self.kept[name] for name in names}
        for name, path in found.items():
            self.check_link(name)
            if not path.is_file():
                raise SourceError(f"{path}: is not a regular file (a pipe, or a broken or folder link): remove it")
        return found


def list_folder(
    path: AnyPath, ignore: Collection[str] = (), optional: Collection[str] = (), *, follow_links: bool = False
) -> SourceFolder:
    """List the files under a folder.

    Args:
        path: of the folder.
        ignore: patterns of files to leave out; each must match a file.
        optional: further patterns, which may match nothing; ``ignore`` takes precedence.
        follow_links: whether files may be links out of the folder.

    Raises:
        SourceError: if the folder cannot be read, or a run has not finished writing it.
        UsageError: if a pattern matches nothing.
    """
    try:
        found = [(relative_name(one, path), one) for one in walk(path)]
    except OSError as error:
        raise SourceError(f"{error.filename}: cannot be read: {error.strerror}") from error
    files = {f"{name}/" if one.name.startswith(".") and one.is_dir() else name: one for name, one in found}
    ignored = {name: pattern for pattern in optional for name in files if matches(name, pattern)}
    for pattern in ignore:
        matched = [name for name in files if matches(name, pattern)]
        if not matched:
            raise UsageError(
                f"{option(ignore=[pattern])} matches no file in {path}: pass a pattern relative to that folder, such "
                "as '*.gguf' or 'original/*'"
            )
        ignored |= dict.fromkeys(matched, pattern)
    if LOCK_NAME in files and LOCK_NAME not in ignored:
        raise SourceError(f"{path}: {locked(path)}")
    left_out = {name: "hidden folder" for name in files if name.endswith("/")}
    left_out |= {name: "lock of a run that has not finished" for name in files if is_lock(name)}
    left_out |= {name: f"ignored by {pattern!r}" for name, pattern in ignored.items()}
    kept = {name: one for name, one in files.items() if name not in left_out}
    return SourceFolder(path, kept, left_out, tuple(dict.fromkeys([*optional, *ignore])), follow_links)


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
    """Whether files directly in a folder have weights other than an adapter's."""
    return any(is_weights(name) and name not in ADAPTER_FILES and not is_trainer_state(name) for name in names)


def leave_out_weights(
    folder: SourceFolder, checkpoint: Collection[str], shapes: Callable[[], Mapping[str, tuple[int, ...]]] | None
) -> dict[str, str]:
    """Name to reason of the weight files that are not part of the checkpoint and that the model does not need.

    Args:
        folder: the folder.
        checkpoint: names of the checkpoint's files; the index is last.
        shapes: returns name to shape of the checkpoint's tensors; None if the user passed its index, which excludes
            other weights.

    Raises:
        SourceError: if the model may need one.
    """
    others = {name: path for name, path in folder.kept.items() if is_weights(name) and name not in checkpoint}
    if shapes is None:
        return dict.fromkeys(others, "not in the given index")
    rest = {name: path for name, path in others.items() if not is_trainer_state(name)}
    regular = {
        name: path
        for name, path in rest.items()
        if path.is_file() and (folder.follow_links or not leads_out(path, folder.path))
    }
    unknown = dict.fromkeys(rest.keys() - regular.keys(), "") | (unproven(regular, shapes()) if regular else {})
    if unknown:
        _refuse(folder, {name: unknown[name] for name in rest if name in unknown}, checkpoint)
    proven = dict.fromkeys(rest, "duplicate of the checkpoint in another format")
    return dict.fromkeys(others, "trainer state") | proven


def _refuse(folder: SourceFolder, unknown: Mapping[str, str], checkpoint: Collection[str]) -> NoReturn:
    """Refuse weights that are not part of a checkpoint."""
    is_adapter, last = any(name in ADAPTER_FILES for name in checkpoint), [*checkpoint][-1]
    weights = [PurePosixPath(name) for name in unknown if PurePosixPath(name).name in ADAPTER_WEIGHTS]
    parents = dict.fromkeys(str(name.parent) for name in weights)
    adapters = [name for name in parents if f"{name}/{ADAPTER_CONFIG}" in folder.kept]
    if adapters and not is_adapter:  # in subfolders of their base model, where a merge writes them
        raise SourceError(
            f"{folder.path}: holds PEFT adapters in subfolders ({', '.join(adapters)}): pass "
            f"{option(adapters=[str(folder.path / name) for name in adapters])} to split them with the base model, or "
            f"{option(ignore=[escape(name) for name in adapters])} to leave these folders out"
        )
    described = [f"{name} ({why})" if why else name for name, why in unknown.items()]
    more = f" and {len(described) - _MAX_NAMES} more" if len(described) > _MAX_NAMES else ""
    alone = "" if last in ADAPTER_FILES else f", or pass {folder.path / last} instead of the folder"
    raise SourceError(
        f"{folder.path}: holds weights that are not in {last}: {', '.join(described[:_MAX_NAMES])}{more}. If the "
        f"model does not need them, pass {ignore_options(unknown, folder.kept.keys() - unknown.keys())}{alone}"
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


# --- duplicates in PyTorch's format or Meta's layout -----------------------------------------------------------------


def unproven(files: Mapping[str, AnyPath], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The files that are not proven to be duplicates of a checkpoint.

    Args:
        files: name in the folder to path, of regular weight files that are not part of the checkpoint.
        shapes: of the checkpoint's tensors.

    Returns:
        Name to reason; the reason is empty for formats that cannot be listed.
    """
    reasons = dict.fromkeys(files, "")
    indexes = {name: _index(name, path) for name, path in files.items() if PYTORCH.lists(name)}
    for name, index in indexes.items():
        if not isinstance(index, str) and index.tensors == shapes.keys():
            listed_files = {file for file in index.files & files.keys() if file.endswith(PYTORCH.suffixes)}
            reasons |= dict.fromkeys([name, *listed_files], _PROVEN)
    pickles = [name for name in files if name.endswith(PYTORCH.suffixes) and reasons[name] != _PROVEN]
    paths = [files[name] for name in pickles]
    for name, listed in zip(pickles, containers.torch_files.list_torch_files(paths), strict=True):
        reasons[name] = _first_mismatch(listed if isinstance(listed, TensorFile) else listed.problem, shapes)
    for name in [name for name in files if SAFETENSORS.has(name) and layout_head(META).names.fullmatch(name)]:
        reasons[name] = _first_mismatch(_read_tensors(files[name]), shapes)
    indexes |= {name: _index(name, path) for name, path in files.items() if name == _META_INDEX}
    for name, index in indexes.items():
        if isinstance(index, str):
            reasons[name] = index
        elif all(reasons.get(file) == _PROVEN for file in index.files):
            reasons[name] = _PROVEN
        else:
            reasons[name] = "lists tensors that the checkpoint does not have"
    return {name: why for name, why in reasons.items() if why != _PROVEN}


_META_INDEX = f"consolidated{SAFETENSORS.index_suffix}"
#: Marks a file that is proven to be a duplicate.
_PROVEN = "proven"


class _Index(NamedTuple):
    """The tensors that an index lists, and their files, by their names in the folder."""

    tensors: set[str]
    files: set[str]


def _index(name: str, path: AnyPath) -> _Index | str:
    """Read an index; returns a description of the error if it cannot be used."""
    try:
        weight_map = read_json(path).get("weight_map")
    except SourceError as error:
        return error.with_options().removeprefix(f"{path}: ")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        return "does not have a weight_map"
    return _Index(set(weight_map), {str(PurePosixPath(name).parent / file) for file in weight_map.values()})


def _read_tensors(path: AnyPath) -> TensorFile | str:
    """The tensors of a safetensors file, or the reason for which it cannot be read."""
    try:
        return read_header(path).file(path)
    except SourceError as error:
        return error.with_options().removeprefix(f"{path}: ")


def _with_model_names(
    tensors: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors: Meta's under their names in the checkpoint, without tensors that follow from the layout."""
    layout = layout_file(META).all_rules
    for name, info in tensors.items():
        known = find_target(layout.rules, name)
        if known is not None and name not in shapes:
            yield known.sources[0], info
        elif name in shapes or not layout.is_without_source(name):
            yield name, info


def _first_mismatch(listed: TensorFile | str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Describe the first tensor that is not in the checkpoint, or return ``_PROVEN``.

    A tensor that shares storage with one of the checkpoint is in it, too: safetensors stores only one of them.
    """
    if isinstance(listed, str):
        return listed
    tensors = list(_with_model_names(listed.tensors, shapes))
    known = {info for name, info in tensors if info.shape == shapes.get(name)}
    for name, info in tensors:
        if name in shapes and info.shape != shapes[name]:
            return f"has {name} of shape {list(info.shape)}, expected {list(shapes[name])} as in the checkpoint"
        if name not in shapes and info not in known:
            return f"has {name}, which the checkpoint does not have"
    return _PROVEN
