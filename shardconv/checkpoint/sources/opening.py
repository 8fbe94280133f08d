"""Open sources: a safetensors or PyTorch file, a Hugging Face folder, or a folder with rank files of another tool."""

import os
from pathlib import Path

from msgspec.structs import replace

from shardconv.checkpoint import sources
from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.sources.folder_files import SourceFolder, leave_out_weights, list_folder
from shardconv.checkpoint.sources.layout_files import find_layout, refuse_rank_file, with_iteration
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.source_files import WeightFiles, find_weight_files, read_weights
from shardconv.files.folder import AnyPath, check_portable, read_json
from shardconv.files.paths import check_link, missing_hint, unfinished
from shardconv.files.weight_formats import (
    ADAPTER_FILES,
    CONFIG_NAME,
    NUMBERED_NAME,
    SOURCE_FORMATS,
    conversion_instructions,
    is_index,
    is_weights,
    refuse_rank_files,
    without_weights,
)
from shardconv.plan.families.loading import model_type_of
from shardconv.support.errors import SourceError, UsageError, option


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
    is_folder = path.is_dir()
    if source_layout is not None and not is_folder:
        raise UsageError(
            f"{option(source_layout=source_layout)}: only applies to folders (got the file {path}): remove it"
        )
    if is_folder or is_index(path.name):
        folder = list_folder(path if is_folder else path.parent, ignore, optional_ignore, follow_links=follow_links)
        folder = with_iteration(folder) if is_folder else folder
        layout = find_layout(folder, source_layout) if is_folder else None
        if layout is not None:
            source = sources.layout_source.open_layout(folder, layout, given, is_asked=source_layout is not None)
        else:
            source = _open_folder(folder, None if is_folder else path.name)
    elif ignore:
        raise UsageError(f"{option(ignore=ignore[:1])}: only applies to folders (got the file {path}): remove it")
    else:
        source = _open_file(path, follow_links=follow_links)
    if config is not None:
        auxiliary_files = {**source.auxiliary_files, CONFIG_NAME: config}
        source = replace(source, config=given, auxiliary_files=auxiliary_files, is_config_given=True)
    return _checked(source)


def open_if_external(path: AnyPath, source_layout: str | None, config: Path | None = None) -> Source | None:
    """Open a folder with rank files of another tool; None for all other paths.

    Args:
        path: the folder.
        source_layout: the layout of the rank files; None to detect it.
        config: a config.json to use instead of the folder's.

    Raises:
        SourceError: as :func:`open_source`.
    """
    if not path.is_dir() or (path / MANIFEST_NAME).exists():
        return None
    if find_layout(with_iteration(list_folder(path)), source_layout) is None:
        return None
    return open_source(path, config=config, source_layout=source_layout)


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
    source = read_weights(folder, WeightFiles([*names]), follow_links=follow_links)
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
    is_of_model = model_type_of(config) is not None
    if path.name == CONFIG_NAME and not is_of_model:
        raise SourceError(f"{path}: does not have a model_type, a _class_name or weights next to it: add one of them")
    return config if is_of_model else None


def _read_config(path: Path) -> dict[str, object]:
    """Read the config of the user's option."""
    if not os.path.lexists(path):
        raise SourceError(f"{option(config=path)}: does not exist{missing_hint(path, takes_url=False)}")
    return read_json(path)


def _checked(source: Source) -> Source:
    """The source, unless it has file names that would be refused when they are read from a manifest."""
    index = [] if source.index is None else [source.index[0]]
    check_portable(source.path, (*(file.name for file in source.files), *index, *source.auxiliary_files))
    return source


def _check_path(path: AnyPath) -> None:
    """Refuse a path that does not exist, and a file of a split checkpoint, whose tensors are shards."""
    if not path.exists():
        raise SourceError(f"{path}: does not exist{missing_hint(path)}")
    if problem := unfinished(path):
        raise SourceError(f"{path}: {problem}")
    if path.is_file() and (path.parent / MANIFEST_NAME).exists():
        raise SourceError(f"{path}: belongs to a split checkpoint: pass its folder {path.parent}, or the source")


def _open_file(path: AnyPath, *, follow_links: bool) -> Source:
    """Open a file with all weights, and the config beside it."""
    if path.name in ADAPTER_FILES:
        raise SourceError(f"{path}: belongs to a PEFT adapter: pass its folder {path.parent}")
    if not any(path.name.endswith(one.suffixes) for one in SOURCE_FORMATS):
        if standalone_config(path, follow_links=follow_links) is not None:
            raise SourceError(f"{path}: is a config, not a file of weights: {without_weights(path)}")
        raise SourceError(
            f"{path}: is not a .safetensors or PyTorch file. {conversion_instructions(path.parent, [path.name])}"
        )
    refuse_rank_file(path)
    refuse_rank_files(path.parent, [path.name])
    match = NUMBERED_NAME.fullmatch(path.name)
    if match and int(match["count"]) > 1:
        raise SourceError(
            f"{path}: is one of {int(match['count'])} files of a checkpoint: pass their folder or their index instead"
        )
    source = read_weights(path, WeightFiles([path.name]), follow_links=True)
    config = path.parent / CONFIG_NAME
    if not (config.is_symlink() or config.exists()):
        return source
    check_link(config, path.parent, follow_links=follow_links)
    return replace(source, config=read_json(config), auxiliary_files={CONFIG_NAME: config})


def _open_folder(folder: SourceFolder, index_name: str | None) -> Source:
    """Open the checkpoint in a folder; the user may have passed one of its indexes."""
    found = find_weight_files(folder, index_name)
    source = read_weights(folder.path, found, follow_links=folder.follow_links)
    checkpoint_names = [*found.names, *([found.index[0]] if found.index else [])]
    auxiliary_files = folder.auxiliary(checkpoint_names)
    shapes = None if index_name else lambda: {name: spec.shape for name, spec in source.specs.items()}
    left_out = {**source.left_out, **folder.left_out, **leave_out_weights(folder, checkpoint_names, shapes)}
    config = read_json(auxiliary_files[CONFIG_NAME]) if CONFIG_NAME in auxiliary_files else None
    return replace(
        source, config=config, auxiliary_files=auxiliary_files, left_out=dict(sorted(left_out.items())),
        ignore=folder.ignore,
    )  # fmt: skip
