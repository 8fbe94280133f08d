"""Propose rules for a model that no family covers, from its modules and the connections between them.

Owns the choice of a style for each kind of module. Every rule on its own keeps the outputs of the model: linear layers
gather their outputs, and parameters of other modules are gathered on use. If the features of a linear layer go to
another one and nowhere else, both are sharded along these features. Attention modules are sharded by heads if their
layers, attributes and config fields have usual names. A proposal has to be proven, see prove.py.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from itertools import chain, count
from typing import NamedTuple

from msgspec.structs import replace
from torch import Tensor, nn

from shardconv.convert.protocols import PretrainedModel
from shardconv.plan.families.family import PLAN_FILE, Family
from shardconv.plan.families.rule import ModuleRule, Rule, UnitRule
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
            overrides[_pattern(name)] = found.overrides.mounted({}, names, pattern=_pattern(name))
    return units, rules, overrides


#: If modules of one pattern get different styles, all get the first of these, which is correct for each.
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

    All layers of one pattern have the same rule: if one of them cannot be sharded like this, none is.
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


# --- attention modules ------------------------------------------------------------------------------------------------

#: Names of the query, key, value and output projections.
_QUERIES = ("q_proj", "query", "q", "q_lin", "wq", "to_q", "query_proj", "q_proj_layer", "linear_q", "q_head")
_KEYS = ("k_proj", "key", "k", "k_lin", "wk", "to_k", "key_proj", "linear_k", "k_head")
_VALUES = ("v_proj", "value", "v", "v_lin", "wv", "to_v", "value_proj", "linear_v", "v_head")
_OUTPUTS = (
    "o_proj", "out_proj", "dense", "out_lin", "out", "o", "c_proj", "wo", "proj", "projection_layer", "projection",
    "post_proj", "to_out", "linear_out",
)  # fmt: skip

#: Names of attributes with the number of heads, the number of KV heads, the features of all heads, and those per head.
_HEADS = ("num_heads", "num_attn_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS = (
    "all_head_size", "inner_dim", "embed_dim", "attn_dim", "split_size", "hidden_size", "d_model", "dim", "embed_size",
)  # fmt: skip
_SIZES = ("head_dim", "attention_head_size", "d_kv", "key_value_proj_dim", "head_size", "d_head", "dim_head")

#: Names of config fields with the number of heads, the number of KV heads, and the width of the model.
_HEAD_FIELDS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
    "attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
_KV_FIELDS = ("num_key_value_heads", "num_kv_heads")
_WIDTH_FIELDS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim")


class Attention(NamedTuple):
    """The entries of a plan file for one attention module.

    Attributes:
        rules: name of a layer or tensor to rule.
        units: name to unit.
        overrides: the overrides of its attributes.
    """

    rules: dict[str, Rule]
    units: dict[str, UnitRule]
    overrides: ModuleRule


class _Projections(NamedTuple):
    """Names of the projections of an attention module, and their widths.

    Attributes:
        query: name of the query projection.
        key: name of the key projection.
        value: name of the value projection.
        output: name of the output projection.
        width: outputs of the query projection.
        kv_width: outputs of the key and value projections.
        size: features per head.
    """

    query: str
    key: str
    value: str
    output: str
    width: int
    kv_width: int
    size: int


def find_attention(
    name: str, module: nn.Module, modules: Mapping[str, nn.Module], config: Mapping[str, object]
) -> Attention | None:
    """The entries of a plan file for a module, or None if it is not attention with usual names and local sizes.

    Args:
        name: of the module.
        module: to examine.
        modules: all modules of the model, by name.
        config: fields of the model's config.
    """
    found = _find_projections(name, module, modules)
    units = None if found is None else _units(name, found, config)
    if found is None or units is None or _reshapes_to_input_width(module):
        return None
    rules = [
        Rule(found.query, "colwise", "query_head"),
        Rule(found.output, "rowwise", "query_head"),
        Rule(found.key, "colwise", "kv_head"),
        Rule(found.value, "colwise", "kv_head"),
    ]
    rules += _norms(name, modules, found)
    rules += _gates(name, modules, found, {rule.pattern for rule in rules})
    if any(rule.unit == "query_row" for rule in rules):
        units["query_row"] = UnitRule(units["query_head"].count)
    overrides = ModuleRule(name, _attributes(module, found.width, units["query_head"].size))
    return Attention({rule.pattern: rule for rule in rules}, units, overrides)


def _find_projections(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> _Projections | None:
    """The projections, if there are all four and full heads."""
    query, key, value = (_child(name, modules, names) for names in (_QUERIES, _KEYS, _VALUES))
    output = _child(name, modules, _OUTPUTS) or _child(f"{name.rpartition('.')[0]}.output", modules, _OUTPUTS)
    if query is None or key is None or value is None or output is None:
        return None
    width, kv_width = _width(modules[query]), _width(modules[key])
    heads, size = _first_int(module, _HEADS), _first_int(module, _SIZES)
    size = size or (width // heads if heads else None)
    if not size or width % size or kv_width % size or _width(modules[value]) != kv_width:
        return None
    return _Projections(query, key, value, output, width, kv_width, size)


def _attributes(module: nn.Module, width: int, size: str | int) -> dict[str, str]:
    """The overrides of the attributes that count heads or the features of all heads."""
    attributes = {one: "query_head" for one in _HEADS if _is_int(module, one)}
    attributes |= {one: "kv_head" for one in _KV_HEADS if _is_int(module, one)}
    attributes |= {one: f"query_head * ({size})" for one in _WIDTHS if getattr(module, one, None) == width}
    if hasattr(module, "num_key_value_groups"):
        attributes["num_key_value_groups"] = "query_head // kv_head"
    return attributes


def _is_int(module: nn.Module, name: str) -> bool:
    return type(getattr(module, name, None)) is int


def _first_int(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The value of the first attribute among some names that is an int."""
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if type(value) is int), None)


