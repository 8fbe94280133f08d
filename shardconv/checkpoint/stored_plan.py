"""The plan that a split checkpoint was written with: what is executed when it is resharded, reported or run.

Owns what happens with manifests of format 1 and 2, which stored placements and not the rules behind them. Nothing here
reads installed families for a manifest of a later version.
"""

from dataclasses import replace
from pathlib import Path

from shardconv.checkpoint.manifest import Manifest
from shardconv.errors import PlanError, SplitCheckpointError
from shardconv.plan.engines import engine_named
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan
from shardconv.plan.request import resolve
from shardconv.plan.resolve import Resolver
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.scope import Scope
from shardconv.plan.unused import known_unused


def stored_rules(manifest: Manifest) -> RuleSet:
    """The rules that a manifest holds; of format 1 and 2 the installed ones for what was asked for.

    Raises:
        PlanError: if the installed rules do not fit the checkpoint.
    """
    if manifest.plan.rules is not None:
        return manifest.plan.rules
    return resolve(manifest.source_tensors, manifest.config, manifest.request).resolver.rules


def resolver_of(manifest: Manifest, engine: str | None, *, pad: int | None = None) -> Resolver:
    """The stored rules over the tensors of the source, which give the plan for another tensor parallel size.

    Args:
        manifest: of the split checkpoint.
        engine: the engine whose boundaries the plan has to follow; None for shardconv's own.
        pad: as in :class:`~shardconv.plan.request.PlanRequest`; None for that of the split checkpoint.

    Raises:
        PlanError: if they do not fit the checkpoint.
    """
    rules = stored_rules(manifest)
    if engine != manifest.request.engine:
        rules = rules.for_engine(engine_named(engine))
    return Resolver(manifest.source_tensors, rules).padded(manifest.request.pad if pad is None else pad)


def runnable_plan(manifest: Manifest, folder: Path) -> Plan:
    """The plan to execute with the rank files of a split checkpoint: its rules give exactly its placements.

    Args:
        manifest: of the split checkpoint.
        folder: where it is, for the message.

    Raises:
        SplitCheckpointError: if the rules place a tensor elsewhere than its rank files have it.
    """
    stored = manifest.plan
    try:
        made = resolver_of(manifest, manifest.request.engine).plan(manifest.tp, assumed=stored.assumed)
    except PlanError as error:
        raise SplitCheckpointError(f"{folder}: {_WHY[stored.rules is None]}: {error}. {_remedy(folder)}") from error
    if (name := stored.first_difference(made)) is None:
        return replace(made, assumed=(*made.assumed, _OLD)) if stored.rules is None else _for_memory(made)
    raise SplitCheckpointError(
        f"{folder}: {_WHY[stored.rules is None]}: {name} was split as {_describe(stored, name)}, and would now be "
        f"split as {_describe(made, name)}. {_remedy(folder)}"
    )


#: What is assumed of a checkpoint of an older format.
_OLD = "its manifest is of format 1 or 2, which does not store module overrides: the installed ones are used"


def _for_memory(plan: Plan) -> Plan:
    """The plan, in which a user's rule or block for tensors that are known to be unused may match nothing in memory.

    Any other rule of the user's has to match: names in memory may differ, and another rule would take its place.
    """
    assert plan.rules is not None
    unused = known_unused(plan.tensors)
    needed = {planned.reason.rule for name, planned in plan.tensors.items() if name not in unused}

    def relaxed(scope: Scope) -> Scope:
        mounts = {rule.mount for rule in scope.family.rules if rule.pattern in needed}
        rules = tuple(
            replace(rule, optional=True, mount=rule.mount if rule.mount in mounts else "")
            if rule.by_user and rule.pattern not in needed
            else rule
            for rule in scope.family.rules
        )
        return replace(scope, family=replace(scope.family, rules=rules))

    return replace(plan, rules=replace(plan.rules, scopes=tuple(map(relaxed, plan.rules.scopes))).without_engine())


def placements_in_memory(manifest: Manifest, plan: Plan) -> dict[str, Placement]:
    """The placements of tensors of which a rank file has more than shardconv's own runtime takes of it.

    They are replicated because an engine reads all of them on each rank.

    Args:
        manifest: of the split checkpoint.
        plan: what :func:`runnable_plan` gives.
    """
    if plan.rules is None or plan.tp == 1:
        return {}
    own = Resolver(manifest.source_tensors, plan.rules).plan(plan.tp)
    placements = {name: planned.placement for name, planned in own.tensors.items()}
    other = {name: placement for name, placement in placements.items() if placement != plan.placement(name)}
    if (name := next((name for name in other if plan.placement(name).dim is not None), None)) is not None:
        raise SplitCheckpointError(
            f"{name}: its shard for {manifest.request.engine} is {plan.placement(name).describe()} (expected the full "
            f"tensor, or {other[name].describe()}): split the source again"
        )
    return other


#: Why a plan cannot be executed, by whether the manifest lacks the rules.
_WHY = {
    True: "its manifest is of format 1 or 2, which does not store rules, and the installed rules differ",
    False: "it was written by another version of shardconv, which planned differently",
}


def _remedy(folder: Path) -> str:
    return f"Merge it and split it again: shardconv merge {folder} -o MERGED; shardconv split MERGED --tp N"


def _describe(plan: Plan, name: str) -> str:
    planned = plan.tensors.get(name)
    return "nothing" if planned is None else f"{planned.style} ({planned.placement.describe()})"
