"""Merge a split checkpoint back into its source, byte for byte, or rank files of another tool into a checkpoint."""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from shardconv.checkpoint.engine.layout import ADAPTERS, lay_out_source
from shardconv.checkpoint.operations.pipeline import on_pipelines, open_split_folders
from shardconv.checkpoint.operations.verify import is_source_of
from shardconv.checkpoint.operations.written_pipeline import Written
from shardconv.checkpoint.output.auxiliary import AuxiliaryFiles
from shardconv.checkpoint.output.combined import every, paths, texts, total
from shardconv.checkpoint.output.destination import Destination, find_destination
from shardconv.checkpoint.output.job import settings_of
from shardconv.checkpoint.output.writer import CheckpointWriter, Weights, WriteOptions, WriteReport
from shardconv.checkpoint.sources.planning import StrPath, check_shapes
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.split_folders import SplitFolders, open_folders
from shardconv.files.containers.safetensors import Header, build_header
from shardconv.files.folder import AnyPath, permissions, relative_name
from shardconv.files.paths import SourcePath
from shardconv.files.weight_formats import is_weights
from shardconv.support import Progress
from shardconv.support.arguments import checked
from shardconv.support.errors import UsageError, option


class MergeReport(WriteReport, frozen=True, kw_only=True):
    """Result of a merge.

    Attributes:
        files: the names of the weight files.
        num_bytes: bytes of all tensors.
        is_identical: whether the weight files equal the source files, byte for byte; False if several source files are
            merged into one, or if the source was ``derived``. None without checksums.
        notes: assumptions, and the reasons why merged adapters differ from the split ones.
        derived: the reasons why the files differ from the split ones, one phrase each; empty for safetensors files.
        adapters: names of the adapters of the split checkpoint, which are merged into folders of their own.
    """

    files: Annotated[tuple[str, ...], paths]
    num_bytes: Annotated[int, total]
    is_identical: Annotated[bool | None, every]
    notes: Annotated[tuple[str, ...], texts] = ()
    derived: Annotated[tuple[str, ...], texts] = ()
    adapters: Annotated[tuple[str, ...], paths] = ()


