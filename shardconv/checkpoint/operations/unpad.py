"""Restore the source of a padded checkpoint, byte for byte."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from shardconv.checkpoint.engine.copy import Progress
from shardconv.checkpoint.engine.layout import lay_out_source
from shardconv.checkpoint.output.auxiliary import AuxiliaryFiles, NewText
from shardconv.checkpoint.output.destination import LocalDestination, find_destination
from shardconv.checkpoint.output.job import settings_of
from shardconv.checkpoint.output.writer import CheckpointWriter, Weights, WriteOptions
from shardconv.checkpoint.sources.planning import StrPath
from shardconv.checkpoint.split.padding_manifest import PADDING_NAME, read_padding
from shardconv.checkpoint.split.split_folders import SplitFolders, as_folders
from shardconv.files.folder import permissions
from shardconv.files.paths import SourcePath, open_path
from shardconv.files.weight_formats import CONFIG_NAME


@dataclass(frozen=True, slots=True)
class UnpadReport:
    """Result of unpadding, or with ``dry_run`` the expected result.

    The attributes are those of :class:`~shardconv.checkpoint.operations.pad.PadReport`, and ``derived`` that of
    :class:`~shardconv.checkpoint.operations.merge.MergeReport`.
    """

    path: str
    num_tensors: int
    num_bytes: int
    seconds: float
    dry_run: bool
    destination_exists: bool
    derived: tuple[str, ...] = ()
    resumed_bytes: int = 0


def unpad(  # noqa: D417 - WriteOptions has the descriptions
    src: SourcePath,
    dst: StrPath | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> UnpadReport:
    """Restore the checkpoint that :func:`~shardconv.pad` padded, byte for byte, and check its checksums.

    Args:
        src: the padded checkpoint.
        dst: the folder to write, or its URL in an object store; defaults to ``NAME-unpadded`` in the current folder.
        overwrite, dry_run, resume, threads, progress: how it is written, see
            :class:`~shardconv.WriteOptions`.

    Raises:
        SplitCheckpointError: if the folder is not a padded checkpoint, or bytes differ from those that were written.
        OutputError: if the destination exists, is in use, or has too little free space, or the interrupted run is not
            that of the same arguments.
    """
    began = time.perf_counter()
    how = WriteOptions(overwrite=overwrite, dry_run=dry_run, resume=resume, threads=threads, progress=progress)
    given = find_destination(dst, resume=resume)
    folder = open_path(src)
    manifest, config = read_padding(folder)
    padded = as_folders(folder, manifest)
    destination = given or LocalDestination(Path(f"{folder.resolve().name}-unpadded"))
    auxiliary = AuxiliaryFiles.of_split(manifest, folder)
    made = {CONFIG_NAME: NewText(config, permissions([folder / CONFIG_NAME]))}
    writer = CheckpointWriter(destination, how, replace(auxiliary, made=made), like=folder)
    exists = writer.check([folder])
    if dry_run:
        padded.check_readable()
    resumed_bytes = 0 if dry_run else _write(writer, padded)
    return UnpadReport(
        path=str(destination),
        num_tensors=len(manifest.tensors),
        num_bytes=sum(header.data_bytes for _, header in manifest.source_files),
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        destination_exists=exists,
        derived=manifest.derived,
        resumed_bytes=resumed_bytes,
    )


def _write(writer: CheckpointWriter, padded: SplitFolders) -> int:
    """Write the checkpoint; returns the bytes of full tensors that an interrupted run had written."""
    manifest = padded.manifest
    names, headers = zip(*manifest.source_files, strict=True)
    weights = Weights(names, lay_out_source(headers, manifest.tensors), manifest.stripes)
    reader, inputs = padded.open()
    read = padded.manifests(PADDING_NAME)
    with writer.writing(reader, inputs, weights, settings_of("unpad", manifest), read) as staged:
        if manifest.index is not None:
            name, text = manifest.index
            staged.write(name, text, permissions([padded.first / name]))
    return staged.resumed_bytes
