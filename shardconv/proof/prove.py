"""Prove a plan: a small model, sharded by the same rules, computes the same as the unsharded small model.

Reads headers and config of the source only. The small model is randomly initialized, and as close to the source as
possible. The report lists the tensors of the source that the small model does not have, which the proof does not cover.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from msgspec import Struct
from msgspec.structs import replace

from shardconv.checkpoint.operations.pipeline import Options, call_on_each, on_pipelines, open_source_pipeline
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.planning import PlanOptions, plan_source
from shardconv.checkpoint.sources.source import Source
from shardconv.files.folder import AnyPath, temporary_folder
from shardconv.files.paths import SourcePath, open_path
from shardconv.plan.families.family import NAMES_FAMILY
from shardconv.plan.families.matcher import starred
from shardconv.plan.padding import Heads
from shardconv.plan.plan import Plan, TensorSpec, logical_tensors
from shardconv.plan.planner import Planner, tp_sizes
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.proof.grids import grid_differences
from shardconv.proof.model_check import require_model
from shardconv.proof.ranks import SMALL, Proof, heads_for, prove_all, write_small_model
from shardconv.support import Progress
from shardconv.support.arguments import checked
from shardconv.support.errors import PlanError, RunError, UsageError, option

#: The tensor parallel sizes to try: small models have four heads and two KV heads.
PROOF_TPS = (2, 4)
#: Further sizes to try if the plan supports them, which can be wrong if it splits inside heads.
_BEYOND = (8,)


class ProofReport(Struct, frozen=True):
    """Report of ``shardconv plan --prove``.

    Attributes:
        source: the path.
        family: the model family whose rules were used.
        model: the class of the small model.
        num_parameters: of the small model.
        proofs: one for each tensor parallel size that was tried.
        skipped: the tensor parallel sizes that were not tried, each with the reason.
        note: the heads of the small model that are smaller than the source's; "" if there are none.
        supported_tp: the tensor parallel sizes that the source supports.
        num_grids: kinds of quantized weights, of which dequantized shards were compared; 0 without quantization.
        grid_differences: the tensors whose dequantized shards are not the shards of the dequantized weight.
        unreached: names of tensors of the source that the small model does not have, and the proof does not cover; with
            a star for each layer number.
        is_proven: whether at least one size was tried, and all comparisons of outputs and dequantized shards passed.
    """

    source: str
    family: str
    model: str
    num_parameters: int
    proofs: tuple[Proof, ...]
    skipped: tuple[str, ...]
    note: str
    supported_tp: tuple[int, ...]
    num_grids: int
    grid_differences: tuple[str, ...]
    unreached: tuple[str, ...]
    is_proven: bool


class PipelineProof(Struct, frozen=True):
    """Proofs of the components of a pipeline of diffusers that are sharded.

    Attributes:
        source: the path.
        components: name to the proof of each component.
        is_proven: whether all are proven.
    """

    source: str
    components: Mapping[str, ProofReport]
    is_proven: bool


def prove_each(operation: Callable[..., ProofReport], paths: list[AnyPath], options: Options) -> Any:
    """Prove the plan of each component of a pipeline: a :class:`PipelineProof`."""
    reports = call_on_each(operation, open_source_pipeline(paths, options), options)
    return PipelineProof(str(paths[0]), reports, all(one.is_proven for one in reports.values()))


@checked
@on_pipelines(prove_each)
def prove(
    src: SourcePath,
    *,
    tps: Sequence[int] = (),
    check_model: bool = True,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> ProofReport:
    """Prove the plan of a source on the CPU, with a small model.

    The small model has heads of the source's size, and with ``pad`` as many, if such a model can be built. A tensor
    parallel size at which the small model is padded differently from the source is skipped. The small model is not
    quantized; for a quantized source, dequantized shards of random values are compared as well.

    Args:
        src: a ``.safetensors`` or PyTorch file, an index file, or a folder, with a config that names a class of
            transformers. Of a pipeline of diffusers, the result is a :class:`PipelineProof`.
        tps: tensor parallel sizes to try; by default 2 and 4, and 8 if the plan of the small model supports it.
        check_model: first compare names and shapes of the source with the model that its config names.
        progress: called with the number of tensor parallel sizes that were compared, and of all.
        options: see :class:`~shardconv.checkpoint.sources.planning.PlanOptions`.

    Raises:
        SourceError: if the checkpoint cannot be read, or with ``check_model`` does not have the tensors of its model.
        PlanError: if no rules exist for it.
        UsageError: if the family or a tensor parallel size is not valid, or an option does not apply to it.
        RunError: if the small model cannot be built or run.

    Example:
        >>> shardconv.prove("llama").is_proven  # doctest: +SKIP
        True
    """
    path = open_path(src)
    planned = plan_source(path, **options)
    source, request = planned.source, replace(planned.request, allow_unmatched_rules=True)
    config, tensors = require_config(source), logical_tensors(planned.tensors)
    if check_model:
        require_model(config, tensors, str(path))
    planner, pads = planned.planner, bool(request.pad)
    possible, unsupported = _plans(planner, tps)
    with temporary_folder() as folder:
        model, note = write_small_model(config, folder, heads=heads_for([*possible]), has_real_counts=pads)
        small = open_source(folder / SMALL)
        of_small = planner_for(small.specs, small.config, request)
        plans, not_small = ({}, {}) if unsupported and not possible else _small_plans(of_small, [*possible])
        mismatched = {tp: reason for tp in plans if (reason := padding_mismatch(planner, of_small, tp))}
        proofs = prove_all(folder, small, {tp: plans[tp] for tp in plans if tp not in mismatched}, request, progress)
        proofs = tuple(_with_remedy(proof, of_small, request) for proof in proofs)
    grids = list(_compare_grids(planned.tensors, planner, _plans(planner, [proof.tp for proof in proofs])[0]))
    differences = tuple(f"{name}: {difference}" for name, difference in grids if difference)
    return ProofReport(
        source=str(path),
        family=planner.rules.family,
        model=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        proofs=proofs,
        skipped=(
            *skipped_sizes(str(path), unsupported, not_small, has_plan_file=request.plan_file is not None),
            *(f"tp {tp}: {reason}" for tp, reason in mismatched.items()),
        ),
        note=note,
        supported_tp=tp_sizes(planner).usable(pad=pads),
        num_grids=len({name for name, _ in grids}),
        grid_differences=differences,
        unreached=tuple(sorted({*map(starred, tensors)} - {*map(starred, small.specs)})),
        is_proven=bool(proofs) and all(proof.has_passed for proof in proofs) and not differences,
    )


def _with_remedy(proof: Proof, planner: Planner, request: PlanRequest) -> Proof:
    """Add the remedy for a plan file whose rules the module overrides of the family do not fit, if the model failed."""
    overrides = [rule for model_rules in planner.rules.models for _, rule in model_rules.modules()]
    if proof.output is not None or request.plan_file is None or all(rule.by_user for rule in overrides):
        return proof
    name, family = request.plan_file[0], planner.rules.family
    return replace(
        proof,
        note=f"{proof.note.rstrip()}. The module overrides of family {family} apply, too: if they do not fit the rules "
        f'of {name}, begin it with inherits = "{NAMES_FAMILY}", and add rules for the other tensors',
    )


def _compare_grids(
    tensors: Mapping[str, TensorSpec], planner: Planner, plans: Mapping[int, Plan]
) -> Iterator[tuple[str, str]]:
    """As :func:`~shardconv.proof.grids.grid_differences`, for each tensor parallel size."""
    if not any(spec.grid for spec in tensors.values()):
        return
    of_weights = Planner(logical_tensors(tensors), planner.rules)
    for tp, plan in plans.items():
        yield from grid_differences(tensors, of_weights.plan(tp), plan)


def require_config(source: Source) -> Mapping[str, object]:
    """The config of a source, which names the class of the small model.

    Raises:
        RunError: if the source does not have a config.
    """
    if source.config is None:
        raise RunError(
            f"{source.path}: a proof builds a small model from config.json, and this source does not have one: pass "
            f"{option(config='FILE')}"
        )
    return source.config


def _small_plans(planner: Planner, tps: Sequence[int]) -> tuple[dict[int, Plan], dict[int, str]]:
    """As :func:`_plans`; without sizes, the plans of the default sizes."""
    plans, reasons = _plans(planner, tps or PROOF_TPS)
    return plans | ({} if tps else _plans(planner, _BEYOND)[0]), reasons


def _plans(planner: Planner, tps: Sequence[int]) -> tuple[dict[int, Plan], dict[int, str]]:
    """The plans by tensor parallel size, and the reasons why there are none for other sizes."""
    plans, reasons = {}, {}
    for tp in tps:
        try:
            plan = planner.plan(tp)
            if plan.ranks_per_stage > tp:
                raise PlanError("a proof has one data group", f"pass {option(ep=tp)}")
        except (PlanError, UsageError) as error:
            reasons[tp] = error.with_options()
        else:
            plans[tp] = plan
    return plans, reasons


def skipped_sizes(
    source: str, unsupported: Mapping[int, str], not_small: Mapping[int, str], *, has_plan_file: bool
) -> Iterator[str]:
    """The tensor parallel sizes that the source or the small model does not support."""
    for tp, reason in unsupported.items():
        yield f"tp {tp}: {source} cannot be sharded for it: {reason}"
    numbers = " If the plan file has numbers of the large model, write fields of its config instead." * has_plan_file
    for tp, reason in not_small.items():
        yield f"tp {tp}: the small model cannot be sharded for it, though {source} may be: {reason}{numbers}"


def padding_mismatch(source: Planner, small: Planner, tp: int) -> str:
    """The reason why a small model does not prove the padding of a source, which pads heads differently; or ""."""
    of_source, of_small = _padded_heads(source, tp), _padded_heads(small, tp)
    if of_source <= of_small:
        return ""
    wanted, found = (
        " and ".join(sorted(f"{one.query_heads}/{one.kv_heads}" for _, one in heads)) or "none that are padded"
        for heads in (of_source - of_small, of_small)
    )
    return (
        f"the positions of padding depend on the numbers of query and KV heads, which are {wanted} in the source and "
        f"{found} in the small model"
    )


def _padded_heads(planner: Planner, tp: int) -> set[tuple[str, Heads]]:
    """The heads that a plan pads in groups, each with the submodel that has them."""
    if not planner.rules.pad or planner.blocked(tp) is not None:
        return set()
    padded = ((one.group.model_rules, one.group.rule, one.unit) for one in planner.padded_rules(tp))
    paddings = ((model_rules.at, model_rules.padding(rule, unit)) for model_rules, rule, unit in padded)
    return {(at, padding.heads) for at, padding in paddings if padding and padding.heads}
