"""Reshard a split checkpoint for another tensor parallel size or layout, without its source and without a merge."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec.structs import asdict, fields, replace

from shardconv.checkpoint.engine.layout import ADAPTERS
from shardconv.checkpoint.operations.pipeline import on_pipelines, open_split_folders
from shardconv.checkpoint.operations.split import chosen_tp, split
from shardconv.checkpoint.operations.split_writing import write_ranks
from shardconv.checkpoint.operations.verify import is_right
from shardconv.checkpoint.operations.written_pipeline import Written
from shardconv.checkpoint.output.auxiliary import AuxiliaryFiles
from shardconv.checkpoint.output.combined import padding_of_all, texts, total, totals_per_rank
from shardconv.checkpoint.output.destination import Destination, find_destination
from shardconv.checkpoint.output.job import settings_of
from shardconv.checkpoint.output.writer import CheckpointWriter, Staged, WriteOptions, WriteReport
from shardconv.checkpoint.sources.planning import StrPath, request_for
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.split.chosen_ranks import size_suffix
from shardconv.checkpoint.split.loadable import quantized_tensors, stored_planner
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.split_folders import SplitFolders, open_folders
from shardconv.files.containers.safetensors import total_bytes
from shardconv.files.folder import permissions
from shardconv.files.paths import SourcePath
from shardconv.files.weight_formats import ADAPTER_CONFIG
from shardconv.layouts import FOREIGN, LAYOUTS
from shardconv.layouts.choice import check_stages, choose_layout, engine_of, refuse_adapters, with_max_file_size
from shardconv.layouts.layout import DCP, NATIVE
from shardconv.plan.planner import NO_PADDING, PaddingReport, padding_report
from shardconv.plan.stages import StageChoice, Stages, chosen_stages
from shardconv.support import Progress
from shardconv.support.arguments import checked
from shardconv.support.errors import UsageError, option


class ReshardReport(WriteReport, frozen=True, kw_only=True):
    """Result of a reshard.

    Attributes:
        old_tp: tensor parallel size of the old split checkpoint; number of ranks of files of another tool.
        tp: tensor parallel size of the new one.
        old_layout: layout of the old rank files.
        layout: layout of the new rank files.
        num_bytes: bytes of all tensors.
        rank_bytes: for each new rank the bytes of its files.
        notes: why the source differs from rank files of another tool, and assumptions.
        padding: padded units and their cost.
        files_per_rank: number of files of each new rank, at most: that of the pipeline stage with most.
        old_pp: number of pipeline stages of the old split checkpoint.
        stages: number of layers of each pipeline stage of the new one; empty for one stage.
        old_ep: expert parallel size of the old split checkpoint; 1 if each expert is sharded.
        ep: expert parallel size of the new one.
    """

    old_tp: int
    tp: int
    old_layout: str
    layout: str
    num_bytes: Annotated[int, total]
    rank_bytes: Annotated[tuple[int, ...], totals_per_rank]
    notes: Annotated[tuple[str, ...], texts] = ()
    padding: Annotated[PaddingReport, padding_of_all] = NO_PADDING
    files_per_rank: Annotated[int, total] = 1
    old_pp: int = 1
    stages: tuple[int, ...] = ()
    old_ep: int = 1
    ep: int = 1


@checked
@on_pipelines(Written("reshard", open_split_folders, "{name}-tp{tp}", is_split=True, is_finished=is_right))
def reshard(  # noqa: D417 - WriteOptions has the descriptions
    src: SourcePath | Sequence[SourcePath],
    dst: StrPath | Destination | None = None,
    *,
    tp: int | None = None,
    pp: int | None = None,
    stages: str | Sequence[int] | Stages = (),
    ep: int | None = None,
    layout: str | None = None,
    engine: str | None = None,
    pad: bool = False,
    max_file_size: int | str | None = None,
    overwrite: bool = False,
    checksums: bool = True,
    dry_run: bool = False,
    resume: bool = False,
    source_layout: str | None = None,
    config: StrPath | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ReshardReport:
    """Rewrite a split checkpoint for another number of ranks or layout; the result equals a split of the source.

    Args:
        src: the split checkpoint, a folder that vLLM saved of a dense unquantized model, or one with rank files of
            another tool; or the folders of one split that each have some of the ranks.
        dst: the folder to write, or its URL in an object store; defaults to ``NAME-tpM`` in the current folder.
        tp: the new tensor parallel size, as in :func:`~shardconv.split`.
        pp, stages: the new pipeline stages, as in :func:`~shardconv.split`; by default as in the split checkpoint. 1
            removes them.
        ep: the new expert parallel size; by default as in the split checkpoint.
        layout: of the new rank files, as in :func:`~shardconv.split`; defaults to the option of the split checkpoint.
        engine: the engine whose boundaries to use, as in :func:`~shardconv.split`, or "shardconv". Defaults to the
            engine of ``layout`` or else of the split checkpoint; to shardconv for layout dcp, which does not support
            padding.
        pad: pad units that do not divide with zeros, as in :func:`~shardconv.split`; independent of the padding of the
            split checkpoint.
        max_file_size: as in :func:`~shardconv.split`; defaults to the option of the split checkpoint. A size
            that no rank reaches gives one file per rank.
        source_layout: the layout of another tool's rank files in ``src``; None to detect it.
        config: a config.json to use instead of the config of another tool's rank files.
        overwrite, dry_run, resume, threads, progress, checksums: how it is written, see
            :class:`~shardconv.WriteOptions`.

    Raises:
        SplitCheckpointError: if a rank file is missing, bytes differ from their checksums, or folders are not
            of one split.
        PlanError: if the checkpoint cannot be split for ``tp`` in this layout.
        UsageError: if the layout is unknown, or it is the layout of an engine and the checkpoint was split with options
            that change the plan, or the destination is in the source or contains it.
        OutputError: if the destination exists, is in use, or has too little free space, or the interrupted run had
            other arguments.
    """
    began = time.perf_counter()
    how = WriteOptions(
        overwrite=overwrite, dry_run=dry_run, resume=resume, threads=threads, progress=progress, checksums=checksums
    )
    given = find_destination(dst, resume=resume)
    found = open_folders(src, source_layout, config=config)
    if found.source is not None:
        return _split_external(
            found.source, given, layout, engine,
            tp=tp, pp=pp, stages=stages, ep=ep, max_file_size=max_file_size, pad=pad, **asdict(how),
        )  # fmt: skip
    _refuse_foreign(found, layout, tp)
    old, tp = found.manifest, chosen_tp(tp)
    how = replace(how, checksums=checksums and old.checksums is not None)  # new ones would hide errors
    chosen = chosen_stages(pp, stages, default=old.plan.stages)
    ep = old.plan.ep if ep is None else ep
    destination = given or Destination(Path(f"{found.name}{size_suffix(tp, ep, chosen.count)}"))
    is_identified = how.checksums and not destination.is_remote
    new, padding = _plan_reshard(
        old, tp, chosen, ep, layout=layout, max_file_size=max_file_size, engine=engine, pad=int(pad),
        checksums=is_identified,
    )  # fmt: skip
    auxiliary = AuxiliaryFiles.of_split(old, found.first)
    writer = CheckpointWriter(destination, how, auxiliary, like=found.first)
    adapters = found.adapters()
    for adapter in adapters.values():
        _plan_reshard(adapter.manifest, tp, StageChoice.of(new.plan.stages), ep, pad=int(pad), checksums=how.checksums)
    write = partial(_write, old=found, new=new, adapters=adapters)
    return ReshardReport(
        **writer.run(found.paths, write, began=began, check=found.check_readable),
        old_tp=old.tp,
        tp=tp,
        old_pp=old.plan.pp,
        stages=new.plan.num_layers,
        old_ep=old.plan.ep,
        ep=ep,
        old_layout=old.layout.name,
        layout=new.layout.name,
        num_tensors=len(new.tensors),
        num_bytes=total_bytes(new.source_tensors.values()),
        rank_bytes=new.rank_layout.rank_bytes,
        padding=padding,
        files_per_rank=max(new.files_per_rank),
    )


def _split_external(
    source: Source,
    dst: Destination | None,
    layout: str | None,
    engine: str | None,
    **options: Any,  # noqa: ANN401 - other options of split
) -> ReshardReport:
    """Split rank files of another tool. The default layout and engine for files of an engine are its own."""
    saved_for = engine_of(str(source.layout)) if source.layout in LAYOUTS else None
    layout = layout or (source.layout if saved_for else None) or NATIVE.name
    engine = engine or (None if layout == DCP.name else saved_for)
    report = split(source, dst, layout=layout, engine=engine, **options)
    written = {each.name: getattr(report, each.name) for each in fields(WriteReport)}
    return ReshardReport(
        **written,
        old_tp=source.num_ranks,
        tp=report.tp,
        stages=report.stages,
        ep=report.ep,
        old_layout=str(source.layout),
        layout=report.layout,
        num_bytes=report.source_bytes,
        rank_bytes=report.rank_bytes,
        notes=(*source.derived, *report.assumed),
        padding=report.padding,
        files_per_rank=report.files_per_rank,
    )


def _refuse_foreign(found: SplitFolders, layout: str | None, tp: int | None) -> None:
    """Refuse a layout that is written from a source only."""
    if layout in FOREIGN:
        merged, folders = found.manifest.source_name + "-merged", " ".join(map(str, found.paths))
        size = "" if tp is None else f" --tp {tp}"
        raise UsageError(
            f"{folders}: layout {layout} is written from a source, and not from a split checkpoint: shardconv merge "
            f"{folders} -o {merged}, then shardconv split {merged}{size} --layout {layout}"
        )


def _plan_reshard(
    old: Manifest,
    tp: int,
    chosen: StageChoice,
    ep: int,
    *,
    layout: str | None = None,
    max_file_size: int | str | None = None,
    engine: str | None = None,
    pad: int,
    checksums: bool,
) -> tuple[Manifest, PaddingReport]:
    """The manifest of the new split checkpoint, and its padding."""
    if ADAPTER_CONFIG in old.auxiliary_files or old.adapters:
        refuse_adapters(layout or NATIVE.name, engine)
        if pad:
            raise UsageError(
                f"{option(pad=True)} is not supported for adapters: remove it, and choose a size that divides "
                "(shardconv plan DIR)"
            )
    new_engine = engine or (None if layout == DCP.name else old.request.engine)
    request = replace(old.request, engine=new_engine, pad=pad, ep=ep)
    if layout in {None, old.layout.name}:
        request_for(request, old.layout.name)  # refuses an option that changes the plan of an engine
        file_layout = old.layout
    else:
        request = request_for(request, layout)
        chosen_layout = choose_layout(layout, quantized_tensors(old), old.config)
        file_layout = with_max_file_size(chosen_layout, old.layout.max_file_bytes)
    planner = stored_planner(old, request.engine, ep=ep, pad=pad)
    if ADAPTER_CONFIG not in old.auxiliary_files:  # an adapter may lack layers with experts
        planner.check_ep()
    plan = planner.plan(tp, planner.stages(chosen))
    check_stages(file_layout, plan.pp)
    file_layout = with_max_file_size(file_layout, max_file_size)
    return old.with_plan(plan, request, file_layout, checksums=checksums), padding_report(planner, tp)


def _write(writer: CheckpointWriter, old: SplitFolders, new: Manifest, adapters: Mapping[str, SplitFolders]) -> int:
    """Write the checkpoint; returns the bytes of full tensors that an interrupted run had written."""
    options, manifests = writer.options, old.manifests

    def write_adapters(staged: Staged) -> None:
        for name, adapter in adapters.items():
            inner = staged.inner(f"{ADAPTERS}/{name}")
            reshard(
                adapter.paths, inner, tp=new.tp, pp=new.plan.pp, stages=new.plan.stages or (),
                ep=new.plan.ep, checksums=options.checksums, threads=options.threads,
            )  # fmt: skip

    settings, mode = settings_of("reshard", new), permissions(manifests[:1])
    return write_ranks(writer, old.open(), new, settings, manifests, write_adapters=write_adapters, mode=mode)
