"""``shardconv plan``: the plan of a source, its proof, and its communication cost; and a rank of that proof."""

import gc
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shardconv.checkpoint.split.chosen_ranks import name_ranks
from shardconv.commands.command import CHECKS, REPORT, Command, Flag, Option, chosen
from shardconv.commands.cost import COST_OPTIONS, measured_link, show_cost
from shardconv.commands.listed_sizes import MEMORY, TPS, ListedSizes
from shardconv.commands.options import (
    BASE,
    FAMILY,
    HTML_OPTIONS,
    PATH,
    PLAN_OPTIONS,
    SOURCE_OPTIONS,
    SOURCE_PATH,
    STAGE_OPTIONS,
    SourcePath,
    check_model_option,
    display_options,
    dtype_option,
)
from shardconv.commands.shared import (
    HtmlFile,
    adapter_notes,
    check_source,
    component_notes,
    layout_note,
    model_notes,
    notes,
    padding_notes,
    stages_note,
)
from shardconv.plan.families.matcher import layer_keys, starred
from shardconv.support.console import Console
from shardconv.support.errors import UsageError
from shardconv.support.exits import ImportPhase
from shardconv.support.formatting import counted, ranges, size, sizes

if TYPE_CHECKING:
    from shardconv.checkpoint.operations.plan_report import PlanReport, TensorReport
    from shardconv.plan.planner import BlockedTp
    from shardconv.proof.prove import ProofReport


_DISPLAY = ("src", "as_json", "quiet")
_PLAN, _COST, _HTML = ([str(option.name) for option in some] for some in (PLAN_OPTIONS, COST_OPTIONS, HTML_OPTIONS))
#: The option of another report than the plan, to the options that apply to it besides the common ones.
_APPLYING = {
    "families": _DISPLAY,
    "propose": (*_DISPLAY, *(option.name for option in SOURCE_OPTIONS), "check_model"),
    "prove": (*_DISPLAY, *_PLAN, "check_model", "tps"),
    "cost": (*_DISPLAY, *_PLAN, *_COST, *_HTML, "tps", "pp", "stages", "memory"),
    "measure_link": (*_DISPLAY, *_COST),
}

#: A number in the reason why a size is not supported, which differs between layers and experts.
_NUMBER = re.compile(r"\d+")
#: Alternatives in the pattern of a rule.
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")

_FAMILIES = Option(
    REPORT, "--list-families families", "List the families and the model types that they serve; with WORD, "
    "only names that contain it.",
    type=FAMILY, metavar="[WORD]", is_flag=False, flag_value="",
)  # fmt: skip


@click.command(
    cls=Command,
    params=[
        click.Argument(["src"], type=SOURCE_PATH, required=False),
        TPS,
        *STAGE_OPTIONS,
        *PLAN_OPTIONS,
        BASE,
        MEMORY,
        Flag(REPORT, "--all show_all", "Print a line per tensor, not one for all layers."),
        _FAMILIES,
        Flag(REPORT, "--propose", "Derive a plan file from the modules of a small model, and print it."),
        *HTML_OPTIONS,
        dtype_option(REPORT),
        Flag(CHECKS, "--prove", "Compare a small sharded model of this kind with the unsharded one."),
        check_model_option("with --prove", value=None),
        *COST_OPTIONS,
        *display_options(),
    ],
    epilog="shardconv plan llama\n"
    "shardconv plan hf://org/llama --tp 8\n"
    "shardconv plan llama --cost --memory 80GB\n"
    "shardconv plan --list-families qwen",
)
def plan(
    console: Console,
    src: SourcePath | None,
    *,
    tps: tuple[int, ...] | None,
    memory: int | None,
    pp: int | None,
    stages: str,
    families: str | None,
    propose: bool,
    prove: bool,
    check_model: bool | None,
    show_all: bool,
    base: Path | None,
    html: Path | None,
    overwrite: bool,
    dtype: str | None,
    **values: Any,
) -> None:
    """Show the plan of SRC: the shard of each tensor, and the reason.

    Without --tp, list the supported tensor parallel sizes. Reads the headers and the config only. SRC is a
    .safetensors or PyTorch file, an index, a folder, or the URL of one. For a split checkpoint, show its stored plan.
    """
    from shardconv.checkpoint.operations.plan_report import report_plan
    from shardconv.files.folder import header_progress

    flags, options = chosen(values, COST_OPTIONS), chosen(values, PLAN_OPTIONS)
    is_measured, is_cost = flags["measure_link"], flags["cost"]
    is_link = is_measured and not is_cost
    if base is not None and (is_cost or check_model):
        raise UsageError("--base plans an adapter, which is not a model of its own: remove it, and pass the base model")
    _check_options(src, families=families is not None, propose=propose, prove=prove, cost=is_cost, measure_link=is_link)
    if families is not None:
        _show_families(families, console)
        return
    listed = ListedSizes(tps, memory)
    page = HtmlFile.of(html, overwrite=overwrite, sources=(src, base))
    link = measured_link(console, is_reported=src is None) if is_measured else None
    if src is None or (is_measured and link is None):
        return
    if is_cost:
        stage_options = {"pp": pp, "stages": stages}
        show_cost(src, console, flags, options, link=link, page=page, listed=listed, stages=stage_options)
        return
    checked = check_source(src, options) if check_model and not prove else None
    if propose:
        _show_proposal(src, console, options)
    elif prove:
        _show_proof(src, console, tps or (), options, check_model=check_model is not False)
    else:
        with console.progress("read headers", counts=True) as progress, header_progress(progress):
            report = report_plan(src, tp=listed.tp, pp=pp, stages=stages, base=base, dtype=dtype, **options)
        if page is not None:
            from shardconv.html import write_page

            page.write(console, write_page(report))
        _show_plan(report, console, model_notes(checked), listed, show_all=show_all)


