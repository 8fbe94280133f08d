"""Merge a split checkpoint back into its source, byte for byte."""

import time
from dataclasses import dataclass
from pathlib import Path

from shardconv.checkpoint.copy import Progress
from shardconv.checkpoint.fileio import create, permissions
from shardconv.checkpoint.header import Header, build_header
from shardconv.checkpoint.layout import MANIFEST_NAME, lay_out_source
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import StrPath
from shardconv.checkpoint.rewrite import Rewrite
from shardconv.checkpoint.vllm_folder import read_split


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Result of a merge, or with ``dry_run`` the expected result.

    Attributes:
        path: the merged file or folder.
        files: the names of its weight files.
        num_tensors: number of tensors.
        num_bytes: bytes of the weight files.
        is_identical: whether the weight files equal the source files, byte for byte; False if several source files are
            merged into one. None without checksums.
        seconds: wall time in seconds.
        dry_run: whether nothing was written.
        destination_exists: whether ``path`` held a checkpoint before, which only ``overwrite`` replaces.
        saved_by: the engine that saved the rank files; None for a split checkpoint.
        notes: possible differences from the checkpoint that the engine loaded.
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

    Checks checksums, equality of replicas, and zeros in the padding during the copy.

    Args:
        src: the split checkpoint, or a folder that vLLM saved of a dense unquantized model.
        dst: the output: a path that ends with ``.safetensors`` for one file, any other path for a folder with the
            source files. Defaults to ``NAME-merged`` in the current folder, a file or a folder like the source.
        overwrite: replace an existing checkpoint at ``dst``.
        dry_run: check everything that does not require reading the data, but write nothing; an existing checkpoint at
            ``dst`` is not an error.
        threads: number of threads; defaults to the number of processors, at most 8.
        progress: called with the number of copied bytes and the total.

    Raises:
        SplitCheckpointError: if a rank file is missing, or bytes differ from those that were written.
        OutputError: if the destination exists, is in use, or has too little free space.
    """
    began = time.perf_counter()
    folder = local_path(src)
    manifest = read_split(folder)
    target = local_path(dst) if dst is not None else _default_target(folder, manifest)
    is_folder = target.suffix != ".safetensors"
    headers = _headers(manifest, one_file=not is_folder)
    is_same_layout = list(headers.values()) == [header for _, header in manifest.source_files]
    rewrite = Rewrite(
        manifest, folder, target, is_folder=is_folder, overwrite=overwrite, threads=threads, progress=progress
    )
    exists = rewrite.check(dry_run=dry_run)
    if not dry_run:
        _write(rewrite, headers)
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
    """Name to header of the files to write: the source files, or one file with all tensors."""
    if one_file and len(manifest.source_files) > 1:
        tensors = ((name, spec.dtype, spec.shape) for name, spec in manifest.tensors.items())
        return {"model.safetensors": build_header(tensors, manifest.metadata or None)}
    return dict(manifest.source_files)


def _write(rewrite: Rewrite, headers: dict[str, Header]) -> None:
    manifest = rewrite.manifest
    names = list(headers) if rewrite.is_folder else [rewrite.target.name]
    with rewrite.run(names, lay_out_source(list(headers.values()), manifest.tensors)) as staged:
        if rewrite.is_folder and manifest.index is not None:
            name, text = manifest.index
            with create(staged.folder / name, permissions([rewrite.folder / MANIFEST_NAME])) as file:
                file.write(text.encode())