@checked
@on_pipelines(Written("merge", open_split_folders, "{name}-merged", is_split=False, is_finished=is_source_of))
def merge(  # noqa: D417 - WriteOptions has the descriptions
    src: SourcePath | Sequence[SourcePath],
    dst: StrPath | Destination | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    source_layout: str | None = None,
    config: StrPath | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Merge a split checkpoint, a folder that vLLM saved with ``save_sharded_state``, or rank files of another tool.

    Checks checksums, equality of replicas, and zeros in the padding during the copy.

    Args:
        src: the split checkpoint, a folder that vLLM saved of a dense unquantized model, or one with rank files of
            another tool; or the folders of one split that each have some of the ranks.
        dst: the output: a path that ends with ``.safetensors`` for one file, any other path for a folder with the
            source files; or the URL of either in an object store. Defaults to ``NAME-merged`` in the current folder, a
            file or a folder like the source.
        source_layout: the layout of another tool's rank files in ``src``; None to detect it.
        config: a config.json to use instead of the config of another tool's rank files.
        overwrite, dry_run, resume, threads, progress: how it is written, see
            :class:`~shardconv.WriteOptions`.

    Raises:
        SplitCheckpointError: if a rank file is missing, bytes differ from their checksums, or folders are not
            of one split.
        UsageError: if the destination is in the source, or contains it.
        OutputError: if the destination exists, is in use, or has too little free space, or the interrupted run had
            other arguments.
    """
    began = time.perf_counter()
    how = WriteOptions(overwrite=overwrite, dry_run=dry_run, resume=resume, threads=threads, progress=progress)
    given = find_destination(dst, resume=resume)
    split = open_folders(src, source_layout, config=config)
    notes = () if split.source is None else (*split.source.assumed, *check_shapes(split.source))
    manifest, adapters = split.manifest, split.adapters()
    destination = given or Destination(Path(f"{split.name}-merged{'' if manifest.is_folder else '.safetensors'}"))
    is_folder = _is_folder(destination)
    if adapters and not is_folder:
        raise UsageError(
            f"{destination}: is one file (expected a folder, also for the adapters {', '.join(adapters)}): change "
            f"{option('dst')}"
        )
    headers = _headers(manifest, one_file=not is_folder)
    equals_source = not manifest.derived and list(headers.values()) == [header for _, header in manifest.source_files]
    writer = CheckpointWriter(
        destination, how, _auxiliary(split) if is_folder else AuxiliaryFiles(), like=split.first, is_folder=is_folder,
        added_files=tuple(name for one in adapters.values() for name in _merged_names(split.first, one)),
        added_bytes=sum(header.file_bytes for one in adapters.values() for _, header in one.manifest.source_files),
    )  # fmt: skip
    names = tuple(headers) if is_folder else (destination.path.name,)
    renamed = dict(zip(names, headers.values(), strict=True))
    write = partial(write_full, split=split, headers=renamed, adapters=adapters)
    check = partial(_check_readable, [split, *adapters.values()])
    return MergeReport(
        **writer.run(split.paths, write, began=began, check=check),
        files=names,
        num_tensors=len(manifest.tensors),
        num_bytes=sum(header.data_bytes for header in headers.values()),
        is_identical=None if equals_source and manifest.checksums is None else equals_source,
        notes=(*notes, *_adapter_notes(adapters)),
        derived=manifest.derived,
        adapters=manifest.adapters,
    )


def _check_readable(checkpoints: Sequence[SplitFolders]) -> None:
    for one in checkpoints:
        one.check_readable()


def _auxiliary(split: SplitFolders) -> AuxiliaryFiles:
    if split.source is not None:
        return AuxiliaryFiles.of_source(split.source)
    return AuxiliaryFiles.of_split(split.manifest, split.first)


def _is_folder(destination: Destination) -> bool:
    """Whether a folder is written, by the name of the destination; refuses names of weight files in other formats."""
    target = destination.path
    if target.suffix == ".safetensors":
        return False
    if is_weights(target.name):
        raise UsageError(
            f"{destination}: has the suffix of a weight file that merge does not write (got {target.suffix}, expected "
            f".safetensors for one file, or a folder): change {option('dst')}"
        )
    return True


def _headers(manifest: Manifest, *, one_file: bool) -> dict[str, Header]:
    """Name to header of the files to write: the source files, or one file with all tensors."""
    if one_file and len(manifest.source_files) > 1:
        return {"model.safetensors": build_header(manifest.tensors.items(), manifest.metadata or None)}
    return dict(manifest.source_files)


def _merged_names(folder: AnyPath, adapter: SplitFolders) -> Iterator[str]:
    """Yield the names of the files of a merged adapter, relative to the folder of its base model."""
    manifest = adapter.manifest
    for name in (*(name for name, _ in manifest.source_files), *manifest.auxiliary_files):
        yield relative_name(adapter.first / name, folder)


def _adapter_notes(adapters: Mapping[str, SplitFolders]) -> Iterator[str]:
    """Yield the reasons why adapters differ from the split ones."""
    for name, adapter in adapters.items():
        yield from (f"adapter {name}: {phrase}" for phrase in adapter.manifest.derived)


def write_full(
    writer: CheckpointWriter,
    split: SplitFolders,
    headers: Mapping[str, Header],
    adapters: Mapping[str, SplitFolders] = MappingProxyType({}),
    command: str = "merge",
) -> int:
    """Write the full tensors of a split or padded checkpoint.

    Args:
        writer: of the new checkpoint.
        split: the checkpoint.
        headers: name to header of each file to write.
        adapters: name to each adapter, which is merged into a folder of its own.
        command: the name of the command.

    Returns:
        Bytes of full tensors that an interrupted run had written.
    """
    manifest, read = split.manifest, split.manifests
    layout = lay_out_source([*headers.values()], manifest.tensors)
    weights = Weights.of_layout([*headers], layout, manifest.stripes)
    reader, inputs = split.open()
    with writer.writing(reader, inputs, weights, settings_of(command, manifest), read) as staged:
        for name, adapter in adapters.items():
            merge(adapter.paths, staged.inner(f"{ADAPTERS}/{name}"), threads=writer.options.threads)
        if writer.is_folder and manifest.index is not None:
            name, index = manifest.index
            staged.write(name, index.raw().decode(), permissions(read))
    return staged.resumed_bytes