def _check_options(src: SourcePath | None, **outputs: bool) -> None:
    """Refuse options that would be ignored because they do not apply to an output, and a missing or needless source.

    Args:
        src: the source, if one was given.
        outputs: name of each output in :data:`_APPLYING`, and whether it was asked for.

    Raises:
        UsageError: if the user passed such an option.
    """
    context = click.get_current_context()
    options = {str(parameter.name): parameter.opts[0] for parameter in context.command.params}
    given = [name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    for output in (name for name, is_asked in outputs.items() if is_asked):
        if other := next((name for name in given if name not in {*_APPLYING[output], output}), None):
            raise UsageError(f"{options[other]} does not apply to {options[output]}: remove one of the two")
    found = [name for name in given if name in _COST]
    if found and not {"cost", "measure_link"} & {*found}:
        raise UsageError(f"{options[found[0]]} applies to --cost only: add --cost")
    if "measure_link" in found and {"alpha", "beta"} & {*found}:
        raise UsageError("--measure-link measures --alpha and --beta: pass one or the other")
    if src is None and not (outputs["families"] or outputs["measure_link"]):
        raise click.MissingParameter(param_hint="'SRC'", param_type="argument")
    if src is not None and outputs["families"]:
        raise UsageError("--list-families does not read SRC: remove SRC")
    if src is not None and outputs["measure_link"]:
        raise UsageError("--measure-link takes SRC only together with --cost")


def _show_families(word: str, console: Console) -> None:
    from shardconv.plan.families.loading import list_families

    found = list_families(word)
    lines = [f"{name}: {', '.join(kinds) or 'no model type'}" for name, kinds in found.families.items()]
    similar = f" (similar: {', '.join(found.similar)})" if found.similar else ""
    console.report(found, lines or [f"no family or model type contains {word!r}{similar}"])


def _show_proposal(src: SourcePath, console: Console, options: dict[str, Any]) -> None:
    with ImportPhase():
        from shardconv.proof.propose import propose_plan
    console.document(propose_plan(src, **chosen(options, SOURCE_OPTIONS)), tomllib.loads)


def _show_plan(
    report: "PlanReport", console: Console, of_model: list[str], listed: ListedSizes, *, show_all: bool
) -> None:
    if show_all and report.tp is None:
        raise UsageError("--all lists the tensors of a plan, which is for one tensor parallel size: add --tp N")
    least = listed.least(dict(zip(report.supported_tp, report.supported_bytes, strict=True)))
    report, found = listed.of_plan(report), [*notes(report.assumed, report.left_out), *of_model]
    console.report(report, _plan_lines(report, found, listed, least), quiet_warnings=notes(report.assumed, {}))
    if listed.is_list and report.supported_tp:
        rows = zip(report.supported_tp, report.supported_bytes, strict=True)
        console.table(("tp", "weights per rank"), [(str(tp), size(num_bytes)) for tp, num_bytes in rows])
    elif report.tp is not None:
        columns = ("tensor", "count", "dtype", "shape", "shard", "placement", "why")
        console.table(columns, _plan_rows(report, show_all=show_all), ends_with_remark=True)


def _plan_lines(report: "PlanReport", found: list[str], listed: ListedSizes, least: list[str]) -> list[str]:
    rules = f"family {report.family}{layout_note(report.layout)}"
    lines = [f"{report.source}: {report.num_tensors} tensors, {size(report.num_bytes)}, {rules}"]
    if report.stored_tp is not None:
        lines += _stored_lines(report, max(report.stored_tp, report.stored_ep) * len(report.stored_stages or (0,)))
    if report.engine is not None:
        lines.append(f"sharded at the boundaries of {report.engine} (--for {report.engine})")
    if report.num_quantized:
        stored = ", ".join([report.quantization or "settings unknown", *report.quantized_blocks])
        lines.append(f"{counted(report.num_quantized, 'quantized weight')} ({stored})")
    lines += [*component_notes(report), *adapter_notes(report.adapters), *found]
    lines += [f"supported tp{listed.where}: {', '.join(map(str, report.supported_tp)) or 'none'}", *least]
    blocks: dict[tuple[str, str], list[BlockedTp]] = {}
    for blocked in report.blocked_tp:
        blocks.setdefault((blocked.tensor, _NUMBER.sub("", blocked.reason)), []).append(blocked)
    for (tensor, _), equal in blocks.items():
        lines.append(f"unsupported tp: {ranges([blocked.tp for blocked in equal])}; {tensor}: {equal[0].reason}")
    if report.padded_tp:
        from shardconv.plan.planner import MAX_PADDED_TP

        padded = ", ".join(f"{one.tp} ({one.memory:.1%})" for one in report.padded_tp)
        lines.append(f"supported with --pad up to tp {MAX_PADDED_TP} (additional memory): {padded}")
    lines += padding_notes(report.padding)
    if report.tp is not None:
        lines += _rank_lines(report, report.tp)
    return [*lines, ""] if report.tp is not None or listed.is_list else lines


def _stored_lines(report: "PlanReport", num_ranks: int) -> Iterator[str]:
    """The ranks of a split checkpoint, and the command whose plan this is, if it is another one."""
    if len(report.ranks) < num_ranks:
        yield f"this folder has {name_ranks(report.ranks)} of {num_ranks}"
    if (report.stored_tp, report.stored_ep, report.stored_stages) != (report.tp, report.ep, report.stages):
        stages = f" --stages {','.join(map(str, report.stages))}" if report.stages else ""
        stages = " --pp 1" if report.stored_stages and not report.stages else stages
        ep = f" --ep {report.ep}" if report.ep != report.stored_ep else ""
        yield (
            f"{report.source} has {counted(num_ranks, 'rank')}{stages_note(report.stored_stages)}: this is the plan of "
            f"shardconv reshard {report.source} --tp {report.tp}{ep}{stages}"
        )


def _rank_lines(report: "PlanReport", tp: int) -> Iterator[str]:
    """The bytes per rank, for each pipeline stage, and stages that are more even."""
    given, count = f"tp {tp}" + (f", ep {report.ep}" if report.ep > 1 else ""), max(tp, report.ep)
    if not report.stages:
        yield f"{given}: {sizes(report.rank_bytes)} per rank"
        return
    yield f"{given}{stages_note(report.stages)}:"
    for stage, layers in enumerate(report.stages):
        ranks = range(stage * count, (stage + 1) * count)
        of_stage = report.rank_bytes[ranks.start : ranks.stop]
        yield f"  stage {stage}, {name_ranks(ranks)}: {layers} layers, {sizes(of_stage)} per rank"
    if report.even_stages != report.stages:
        yield (
            f"more even: --stages {','.join(map(str, report.even_stages))} (at most {size(report.even_bytes)} per rank "
            f"instead of {size(max(report.rank_bytes))})"
        )


def _plan_rows(report: "PlanReport", *, show_all: bool) -> list[tuple[str, ...]]:
    tensors = report.tensors
    if show_all:
        return [_plan_row(tensor.name, tensor, 1, _placement(tensor)) for tensor in tensors]
    names = zip(layer_keys([tensor.name for tensor in tensors]), tensors, strict=True)
    keys = [(name, one.dtype, one.shape, one.placement, one.reason) for name, one in names]
    first = dict(zip(reversed(keys), reversed(tensors), strict=True))
    found = ((first[key], count) for key, count in Counter(keys).items())
    return [_plan_row(starred(tensor.name), tensor, count, tensor.placement) for tensor, count in found]


def _placement(tensor: "TensorReport") -> str:
    """The placement; of an expert that one of several ranks has, this rank."""
    held = [rank for rank, shape in enumerate(tensor.shard_shapes) if 0 not in shape]
    is_on_one = tensor.style == "expert" and len(held) == 1 < len(tensor.shard_shapes)
    return f"expert on rank {held[0]}" if is_on_one else tensor.placement


def _plan_row(name: str, tensor: "TensorReport", count: int, placement: str) -> tuple[str, ...]:
    shards = " ".join(dict.fromkeys(map(_shape, tensor.shard_shapes)))
    reason = _ALTERNATIVES.sub(partial(_alternative, tensor.name), tensor.reason)
    return name, str(count), tensor.dtype, _shape(tensor.shape), shards, placement, reason


def _alternative(name: str, choice: re.Match[str]) -> str:
    """The alternative of a rule's pattern that the name of a tensor contains, for a narrow column."""
    found = [each for each in choice[1].split(",") if each and each in name]
    return max(found, key=len, default="{...}")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


# --- the proof of a plan ----------------------------------------------------------------------------------------------


def _show_proof(
    src: SourcePath, console: Console, tps: tuple[int, ...], options: dict[str, Any], *, check_model: bool
) -> None:
    """Prove the plan. Exits 3 where the sharded model differs from the unsharded one."""
    with ImportPhase():
        from shardconv.proof.prove import PipelineProof, prove
    with console.progress("prove", counts=True) as progress:
        report = prove(src, tps=tps, check_model=check_model, progress=progress, **options)
    models = [*report.components.values()] if isinstance(report, PipelineProof) else [report]
    gaps = [line for one in models for line in _proof_gaps(one)]
    lines = [line for one in models for line in (*_proof_lines(one), *_proof_gaps(one), _proof_verdict(one))]
    console.report(report, lines, quiet_warnings=gaps if report.is_proven else lines)
    if not report.is_proven:
        sys.exit(3 if all(one.proofs for one in models) else 1)


def _proof_lines(report: "ProofReport") -> list[str]:
    numel = f"{report.num_parameters:,} randomly initialized parameters"
    lines = [f"{report.source}: family {report.family}, tried on a small {report.model} of {numel}"]
    for proof in report.proofs:
        tokens = {True: ", greedy tokens equal", False: ", greedy tokens differ", None: ""}[proof.tokens]
        gradients = "" if proof.gradient is None else f", gradients to {proof.gradient:.0e}"
        found = "" if proof.output is None else f"outputs to {proof.output:.0e}{gradients} of the largest{tokens}; "
        verdict = "passed" if proof.has_passed else "failed" if found else "failed to run"
        lines.append(
            f"tp {proof.tp}: {verdict}: {found}{proof.sharded_fraction:.0%} of the elements of matrices are sharded"
        )
    if report.num_grids:
        verdict = "failed" if report.grid_differences else "passed"
        kinds = counted(report.num_grids, "kind")
        lines.append(
            f"{kinds} of quantized weights: {verdict}: dequantized shards are shards of the dequantized weight"
        )
        lines += [f"differs: {line}" for line in report.grid_differences]
    return lines


def _proof_gaps(report: "ProofReport") -> list[str]:
    """Limits of the proofs: sizes that were skipped, smaller heads, and tensors that are not covered."""
    lines = list(dict.fromkeys(f"tp {proof.tp}: {proof.note}" for proof in report.proofs if proof.note))
    lines += [report.note] if report.note else []
    lines += [f"not tried: {text}" for text in report.skipped]
    lines += [f"not covered, as the small model does not have this tensor: {name}" for name in report.unreached]
    if {proof.tp for proof in report.proofs} - set(report.supported_tp):
        lines.append(f"supported tp of {report.source} itself: {', '.join(map(str, report.supported_tp)) or 'none'}")
    return lines


def _proof_verdict(report: "ProofReport") -> str:
    tried = ", ".join(str(proof.tp) for proof in report.proofs)
    if report.is_proven:
        return f"proven for tp {tried}{', except for the tensors that are not covered' if report.unreached else ''}"
    return "not proven: do not split with this plan" if tried else "not proven: no tensor parallel size was tried"


@click.command(hidden=True)
@click.argument("folder", type=PATH)
def prove_rank(folder: Path) -> None:
    """Run one rank of a proof: started by ``proof/ranks.py``."""
    gc.enable()
    from shardconv.proof.ranks import prove_rank as run
    from shardconv.runtime.launch import join, leave

    join()
    run(folder)
    leave()
