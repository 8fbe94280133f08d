"""Merge: a split checkpoint becomes its source again, byte for byte."""

import time
from dataclasses import dataclass
from pathlib import Path

from shardconv.checkpoint.copy import Progress
from shardconv.checkpoint.fileio import create, permissions
from shardconv.checkpoint.header import Header, build_header
from shardconv.checkpoint.layout import MANIFEST_NAME, lay_out_parts
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import StrPath
from shardconv.checkpoint.staging import check_apart, check_target, staging
from shardconv.checkpoint.vllm_folder import read_split
from shardconv.checkpoint.write import check_readable, copy_files, copy_side_files, read_ranks, side_bytes, side_paths


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did, or with ``dry_run`` would do.

    Attributes:
        path: the merged file or folder.
        files: the names of its weight files.
        num_tensors: number of tensors.
        num_bytes: bytes of the weight files.
        is_identical: whether those are the source's files again, byte for byte: parts merged into one file are not.
            None where there are no checksums to tell.
        seconds: wall time.
        dry_run: whether nothing was written.
        destination_exists: whether a checkpoint was at ``path`` before, which only ``overwrite`` replaces.
        saved_by: the engine that saved the folder itself, without naming its source; None for a split checkpoint.
        notes: how such a checkpoint may differ from the one that the engine loaded.
    """

    path: str
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    is_identical: bool | None
    seconds: float
    dry_run: bool
    destination_exists: bool
    saved_by: str | None = None
    notes: tuple[str, ...] = ()


def merge(
    src: StrPath,
    dst: StrPath | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Merge a split checkpoint, or a folder that vLLM saved with ``save_sharded_state``.

    Checksums are checked while the data passes, copies on several ranks to be equal, padding to be zero.

    Args:
        src: the split checkpoint, or a folder that vLLM saved of a dense unquantized model.
        dst: what to write: a name that ends in ``.safetensors`` for one file, any other for a folder with the source's
            files. By default ``NAME-merged`` in the current folder, a file or a folder as the source was.
        overwrite: replace what is at ``dst``.
        dry_run: check what can be checked without reading the data, write nothing; a checkpoint at ``dst`` is then not
            an error.
        threads: how many threads copy; by default as many as there are processors, up to 8.
        progress: called with bytes done and bytes in all.

    Raises:
        SplitCheckpointError: if a rank file is missing, or bytes are not those that were written.
        OutputError: if the destination exists, is in use, or has no room.
    """
    began = time.perf_counter()
    folder = local_path(src)
    manifest = read_split(folder)
    target = local_path(dst) if dst is not None else _default_target(folder, manifest)
    is_folder = target.suffix != ".safetensors"
    headers = _headers(manifest, one_file=not is_folder)
    is_same_layout = list(headers.values()) == [header for _, header in manifest.parts]
    check_apart(target, [folder])
    exists = check_target(
        target, is_folder=is_folder, overwrite=overwrite, dry_run=dry_run, side_files=manifest.side_files
    )
    if dry_run:
        check_readable(manifest, folder)
    else:
        _write(manifest, folder, target, headers, overwrite=overwrite, threads=threads, progress=progress)
    return MergeReport(
        path=str(target),
        files=tuple(headers) if is_folder else (target.name,),
        num_tensors=len(manifest.tensors),
        num_bytes=sum(header.file_bytes for header in headers.values()),
        is_identical=None if is_same_layout and manifest.checksums is None else is_same_layout,
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        destination_exists=exists,
        saved_by=manifest.saved_by,
        notes=manifest.notes,
    )


def _default_target(folder: Path, manifest: Manifest) -> Path:
    name = folder.resolve().name.removesuffix(f"-tp{manifest.tp}") + "-merged"
    return Path(name if manifest.is_folder else f"{name}.safetensors")


def _headers(manifest: Manifest, *, one_file: bool) -> dict[str, Header]:
    """The files to write and their headers: the source's own, or one over all its parts."""
    if one_file and len(manifest.parts) > 1:
        tensors = ((name, spec.dtype, spec.shape) for name, spec in manifest.tensors.items())
        return {"model.safetensors": build_header(tensors, manifest.metadata or None)}
    return dict(manifest.parts)


def _write(
    manifest: Manifest,
    folder: Path,
    target: Path,
    headers: dict[str, Header],
    *,
    overwrite: bool,
    threads: int | None,
    progress: Progress | None,
) -> None:
    is_folder = target.suffix != ".safetensors"
    side_files = side_paths(manifest, folder) if is_folder else {}
    layout = lay_out_parts(list(headers.values()), manifest.tensors)
    reader, inputs = read_ranks(manifest, folder)
    total = sum(layout.file_bytes) + side_bytes(side_files)
    with (
        inputs,
        staging(
            target,
            is_folder=is_folder,
            overwrite=overwrite,
            num_bytes=total,
            side_files=side_files,
            mode=permissions([folder]),
        ) as stage,
    ):
        paths = [stage / (name if is_folder else target.name) for name in headers]
        copy_files(reader, inputs, paths, layout, manifest.stripes, threads=threads, progress=progress)
        copy_side_files(side_files, stage, manifest.side_files)
        if is_folder and manifest.index is not None:
            with create(stage / manifest.index[0], permissions([folder / MANIFEST_NAME])) as file:
                file.write(manifest.index[1].encode())
