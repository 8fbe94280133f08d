"""Split a source checkpoint into a folder with one file per rank."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Unpack

from shardconv.checkpoint import operations
from shardconv.checkpoint.adapters.adapter import AnyAdapter
from shardconv.checkpoint.operations.pipeline import on_pipelines, open_source_pipeline
from shardconv.checkpoint.operations.split_sources import plan_sources
from shardconv.checkpoint.operations.split_writing import Adapters, write_split, writer_of
from shardconv.checkpoint.operations.verify import is_right
from shardconv.checkpoint.operations.written_pipeline import Written
from shardconv.checkpoint.output.combined import listed, padding_of_all, path_keys, paths, texts, total, totals_per_rank
from shardconv.checkpoint.output.destination import Destination, find_destination
from shardconv.checkpoint.output.job import settings_of
from shardconv.checkpoint.output.writer import CheckpointWriter, Team, WriteOptions, WriteReport
from shardconv.checkpoint.sources.planning import PlannedSource, PlanOptions, StrPath
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.split.chosen_ranks import Ranks, choose_ranks, size_suffix
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.files.paths import SourcePath
from shardconv.layouts import MEGATRON, META
from shardconv.layouts.choice import check_stages, choose_layout, with_max_file_size
from shardconv.layouts.layout import NATIVE
from shardconv.plan.plan import Plan
from shardconv.plan.planner import MAX_TP, NO_PADDING, PaddingReport, Planner, padding_report
from shardconv.plan.stages import Stages, chosen_stages
from shardconv.support import Progress
from shardconv.support.arguments import checked
from shardconv.support.errors import UsageError, check_count, option


class SplitReport(WriteReport, frozen=True, kw_only=True):
    """Result of a split.

    Attributes:
        tp: tensor parallel size; of layout megatron, number of files.
        ep: expert parallel size; 1 if each expert is sharded.
        stages: number of layers of each pipeline stage; empty for one stage.
        family: the model family whose rules were used.
        layout: of the rank files.
        source_bytes: bytes of the source's weights.
        rank_bytes: for each of ``ranks`` the bytes of its files.
        assumed: assumptions of the plan.
        left_out: name to reason of files of the source that were left out; names of hidden folders end with /.
        padding: padded units and their cost.
        derived: why a merge does not give the bytes of the source's files, one phrase each; empty if it does.
        files_per_rank: number of files of each rank, at most: that of the pipeline stage with most.
        adapters: names of the adapters that were split with the model.
        ranks: the ranks whose files were written to ``path``.
    """

    tp: int
    ep: int = 1
    family: Annotated[str | None, listed]
    layout: str
    source_bytes: Annotated[int, total]
    rank_bytes: Annotated[tuple[int, ...], totals_per_rank]
    assumed: Annotated[tuple[str, ...], texts]
    left_out: Annotated[Mapping[str, str], path_keys]
    padding: Annotated[PaddingReport, padding_of_all] = NO_PADDING
    derived: Annotated[tuple[str, ...], texts] = ()
    files_per_rank: Annotated[int, total] = 1
    adapters: Annotated[tuple[str, ...], paths] = ()
    ranks: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()


@checked
@on_pipelines(Written("split", open_source_pipeline, "{name}-tp{tp}", is_split=True, is_finished=is_right))
def split(  # noqa: D417 - WriteOptions has the descriptions
    src: SourcePath | Source,
    dst: StrPath | Destination | None = None,
    *,
    tp: int | None = None,
    pp: int | None = None,
    stages: str | Sequence[int] | Stages = (),
    ranks: Ranks = None,
    base: StrPath | None = None,
    adapters: Sequence[StrPath | AnyAdapter] = (),
    merge_adapter: bool = False,
    overwrite: bool = False,
    checksums: bool = True,
    layout: str = NATIVE.name,
    stacked_layers: bool = False,
    make_vocab_size_divisible_by: int | None = None,
    dtype: str | None = None,
    max_file_size: int | str | None = None,
    dry_run: bool = False,
    resume: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    team: Team | None = None,
    **options: Unpack[PlanOptions],
) -> SplitReport:
    """Split a checkpoint for ``tp`` ranks.

    Args:
        src: a ``.safetensors`` or PyTorch file, an index file, a folder, or a source that is already open.
        dst: the folder to write, or its URL in an object store; defaults to ``NAME-tpN`` in the current folder.
        tp: tensor parallel size. Files of layout megatron do not depend on it: of these, it is the number of files with
            tensors, 1 by default.
        pp: number of pipeline stages; each file has the shards of one rank of one stage. The ranks of a stage are
            consecutive; there are ``tp`` or, if it is larger, ``ep`` of them.
        stages: number of layers of each stage, such as "20,20,21,19" or ``(20, 20, 21, 19)``; by default equal, with
            the remainder in the stages before the last one, as in vLLM.
        ranks: the ranks to write, such as "8-15", "0,2,5-7", 3 or ``range(8)``; None for all. Only what their files
            need is read: of column parallel tensors their rows, of row parallel tensors all rows.
        base: the base model of ``src``, a LoRA adapter of PEFT: a checkpoint, a split checkpoint, or a config.json or a
            folder with one. ``options`` then apply to the base model.
        adapters: folders of LoRA adapters of PEFT for the model ``src``, or LoRA files of diffusers or Kohya; each is
            split into a folder ``adapters/NAME`` of ``dst``, or of the components of a pipeline that it has layers of.
        merge_adapter: merge the only one of ``adapters`` into the weights instead, as ``merge_and_unload`` of PEFT.
        layout: names, fusions and files of the shards: "native" for the source's names; "dcp" for the source's names
            and the offsets of the shards, so that HuggingFaceStorageReader of torch.distributed.checkpoint loads the
            folder into full tensors or DTensors; "vllm" and "sglang" for files that these engines load with
            load_format="sharded_state"; "meta" for Meta's consolidated.NN.pth and params.json of a Llama or Mistral,
            and "megatron" for a checkpoint of Megatron-Core (torch_dist), both without a manifest.
        stacked_layers: whether layout megatron has the layers of a model in one tensor, instead of one for each layer.
        make_vocab_size_divisible_by: for layout megatron, pad the rows of the vocabulary with zeros to a multiple of
            this, times ``tp``. By default they are not padded: Megatron-Core pads when it loads.
        dtype: convert floating-point tensors to "bf16", "fp16" or "fp32", rounded to nearest, ties to even; a merge
            then gives the converted tensors. Tensors that are wider than most are kept. By default nothing is
            converted.
        max_file_size: maximum bytes of a rank file, as a number or such as "5GB"; larger ones become several files with
            an index. A tensor is never divided over files, so one that is larger has a file of its own. By default
            each rank has one file. Not for layout meta.
        team: the processes that write the checkpoint together; None for this one alone.
        options: how the source is read and planned, see :class:`PlanOptions`.
        overwrite, dry_run, resume, threads, progress, checksums: how it is written, see
            :class:`~shardconv.WriteOptions`.

    Raises:
        SourceError: if the source cannot be read, changes during the split, or has an element that is too large for
            ``dtype``.
        PlanError: if no plan is known to be correct, or the layout does not support it: dcp does not support fused or
            padded tensors, and vllm and sglang only certain model types and plans; or a ``dtype`` is given for a
            quantized source.
        UsageError: if the layout, dtype, size or a rank is unknown, or it is the layout of an engine and the options
            change the plan, or the destination is in the source or contains it.
        OutputError: if the destination exists, is in use, or has too little free space, or the interrupted run had
            other arguments.
    """
    began = time.perf_counter()
    how = WriteOptions(
        overwrite=overwrite, dry_run=dry_run, resume=resume, threads=threads, progress=progress, checksums=checksums
    )
    if resume and not checksums:
        raise UsageError(
            f"{option(resume=True)} compares existing files with checksums: remove {option(checksums=False)}"
        )
    rules = options.get("rules")
    of_rules = rules.stages if isinstance(rules, Plan) else None
    tp, chosen_pp = chosen_tp(tp, layout), chosen_stages(pp, stages, default=of_rules)
    pp = chosen_pp.count
    foreign = _foreign_layout(layout, tp, stacked_layers=stacked_layers, multiple=make_vocab_size_divisible_by)
    given = find_destination(dst, resume=resume)
    planned, of_adapters = plan_sources(src, base, adapters, layout, options, merge_adapter=merge_adapter, dtype=dtype)
    source, team, of_planner = planned.source, team or Team(), planned.planner.rules
    num_ranks = of_planner.ranks_per_stage(tp) * pp
    chosen = choose_ranks(ranks, num_ranks)
    destination = given or Destination(Path(f"{source.name}{size_suffix(tp, of_planner.ep, pp)}"))
    _check_team(team, destination, resume=resume)
    if foreign is not None:
        is_whole = len(chosen) == num_ranks and team.size == 1
        _check_foreign_options(foreign.name, pp, of_adapters, max_file_size, is_whole=is_whole)
        foreign.check(planned, tp)
    is_identified = checksums and not destination.is_remote
    plan_tp = tp if foreign is None else foreign.plan_tp(tp)
    plan_of = partial(Planner.plan, tp=plan_tp, stages=planned.planner.stages(chosen_pp))
    manifest, nested = _manifests(
        planned, of_adapters, plan_of, None if foreign else layout, max_file_size, checksums=is_identified,
        ranks=chosen if plan_tp == tp else (0,),
    )  # fmt: skip
    rank_bytes, write = _ranks(planned, manifest, nested, foreign)
    padding = padding_report(planned.planner, plan_tp)
    writer = writer_of(source, destination, how, ranks=chosen, team=team, adapters=nested)
    read = [*planned.paths, *(path for one in of_adapters.values() for path in one.paths)]
    del planned  # with the groups of all tensors, which the copy does not need
    outcome = writer.run(read, write, began=began)
    held = team.folder_ranks(chosen)
    return SplitReport(
        **outcome,
        tp=tp,
        ep=manifest.plan.ep,
        stages=manifest.plan.num_layers,
        family=manifest.plan.family,
        layout=layout,
        num_tensors=len(source.specs),
        source_bytes=source.num_bytes,
        rank_bytes=tuple(count for rank, count in zip(chosen, rank_bytes, strict=True) if rank in held),
        assumed=manifest.plan.assumed,
        left_out=source.left_out,
        padding=padding,
        derived=source.derived,
        files_per_rank=max(manifest.files_per_rank, default=1),
        adapters=tuple(of_adapters),
        ranks=held,
    )


def chosen_tp(tp: int | None, layout: str | None = None) -> int:
    """The tensor parallel size of a new checkpoint.

    Raises:
        UsageError: if it is missing, and the layout depends on it.
    """
    if tp is None and layout != MEGATRON:
        raise UsageError(f"{option('tp')} is missing: shardconv plan SRC lists the supported sizes")
    return 1 if tp is None else check_count(tp, "tp", MAX_TP)


def _foreign_layout(
    layout: str, tp: int, *, stacked_layers: bool, multiple: int | None
) -> "operations.foreign_writer.ForeignLayout | None":
    """A layout of another tool; None for one with a manifest."""
    if layout == MEGATRON:
        return operations.megatron_writer.MegatronLayout(tp, stacked_layers, multiple)
    if stacked_layers or multiple is not None:
        raise UsageError(
            f"{option(stacked_layers=True)} and {option('make_vocab_size_divisible_by')} are for "
            f"{option(layout=MEGATRON)} (got {layout}): remove them"
        )
    return operations.meta_writer.MetaLayout() if layout == META else None


def _check_team(team: Team, destination: Destination, *, resume: bool) -> None:
    """Refuse options and destinations that several processes cannot have."""
    if team.size == 1:
        return
    if resume:
        raise UsageError(
            f"{option(resume=True)} continues the run of one process (got {team.size}): remove it, or use "
            f"{option('ranks')}"
        )
    if destination.is_remote:
        raise UsageError(f"{destination}: several processes write one URL (got {team.size}): start one process")


def _check_foreign_options(
    layout: str, pp: int, adapters: Mapping[str, PlannedSource], max_file_size: int | str | None, *, is_whole: bool
) -> None:
    """Refuse options that layouts without a manifest do not support."""
    if pp > 1:
        raise UsageError(
            f"layout {layout} does not have pipeline stages (got {option(pp=pp)}): remove it. Megatron-Core loads a "
            "checkpoint of layout megatron with any number of them"
        )
    if not is_whole:
        raise UsageError(
            f"layout {layout} is written for all ranks by one process: remove {option('ranks')}, and start one process"
        )
    if max_file_size is not None:
        raise UsageError(f"layout {layout} has one file per rank: remove {option('max_file_size')}")
    if adapters:
        raise UsageError(
            f"layout {layout} does not hold adapters: pass {option(merge_adapter=True)}, or split them alone "
            f"({option('base')})"
        )


def _manifests(
    planned: PlannedSource,
    adapters: Mapping[str, PlannedSource],
    plan_of: Callable[[Planner], Plan],
    layout: str | None,
    max_file_size: int | str | None,
    *,
    checksums: bool,
    ranks: tuple[int, ...],
) -> tuple[Manifest, Adapters]:
    """The manifests of a split checkpoint and of its adapters; None for foreign layouts, which do not have one."""
    of_source = partial(Manifest.of_source, checksums=checksums, ranks=ranks)
    file_layout = NATIVE
    if layout is not None:
        chosen = choose_layout(layout, planned.tensors, planned.source.config_with_quantization())
        file_layout = with_max_file_size(chosen, max_file_size)
    plan, names = plan_of(planned.planner), tuple(adapters)
    check_stages(file_layout, plan.pp)
    manifest = of_source(planned.source, plan, planned.request, layout=file_layout, adapters=names)
    nested = {
        name: (one.source, of_source(one.source, plan_of(one.planner), one.request)) for name, one in adapters.items()
    }
    return manifest, nested


def _ranks(
    planned: PlannedSource,
    manifest: Manifest,
    adapters: Adapters,
    foreign: "operations.foreign_writer.ForeignLayout | None",
) -> tuple[Sequence[int], Callable[[CheckpointWriter], int]]:
    """For each rank the bytes of its files, and the function that writes them."""
    source, read = planned.source, planned.paths
    if foreign is None:
        write = partial(write_split, source=source, manifest=manifest, adapters=adapters, read=read)
        return manifest.rank_layout.rank_bytes, write
    settings = {**settings_of("split", manifest), "layout": foreign.name, **foreign.settings}
    files = foreign.lay_out(planned, manifest.plan)
    write = partial(operations.foreign_writer.write_foreign, source=source, files=files, settings=settings, read=read)
    return files.rank_bytes, write
