"""A plan file for a model that no family knows, from its modules and from what flows between them.

Owns which kind of module is cut how. Each rule by itself leaves what the model computes as it is: linear layers give
their whole output, and what is no layer is put together when it is used. Where the features of one linear layer go to
another and nowhere else, both are cut along them. Proof is another matter: see prove.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

from torch import Tensor, nn

from shardconv.proof.attention import find_attention
from shardconv.proof.layer_graph import Fed, Flow, trace

#: Whole stays a linear layer with fewer outputs than this, and what would be gathered if it has less than this share.
_FEW_OUTPUTS, _SMALL = 16, 0.08
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

#: A rule of a plan file.
RuleTable = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan file in the making.

    Attributes:
        units: what cuts fall between.
        rules: by pattern.
        told: the module overrides of attention, by pattern.
        blocks: the names of blocks, or tables with them, by the module that they are mounted at.
    """

    units: dict[str, RuleTable]
    rules: dict[str, RuleTable]
    told: dict[str, RuleTable]
    blocks: dict[str, list[Any]] = field(default_factory=dict)


def propose(model: Any, inputs: Mapping[str, Tensor], *, by_heads: bool = True) -> Proposal:
    """Propose how a model is cut.

    Args:
        model: a small one of its class, with values in memory.
        inputs: what it can be called with.
        by_heads: whether attention is cut by heads where its names tell how; else its layers give whole outputs.
    """
    flow = trace(model, inputs, _is_linear)
    found = _pairs(flow)
    units: dict[str, RuleTable] = {}
    told: dict[str, RuleTable] = {}
    if by_heads:
        units, heads, told = _attention(model)
        found |= heads
    total = sum(parameter.numel() for parameter in model.parameters())
    rules: dict[str, RuleTable] = {}
    for name, module in model.named_modules():
        small = total * _SMALL if name in flow.called else total
        for pattern, rule in _module_rules(name, module, model, found, small, is_called=name in flow.called):
            known = rules.setdefault(pattern, rule)
            if known != rule:
                rules[pattern] = min(known, rule, key=lambda one: _CAUTION.index(one["style"]))
    if any("parts" in rule for rule in rules.values()):
        units["part"] = {}
    return Proposal(units, rules, told)


def _attention(model: Any) -> tuple[dict[str, RuleTable], dict[str, RuleTable], dict[str, RuleTable]]:
    """Units, rules by module, and module overrides by pattern, of attention that is sharded by heads."""
    modules, config = dict(model.named_modules()), model.config.to_dict()
    units: dict[str, RuleTable] = {}
    rules: dict[str, RuleTable] = {}
    told: dict[str, RuleTable] = {}
    names: dict[str, str] = {}
    for name, module in modules.items():
        if (found := find_attention(name, module, modules, config)) is None:
            continue
        for unit, fields in found.units.items():
            candidates = chain([unit], (f"{unit}_{number}" for number in count(2)))
            names[unit] = next(one for one in candidates if units.get(one, fields) == fields)
            units[names[unit]] = fields
        rules |= {child: _renamed(rule, names) for child, rule in found.rules.items()}
        overrides = {"attributes": _renamed(found.told, names), "full_width": found.full_width}
        if any(overrides.values()):
            told[_pattern(name)] = {key: value for key, value in overrides.items() if value}
    return units, rules, told


def _renamed(table: Mapping[str, Any], names: Mapping[str, str]) -> RuleTable:
    """The same, with the names that units have been given."""
    is_unit = re.compile(r"(query|kv)_head|query_row")
    return {
        key: is_unit.sub(lambda match: names[match[0]], value) if isinstance(value, str) else value
        for key, value in table.items()
    }


#: Where modules of one pattern are cut differently, the style that is right for all of them comes first.
_CAUTION = [
    "replicate", "replicated_with_grad_allreduce", "gathered", "colwise_gather_output", "embedding_rowwise",
    "packed_colwise", "rowwise", "colwise",
]  # fmt: skip


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _pairs(flow: Flow) -> dict[str, RuleTable]:
    """Linear layers that are cut along the features between them."""
    refused = {_pattern(name) for name in flow.escaped}
    consumers = {_pattern(name) for name in flow.fed}
    while True:
        found = {
            consumer: fed
            for consumer, fed in flow.fed.items()
            if not any(_pattern(one.layer) in refused | consumers for one in fed) and _is_whole(fed)
        }
        left_out = set(flow.fed) - set(found)
        more = {_pattern(one.layer) for consumer in left_out for one in flow.fed[consumer]} - refused
        gone = consumers - {_pattern(name) for name in found}
        if not more and not gone:
            break
        refused |= more
        consumers -= gone
    rules: dict[str, RuleTable] = {}
    for consumer, fed in found.items():
        rules[consumer] = {"style": "rowwise"}
        for one in fed:
            parts = ["part"] * one.parts
            rules[one.layer] = {"style": "packed_colwise", "parts": parts} if one.parts > 1 else {"style": "colwise"}
    return rules


def _is_whole(fed: frozenset[Fed]) -> bool:
    """Whether all parts of each layer are there."""
    counts = {one.layer: one.parts for one in fed}
    return all({one.part for one in fed if one.layer == layer} == set(range(count)) for layer, count in counts.items())


