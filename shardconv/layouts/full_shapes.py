"""Full shapes of the tensors of rank files: the names and shapes of the source tensors, and their placements.

The dims that ranks shard follow from the layout's rules, or from the plan of the model that an engine has loaded. If
shapes do not follow from the config there, the result is a guess: callers must lay out these tensors and compare the
result with the rank files.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from shardconv.layouts.layout_file import ChosenRules, layout_file
from shardconv.layouts.relation import LayoutRule, RuleTable, find_target
from shardconv.plan.placement import Interval, Placement
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.planner import Planner
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.support.errors import PlanError
from shardconv.support.formatting import counted

#: The index of a layer in a name.
_LAYER = re.compile(r"\.(\d{1,6})\.")
#: A cause of missing weights.
_NOT_SAVED = "for example because vLLM ran on a CPU, where it packs weights of linear layers and does not save them"


class FullTensor(NamedTuple):
    """A full tensor: its shape, how ranks hold it, and the number of heads whose rows are in another order, or 0."""

    shape: tuple[int, ...]
    placement: Placement
    rotary_heads: int = 0


def num_ranks(options: RuleTable, shard: tuple[int, ...], config: Mapping[str, object]) -> int | None:
    """The number of ranks by the heads of a shard; None if they do not give it.

    Raises:
        PlanError: if the config does not have the heads.
    """
    if not options.gives_tp or options.heads is None:
        return None
    rows = positive(config, options.heads) * positive(config, "head_dim")
    return None if not shard or not shard[0] or rows % shard[0] else rows // shard[0]


def full_tensor(options: RuleTable, shards: Sequence[tuple[int, ...]], config: Mapping[str, object]) -> FullTensor:
    """The full tensor of the shards of all ranks, which must have equal shapes, by the dims of a rule.

    Raises:
        PlanError: if the shards do not form a tensor that fits the config.
    """
    if len(set(shards)) > 1:
        got = " and ".join(str(list(shape)) for shape in dict.fromkeys(shards))
        raise PlanError(f"ranks have different shapes (got {got})")
    if max(options.dims, default=-1) >= len(shards[0]):
        raise PlanError(f"it has shape {list(shards[0])} on each rank (expected {max(options.dims) + 1} dims)")
    candidates = [_sharded(options, shards[0], dim, len(shards), config) for dim in options.dims or (None,)]
    expected = _expected(options, config)
    fitting = (
        one
        for one in candidates
        if all(one.shape[dim] == size for dim, (size, _) in expected.items() if dim < len(one.shape))
    )
    full = next(fitting, candidates[0])
    for dim, (size, field) in expected.items():
        if len(full.shape) <= dim or full.shape[dim] != size:
            raise PlanError(
                f"the shards of {counted(full.placement.num_ranks, 'rank')} form a tensor of shape {list(full.shape)} "
                f"(expected {size} in dim {dim}, which is {field})"
            )
    return full


def _sharded(
    options: RuleTable, shard: tuple[int, ...], dim: int | None, tp: int, config: Mapping[str, object]
) -> FullTensor:
    if dim is None:
        return FullTensor(shard, Placement.replicated(tp))
    heads = None if options.heads is None else positive(config, options.heads)
    replicas = 1 if heads is None or heads >= tp else tp // heads
    if heads is not None and (tp % heads if heads < tp else heads % tp):
        raise PlanError(f"{options.heads} is {heads}, which cannot be divided over {tp} ranks")
    size = shard[dim]
    ranks = tuple((Interval(at * size, (at + 1) * size),) for at in (rank // replicas for rank in range(tp)))
    full = size * tp // replicas
    placement = Placement(dim, full, ranks if size else ((),) * tp) if tp > 1 else Placement.replicated(1)
    shape = (*shard[:dim], full, *shard[dim + 1 :])
    return FullTensor(shape, placement, heads if options.rotary and heads is not None else 0)


def _expected(options: RuleTable, config: Mapping[str, object]) -> dict[int, tuple[int, str]]:
    """Dim to its expected size in the full tensor, and the fields of the config that have it."""
    expected = {dim: (positive(config, field), field) for dim, field in options.shape.items()}
    if options.heads is not None:
        heads, head_dim = positive(config, options.heads), positive(config, "head_dim")
        expected[0] = (heads * head_dim, f"{options.heads} * head_dim")
        if options.rotary and head_dim % 2:
            raise PlanError(f"head_dim is {head_dim} (expected an even number)")
    return expected


def positive(config: Mapping[str, object], field: str) -> int:
    """A positive integer of the config.

    Raises:
        PlanError: if it is not one.
    """
    value = config.get(field)
    if type(value) is not int or value < 1:
        raise PlanError(f"{field} in the config is {value!r:.40} (expected a positive integer)")
    return value


def planned_tensors(
    layout: str, rank_tensors: Mapping[str, TensorSpec], tp: int, config: Mapping[str, object], request: PlanRequest
) -> dict[str, TensorSpec]:
    """The source tensors of the rank files of an engine, by the plan of the model.

    Args:
        layout: the name of an engine's layout.
        rank_tensors: name to dtype and shape of the tensors of a rank's files.
        tp: number of ranks.
        config: contents of config.json.
        request: for a plan that the engine can execute.

    Returns:
        Name to dtype and full shape, in the order in which the safetensors library writes tensors of one dtype.

    Raises:
        PlanError: if the layout does not support the model, a layer lacks a tensor, or no plan is known.
    """
    if config.get(SETTINGS_KEY) is not None:
        raise PlanError(f"layout {layout} does not support quantized checkpoints")
    members = _members_of(layout_file(layout).rules_for(config), rank_tensors)
    shards, planner = _resolved(members, rank_tensors, config, request)
    check_layers(shards, config)
    _check_equal_layers(shards, config)
    return {name: TensorSpec(shards[name].dtype, planner.group_of[name].full_shape(tp)) for name in sorted(shards)}


def _resolved(
    members: Mapping[str, tuple[str, ...]],
    rank_tensors: Mapping[str, TensorSpec],
    config: Mapping[str, object],
    request: PlanRequest,
) -> tuple[dict[str, TensorSpec], Planner]:
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
            resolved.append((shards, planner_for(shards, config, request)))
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


def check_layers(names: Iterable[str], config: Mapping[str, object]) -> range:
    """Check that all layers of the config have tensors, and return their numbers.

    Raises:
        PlanError: if layers are missing, or the config has fewer.
    """
    layers = _layers(names).keys()
    expected = config.get("num_hidden_layers", len(layers))
    if layers != set(range(len(layers))) or len(layers) != expected:
        last = f", the last with index {max(layers)}" if layers else ""
        raise PlanError(
            f"layers are missing (got {counted(len(layers), 'layer')}{last}, expected {expected})",
            "correct num_hidden_layers of the config, or the source",
        )
    return range(len(layers))


def _layers(names: Iterable[str]) -> dict[int, set[str]]:
    """Index of each layer to its tensors, by their names in any layer."""
    layers: dict[int, set[str]] = {}
    for name in names:
        if (match := _LAYER.search(name)) is not None:
            layers.setdefault(int(match[1]), set()).add(_LAYER.sub(".*.", name, count=1))
    return layers


def _check_equal_layers(names: Collection[str], config: Mapping[str, object]) -> None:
    """Check that layers of the same type have the same tensors: vLLM saves only one of tensors that share memory."""
    layers = _layers(names)
    layer_types = config.get("layer_types")
    types = [""] * len(layers)
    if isinstance(layer_types, list) and len(layer_types) == len(layers):
        types = [str(layer_type) for layer_type in layer_types]
    for layer, layer_type in enumerate(types):
        first = layers[types.index(layer_type)]
        for name in sorted(first ^ layers[layer]):
            at = layer if name in first else types.index(layer_type)
            raise PlanError(f"{name.replace('*', str(at))}: is missing, but another layer of this type has it")


def _members_of(chosen: ChosenRules, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The source tensors of each tensor of a rank file, in order, without constants.

    Raises:
        PlanError: if a tensor belongs to experts, or a source is missing or duplicated.
    """
    if (name := next((name for name in names if ".experts." in name), None)) is not None:
        raise PlanError(f"{name}: belongs to experts, which vLLM repacks before it saves them")
    _check_groups(chosen, names)
    found = {name: find_target(chosen.rules, name) for name in names if not chosen.is_without_source(name)}
    result = {name: (name,) if one is None else tuple(one.sources) for name, one in found.items()}
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


def _check_sources(rule: LayoutRule, names: Collection[str], members: Collection[str]) -> None:
    """Refuse tensors whose source would be another tensor under another config.

    Otherwise files of a model with tied embeddings would be accepted as a model without input embeddings.
    """
    for name in names:
        sources = [] if (match := rule.target.match(name)) is None else rule.source_names(match.texts)
        if missing := [source for source in sources if source not in members]:
            expected = ", ".join(f"{field} = {value}" for field, value in rule.options.when.items())
            raise PlanError(
                f"{missing[0]}: is missing (got {name}, which is the same tensor if config.json has {expected})"
            )
