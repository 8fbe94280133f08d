"""Reshard a split checkpoint for another tensor parallel size or layout, without its source and without a merge."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardconv import __version__
from shardconv.checkpoint.engine.copy import Progress
from shardconv.checkpoint.engine.layout import ADAPTERS, MANIFEST_NAME
from shardconv.checkpoint.operations.rewrite import Rewrite
from shardconv.checkpoint.operations.split import SplitReport, split
from shardconv.checkpoint.output.job import settings_of
from shardconv.checkpoint.output.journal import check_resume
from shardconv.checkpoint.output.remote_output import is_remote, writes_remote
from shardconv.checkpoint.output.write import write_indexes
from shardconv.checkpoint.sources.planning import StrPath, request_for
from shardconv.checkpoint.sources.remote import reads_remote
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import write_manifest
from shardconv.checkpoint.split.split_folders import find_folders, read_folders
from shardconv.checkpoint.split.stored_plan import quantized_tensors, resolver_of
from shardconv.files.fileio import permissions
from shardconv.files.header import total_bytes
from shardconv.files.paths import local_path
from shardconv.files.storage.table import shown
from shardconv.files.weight_formats import ADAPTER_CONFIG
from shardconv.layouts import LAYOUTS, META
from shardconv.layouts.choice import choose_layout, engine_of, with_max_file_size
from shardconv.layouts.layout import DCP, NATIVE
from shardconv.plan.tp_sizes import NO_PADDING, PaddingReport
from shardconv.support.errors import UsageError, option


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """Result of a reshard, or with ``dry_run`` the expected result.

    Attributes:
        path: the new split checkpoint.
        old_tp: number of ranks of the old split checkpoint.
        tp: number of ranks of the new one.
        old_layout: layout of the old rank files.
        layout: layout of the new rank files.
        num_tensors: number of tensors.
        num_bytes: bytes of all tensors.
        rank_bytes: for each new rank the bytes of its files.
        seconds: wall time in seconds.
        dry_run: whether nothing was written.
        destination_exists: whether ``path`` held a checkpoint before, which only ``overwrite`` replaces.
        notes: why the source differs from rank files of another tool, and assumptions.
        padding: padded units and their cost.
        files_per_rank: number of files of each new rank.
        resumed_bytes: bytes of full tensors that an interrupted run had written and that were not copied again.
    """

    path: str
    old_tp: int
    tp: int
    old_layout: str
    layout: str
    num_tensors: int
    num_bytes: int
    rank_bytes: tuple[int, ...]
    seconds: float
    dry_run: bool
    destination_exists: bool
    notes: tuple[str, ...] = ()
    padding: PaddingReport = NO_PADDING
    files_per_rank: int = 1
    resumed_bytes: int = 0


@reads_remote("src")
@writes_remote
def reshard(
    src: StrPath | Sequence[StrPath],
    dst: StrPath | None = None,
    *,
    tp: int,
    layout: str | None = None,
    engine: str | None = None,
    pad: bool = False,
    max_file_size: int | str | None = None,
    overwrite: bool = False,
    checksums: bool = True,
    dry_run: bool = False,
    resume: bool = False,
    source_layout: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ReshardReport:
    """Rewrite a split checkpoint for another number of ranks or layout; the result equals a split of the source.

    Args:
        src: the split checkpoint, a folder that vLLM saved of a dense unquantized model, or one with rank files of
            another tool; or several folders with some of the ranks each of one split.
        dst: the folder to write, or its URL in an object store; defaults to ``NAME-tpM`` in the current folder.
        tp: the new number of ranks.
        layout: of the new rank files, as in :func:`~shardconv.split`; defaults to that of the split checkpoint.
        engine: the engine whose boundaries to use, as in :func:`~shardconv.split`, or "shardconv". Defaults to the
            engine of ``layout`` or else of the split checkpoint; to shardconv for layout dcp, which does not support
            padding.
        pad: pad units that do not divide with zeros, as in :func:`~shardconv.split`; independent of the padding of the
            split checkpoint.
        max_file_size: as in :func:`~shardconv.split`; defaults to that of the split checkpoint. A size that no rank
            reaches gives one file per rank.
        overwrite: replace an existing checkpoint at ``dst``.
        checksums: store checksums, unless the split checkpoint has none.
        dry_run: plan and check, but write nothing; an existing checkpoint at ``dst`` is not an error.
        source_layout: the layout of another tool's rank files in ``src``; None to detect it.
        resume: continue an interrupted run of the same arguments, if there is one: stripes that it finished are not
            copied again. If this run fails, finished stripes are kept.
        threads: number of threads; defaults to the number of processors, at most 8.
        progress: called with the number of copied bytes and the total.

    Raises:
        SplitCheckpointError: if a rank file is missing, bytes differ from those that were written, or folders are not
            of one split.
        PlanError: if the checkpoint cannot be split for ``tp`` in this layout.
        UsageError: if the layout is unknown, or it is the layout of an engine and the checkpoint was split with options
            that change the plan, or the destination is in the source or contains it.
        OutputError: if the destination exists, is in use, or has too little free space, or the interrupted run is not
            that of the same arguments.
    """
    began = time.perf_counter()
    check_resume(resume=resume, dry_run=dry_run)
    paths, source = find_folders(src, source_layout)
    if source is not None:
        saved_for = engine_of(str(source.layout)) if source.layout in LAYOUTS else None
        layout = layout or (source.layout if saved_for else None) or NATIVE.name
        engine = engine or (None if layout == DCP.name else saved_for)
        report = split(
            source, dst, tp=tp, layout=layout, max_file_size=max_file_size, engine=engine, pad=pad,
            overwrite=overwrite, checksums=checksums, dry_run=dry_run, resume=resume, threads=threads,
            progress=progress,
        )  # fmt: skip
        return _of_split(report, source)
    old, folders = found = read_folders(paths)
    folder = found.first
    if layout == META:
        merged, given = old.source_name + "-merged", " ".join(map(str, paths))
        raise UsageError(
            f"{given}: layout meta is written from a source, and not from a split checkpoint: shardconv merge {given} "
            f"-o {merged}, then shardconv split {merged} --tp {tp} --layout meta"
        )
    checksums = checksums and old.checksums is not None  # new checksums would hide errors in unchecked data
    name = folder.resolve().name.removesuffix(f"-tp{old.tp}")
    target = Path(f"{name}-tp{tp}") if dst is None else local_path(dst)
    is_identified = checksums and not is_remote(target)
    new, padding = _plan_reshard(old, tp, layout, max_file_size, engine, int(pad), checksums=is_identified)
    rewrite = Rewrite(
        old, folder, target, overwrite=overwrite, resume=resume, threads=threads, progress=progress, folders=folders
    )  # fmt: skip
    exists = rewrite.check(dry_run=dry_run)
    for name in old.adapters:
        adapter = read_folders([one.path / ADAPTERS / name for one in folders]).manifest
        _plan_reshard(adapter, tp, None, None, None, int(pad), checksums=checksums)
    resumed_bytes = 0 if dry_run else _write(rewrite, new, checksums=checksums)
    return ReshardReport(
        path=shown(target),
        old_tp=old.tp,
        tp=tp,
        old_layout=old.layout.name,
        layout=new.layout.name,
        num_tensors=len(new.tensors),
        num_bytes=total_bytes(new.source_tensors.values()),
        rank_bytes=new.rank_layout.rank_bytes,
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        destination_exists=exists,
        padding=padding,
        files_per_rank=new.files_per_rank,
        resumed_bytes=resumed_bytes,
    )


def _of_split(report: SplitReport, source: Source) -> ReshardReport:
    """The report of a split of rank files of another tool."""
    return ReshardReport(
        path=report.path,
        old_tp=source.num_ranks,
        tp=report.tp,
        old_layout=str(source.layout),
        layout=report.layout,
        num_tensors=report.num_tensors,
        num_bytes=report.source_bytes,
        rank_bytes=report.rank_bytes,
        seconds=report.seconds,
        dry_run=report.dry_run,
        destination_exists=report.destination_exists,
        notes=(*source.derived, *report.assumed),
        padding=report.padding,
        files_per_rank=report.files_per_rank,
        resumed_bytes=report.resumed_bytes,
    )


def _plan_reshard(
    old: Manifest,
    tp: int,
    layout: str | None,
    max_file_size: int | str | None,
    engine: str | None,
    pad: int,
    *,
    checksums: bool,
) -> tuple[Manifest, PaddingReport]:
    """The manifest of the new split checkpoint, and its padding."""
    if pad and (ADAPTER_CONFIG in old.auxiliary_files or old.adapters):
        raise UsageError(
            f"{option(pad=True)} is not supported for adapters: remove it, and choose a size that divides "
            "(shardconv plan DIR)"
        )
    new_engine = engine or (None if layout == DCP.name else old.request.engine)
    request = replace(old.request, engine=new_engine, pad=pad)
    if layout in {None, old.layout.name}:
        file_layout = old.layout
    else:
        request = request_for(request, layout)
        file_layout = choose_layout(layout, quantized_tensors(old), old.config)
    file_layout = with_max_file_size(file_layout, old.layout.max_file_bytes if max_file_size is None else max_file_size)
    resolver = resolver_of(old, request.engine, pad=pad)
    plan = resolver.plan(tp, assumed=old.plan.assumed)
    return old.with_plan(plan, request, file_layout, checksums=checksums), resolver.padding(tp)


def _write(rewrite: Rewrite, new: Manifest, *, checksums: bool) -> int:
    """Write the checkpoint; returns the bytes of full tensors that an interrupted run had written."""
    old, folder = rewrite.manifest, rewrite.folder
    settings, identify = settings_of("reshard", new), new.prefixes_with if checksums else None
    with rewrite.run(settings, new.rank_files, new.rank_layout, identify=identify) as staged:
        for name in old.adapters:
            paths = [one.path / ADAPTERS / name for one in rewrite.folders]
            reshard(paths, staged.folder / ADAPTERS / name, tp=new.tp, checksums=checksums, threads=rewrite.threads)
        mode = permissions([folder / MANIFEST_NAME])
        write_indexes(new, staged.folder, staged.mode)
        written = new.written(staged.checksums, staged.auxiliary_files)
        write_manifest(written, staged.folder, f"shardconv {__version__}", mode=mode)
    return staged.resumed_bytes
