"""Attention that can be cut by heads: which layers of a module are its projections, and its module overrides.

Owns the usual names. Whether a module with these names can be cut so, a proof has to tell.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

#: Names of projections: query, key, value, and output.
_QUERIES = ("q_proj", "query", "q", "q_lin", "wq", "to_q", "query_proj", "q_proj_layer", "linear_q", "q_head")
_KEYS = ("k_proj", "key", "k", "k_lin", "wk", "to_k", "key_proj", "linear_k", "k_head")
_VALUES = ("v_proj", "value", "v", "v_lin", "wv", "to_v", "value_proj", "linear_v", "v_head")
_OUTPUTS = (
    "o_proj",
    "out_proj",
    "dense",
    "out_lin",
    "out",
    "o",
    "c_proj",
    "wo",
    "proj",
    "projection_layer",
    "projection",
    "post_proj",
    "to_out",
    "linear_out",
)

#: Names of attributes that count heads, kv heads, and features of all heads.
_HEADS = ("num_heads", "num_attn_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS = (
    "all_head_size",
    "inner_dim",
    "embed_dim",
    "attn_dim",
    "split_size",
    "hidden_size",
    "d_model",
    "dim",
    "embed_size",
)
_SIZES = ("head_dim", "attention_head_size", "d_kv", "key_value_proj_dim", "head_size", "d_head", "dim_head")

#: Fields of configs.
_HEAD_FIELDS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
    "attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
_KV_FIELDS = ("num_key_value_heads", "num_kv_heads")
_WIDTH_FIELDS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim")


class Attention(NamedTuple):
    """How one attention module is cut.

    Attributes:
        rules: by the names of layers and tensors.
        units: by name.
        told: the values of its attributes.
        full_width: the layer whose outputs its code takes for those of all heads; "" if it does not.
    """

    rules: dict[str, dict[str, Any]]
    units: dict[str, dict[str, Any]]
    told: dict[str, str]
    full_width: str


def find_attention(
    name: str, module: nn.Module, modules: Mapping[str, nn.Module], config: Mapping[str, Any]
) -> Attention | None:
    """How a module is cut by heads, if its names tell.

    Args:
        name: of the module.
        module: that may be attention.
        modules: all of the model, by name.
        config: fields of the model's config.
    """
    query, key, value = (_child(name, modules, names) for names in (_QUERIES, _KEYS, _VALUES))
    output = _child(name, modules, _OUTPUTS) or _child(f"{name.rpartition('.')[0]}.output", modules, _OUTPUTS)
    if query is None or key is None or value is None or output is None:
        return None
    width, kv_width = _width(modules[query]), _width(modules[key])
    heads = next((getattr(module, one) for one in _HEADS if type(getattr(module, one, None)) is int), None)
    size = next((getattr(module, one) for one in _SIZES if type(getattr(module, one, None)) is int), None)
    size = size or (width // heads if heads else None)
    if not size or width % size or kv_width % size or _width(modules[value]) != kv_width:
        return None
    fields = _unit_fields(name, width // size, kv_width // size, size, config)
    if fields is None:
        return None
    query_unit, kv_unit = fields
    rules = {query: {"style": "colwise", "unit": "query_head"}, output: {"style": "rowwise", "unit": "query_head"}}
    rules |= {one: {"style": "colwise", "unit": "kv_head"} for one in (key, value)}
    rules |= dict(_norms(name, modules, size, width, kv_width))
    rules |= dict(_gates(name, modules, width, width // size, {*rules}))
    told = {one: "query_head" for one in _HEADS if type(getattr(module, one, None)) is int}
    told |= {one: "kv_head" for one in _KV_HEADS if type(getattr(module, one, None)) is int}
    told |= {one: f"query_head * ({query_unit['size']})" for one in _WIDTHS if getattr(module, one, None) == width}
    if hasattr(module, "num_key_value_groups"):
        told["num_key_value_groups"] = "query_head // kv_head"
    units = {"query_head": query_unit, "kv_head": kv_unit}
    if any(rule.get("unit") == "query_row" for rule in rules.values()):
        units["query_row"] = {"count": query_unit["count"]}
    return Attention(rules, units, told, query.removeprefix(f"{name}.") if _joins_to_input_width(module) else "")


def _child(name: str, modules: Mapping[str, nn.Module], names: tuple[str, ...]) -> str | None:
    found = (f"{name}.{one}{inner}" for one in names for inner in ("", ".linear"))
    return next((one for one in found if type(modules.get(one)) is nn.Linear), None)


def _width(layer: Any) -> int:
    return int(layer.out_features)


def _unit_fields(
    name: str, heads: int, kv_heads: int, size: int, config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The units, in fields of the config."""
    fields = sorted(_HEAD_FIELDS, key=lambda one: not one.startswith(("encoder", "decoder")) or one[:7] not in name)
    count = next((one for one in fields if config.get(one) == heads), None)
    kv_count: str | int | None = (
        count if kv_heads == heads else next((one for one in _KV_FIELDS if config.get(one) == kv_heads), None)
    )
    if kv_heads == 1 and kv_count is None:
        kv_count = 1
    named = next((one for one in _SIZES if config.get(one) == size), None)
    whole = next((one for one in _WIDTH_FIELDS if config.get(one) == heads * size), None)
    if count is None or kv_count is None or (named is None and whole is None):
        return None
    unit_size = named or f"{whole} // {count}"
    explicit: str | int = next((one for one in _KV_FIELDS if config.get(one) == kv_heads), kv_count)
    return {"count": count, "size": unit_size}, {"count": explicit, "size": unit_size, "copies": True}


def _gates(
    name: str, modules: Mapping[str, nn.Module], width: int, heads: int, known: set[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Gates of what heads give: a linear layer, or a parameter, with something for each feature or each head."""
    units = {width: "query_head", heads: "query_row"}
    for own, module in modules[name].named_children():
        if "gate" in own and f"{name}.{own}" not in known and type(module) is nn.Linear and _width(module) in units:
            yield f"{name}.{own}", {"style": "colwise", "unit": units[_width(module)]}
    for own, parameter in modules[name].named_parameters(recurse=False):
        if parameter.shape == (heads,):
            yield f"{name}.{own}", {"style": "by_rows", "unit": "query_row"}


def _joins_to_input_width(module: nn.Module) -> bool:
    """Whether the code of a module reshapes to a width that it reads from its input's shape."""
    code = inspect.getsource(type(module).forward)
    widths = re.findall(r"(\w+) = \w+\.(?:size\(\)|shape)\n", code)
    return any(re.search(rf"\.(?:view|reshape)\([^()]*\b{width}\)", code) for width in widths)


def _norms(
    name: str, modules: Mapping[str, nn.Module], size: int, width: int, kv_width: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Norms inside of attention: over one head, or over all."""
    for child, module in modules.items():
        weight = getattr(module, "weight", None)
        if not child.startswith(f"{name}.") or weight is None or weight.dim() != 1:
            continue
        if weight.numel() == size:
            yield child, {"style": "replicated_with_grad_allreduce"}
        elif weight.numel() in (width, kv_width):
            yield child, {"style": "colwise", "unit": "query_head" if weight.numel() == width else "kv_head"}
