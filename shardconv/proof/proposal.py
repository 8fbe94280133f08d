"""Propose rules for a model that no family covers, from its modules and the connections between them.

Owns the choice of a style for each kind of module. Every rule on its own keeps the outputs of the model: linear layers
gather their outputs, and parameters of other modules are gathered on use. If the features of a linear layer go to
another one and nowhere else, both are sharded along these features. A proposal has to be proven, see prove.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count

from torch import Tensor, nn

from shardconv.convert.protocols import PretrainedModel
from shardconv.proof.attention import Attention, find_attention
from shardconv.proof.layer_graph import Features, LayerGraph, trace_layers
from shardconv.proof.plan_file import MountTable, OverrideTable, RuleTable, UnitTable, merge_rules

#: A linear layer with fewer outputs is replicated.
_FEW_OUTPUTS = 16
#: A parameter with a smaller fraction of the model's elements is replicated instead of gathered on use.
_SMALL_FRACTION = 0.08
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Proposal:
    """The tables of a plan file.

    Attributes:
        units: by name.
        rules: by pattern.
        overrides: the module overrides of attention, by pattern.
        blocks: by the path at which they are mounted.
    """

    units: dict[str, UnitTable]
    rules: dict[str, RuleTable]
    overrides: dict[str, OverrideTable]
    blocks: dict[str, list[str | MountTable]] = field(default_factory=dict)

    def tables(self) -> dict[str, object]:
        """The content of the plan file."""
        blocks = {path: blocks[0] if len(blocks) == 1 else blocks for path, blocks in self.blocks.items()}
        return {"blocks": blocks, "units": self.units, "rules": merge_rules(self.rules), "modules": self.overrides}


def propose_rules(model: PretrainedModel, inputs: Mapping[str, Tensor], *, by_heads: bool = True) -> Proposal:
    """Propose rules for a model.

    Args:
        model: a small model, with values in memory.
        inputs: of the model.
        by_heads: shard attention by heads if its layers have usual names; else these layers gather their outputs.
    """
    graph = trace_layers(model, inputs, _is_linear)
    units, by_heads_rules, overrides = _attention(model) if by_heads else ({}, {}, {})
    of_modules = {**_pairs(graph), **by_heads_rules}
    total = sum(parameter.numel() for parameter in model.parameters())
    proposer = _ModuleRules(model, of_modules, total, graph.called)
    rules: dict[str, RuleTable] = {}
    for name, module in model.named_modules():
        for pattern, rule in proposer.propose(name, module):
            known = rules.setdefault(pattern, rule)
            if known != rule:
                rules[pattern] = min(known, rule, key=lambda one: _CAUTION.index(one["style"]))
    if any("segments" in rule for rule in rules.values()):
        units["element"] = {}
    return Proposal(units, rules, overrides)


def _attention(model: PretrainedModel) -> tuple[dict[str, UnitTable], dict[str, RuleTable], dict[str, OverrideTable]]:
    """Units, rules by module, and module overrides by pattern, of attention that is sharded by heads."""
    modules, config = dict(model.named_modules()), model.config.to_dict()
    units: dict[str, UnitTable] = {}
    rules: dict[str, RuleTable] = {}
    overrides: dict[str, OverrideTable] = {}
    names: dict[str, str] = {}
    for name, module in modules.items():
        if (found := find_attention(name, module, modules, config)) is None:
            continue
        for unit, fields in found.units.items():
            candidates = chain([unit], (f"{unit}_{number}" for number in count(2)))
            names[unit] = next(one for one in candidates if units.get(one, fields) == fields)
            units[names[unit]] = fields
        rules |= {child: _with_units(rule, names) for child, rule in found.rules.items()}
        if table := _overrides(found, names):
            overrides[_pattern(name)] = table
    return units, rules, overrides


def _with_units(rule: RuleTable, names: Mapping[str, str]) -> RuleTable:
    """A rule with the names of its units replaced."""
    return {**rule, "unit": names[rule["unit"]]} if "unit" in rule else rule


def _overrides(attention: Attention, names: Mapping[str, str]) -> OverrideTable:
    """The module overrides of attention, with the names of units replaced."""
    unit = re.compile(r"(query|kv)_head|query_row")
    table: OverrideTable = {}
    if attention.attributes:
        table["attributes"] = {
            key: unit.sub(lambda match: names[match[0]], value) for key, value in attention.attributes.items()
        }
    return table


#: If modules of one pattern get different styles, the first of these, which is right for all of them, is used.
_CAUTION = [
    "replicate", "replicated_with_grad_allreduce", "gathered", "colwise_gather_output", "embedding_rowwise",
    "packed_colwise", "rowwise", "colwise",
]  # fmt: skip


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D"


def _pairs(graph: LayerGraph) -> dict[str, RuleTable]:
    """Rules of the linear layers that are sharded along the features between them.

    All layers of one pattern have the same rule, so one layer that cannot be sharded so excludes the others.
    """
    refused = {_pattern(name) for name in graph.escaped}
    consumers = {_pattern(name) for name in graph.inputs}
    while True:
        found = {
            consumer: inputs
            for consumer, inputs in graph.inputs.items()
            if not any(_pattern(one.layer) in refused | consumers for one in inputs) and _is_complete(inputs)
        }
        left_out = set(graph.inputs) - set(found)
        more = {_pattern(one.layer) for consumer in left_out for one in graph.inputs[consumer]} - refused
        gone = consumers - {_pattern(name) for name in found}
        if not more and not gone:
            break
        refused |= more
        consumers -= gone
    rules: dict[str, RuleTable] = {}
    for consumer, inputs in found.items():
        rules[consumer] = {"style": "rowwise"}
        for one in inputs:
            segments = ["element"] * one.segments
            rules[one.layer] = (
                {"style": "packed_colwise", "segments": segments} if one.segments > 1 else {"style": "colwise"}
            )
    return rules


def _is_complete(features: frozenset[Features]) -> bool:
    """Whether all segments of each layer are among some features."""
    counts = {one.layer: one.segments for one in features}
    return all(
        {one.segment for one in features if one.layer == layer} == set(range(segments))
        for layer, segments in counts.items()
    )


#: The rule of an embedding table, and of other parameters with a row per token of the vocabulary.
_VOCABULARY: RuleTable = {"style": "embedding_rowwise", "pad": True}


class _ModuleRules:
    """Proposes rules for the tensors of single modules.

    Args:
        model: the model.
        known: rules of modules that are known from attention and from pairs of layers.
        total: number of elements of all parameters.
        called: names of the modules that were called.
    """

    def __init__(self, model: PretrainedModel, known: Mapping[str, RuleTable], total: int, called: set[str]) -> None:
        self._known, self._total, self._called = known, total, called
        self._vocab_size = getattr(model.config.get_text_config(), "vocab_size", None)
        self._stored = model.state_dict().keys()
        tables = [module for module in model.modules() if self._has_vocabulary(module)]
        self._tied = {id(parameter) for module in tables for parameter in module.parameters(recurse=False)}

    def propose(self, name: str, module: nn.Module) -> Iterator[tuple[str, RuleTable]]:
        """Patterns and rules for a module's own tensors."""
        own = self._own_tensors(name, module)
        if not own:
            return
        pattern, is_called, weight = _pattern(name), name in self._called, own.get("weight")
        limit = self._total * _SMALL_FRACTION if is_called else self._total
        if name in self._known:
            yield pattern, _transposed(self._known[name], module)
        elif (packed := _packed_rules(own)) is not None:
            yield from ((f"{pattern}.{key}", rule) for key, rule in packed.items())
        elif weight is not None and self._has_vocabulary(module):
            yield pattern, _VOCABULARY
        elif _is_linear(module) and is_called and _outputs(module) >= _FEW_OUTPUTS:
            yield pattern, _transposed({"style": "colwise_gather_output", "pad": True}, module)
        elif set(own) <= {"weight", "bias"} and weight is not None:
            yield pattern, _gathered(weight, limit)
        else:
            for key, tensor in own.items():
                by_heads = self._known.get(f"{name}.{key}")
                rule = _VOCABULARY if id(tensor) in self._tied else by_heads or _gathered(tensor, limit)
                yield (f"{pattern}.{key}" if pattern else key), rule

    def _own_tensors(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        """A module's own parameters, and its buffers that are saved."""
        prefix = f"{name}." if name else ""
        buffers = {key: value for key, value in module.named_buffers(recurse=False) if f"{prefix}{key}" in self._stored}
        return {**dict(module.named_parameters(recurse=False)), **buffers}

    def _has_vocabulary(self, module: nn.Module) -> bool:
        """Whether a module is a layer with a row per token of the vocabulary."""
        is_kind = type(module) is nn.Linear or isinstance(module, nn.Embedding)
        weight = getattr(module, "weight", None)
        return is_kind and isinstance(weight, Tensor) and weight.shape[0] == self._vocab_size


def _transposed(rule: RuleTable, module: nn.Module) -> RuleTable:
    """The rule, for the transposed weight of a Conv1D where the module is one."""
    return {**rule, "transposed": True} if _is_conv1d(module) else rule


def _gathered(tensor: Tensor, limit: float) -> RuleTable:
    """Gather a parameter on use if it has at least ``limit`` elements; replicate smaller ones, vectors and buffers."""
    is_large = isinstance(tensor, nn.Parameter) and tensor.dim() > 1 and tensor.numel() >= limit
    return {"style": "gathered", "pad": True} if is_large else {"style": "replicate"}


def _outputs(module: nn.Module) -> int:
    """Number of outputs of a linear layer."""
    weight = module.get_parameter("weight")
    return weight.shape[1] if _is_conv1d(module) else weight.shape[0]


#: Rules of the first tensor of packed experts, by its name.
_PACKED: dict[str, RuleTable] = {
    "gate_up_proj": {"style": "packed_colwise", "segments": ["element", "element"]},
    "up_proj": {"style": "colwise"},
}


def _packed_rules(own: Mapping[str, Tensor]) -> dict[str, RuleTable] | None:
    """Rules of packed experts, [experts, inner, hidden] and [experts, hidden, inner], or their transposes."""
    first = next((name for name in _PACKED if set(own) == {name, "down_proj"}), None)
    if first is None or {tensor.dim() for tensor in own.values()} != {3}:
        return None
    segments = len(_PACKED[first].get("segments", [""]))
    up, (outputs, inputs) = tuple(own[first].shape[1:]), own["down_proj"].shape[1:]
    if up not in {(inputs * segments, outputs), (inputs, outputs * segments)}:
        return None
    rules: dict[str, RuleTable] = {first: _PACKED[first], "down_proj": {"style": "rowwise"}}
    if up != (inputs * segments, outputs):
        rules = {name: {**rule, "transposed": True} for name, rule in rules.items()}
    return rules


def _pattern(name: str) -> str:
    """A module name with a star for each number."""
    return _NUMBER.sub("*", name)
