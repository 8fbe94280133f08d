"""Merge a split checkpoint back into its source, byte for byte, or rank files of another tool into a checkpoint."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardconv.checkpoint.engine.copy import STRIPE_BYTES, Progress
from shardconv.checkpoint.engine.layout import ADAPTERS, MANIFEST_NAME, lay_out_source
from shardconv.checkpoint.operations.rewrite import Rewrite
from shardconv.checkpoint.output.job import settings_of
from shardconv.checkpoint.output.journal import check_resume
from shardconv.checkpoint.output.remote_output import writes_remote
from shardconv.checkpoint.sources.planning import StrPath, check_shapes
from shardconv.checkpoint.sources.remote import reads_remote
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.rank_files import SplitFolder, check_readable
from shardconv.checkpoint.split.split_folders import SplitFolders, find_folders, read_folders
from shardconv.files.fileio import create, permissions
from shardconv.files.header import Header, build_header
from shardconv.files.paths import local_path
from shardconv.files.storage.table import shown
from shardconv.files.weight_formats import is_weights
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan, Reason, TensorPlan
from shardconv.plan.request import PlanRequest
from shardconv.support.errors import UsageError, option


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Result of a merge, or with ``dry_run`` the expected result.

    Attributes:
        path: the merged file or folder.
        files: the names of its weight files.
        num_tensors: number of tensors.
        num_bytes: bytes of all tensors.
        is_identical: whether the weight files equal the source files, byte for byte; False if several source files are
            merged into one, or if the source was ``derived``. None without checksums.
        seconds: wall time in seconds.
        dry_run: whether nothing was written.
        destination_exists: whether ``path`` held a checkpoint before, which only ``overwrite`` replaces.
        notes: assumptions, and why merged adapters differ from those that were split.
        derived: why the files differ from those that were split, one phrase each; empty for safetensors files.
        adapters: names of the adapters of the split checkpoint, which are merged into folders of their own.
        resumed_bytes: bytes of full tensors that an interrupted run had written and that were not copied again.
    """

    path: str
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    is_identical: bool | None
    seconds: float
    dry_run: bool
    destination_exists: bool
    notes: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    resumed_bytes: int = 0


