"""Unpad: the source of a padded checkpoint, byte for byte."""

import time
from dataclasses import dataclass
from pathlib import Path

from shardconv.checkpoint.copy import Progress
from shardconv.checkpoint.fileio import create, permissions
from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.layout import lay_out_parts
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.padding_manifest import read_padding
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import StrPath
from shardconv.checkpoint.staging import check_apart, check_target, staging
from shardconv.checkpoint.write import check_readable, copy_files, copy_side_files, read_ranks, side_bytes, side_paths


@dataclass(frozen=True, slots=True)
class UnpadReport:
    """What an unpadding did, or with ``dry_run`` would do; attributes as of :class:`~shardconv.PadReport`."""

    path: str
    num_tensors: int
    num_bytes: int
    seconds: float
    dry_run: bool
    destination_exists: bool


def unpad(
    src: StrPath,
    dst: StrPath | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> UnpadReport:
    """Write the checkpoint that :func:`~shardconv.pad` padded, byte for byte; bytes are checked against checksums.

    Args:
        src: the padded checkpoint.
        dst: the folder to write; by default ``NAME-unpadded`` in the current folder.
        overwrite: replace what is at ``dst``.
        dry_run: check what can be checked without reading the data, write nothing.
        threads: how many threads copy; by default as many as there are processors, up to 8.
        progress: called with bytes done and bytes in all.

    Raises:
        SplitCheckpointError: if the folder is not a padded checkpoint, or bytes are not those that were written.
        OutputError: if the destination exists, is in use, or has no room.
    """
    began = time.perf_counter()
    folder = local_path(src)
    manifest, config = read_padding(folder)
    target = local_path(dst) if dst is not None else Path(f"{folder.resolve().name}-unpadded")
    check_apart(target, [folder])
    names = [*manifest.side_files, CONFIG_NAME]
    exists = check_target(target, is_folder=True, overwrite=overwrite, dry_run=dry_run, side_files=names)
    if dry_run:
        check_readable(manifest, folder)
    else:
        _write(manifest, config, folder, target, overwrite=overwrite, threads=threads, progress=progress)
    return UnpadReport(
        path=str(target),
        num_tensors=len(manifest.tensors),
        num_bytes=sum(header.file_bytes for _, header in manifest.parts),
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        destination_exists=exists,
    )


def _write(
    manifest: Manifest,
    config: str,
    folder: Path,
    target: Path,
    *,
    overwrite: bool,
    threads: int | None,
    progress: Progress | None,
) -> None:
    side_files = side_paths(manifest, folder)
    layout = lay_out_parts([header for _, header in manifest.parts], manifest.tensors)
    reader, inputs = read_ranks(manifest, folder)
    total = sum(layout.file_bytes) + side_bytes(side_files) + len(config)
    with (
        inputs,
        staging(
            target,
            is_folder=True,
            overwrite=overwrite,
            num_bytes=total,
            side_files=[*side_files, CONFIG_NAME],
            mode=permissions([folder]),
        ) as stage,
    ):
        paths = [stage / name for name, _ in manifest.parts]
        copy_files(reader, inputs, paths, layout, manifest.stripes, threads=threads, progress=progress)
        copy_side_files(side_files, stage, manifest.side_files)
        texts = {CONFIG_NAME: config} | dict([manifest.index] if manifest.index else [])
        for name, text in texts.items():
            with create(stage / name, permissions([folder / name])) as file:
                file.write(text.encode())
