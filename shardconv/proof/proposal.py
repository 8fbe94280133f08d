"""Propose rules for a model that no family covers, from its modules and the connections between them.

Owns the choice of a style for each kind of module. Every rule on its own keeps the outputs of the model: linear layers
gather their outputs, and parameters of other modules are gathered on use. If the features of a linear layer go to
another one and nowhere else, both are sharded along these features. A proposal has to be proven, see prove.py.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import chain, count

from msgspec.structs import replace
from torch import Tensor, nn

from shardconv.convert.protocols import PretrainedModel
from shardconv.plan.families.family import PLAN_FILE, Family
from shardconv.plan.families.rule import ModuleRule, Rule, UnitRule
from shardconv.proof.attention import find_attention
from shardconv.proof.layer_graph import Features, LayerGraph, trace_layers

#: A linear layer with fewer outputs is replicated.
_FEW_OUTPUTS = 16
#: A parameter with a smaller fraction of the model's elements is replicated instead of gathered on use.
_SMALL_FRACTION = 0.08
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def propose_rules(model: PretrainedModel, inputs: Mapping[str, Tensor], *, by_heads: bool = True) -> Family:
    """Propose rules, units and module overrides for a model.

    Args:
        model: a small model, with values in memory.
        inputs: of the model.
        by_heads: shard attention by heads if its layers have usual names; else these layers gather their outputs.
    """
    graph = trace_layers(model, inputs, _is_linear)
    units, by_heads_rules, overrides = _attention(model) if by_heads else ({}, {}, {})
    proposer = _ModuleRules(model, {**_pairs(graph), **by_heads_rules}, graph.called)
    rules: dict[str, Rule] = {}
    for rule in (rule for name, module in model.named_modules() for rule in proposer.propose(name, module)):
        known = rules.setdefault(rule.pattern, rule)
        rules[rule.pattern] = min(known, rule, key=lambda one: _CAUTION.index(one.style))
    if any(rule.segments for rule in rules.values()):
        units["element"] = UnitRule()
    return Family("proposal", units=units, rules=(*rules.values(),), modules=(*overrides.values(),), origin=PLAN_FILE)


def _attention(model: PretrainedModel) -> tuple[dict[str, UnitRule], dict[str, Rule], dict[str, ModuleRule]]:
    """Units, rules by module, and module overrides by pattern, of attention that is sharded by heads."""
    modules, config = dict(model.named_modules()), model.config.to_dict()
    units: dict[str, UnitRule] = {}
    rules: dict[str, Rule] = {}
    overrides: dict[str, ModuleRule] = {}
    names: dict[str, str] = {}
    for name, module in modules.items():
        if (found := find_attention(name, module, modules, config)) is None:
            continue
        for unit, of_module in found.units.items():
            candidates = chain([unit], (f"{unit}_{number}" for number in count(2)))
            names[unit] = next(one for one in candidates if units.get(one, of_module) == of_module)
            units[names[unit]] = of_module
        rules |= {child: rule.mounted({}, names) for child, rule in found.rules.items()}
        if found.overrides.attributes:
            overrides[_pattern(name)] = replace(found.overrides.mounted({}, names), pattern=_pattern(name))
    return units, rules, overrides


#: If modules of one pattern get different styles, the first of these, which is right for all of them, is used.
_CAUTION = [
    "replicate", "replicated_with_grad_allreduce", "gathered", "colwise_gather_output", "embedding_rowwise",
    "packed_colwise", "by_rows", "rowwise", "colwise",
]  # fmt: skip


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D"


def _pairs(graph: LayerGraph) -> dict[str, Rule]:
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
    rules = {consumer: Rule(consumer, "rowwise") for consumer in found}
    for one in (one for inputs in found.values() for one in inputs):
        segments = ("element",) * one.segments if one.segments > 1 else ()
        rules[one.layer] = Rule(one.layer, "packed_colwise" if segments else "colwise", segments=segments)
    return rules


def _is_complete(features: frozenset[Features]) -> bool:
    """Whether all segments of each layer are among some features."""
    counts = {one.layer: one.segments for one in features}
    return all(
        {one.segment for one in features if one.layer == layer} == set(range(segments))
        for layer, segments in counts.items()
    )


class _ModuleRules:
    """Proposes rules for the tensors of single modules.

    Args:
        model: the model.
        known: rules of modules that are known from attention and from pairs of layers.
        called: names of the modules that were called.
    """

    def __init__(self, model: PretrainedModel, known: Mapping[str, Rule], called: set[str]) -> None:
        self._known, self._called = known, called
        self._total = sum(parameter.numel() for parameter in model.parameters())
        self._vocab_size = getattr(model.config.get_text_config(), "vocab_size", None)
        self._stored = model.state_dict().keys()
        tables = [module for module in model.modules() if self._has_vocabulary(module)]
        self._tied = {id(parameter) for module in tables for parameter in module.parameters(recurse=False)}

    def propose(self, name: str, module: nn.Module) -> Iterator[Rule]:
        """Rules for a module's own tensors."""
        own = self._own_tensors(name, module)
        if not own:
            return
        pattern, is_called, weight = _pattern(name), name in self._called, own.get("weight")
        limit = self._total * _SMALL_FRACTION if is_called else self._total
        is_transposed = _is_conv1d(module)
        if name in self._known:
            yield replace(self._known[name], pattern=pattern, transposed=is_transposed)
        elif packed := _packed_rules(pattern, own):
            yield from packed
        elif weight is not None and self._has_vocabulary(module):
            yield _of_vocabulary(pattern)
        elif _is_linear(module) and is_called and _outputs(module) >= _FEW_OUTPUTS:
            yield Rule(pattern, "colwise_gather_output", pad=True, transposed=is_transposed)
        elif set(own) <= {"weight", "bias"} and weight is not None:
            yield _gathered(pattern, weight, limit)
        else:
            for key, tensor in own.items():
                of_tensor = f"{pattern}.{key}" if pattern else key
                if id(tensor) in self._tied:
                    yield _of_vocabulary(of_tensor)
                elif (by_heads := self._known.get(f"{name}.{key}")) is not None:
                    yield replace(by_heads, pattern=of_tensor)
                else:
                    yield _gathered(of_tensor, tensor, limit)

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


