"""Find attention modules that can be sharded by heads: their projections, units and module overrides.

Owns the usual names of layers, attributes and config fields. They do not guarantee that a module can be sharded so;
that takes a proof.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from shardconv.plan.families.rule import ModuleRule, Rule, UnitRule

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
        rules: by the names of layers and tensors.
        units: by name.
        overrides: of its attributes.
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
