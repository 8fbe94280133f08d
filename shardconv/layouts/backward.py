"""Inverse of a layout: derives the names and full shapes of the source tensors from the tensors of a rank file.

If shapes do not follow from the config, the result is a guess: callers must lay out these tensors and compare the
result with the rank files.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from shardconv.layouts.choice import ChosenRules, rules_for
from shardconv.layouts.rules import Rule
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.plan.request import PlanRequest, resolve
from shardconv.plan.resolver import Resolver
from shardconv.plan.tensor_placement import ShardedDim
from shardconv.support.errors import PlanError

#: The index of a layer in a name.
_LAYER = re.compile(r"\.(\d{1,6})\.")
#: A cause of missing weights.
_NOT_SAVED = "for example because vLLM ran on a CPU, where it packs weights of linear layers and does not save them"


def full_tensors(
    layout: str, rank_tensors: Mapping[str, TensorSpec], tp: int, config: Mapping[str, object], request: PlanRequest
) -> dict[str, TensorSpec]:
    """The source tensors of rank files.

    Args:
        layout: the name of an engine's layout.
        rank_tensors: name to dtype and shape of the tensors of a rank's files.
        tp: number of ranks.
        config: contents of config.json.
        request: for a plan that the engine can execute.

    Returns:
        Name to dtype and full shape, in the order in which the safetensors library writes tensors of one dtype.

    Raises:
        PlanError: as :func:`rules_for` and :func:`members_of`, if a layer lacks a tensor, or no plan is known.
    """
    if config.get(SETTINGS_KEY) is not None:
        raise PlanError(f"layout {layout} does not support quantized checkpoints")
    chosen = rules_for(layout, config)
    members = members_of(chosen, rank_tensors)
    shards, resolver = _resolved(members, rank_tensors, config, request)
    _check_layers(shards, config)
    return {
        name: TensorSpec(shards[name].dtype, _full_shape(shards[name].shape, resolver.sharded_dim(name), tp))
        for name in sorted(shards)
    }


def _resolved(
    members: Mapping[str, tuple[str, ...]],
    rank_tensors: Mapping[str, TensorSpec],
    config: Mapping[str, object],
    request: PlanRequest,
) -> tuple[dict[str, TensorSpec], Resolver]:
    """Guess the shards of the source tensors, and resolve their rules.

    Members of one tensor get equal shapes. If the family has the fused tensor, it is not split into members.
    """
    as_stored = {fused: names if len(names) == 1 else (fused,) for fused, names in members.items()}
    resolved, errors = [], []
    for candidate in [as_stored, members][as_stored == members :]:
        shards = {
            name: _even_split(rank_tensors[fused], len(names)) for fused, names in candidate.items() for name in names
        }
        try:
            resolved.append((shards, resolve(shards, config, request).resolver))
        except PlanError as error:
            errors.append(error)
    if not resolved:
        raise errors[-1]
    if len(resolved) > 1:
        name = next(fused for fused in members if members[fused] != as_stored[fused])
        raise PlanError(f"{name}: may be one tensor of the checkpoint or {len(members[name])}: its family has both")
    return resolved[0]


def _even_split(spec: TensorSpec, count: int) -> TensorSpec:
    """One of ``count`` members of a tensor with the same number of rows each."""
    return spec if count == 1 else TensorSpec(spec.dtype, (sum(spec.shape[:1]) // count, *spec.shape[1:]))


def _full_shape(shard: tuple[int, ...], sharded: ShardedDim, tp: int) -> tuple[int, ...]:
    if sharded.dim is None:
        return shard
    size = shard[sharded.dim] * tp if sharded.size is None else sharded.size
    return (*shard[: sharded.dim], size, *shard[sharded.dim + 1 :])


def _check_layers(names: Collection[str], config: Mapping[str, object]) -> None:
    """Check that layers of the same type have the same tensors: vLLM saves only one of tensors that share memory."""
    layers: dict[int, set[str]] = {}
    for name in names:
        if (match := _LAYER.search(name)) is not None:
            layers.setdefault(int(match[1]), set()).add(_LAYER.sub(".*.", name, count=1))
    if not layers:
        return
    count = 1 + max(layers)
    expected = config.get("num_hidden_layers", count)
    if layers.keys() != set(range(count)) or expected != count:
        raise PlanError(
            f"layers are missing (got {len(layers)} layers, the last with index {max(layers)}, expected {expected})"
        )
    layer_types = config.get("layer_types")
    types = [""] * count
    if isinstance(layer_types, list) and len(layer_types) == count:
        types = [str(layer_type) for layer_type in layer_types]
    for layer, layer_type in enumerate(types):
        first = layers[types.index(layer_type)]
        for name in sorted(first ^ layers[layer]):
            at = layer if name in first else types.index(layer_type)
            raise PlanError(f"{name.replace('*', str(at))}: is missing, but another layer of this type has it")


def members_of(chosen: ChosenRules, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The source tensors of each tensor of a rank file, in order, without constants.

    Args:
        chosen: the rules of the layout.
        names: of the tensors of a rank file.

    Raises:
        PlanError: if a tensor belongs to experts, or a source is missing or duplicated.
    """
    if (name := next((name for name in names if ".experts." in name), None)) is not None:
        raise PlanError(f"{name}: belongs to experts, which vLLM repacks before it saves them")
    _check_groups(chosen, names)
    constants = [rule.target for group in chosen.groups for rule in group.constants]
    result = {
        name: _members(name, chosen.rules) for name in names if not any(constant.match(name) for constant in constants)
    }
    counts = Counter(member for members in result.values() for member in members)
    if (duplicate := next((name for name, count in counts.items() if count > 1), None)) is not None:
        raise PlanError(f"{duplicate}: is in {counts[duplicate]} tensors of a rank (expected one)")
    for rule in chosen.others:
        _check_sources(rule, names, counts)
    return result


def _check_groups(chosen: ChosenRules, names: Collection[str]) -> None:
    """Check that each group has a weight: vLLM does not save packed weights."""
    for group in chosen.groups:
        rules = [rule for rule in group.rules if rule in chosen.rules]
        targets = [rule.target for rule in rules if rule.target.text.endswith(".weight")]
        if targets and not any(target.match(name) for target in targets for name in names):
            raise PlanError(f"{targets[0].text}: is missing in all layers, {_NOT_SAVED}")


def check_pairs(plan: Plan, tensors: Mapping[str, TensorSpec]) -> None:
    """Check that each module has both column-parallel and row-parallel weights, or neither.

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
    for module, module_dims in dims.items():
        if len(module_dims & {0, 1}) == 1:
            kind = "row" if 0 in module_dims else "column"
            raise PlanError(f"{module}: does not have a {kind}-parallel weight, {_NOT_SAVED}")


def _members(name: str, rules: Sequence[Rule]) -> tuple[str, ...]:
    """The members by the first rule with this target; the tensor itself if there is none."""
    for rule in rules:
        if (match := rule.target.match(name)) is not None:
            return tuple(source.name(match) for source in rule.sources)
    return (name,)


def _check_sources(rule: Rule, names: Collection[str], members: Collection[str]) -> None:
    """Refuse tensors whose source would be another tensor under another config.

    Otherwise files of a model with tied embeddings would be accepted as those of a model without input embeddings.
    """
    for name in names:
        match = rule.target.match(name)
        sources = [] if match is None else [source.name(match) for source in rule.sources]
        if missing := [source for source in sources if source not in members]:
            expected = ", ".join(f"{field} = {value}" for field, value in rule.when.items())
            raise PlanError(
                f"{missing[0]}: is missing (got {name}, which is the same tensor if config.json has {expected})"
            )