def _child(name: str, modules: Mapping[str, nn.Module], names: tuple[str, ...]) -> str | None:
    """The first linear layer with one of some names below a module."""
    found = (f"{name}.{one}{inner}" for one in names for inner in ("", ".linear"))
    return next((one for one in found if type(modules.get(one)) is nn.Linear), None)


def _width(layer: nn.Module) -> int:
    """Number of outputs of a linear layer."""
    return layer.get_parameter("weight").shape[0]


def _units(name: str, found: _Projections, config: Mapping[str, object]) -> dict[str, UnitRule] | None:
    """The units of query and KV heads in terms of config fields; None if the config does not have their numbers."""
    heads, kv_heads = found.width // found.size, found.kv_width // found.size
    fields = sorted(_HEAD_FIELDS, key=lambda one: not one.startswith(("encoder", "decoder")) or one[:7] not in name)
    count = next((one for one in fields if config.get(one) == heads), None)
    kv_field = next((one for one in _KV_FIELDS if config.get(one) == kv_heads), None)
    kv_count = kv_field or (count if kv_heads == heads else 1 if kv_heads == 1 else None)
    size_field = next((one for one in _SIZES if config.get(one) == found.size), None)
    width_field = next((one for one in _WIDTH_FIELDS if config.get(one) == found.width), None)
    if count is None or kv_count is None or (size_field is None and width_field is None):
        return None
    size = size_field or f"{width_field} // {count}"
    return {
        "query_head": UnitRule(count, size),
        "kv_head": UnitRule(kv_count, size, replicate=True),
    }


def _gates(name: str, modules: Mapping[str, nn.Module], found: _Projections, known: set[str]) -> Iterator[Rule]:
    """Rules for gates of the attention output: linear layers or parameters, with an output per feature or per head."""
    heads = found.width // found.size
    units = {found.width: "query_head", heads: "query_row"}
    for child, module in modules[name].named_children():
        if "gate" in child and f"{name}.{child}" not in known and type(module) is nn.Linear and _width(module) in units:
            yield Rule(f"{name}.{child}", "colwise", units[_width(module)])
    for own, parameter in modules[name].named_parameters(recurse=False):
        if parameter.shape == (heads,):
            yield Rule(f"{name}.{own}", "by_rows", "query_row")


def _reshapes_to_input_width(module: nn.Module) -> bool:
    """Whether the code of a module reshapes its output to a width that it reads from the shape of its input."""
    code = inspect.getsource(type(module).forward)
    widths = re.findall(r"(\w+) = \w+\.(?:size\(\)|shape)\n", code)
    return any(re.search(rf"\.(?:view|reshape)\([^()]*\b{width}\)", code) for width in widths)


def _norms(name: str, modules: Mapping[str, nn.Module], found: _Projections) -> Iterator[Rule]:
    """Rules for norms inside attention: over one head, or over all heads."""
    for child, module in modules.items():
        weight = getattr(module, "weight", None)
        if not child.startswith(f"{name}.") or not isinstance(weight, Tensor) or weight.dim() != 1:
            continue
        if weight.numel() == found.size:
            yield Rule(child, "replicated_with_grad_allreduce")
        elif weight.numel() in (found.width, found.kv_width):
            yield Rule(child, "colwise", "query_head" if weight.numel() == found.width else "kv_head")
