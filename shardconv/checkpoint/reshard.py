"""Reshard: a split checkpoint gets another tensor parallel size or layout, without the source and without a merge."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from shardconv import __version__
from shardconv.checkpoint.copy import Progress
from shardconv.checkpoint.fileio import permissions
from shardconv.checkpoint.layout import MANIFEST_NAME
from shardconv.checkpoint.manifest import Manifest, write_manifest
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import StrPath, request_for
from shardconv.checkpoint.staging import check_apart, check_target, staging
from shardconv.checkpoint.stored_plan import resolver_of
from shardconv.checkpoint.vllm_folder import read_split
from shardconv.checkpoint.write import check_readable, copy_files, copy_side_files, read_ranks, side_bytes, side_paths
from shardconv.layouts.choice import choose_layout
from shardconv.layouts.layout import DCP
from shardconv.plan.sizes import NO_PADDING, PaddingReport


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What a reshard did, or with ``dry_run`` would do.

    Attributes:
        path: the new split checkpoint.
        old_tp: its source's number of ranks.
        tp: its own.
        old_layout: the layout of its source's rank files.
        layout: of its own.
        num_tensors: number of tensors.
        rank_bytes: bytes of each new rank's file.
        seconds: wall time.
        dry_run: whether nothing was written.
        destination_exists: whether a checkpoint was at ``path`` before, which only ``overwrite`` replaces.
        notes: how the rank files of an engine may differ from the checkpoint that it loaded; empty for others.
        padding: what is padded, and what that costs.
    """

    path: str
    old_tp: int
    tp: int
    old_layout: str
    layout: str
    num_tensors: int
    rank_bytes: tuple[int, ...]
    seconds: float
    dry_run: bool
    destination_exists: bool
    notes: tuple[str, ...] = ()
    padding: PaddingReport = NO_PADDING


def reshard(
    src: StrPath,
    dst: StrPath | None = None,
    *,
    tp: int,
    layout: str | None = None,
    engine: str | None = None,
    pad: bool = False,
    overwrite: bool = False,
    checksums: bool = True,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ReshardReport:
    """Rewrite a split checkpoint for another number of ranks or layout; the result is that of splitting the source so.

    Args:
        src: the split checkpoint, or a folder that vLLM saved of a dense unquantized model.
        dst: the folder to write; by default ``NAME-tpM`` in the current folder.
        tp: the new number of ranks.
        layout: of the new rank files, as in :func:`~shardconv.split`; by default that of the split checkpoint.
        engine: whose boundaries, as in :func:`~shardconv.split`, or "shardconv"; by default those that the split
            checkpoint has, or those of an engine's ``layout``; for layout dcp, which cannot have padding, shardconv's.
        pad: pad units that do not divide with zeros, as in :func:`~shardconv.split`; whether the split checkpoint has
            such padding makes no difference.
        overwrite: replace what is at ``dst``.
        checksums: take checksums while the data passes, unless the split checkpoint has none to check it by.
        dry_run: plan and check, write nothing; a checkpoint at ``dst`` is then not an error.
        threads: how many threads copy; by default as many as there are processors, up to 8.
        progress: called with bytes done and bytes in all.

    Raises:
        SplitCheckpointError: if a rank file is missing, or bytes are not those that were written.
        PlanError: if the checkpoint cannot be split for ``tp`` in this layout.
        UsageError: if there is no such layout, or it is an engine's and the checkpoint was split with options that
            change the plan.
        OutputError: if the destination exists, is in use, or has no room.
    """
    began = time.perf_counter()
    folder = local_path(src)
    old = read_split(folder)
    checksums = checksums and old.checksums is not None  # new ones over old errors would say that there are none
    new, padding = _planned(old, tp, layout, engine, int(pad), checksums=checksums)
    name = folder.resolve().name.removesuffix(f"-tp{old.tp}")
    target = Path(f"{name}-tp{tp}") if dst is None else local_path(dst)
    check_apart(target, [folder])
    exists = check_target(target, is_folder=True, overwrite=overwrite, dry_run=dry_run, side_files=old.side_files)
    if dry_run:
        check_readable(old, folder)
    else:
        _write(old, new, folder, target, overwrite=overwrite, checksums=checksums, threads=threads, progress=progress)
    return ReshardReport(
        path=str(target),
        old_tp=old.tp,
        tp=tp,
        old_layout=old.layout.name,
        layout=new.layout.name,
        num_tensors=len(new.tensors),
        rank_bytes=tuple(new.rank_layout.file_bytes),
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        destination_exists=exists,
        notes=old.notes,
        padding=padding,
    )


def _planned(
    old: Manifest, tp: int, layout: str | None, engine: str | None, pad: int, *, checksums: bool
) -> tuple[Manifest, PaddingReport]:
    """The manifest of the new split checkpoint, and what is padded in it."""
    kept = engine or (None if layout == DCP.name else old.request.engine)
    request = replace(old.request, engine=kept, pad=pad)
    if layout in {None, old.layout.name}:
        chosen = old.layout
    else:
        request = request_for(request, layout)
        chosen = choose_layout(layout, old.source_tensors, old.config)
    resolver = resolver_of(old, request.engine, pad=pad)
    plan = resolver.plan(tp, assumed=old.plan.assumed)
    return old.with_plan(plan, request, chosen, checksums=checksums), resolver.padding(tp)


def _write(
    old: Manifest,
    new: Manifest,
    folder: Path,
    target: Path,
    *,
    overwrite: bool,
    checksums: bool,
    threads: int | None,
    progress: Progress | None,
) -> None:
    side_files = side_paths(old, folder)
    layout = new.rank_layout
    reader, inputs = read_ranks(old, folder)
    total = sum(layout.file_bytes) + side_bytes(side_files)
    with (
        inputs,
        staging(
            target,
            is_folder=True,
            overwrite=overwrite,
            num_bytes=total,
            side_files=side_files,
            mode=permissions([folder]),
        ) as stage,
    ):
        digests = copy_files(
            reader, inputs, new.rank_paths(stage), layout, old.stripes,
            identify=new.heads_with if checksums else None, threads=threads, progress=progress,
        )  # fmt: skip
        copied = copy_side_files(side_files, stage, old.side_files)
        mode = permissions([folder / MANIFEST_NAME] if old.found is None else side_files.values())
        write_manifest(new.written(digests, copied), stage, f"shardconv {__version__}", mode=mode)
