"""Source checkpoints: a safetensors or PyTorch file, a Hugging Face folder, or a snapshot in the Hugging Face cache."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.sources.folder_files import find_auxiliary, leave_out_weights, list_files
from shardconv.checkpoint.sources.layout_files import refuse_rank_file
from shardconv.checkpoint.sources.layout_source import open_external
from shardconv.checkpoint.sources.source_files import (
    SourceFile,
    WeightFiles,
    find_weight_files,
    is_portable_name,
    read_safetensors,
)
from shardconv.checkpoint.sources.source_reader import StoredFiles, Transform
from shardconv.checkpoint.sources.torch_source import read_pytorch
from shardconv.files.containers.safetensors import TensorInfo
from shardconv.files.folder import AnyPath
from shardconv.files.paths import absolute_path, check_link, missing_hint, unfinished
from shardconv.files.text_files import read_json
from shardconv.files.weight_formats import (
    ADAPTER_FILES,
    CONFIG_NAME,
    NUMBERED_NAME,
    PYTORCH,
    SAFETENSORS,
    SOURCE_FORMATS,
    convert,
    is_index,
    is_weights,
    refuse_rank_files,
    without_weights,
)
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import SourceError, UsageError, option


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be split.

    Attributes:
        path: the path that the user passed.
        is_folder: whether ``path`` is a folder.
        files: the source files, sorted by name; those that a merge writes.
        index: name and text of the index of the files, or None.
        index_path: the index of the files that store the tensors, or None.
        config: contents of config.json, or None.
        auxiliary_files: name relative to the folder, with / as separator, to path.
        left_out: name to reason of all other files; names of hidden folders end with /.
        ignore: patterns of files that the user left out.
        stored: where the tensors are stored; None if it is where the headers of ``files`` say.
        transforms: name to transform of each tensor that is computed from stored tensors.
        layout: of rank files of another tool; None for all other sources.
        num_ranks: number of ranks whose files store the tensors.
        made_files: name to text of auxiliary files that the folder does not have, or that are written with this text in
            place of theirs, such as a config with another dtype.
        assumed: assumptions about the source, as sentences.
        derived: why a merge does not give the bytes of the source's files, one phrase each; empty if it does.
        merged_adapter: name of the adapter that is merged into the weights; None without one.
        dtype: the dtype that floating-point tensors are converted to, by its name as an option; None if they are not.
        is_config_given: whether the user passed the config, in place of that of the folder.
    """

    path: AnyPath
    is_folder: bool
    files: tuple[SourceFile, ...]
    index: tuple[str, str] | None = None
    index_path: AnyPath | None = None
    config: dict[str, object] | None = None
    auxiliary_files: Mapping[str, AnyPath] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    stored: StoredFiles | None = None
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    layout: str | None = None
    num_ranks: int = 1
    made_files: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    merged_adapter: str | None = None
    dtype: str | None = None
    is_config_given: bool = False

    @property
    def auxiliary_names(self) -> tuple[str, ...]:
        """The names of all auxiliary files that are written beside the weights."""
        return tuple(dict.fromkeys([*self.auxiliary_files, *self.made_files]))

    @property
    def paths(self) -> tuple[AnyPath, ...]:
        """The files that store the tensors."""
        return tuple(file.path for file in self.files) if self.stored is None else self.stored.paths

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Name to dtype and shape of every tensor, in the order of the files and of their data."""
        return {name: TensorSpec(info.dtype, info.shape) for name, _, info in self.tensors()}

    @property
    def name(self) -> str:
        """The name of the file without its suffix, or of the folder; in a Hugging Face cache that of the model."""
        path = absolute_path(self.path) if isinstance(self.path, Path) else self.path  # resolve() would leave a cache
        folder = path if path.is_dir() else path.parent
        if folder.parent.name == "snapshots":
            return folder.parent.parent.name.rpartition("--")[2]
        return (
            path.stem if path.suffix in {*SAFETENSORS.suffixes, *PYTORCH.suffixes} and path != folder else folder.name
        )

    @property
    def folder(self) -> AnyPath:
        """The folder of config.json and the other auxiliary files."""
        return self.path if self.is_folder else self.path.parent

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.header.data_bytes for file in self.files)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of all files; where values differ, the first file takes precedence."""
        merged: dict[str, str] = {}
        for file in self.files:
            merged = {**(file.header.metadata or {}), **merged}
        return merged

    def tensors(self) -> Iterator[tuple[str, int, TensorInfo]]:
        """Name, index of the file, and position in the file of every tensor."""
        for number, file in enumerate(self.files):
            for name, info in file.header.tensors.items():
                yield name, number, info