def _of_vocabulary(pattern: str) -> Rule:
    """The rule of an embedding table, and of other parameters with a row per token of the vocabulary."""
    return Rule(pattern, "embedding_rowwise", pad=True)


def _gathered(pattern: str, tensor: Tensor, limit: float) -> Rule:
    """Gather a parameter on use if it has at least ``limit`` elements; replicate smaller ones, vectors and buffers."""
    is_large = isinstance(tensor, nn.Parameter) and tensor.dim() > 1 and tensor.numel() >= limit
    return Rule(pattern, "gathered", pad=True) if is_large else Rule(pattern, "replicate")


def _outputs(module: nn.Module) -> int:
    """Number of outputs of a linear layer."""
    weight = module.get_parameter("weight")
    return weight.shape[1] if _is_conv1d(module) else weight.shape[0]


#: Number of segments of the first tensor of packed experts, by its name.
_PACKED = {"gate_up_proj": 2, "up_proj": 1}


def _packed_rules(pattern: str, own: Mapping[str, Tensor]) -> list[Rule]:
    """Rules of packed experts, [experts, inner, hidden] and [experts, hidden, inner], or their transposes."""
    first = next((name for name in _PACKED if set(own) == {name, "down_proj"}), None)
    if first is None or {tensor.dim() for tensor in own.values()} != {3}:
        return []
    number = _PACKED[first]
    up, (outputs, inputs) = tuple(own[first].shape[1:]), own["down_proj"].shape[1:]
    is_transposed = up != (inputs * number, outputs)
    if is_transposed and up != (inputs, outputs * number):
        return []
    segments, style = (("element",) * number, "packed_colwise") if number > 1 else ((), "colwise")
    return [
        Rule(f"{pattern}.{first}", style, segments=segments, transposed=is_transposed),
        Rule(f"{pattern}.down_proj", "rowwise", transposed=is_transposed),
    ]


def _pattern(name: str) -> str:
    """A module name with a star for each number."""
    return _NUMBER.sub("*", name)
