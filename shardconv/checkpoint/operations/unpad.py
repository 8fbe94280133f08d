"""Restore the source of a padded checkpoint, byte for byte."""

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardconv.checkpoint.engine.copy import Progress
from shardconv.checkpoint.engine.layout import PADDING_NAME
from shardconv.checkpoint.operations.merge import write_full
from shardconv.checkpoint.output.auxiliary import AuxiliaryFiles, NewText
from shardconv.checkpoint.output.destination import Destination, find_destination
from shardconv.checkpoint.output.writer import CheckpointWriter, WriteOptions, WriteReport
from shardconv.checkpoint.sources.planning import StrPath
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.checkpoint.split.split_folders import as_folders
from shardconv.files.folder import permissions
from shardconv.files.paths import SourcePath, open_path
from shardconv.files.weight_formats import CONFIG_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpadReport(WriteReport):
    """Result of unpadding.

    Attributes:
        num_bytes: bytes of all tensors.
        derived: why the files differ from those that were padded, one phrase each; empty for safetensors files.
    """

    num_bytes: int
    derived: tuple[str, ...] = ()


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
    manifest = read_manifest(folder, name=PADDING_NAME)
    padded = as_folders(folder, manifest)
    destination = given or Destination(Path(f"{folder.resolve().name}-unpadded"))
    auxiliary = AuxiliaryFiles.of_split(manifest, folder)
    made = {CONFIG_NAME: NewText(str(manifest.original_config), permissions([folder / CONFIG_NAME]))}
    writer = CheckpointWriter(destination, how, replace(auxiliary, made=made), like=folder)
    write = partial(write_full, split=padded, headers=dict(manifest.source_files), command="unpad")
    return UnpadReport(
        **writer.run([folder], write, began=began, check=padded.check_readable),
        num_tensors=len(manifest.tensors),
        num_bytes=sum(header.data_bytes for _, header in manifest.source_files),
        derived=manifest.derived,
    )