def _module_rules(
    name: str, module: nn.Module, model: Any, pairs: Mapping[str, RuleTable], small: float, *, is_called: bool
) -> Iterator[tuple[str, RuleTable]]:
    own = _own_tensors(module)
    if not own:
        return
    pattern = _pattern(name)
    transposed = {"transposed": True} if type(module).__name__ == "Conv1D" else {}
    weight = own.get("weight")
    if name in pairs:
        yield pattern, {**pairs[name], **transposed}
    elif (packed := _packed_rules(own)) is not None:
        yield from ((f"{pattern}.{key}", rule) for key, rule in packed.items())
    elif weight is not None and _is_words(module, model):
        yield pattern, _WORDS
    elif _is_linear(module) and is_called and _outputs(module) >= _FEW_OUTPUTS:
        yield pattern, {"style": "colwise_gather_output", "pad": True, **transposed}
    elif set(own) <= {"weight", "bias"} and weight is not None:
        yield pattern, _gathered(weight, small)
    else:
        tied = {id(parameter) for parameter in _word_parameters(model)}
        for key, tensor in own.items():
            of_heads = pairs.get(f"{name}.{key}")
            rule = _WORDS if id(tensor) in tied else of_heads or _gathered(tensor, small)
            yield (f"{pattern}.{key}" if pattern else key), rule


#: What has a row, or a number, for each word.
_WORDS: RuleTable = {"style": "embedding_rowwise", "pad": True}


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Its own parameters, and buffers that are stored."""
    hidden = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no other way to ask
    buffers = {key: value for key, value in module.named_buffers(recurse=False) if key not in hidden}
    return {**dict(module.named_parameters(recurse=False)), **buffers}


def _gathered(tensor: Tensor, small: float) -> RuleTable:
    is_large = isinstance(tensor, nn.Parameter) and tensor.dim() > 1 and tensor.numel() >= small
    return {"style": "gathered", "pad": True} if is_large else {"style": "replicate"}


def _is_words(module: nn.Module, model: Any) -> bool:
    """Whether a module has a row for each word."""
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    weight: Any = getattr(module, "weight", None)
    is_kind = type(module) is nn.Linear or isinstance(module, nn.Embedding)
    return is_kind and vocabulary is not None and weight.shape[0] == vocabulary


def _word_parameters(model: Any) -> list[nn.Parameter]:
    words = [module for module in model.modules() if _is_words(module, model)]
    return [parameter for module in words for parameter in module.parameters(recurse=False)]


def _outputs(module: Any) -> int:
    return int(module.nf if type(module).__name__ == "Conv1D" else module.out_features)


#: Packed experts: the parts of the first of their tensors, by its name.
_PACKED: dict[str, RuleTable] = {
    "gate_up_proj": {"style": "packed_colwise", "parts": ["part", "part"]},
    "up_proj": {"style": "colwise"},
}


def _packed_rules(own: Mapping[str, Tensor]) -> dict[str, RuleTable] | None:
    """How packed experts are cut: [experts, inner, hidden] and [experts, hidden, inner], or their transposes."""
    first = next((name for name in _PACKED if set(own) == {name, "down_proj"}), None)
    if first is None or {tensor.dim() for tensor in own.values()} != {3}:
        return None
    parts = len(_PACKED[first].get("parts", [1]))
    up, (outputs, inputs) = tuple(own[first].shape[1:]), own["down_proj"].shape[1:]
    if up not in {(inputs * parts, outputs), (inputs, outputs * parts)}:
        return None
    flag = {} if up == (inputs * parts, outputs) else {"transposed": True}
    return {first: {**_PACKED[first], **flag}, "down_proj": {"style": "rowwise", **flag}}


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def to_tables(proposal: Proposal) -> dict[str, dict[str, Any]]:
    """A plan file as tables."""
    mounts = {path: names[0] if len(names) == 1 else names for path, names in proposal.blocks.items()}
    return {"blocks": mounts, "units": proposal.units, "rules": _merged(proposal.rules), "modules": proposal.told}


def to_toml(proposal: Proposal) -> str:
    """A plan file."""
    return "\n".join(line for title, table in to_tables(proposal).items() for line in _section(title, table))


def _section(title: str, table: Mapping[str, Any]) -> list[str]:
    width = min(max((len(name) for name in table), default=0), 70) + 2
    return (
        [f"[{title}]", *(f"{_quoted(name):{width}} = {_value(row)}" for name, row in table.items()), ""]
        if table
        else []
    )


def _merged(rules: Mapping[str, RuleTable]) -> dict[str, RuleTable]:
    """Neighbours that differ in the last name, in one rule."""
    groups: dict[tuple[str, str], list[str]] = {}
    for pattern, rule in rules.items():
        parent, _, last = pattern.rpartition(".")
        groups.setdefault((parent, repr(rule)), []).append(last)
    merged: dict[str, RuleTable] = {}
    for (parent, _), names in groups.items():
        start = f"{parent}." if parent else ""
        rule = rules[start + names[0]]
        is_plain = len(names) > 1 and "*" not in names
        for name in [f"{{{','.join(names)}}}"] if is_plain else names:
            merged[start + name] = rule
    return merged


def _quoted(text: str) -> str:
    return f'"{text}"'


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_value(one)}' for key, one in value.items())} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return _quoted(value) if isinstance(value, str) else str(value)
