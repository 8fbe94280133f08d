"""Restore the source of a padded checkpoint, byte for byte."""

import time
from dataclasses import dataclass
from pathlib import Path

from shardconv.checkpoint.engine.copy import Progress
from shardconv.checkpoint.engine.layout import lay_out_source
from shardconv.checkpoint.operations.rewrite import Rewrite
from shardconv.checkpoint.output.job import settings_of
from shardconv.checkpoint.output.journal import check_resume
from shardconv.checkpoint.output.remote_output import writes_remote
from shardconv.checkpoint.sources.planning import StrPath
from shardconv.checkpoint.split.padding_manifest import read_padding
from shardconv.files.fileio import create
from shardconv.files.folder import permissions
from shardconv.files.paths import SourcePath, open_path, target_path
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


@writes_remote
def unpad(
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
        overwrite: replace an existing checkpoint at ``dst``.
        dry_run: check everything that does not require reading the data, but write nothing.
        resume: continue an interrupted run of the same arguments, if there is one: stripes that it finished are not
            copied again. If this run fails, finished stripes are kept.
        threads: number of threads; defaults to the number of processors, at most 8.
        progress: called with the number of copied bytes and the total.

    Raises:
        SplitCheckpointError: if the folder is not a padded checkpoint, or bytes differ from those that were written.
        OutputError: if the destination exists, is in use, or has too little free space, or the interrupted run is not
            that of the same arguments.
    """
    began = time.perf_counter()
    check_resume(resume=resume, dry_run=dry_run)
    folder = open_path(src)
    manifest, config = read_padding(folder)
    target = target_path(dst) if dst is not None else Path(f"{folder.resolve().name}-unpadded")
    rewrite = Rewrite(
        manifest, folder, target, added_files=(CONFIG_NAME,), overwrite=overwrite, resume=resume, threads=threads,
        progress=progress,
    )  # fmt: skip
    exists = rewrite.check(dry_run=dry_run)
    resumed_bytes = 0 if dry_run else _write(rewrite, config)
    return UnpadReport(
        path=str(target),
        num_tensors=len(manifest.tensors),
        num_bytes=sum(header.data_bytes for _, header in manifest.source_files),
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        destination_exists=exists,
        derived=manifest.derived,
        resumed_bytes=resumed_bytes,
    )


def _write(rewrite: Rewrite, config: str) -> int:
    """Write the checkpoint; returns the bytes of full tensors that an interrupted run had written."""
    manifest = rewrite.manifest
    names, headers = zip(*manifest.source_files, strict=True)
    texts = {CONFIG_NAME: config} | dict([manifest.index] if manifest.index else [])
    settings, layout = settings_of("unpad", manifest), lay_out_source(headers, manifest.tensors)
    with rewrite.run(settings, names, layout, added_bytes=len(config)) as staged:
        for name, text in texts.items():
            with create(staged.folder / name, permissions([rewrite.folder / name])) as file:
                file.write(text.encode())
    return staged.resumed_bytes