@reads_remote("src")
@writes_remote
def merge(
    src: StrPath | Sequence[StrPath],
    dst: StrPath | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    source_layout: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Merge a split checkpoint, a folder that vLLM saved with ``save_sharded_state``, or rank files of another tool.

    Checks checksums, equality of replicas, and zeros in the padding during the copy.

    Args:
        src: the split checkpoint, a folder that vLLM saved of a dense unquantized model, or one with rank files of
            another tool; or several folders with some of the ranks each of one split.
        dst: the output: a path that ends with ``.safetensors`` for one file, any other path for a folder with the
            source files; or the URL of either in an object store. Defaults to ``NAME-merged`` in the current folder, a
            file or a folder like the source.
        overwrite: replace an existing checkpoint at ``dst``.
        dry_run: check everything that does not require reading the data, but write nothing; an existing checkpoint at
            ``dst`` is not an error.
        source_layout: the layout of another tool's rank files in ``src``; None to detect it.
        resume: continue an interrupted run of the same arguments, if there is one: stripes that it finished are not
            copied again. If this run fails, finished stripes are kept.
        threads: number of threads; defaults to the number of processors, at most 8.
        progress: called with the number of copied bytes and the total.

    Raises:
        SplitCheckpointError: if a rank file is missing, bytes differ from those that were written, or folders are not
            of one split.
        UsageError: if the destination is in the source, or contains it.
        OutputError: if the destination exists, is in use, or has too little free space, or the interrupted run is not
            that of the same arguments.
    """
    began = time.perf_counter()
    check_resume(resume=resume, dry_run=dry_run)
    split, source = _read(src, source_layout)
    folder, manifest = split.first, split.manifest
    target = local_path(dst) if dst is not None else _default_target(folder, manifest)
    is_folder = _is_folder(target)
    adapters = {name: read_folders([one.path / ADAPTERS / name for one in split.folders]) for name in manifest.adapters}
    if adapters and not is_folder:
        raise UsageError(
            f"{target}: is one file (expected a folder, also for the adapters {', '.join(adapters)}): change "
            f"{option('dst')}"
        )
    headers = _headers(manifest, one_file=not is_folder)
    equals_source = not manifest.derived and list(headers.values()) == [header for _, header in manifest.source_files]
    rewrite = Rewrite(
        manifest, folder, target, is_folder=is_folder, source=source, overwrite=overwrite, resume=resume,
        threads=threads, progress=progress,
        added_files=tuple(name for one in adapters.values() for name in _merged_names(folder, one)),
        folders=split.folders,
    )  # fmt: skip
    exists = rewrite.check(dry_run=dry_run)
    for one in adapters.values() if dry_run else ():
        check_readable(one.manifest, one.folders)
    resumed_bytes = 0 if dry_run else _write(rewrite, headers, adapters)
    return MergeReport(
        path=shown(target),
        files=tuple(headers) if is_folder else (target.name,),
        num_tensors=len(manifest.tensors),
        num_bytes=sum(header.data_bytes for header in headers.values()),
        is_identical=None if equals_source and manifest.checksums is None else equals_source,
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        destination_exists=exists,
        notes=(*(() if source is None else source.assumed), *_adapter_notes(adapters)),
        derived=manifest.derived,
        adapters=manifest.adapters,
        resumed_bytes=resumed_bytes,
    )


def _read(src: StrPath | Sequence[StrPath], source_layout: str | None) -> tuple[SplitFolders, Source | None]:
    """Read a split checkpoint; or open rank files of another tool as a source, with a manifest of one full rank."""
    folders, source = find_folders(src, source_layout)
    if source is None:
        return read_folders(folders), None
    source = replace(source, assumed=(*source.assumed, *check_shapes(source)))
    replicated = TensorPlan(Placement.replicated(1), "replicate", (), Reason("merge", ""))
    plan = Plan(1, None, dict.fromkeys(source.specs, replicated))
    manifest = Manifest.of_source(source, plan, PlanRequest(), stripe_bytes=STRIPE_BYTES, checksums=False)
    return SplitFolders(manifest, (SplitFolder(folders[0], manifest),)), source


def _default_target(folder: Path, manifest: Manifest) -> Path:
    name = folder.resolve().name.removesuffix(f"-tp{manifest.tp}") + "-merged"
    return Path(name if manifest.is_folder else f"{name}.safetensors")


def _is_folder(target: Path) -> bool:
    """Whether a folder is written, by the name of the destination; refuses names of weight files in other formats."""
    if target.suffix == ".safetensors":
        return False
    if is_weights(target.name):
        raise UsageError(
            f"{target}: has the suffix of a weight file that merge does not write (got {target.suffix}, expected "
            f".safetensors for one file, or a folder): change {option('dst')}"
        )
    return True


def _headers(manifest: Manifest, *, one_file: bool) -> dict[str, Header]:
    """Name to header of the files to write: the source files, or one file with all tensors."""
    if one_file and len(manifest.source_files) > 1:
        tensors = ((name, spec.dtype, spec.shape) for name, spec in manifest.tensors.items())
        return {"model.safetensors": build_header(tensors, manifest.metadata or None)}
    return dict(manifest.source_files)


def _merged_names(folder: Path, adapter: SplitFolders) -> Iterator[str]:
    """Yield the names of the files of a merged adapter, relative to the folder of its base model."""
    manifest = adapter.manifest
    for name in (*(name for name, _ in manifest.source_files), *manifest.auxiliary_files):
        yield (adapter.first / name).relative_to(folder).as_posix()


def _adapter_notes(adapters: Mapping[str, SplitFolders]) -> Iterator[str]:
    """Yield why adapters differ from those that were split."""
    for name, adapter in adapters.items():
        yield from (f"adapter {name}: {phrase}" for phrase in adapter.manifest.derived)


def _write(rewrite: Rewrite, headers: dict[str, Header], adapters: Mapping[str, SplitFolders]) -> int:
    """Write the checkpoint; returns the bytes of full tensors that an interrupted run had written."""
    manifest = rewrite.manifest
    names = list(headers) if rewrite.is_folder else [rewrite.target.name]
    layout = lay_out_source(list(headers.values()), manifest.tensors)
    added_bytes = sum(header.file_bytes for one in adapters.values() for _, header in one.manifest.source_files)
    with rewrite.run(settings_of("merge", manifest), names, layout, added_bytes=added_bytes) as staged:
        for name, adapter in adapters.items():
            paths = [one.path for one in adapter.folders]
            merge(paths, staged.folder / ADAPTERS / name, threads=rewrite.threads)
        if rewrite.is_folder and manifest.index is not None:
            name, text = manifest.index
            with create(staged.folder / name, permissions([rewrite.folder / MANIFEST_NAME])) as file:
                file.write(text.encode())
    return staged.resumed_bytes
