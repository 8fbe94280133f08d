"""The plan that is stored in a split checkpoint, as used by reshard, plan and run; installed families are not read."""

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from shardconv.checkpoint.split.manifest import Manifest
from shardconv.files.folder import AnyPath
from shardconv.formats.detect import with_grids
from shardconv.plan.engines import engine_named
from shardconv.plan.families.rule import Rule
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan, TensorSpec, logical_tensors
from shardconv.plan.planner import Planner
from shardconv.plan.rule_set import ModelRules
from shardconv.plan.unused import known_unused
from shardconv.support.errors import PlanError, SplitCheckpointError


def quantized_tensors(manifest: Manifest) -> Mapping[str, TensorSpec]:
    """The source tensors with the grids that the manifest stores, or else with the grids of its config."""
    tensors, planned = manifest.source_tensors, manifest.plan.tensors
    if not any(one.grid for one in planned.values()):
        return with_grids(tensors, manifest.config)
    return {name: spec._replace(grid=planned[name].grid) for name, spec in tensors.items()}


def loaded_tensors(manifest: Manifest, *, dequantize: bool) -> Mapping[str, TensorSpec]:
    """The source tensors as a model has them: with ``dequantize``, weights instead of the tensors that store them."""
    tensors = quantized_tensors(manifest)
    return logical_tensors(tensors) if dequantize else tensors


def stored_planner(
    manifest: Manifest, engine: str | None, *, ep: int | None = None, pad: int | None = None, dequantize: bool = False
) -> Planner:
    """The planner of the stored rules, which makes the plan for any tensor parallel size.

    Args:
        manifest: of the split checkpoint.
        engine: the engine whose boundaries the plan uses; None for shardconv.
        ep: expert parallel size; None for the stored one.
        pad: as in :class:`~shardconv.plan.request.PlanRequest`; None for the option of the split checkpoint.
        dequantize: plan the weights of quantized layers, instead of the tensors that store them.

    Raises:
        PlanError: if the rules do not fit the checkpoint.
    """
    rules = manifest.plan.rules if ep is None else replace(manifest.plan.rules, ep=ep)
    if engine != manifest.request.engine:
        rules = rules.for_engine(engine_named(engine))
    tensors = loaded_tensors(manifest, dequantize=dequantize)
    return Planner(tensors, rules, assumed=manifest.plan.assumed).padded(manifest.request.pad if pad is None else pad)


def runnable_plan(manifest: Manifest, folder: AnyPath, rank: int = 0, *, dequantize: bool = False) -> Plan:
    """The plan to run the rank files of a split checkpoint with; its rules give exactly the stored placements.

    Args:
        manifest: of the split checkpoint.
        folder: of the split checkpoint, for messages.
        rank: the rank, whose tensors the user's rules have to match in memory.
        dequantize: return the plan of the weights of quantized layers, instead of the tensors that store them.

    Raises:
        SplitCheckpointError: if a placement by the rules differs from the stored one.
    """
    stored = manifest.plan
    try:
        plan = stored_planner(manifest, manifest.request.engine).plan(manifest.tp, stored.stages)
    except PlanError as error:
        raise SplitCheckpointError(f"{folder}: {_REASON}: {error.message}. {_remedy(folder)}") from error
    if (name := stored.first_difference(plan)) is None:
        if dequantize:
            planner = stored_planner(manifest, manifest.request.engine, dequantize=True)
            plan = planner.plan(manifest.tp, stored.stages)
        return _relax_unused(plan, rank)
    raise SplitCheckpointError(
        f"{folder}: {_REASON}: {name} was split as {_describe(stored, name)}, and would now be split as "
        f"{_describe(plan, name)}. {_remedy(folder)}"
    )


def _relax_unused(plan: Plan, rank: int) -> Plan:
    """Make user rules and blocks optional if they match only tensors that the model of a rank is known not to use.

    All other user rules must match a parameter in memory: names may differ, and another rule would apply instead.
    """
    unused = known_unused(plan.tensors)
    needed = {
        planned.reason.rule for name, planned in plan.tensors.items() if name not in unused and plan.holds(rank, name)
    }

    def relaxed(model_rules: ModelRules) -> Iterator[Rule]:
        mounts = {rule.mount for rule in model_rules.family.rules if rule.pattern in needed}
        for rule in model_rules.family.rules:
            is_needed = not rule.by_user or rule.pattern in needed
            yield rule if is_needed else replace(rule, optional=True, mount=rule.mount if rule.mount in mounts else "")

    return replace(plan, rules=plan.rules.with_rules(relaxed).without_engine())


def placements_in_memory(manifest: Manifest, plan: Plan, *, dequantize: bool = False) -> dict[str, Placement]:
    """The placements in shardconv's runtime of tensors that the rank files hold replicated for an engine.

    Args:
        manifest: of the split checkpoint.
        plan: the result of :func:`runnable_plan`.
        dequantize: as for the plan.

    Raises:
        SplitCheckpointError: if a tensor is sharded otherwise than in the runtime.
    """
    if plan.tp == 1:
        return {}
    tensors = loaded_tensors(manifest, dequantize=dequantize)
    runtime_plan = Planner(tensors, plan.rules).plan(plan.tp, plan.stages)
    placements = {name: planned.placement for name, planned in runtime_plan.tensors.items()}
    different = {name: placement for name, placement in placements.items() if placement != plan.placement(name)}
    if (name := next((name for name in different if plan.placement(name).dim is not None), None)) is not None:
        raise SplitCheckpointError(
            f"{name}: its shard for {manifest.request.engine} is {plan.placement(name).describe()} (expected the full "
            f"tensor, or {different[name].describe()}): split the source again"
        )
    return different


#: The reason why a plan cannot be executed.
_REASON = "it was written by another version of shardconv, which planned differently"


def _remedy(folder: AnyPath) -> str:
    return f"Merge it and split it again: shardconv merge {folder} -o MERGED; shardconv split MERGED --tp N"


def _describe(plan: Plan, name: str) -> str:
    planned = plan.tensors.get(name)
    return "nothing" if planned is None else f"{planned.style} ({planned.placement.describe()})"