def open_source(
    path: AnyPath,
    *,
    config: Path | None = None,
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
    optional_ignore: tuple[str, ...] = (),
    source_layout: str | None = None,
) -> Source:
    """Read the headers of a checkpoint, and check that its files are consistent.

    Args:
        path: a ``.safetensors`` or PyTorch file, an index file, or a folder.
        config: a config.json to use instead of the one next to the weights.
        follow_links: follow links that point outside of the folder.
        ignore: glob patterns, relative to the folder, of files to leave out; each must match a file.
        optional_ignore: further patterns, which may match nothing.
        source_layout: the layout of another tool's rank files to read; None to detect it.

    Raises:
        SourceError: if a file is missing, damaged, ambiguous or outside of the folder, or the model may need weights
            that are not part of the checkpoint.
        UsageError: if a pattern of ``ignore`` matches nothing, or a file of the checkpoint.
    """
    _check_path(path)
    given = None if config is None else _read_config(config)
    if path.is_dir() and (
        external := _open_external(
            path, source_layout, given, follow_links=follow_links, ignore=ignore, optional_ignore=optional_ignore
        )
    ):
        source = external
    elif source_layout is not None:
        raise UsageError(
            f"{option(source_layout=source_layout)}: only applies to folders (got the file {path}): remove it"
        )
    elif path.is_dir():
        source = _open_folder(path, None, follow_links=follow_links, ignore=ignore, optional_ignore=optional_ignore)
    elif is_index(path.name):
        folder, name = path.parent, path.name
        source = _open_folder(folder, name, follow_links=follow_links, ignore=ignore, optional_ignore=optional_ignore)
    elif ignore:
        raise UsageError(f"{option(ignore=ignore[:1])}: only applies to folders (got the file {path}): remove it")
    elif path.name in ADAPTER_FILES:
        raise SourceError(f"{path}: belongs to a PEFT adapter: pass its folder {path.parent}")
    elif any(path.name.endswith(one.suffixes) for one in SOURCE_FORMATS):
        source = _open_file(path, follow_links=follow_links)
    elif standalone_config(path, follow_links=follow_links) is not None:
        raise SourceError(f"{path}: is a config, not a file of weights: {without_weights(path)}")
    else:
        raise SourceError(f"{path}: is not a .safetensors or PyTorch file. {convert(path.parent, [path.name])}")
    if config is not None:
        auxiliary_files = {**source.auxiliary_files, CONFIG_NAME: config}
        source = replace(source, config=given, auxiliary_files=auxiliary_files, is_config_given=True)
    _check_names(source)
    return source


def _read_config(path: Path) -> dict[str, object]:
    """Read the config of the user's option."""
    if not os.path.lexists(path):
        raise SourceError(f"{option(config=path)}: does not exist{missing_hint(path, takes_url=False)}")
    return read_json(path)


def open_if_external(path: AnyPath, source_layout: str | None) -> Source | None:
    """Open a folder with rank files of another tool; None for all other paths.

    Raises:
        SourceError: as :func:`open_source`.
    """
    if not path.is_dir() or (path / MANIFEST_NAME).exists():
        return None
    source = _open_external(path, source_layout, None, follow_links=False, ignore=(), optional_ignore=())
    if source is not None:
        _check_names(source)
    return source


def open_files(folder: AnyPath, names: tuple[str, ...], auxiliary: tuple[str, ...], *, follow_links: bool) -> Source:
    """Open some files of a folder as a checkpoint of their own.

    Args:
        folder: the folder.
        names: of the weight files, all in one format.
        auxiliary: names of the auxiliary files.
        follow_links: follow links that point outside of the folder.

    Raises:
        SourceError: if a file is missing, damaged, or outside of the folder.
    """
    weight_format = next(one for one in SOURCE_FORMATS if one.has(names[0]))
    source = _read(folder, WeightFiles([*names], None, {}, weight_format), follow_links=follow_links)
    for name in auxiliary:
        check_link(folder / name, folder, follow_links=follow_links)
    return replace(source, auxiliary_files={name: folder / name for name in auxiliary})


def standalone_config(path: AnyPath, *, follow_links: bool = False) -> dict[str, object] | None:
    """Read a config without weights: ``path`` is the config, or a folder that holds it. None for all other paths.

    Raises:
        SourceError: if it cannot be read, or is a link out of its folder.
    """
    if path.is_dir():
        try:
            names = [child.name for child in path.iterdir()]
        except OSError:
            return None  # open_source reports the error
        if any(is_weights(name) or name == MANIFEST_NAME for name in names):
            return None
        path = path / CONFIG_NAME
    if path.suffix != ".json" or is_weights(path.name) or not path.is_file():
        return None
    check_link(path, path.parent, follow_links=follow_links)
    config = read_json(path)
    if path.name == CONFIG_NAME and not isinstance(config.get("model_type"), str):
        raise SourceError(f"{path}: does not have a model_type or weights next to it: add one of them")
    return config if isinstance(config.get("model_type"), str) else None


