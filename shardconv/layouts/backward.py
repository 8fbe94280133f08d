"""A layout read backward: the names and full shapes of the source tensors that the tensors of a rank file are made of.

Pure. What it gives is a proposal where shapes do not follow from the config: whoever uses it lays these tensors out and
compares the result with the rank files.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shardconv.errors import PlanError
from shardconv.layouts.choice import ChosenRules, rules_for
from shardconv.layouts.rules import Rule
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, resolve
from shardconv.plan.resolve import Resolver
from shardconv.plan.tensor_placement import ShardedDim

#: The number of a layer in a name.
_LAYER = re.compile(r"\.(\d{1,6})\.")
#: Why a weight may be missing.
_NOT_SAVED = (
    "as where vLLM ran on a CPU, on which it keeps weights of linear layers in another form that it does not save"
)


def full_tensors(
    layout: str, found: Mapping[str, TensorSpec], tp: int, config: Mapping[str, Any], request: PlanRequest
) -> dict[str, TensorSpec]:
    """The source tensors of rank files.

    Args:
        layout: the name of an engine's layout.
        found: name to dtype and shape of the tensors of a rank's files.
        tp: number of ranks.
        config: what config.json holds.
        request: for a plan that the engine can execute.

    Returns:
        Name to dtype and full shape, in the order in which the library safetensors writes tensors of one dtype.

    Raises:
        PlanError: as :func:`rules_for` and :func:`members_of`, if a layer lacks a tensor, or no plan is known.
    """
    chosen = rules_for(layout, config)
    members = members_of(chosen, found)
    shards, resolver = _resolved(members, found, config, request)
    _check_layers(shards, config)
    return {
        name: TensorSpec(shards[name].dtype, _full_shape(shards[name].shape, resolver.sharded_dim(name), tp))
        for name in sorted(shards)
    }


def _resolved(
    members: Mapping[str, tuple[str, ...]],
    found: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    request: PlanRequest,
) -> tuple[dict[str, TensorSpec], Resolver]:
    """The members, with shapes as if those of a tensor were equal; fused tensors where the family has no members."""
    as_stored = {one: names if len(names) == 1 else (one,) for one, names in members.items()}
    resolved, errors = [], []
    for candidate in [as_stored, members][as_stored == members :]:
        shards = {name: _even_share(found[one], len(names)) for one, names in candidate.items() for name in names}
        try:
            resolved.append((shards, resolve(shards, config, request).resolver))
        except PlanError as error:
            errors.append(error)
    if not resolved:
        raise errors[-1]
    if len(resolved) > 1:
        name = next(one for one in members if members[one] != as_stored[one])
        raise PlanError(f"{name}: may be one tensor of the checkpoint or {len(members[name])}: its family has both")
    return resolved[0]


def _even_share(spec: TensorSpec, count: int) -> TensorSpec:
    """One of so many members of a tensor that have the same number of rows."""
    return spec if count == 1 else TensorSpec(spec.dtype, (sum(spec.shape[:1]) // count, *spec.shape[1:]))


def _full_shape(shard: tuple[int, ...], sharded: ShardedDim, tp: int) -> tuple[int, ...]:
    if sharded.dim is None:
        return shard
    size = shard[sharded.dim] * tp if sharded.size is None else sharded.size
    return (*shard[: sharded.dim], size, *shard[sharded.dim + 1 :])


def _check_layers(names: Collection[str], config: Mapping[str, Any]) -> None:
    """Check that all layers of a kind have the same tensors: of tensors that share memory vLLM saves only one."""
    layers: dict[int, set[str]] = {}
    for name in names:
        if (match := _LAYER.search(name)) is not None:
            layers.setdefault(int(match[1]), set()).add(_LAYER.sub(".*.", name, count=1))
    if not layers:
        return
    count = config.get("num_hidden_layers", 1 + max(layers))
    if layers.keys() != set(range(1 + max(layers))) or count != 1 + max(layers):
        raise PlanError(f"{len(layers)} layers are there, the last is layer {max(layers)} (expected {count}, from 0)")
    types = config.get("layer_types")
    kinds = list(map(str, types)) if isinstance(types, list) and len(types) == count else [""] * count
    for layer, kind in enumerate(kinds):
        first = layers[kinds.index(kind)]
        for name in sorted(first ^ layers[layer]):
            at = layer if name in first else kinds.index(kind)
            raise PlanError(f"{name.replace('*', str(at))}: is missing, and another layer of this type has it")


def members_of(chosen: ChosenRules, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The source tensors of each tensor of a rank file, in order; constants are left out.

    Args:
        chosen: the rules of the layout.
        names: of the tensors of a rank file.

    Raises:
        PlanError: if a tensor is of experts, or a source is missing or there twice.
    """
    if (name := next((name for name in names if ".experts." in name), None)) is not None:
        raise PlanError(f"{name}: is of experts, which vLLM repacks before it saves them")
    _check_groups(chosen, names)
    constants = [rule.target for group in chosen.groups for rule in group.constants]
    found = {
        name: _members(name, chosen.rules) for name in names if not any(constant.match(name) for constant in constants)
    }
    given = Counter(member for members in found.values() for member in members)
    if (twice := next((name for name, count in given.items() if count > 1), None)) is not None:
        raise PlanError(f"{twice}: is in {given[twice]} tensors of a rank (expected one)")
    for rule in chosen.others:
        _check_sources(rule, names, given)
    return found


def _check_groups(chosen: ChosenRules, names: Collection[str]) -> None:
    """Check that a weight of each group is there: vLLM does not save weights that it keeps in another form."""
    for group in chosen.groups:
        rules = [rule for rule in group.rules if rule in chosen.rules]
        targets = [rule.target for rule in rules if rule.target.text.endswith(".weight")]
        if targets and not any(target.match(name) for target in targets for name in names):
            raise PlanError(f"{targets[0].text}: is missing in all layers, {_NOT_SAVED}")


def check_pairs(plan: Plan, tensors: Mapping[str, TensorSpec]) -> None:
    """Check that column-parallel and row-parallel weights of a module are there together.

    Args:
        plan: for all tensors.
        tensors: name to dtype and full shape.

    Raises:
        PlanError: if a module has only one of the two.
    """
    dims: dict[str, set[int | None]] = {}
    for name, spec in tensors.items():
        if len(spec.shape) == 2 and _LAYER.search(name):
            module = name.rpartition(".")[0].rpartition(".")[0]
            dims.setdefault(module, set()).add(plan.placement(name).dim)
    for module, found in dims.items():
        if len(found & {0, 1}) == 1:
            kind = "row" if 0 in found else "column"
            raise PlanError(f"{module}: has no {kind}-parallel weight, {_NOT_SAVED}")


def _members(name: str, rules: Sequence[Rule]) -> tuple[str, ...]:
    """The members by the first rule that gives the tensor; the tensor itself where none does."""
    for rule in rules:
        if (match := rule.target.match(name)) is not None:
            return tuple(source.name(match) for source in rule.sources)
    return (name,)


def _check_sources(rule: Rule, names: Collection[str], given: Collection[str]) -> None:
    """Refuse a tensor that another config would make the only one of its sources.

    So files of a model with tied embeddings are not taken for those of a model that has no embeddings.
    """
    for name in names:
        match = rule.target.match(name)
        missing = [] if match is None else [one.name(match) for one in rule.sources if one.name(match) not in given]
        if missing:
            wanted = ", ".join(f"{field} = {value}" for field, value in rule.when.items())
            raise PlanError(f"{missing[0]}: is missing; {name} would be it if config.json had {wanted}")