def _check_names(source: Source) -> None:
    """Refuse file names that would be refused when they are read from a manifest."""
    index = [] if source.index is None else [source.index[0]]
    for name in (*(file.name for file in source.files), *index, *source.auxiliary_files):
        if not all(is_portable_name(folder_or_file) for folder_or_file in name.split("/")):
            raise SourceError(f"{source.path}: the name of file {name!r:.100} is not valid on every system: rename it")


def _check_path(path: AnyPath) -> None:
    """Refuse a path that does not exist, and a file of a split checkpoint, whose tensors are shards."""
    if not path.exists():
        raise SourceError(f"{path}: does not exist{missing_hint(path)}")
    if problem := unfinished(path):
        raise SourceError(f"{path}: {problem}")
    if path.is_file() and (path.parent / MANIFEST_NAME).exists():
        raise SourceError(f"{path}: belongs to a split checkpoint: pass its folder {path.parent}, or the source")


def _open_file(path: AnyPath, *, follow_links: bool) -> Source:
    refuse_rank_file(path)
    refuse_rank_files(path.parent, [path.name])
    match = NUMBERED_NAME.fullmatch(path.name)
    if match and int(match["count"]) > 1:
        raise SourceError(
            f"{path}: is one of {int(match['count'])} files of a checkpoint: pass their folder or their index instead"
        )
    weight_format = next(one for one in SOURCE_FORMATS if path.name.endswith(one.suffixes))
    source = _read(path, WeightFiles([path.name], None, {}, weight_format), follow_links=True)
    config = path.parent / CONFIG_NAME
    if not (config.is_symlink() or config.exists()):
        return source
    check_link(config, path.parent, follow_links=follow_links)
    return replace(source, config=read_json(config), auxiliary_files={CONFIG_NAME: config})


def _read(path: AnyPath, found: WeightFiles, *, follow_links: bool) -> Source:
    """The source with these weight files, without its other files; ``path`` is the file or the folder."""
    is_folder = path.is_dir()
    read = read_pytorch if found.format is PYTORCH else read_safetensors
    weights = read(path if is_folder else path.parent, found, follow_links=follow_links)
    return Source(
        path, is_folder=is_folder, files=weights.files, index=weights.index, index_path=weights.index_path,
        left_out=weights.left_out, stored=weights.stored, transforms=weights.transforms, derived=weights.derived,
    )  # fmt: skip


def _open_external(
    folder: AnyPath,
    layout: str | None,
    config: dict[str, object] | None,
    *,
    follow_links: bool,
    ignore: tuple[str, ...],
    optional_ignore: tuple[str, ...],
) -> Source | None:
    """Open rank files of another tool; None if the folder does not hold any."""
    files = list_files(folder, ignore, optional_ignore)
    found = open_external(folder, files, layout, config, follow_links=follow_links)
    if found is None:
        return None
    patterns = tuple(dict.fromkeys([*optional_ignore, *ignore]))
    return Source(folder, is_folder=True, ignore=patterns, **found._asdict())


def _open_folder(
    folder: AnyPath,
    index_name: str | None,
    *,
    follow_links: bool,
    ignore: tuple[str, ...],
    optional_ignore: tuple[str, ...],
) -> Source:
    folder_files = list_files(folder, ignore, optional_ignore)
    found = find_weight_files(folder, folder_files, index_name, follow_links=follow_links)
    source = _read(folder, found, follow_links=follow_links)
    checkpoint_names = [*found.names, *([found.index[0]] if found.index else [])]
    shapes = {name: spec.shape for name, spec in source.specs.items()}
    auxiliary_files = find_auxiliary(folder, folder_files, checkpoint_names, follow_links=follow_links)
    other_weights = leave_out_weights(
        folder, folder_files, checkpoint_names, None if index_name else shapes, follow_links=follow_links
    )
    left_out = {**source.left_out, **folder_files.left_out, **other_weights}
    config = read_json(auxiliary_files[CONFIG_NAME]) if CONFIG_NAME in auxiliary_files else None
    return replace(
        source, config=config, auxiliary_files=auxiliary_files, left_out=dict(sorted(left_out.items())),
        ignore=tuple(dict.fromkeys([*optional_ignore, *ignore])),
    )  # fmt: skip
