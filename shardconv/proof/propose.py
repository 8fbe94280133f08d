"""A plan file for a model that no family knows, from its modules and from what flows between them.

Owns which kind of module is cut how. Each rule by itself leaves what the model computes as it is: linear layers give
their whole output, and what is no layer is put together when it is used. Where the features of one linear layer go to
another and nowhere else, both are cut along them. Proof is another matter: see prove.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from torch import Tensor, nn

from shardconv.proof.attention import find_attention
from shardconv.proof.flow import Fed, Flow, trace

#: Matrices with fewer elements than this part of all are left whole.
_SMALL = 0.002
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

#: A rule of a plan file.
RuleTable = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan file in the making.

    Attributes:
        units: what cuts fall between.
        rules: by pattern.
        told: what attention modules have to be told, by pattern.
    """

    units: dict[str, RuleTable]
    rules: dict[str, RuleTable]
    told: dict[str, dict[str, str]]


def propose(
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    by_heads: bool = True,
    config_of: Callable[[str], Mapping[str, Any]] | None = None,
) -> Proposal:
    """Propose how a model is cut.

    Args:
        model: a small one of its class, with values in memory.
        inputs: what it can be called with.
        by_heads: whether attention is cut by heads where its names tell how; else its layers give whole outputs.
        config_of: gives the config that rules for a module are to read; by default the model's own.
    """
    flow = trace(model, inputs, _is_linear)
    found = _pairs(model, flow)
    units, told = {}, {}
    if by_heads:
        fields = model.config.to_dict()
        units, heads, told = _attention(model, config_of or (lambda _: fields))
        found |= heads
    total = sum(parameter.numel() for parameter in model.parameters())
    rules: dict[str, RuleTable] = {}
    for name, module in model.named_modules():
        small = total * _SMALL if name in flow.called else total
        for pattern, rule in _module_rules(name, module, model, found, small):
            known = rules.setdefault(pattern, rule)
            if known != rule:
                rules[pattern] = min(known, rule, key=lambda one: _CAUTION.index(one["style"]))
    if any("parts" in rule for rule in rules.values()):
        units["part"] = {}
    return Proposal(units, rules, told)


def _attention(
    model: Any, config_of: Callable[[str], Mapping[str, Any]]
) -> tuple[dict[str, RuleTable], dict[str, RuleTable], dict[str, dict[str, str]]]:
    """Units, rules by module, and what is told by pattern, of attention that is cut by heads."""
    modules = dict(model.named_modules())
    units: dict[str, RuleTable] = {}
    rules: dict[str, RuleTable] = {}
    told: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}
    for name, module in modules.items():
        if (found := find_attention(name, module, modules, config_of(name))) is None:
            continue
        for unit, fields in found.units.items():
            candidates = chain([unit], (f"{unit}_{number}" for number in count(2)))
            names[unit] = next(one for one in candidates if units.get(one, fields) == fields)
            units[names[unit]] = fields
        rename = lambda text: re.sub(r"(query|kv)_head", lambda match: names[match[0]], text)  # noqa: E731
        rules |= {
            child: {**rule, **({"unit": rename(rule["unit"])} if "unit" in rule else {})}
            for child, rule in found.rules.items()
        }
        if found.told:
            told[_pattern(name)] = {key: rename(value) for key, value in found.told.items()}
    return units, rules, told


#: Where modules of one pattern are cut differently, the style that is right for all of them comes first.
_CAUTION = [
    "replicate", "replicated_with_grad_allreduce", "gathered", "colwise_gather_output", "embedding_rowwise",
    "packed_colwise", "rowwise", "colwise",
]  # fmt: skip


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _pairs(model: nn.Module, flow: Flow) -> dict[str, RuleTable]:
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
    name: str, module: nn.Module, model: Any, pairs: Mapping[str, RuleTable], small: float
) -> Iterator[tuple[str, RuleTable]]:
    own = dict(module.named_parameters(recurse=False))
    own |= {
        key: value
        for key, value in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    }  # noqa: SLF001
    if not own:
        return
    pattern = _pattern(name)
    transposed = {"transposed": True} if type(module).__name__ == "Conv1D" else {}
    vocabulary = (
        model.config.get_text_config().vocab_size if hasattr(model.config.get_text_config(), "vocab_size") else 0
    )
    weight = own.get("weight")
    is_words = weight is not None and weight.dim() == 2 and weight.shape[0] == vocabulary and vocabulary
    if name in pairs:
        yield pattern, {**pairs[name], **transposed}
    elif _is_packed(own):
        unit = {
            "gate_up_proj": {"style": "packed_colwise", "parts": ["part", "part"]},
            "down_proj": {"style": "rowwise"},
        }
        yield from ((f"{pattern}.{key}", unit[key]) for key in own)
    elif (type(module) is nn.Linear or type(module) is nn.Embedding) and is_words:
        yield pattern, {"style": "embedding_rowwise", "pad": True}
    elif _is_linear(module) and weight is not None and weight.numel() >= small:
        yield pattern, {"style": "colwise_gather_output", "pad": True, **transposed}
    elif set(own) <= {"weight", "bias"} and weight is not None:
        style = "gathered" if weight.dim() > 1 and weight.numel() >= small else "replicate"
        yield pattern, {"style": style, **({"pad": True} if style == "gathered" else {})}
    else:
        for key, tensor in own.items():
            large = isinstance(tensor, nn.Parameter) and tensor.dim() > 1 and tensor.numel() >= small
            yield (
                (f"{pattern}.{key}" if pattern else key),
                {"style": "gathered", "pad": True} if large else {"style": "replicate"},
            )


def _is_packed(own: Mapping[str, Tensor]) -> bool:
    """Whether these are experts as transformers packs them: [experts, 2 * inner, hidden], [experts, hidden, inner]."""
    if set(own) != {"gate_up_proj", "down_proj"} or {tensor.dim() for tensor in own.values()} != {3}:
        return False
    up, down = own["gate_up_proj"].shape, own["down_proj"].shape
    return up == (down[0], 2 * down[2], down[1])


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def to_toml(proposal: Proposal) -> str:
    """A plan file."""
    lines = _section("units", proposal.units) + _section("rules", _merged(proposal.rules))
    lines += _section("modules", {pattern: {"attributes": told} for pattern, told in proposal.told.items()})
    return "\n".join(lines)


def _section(title: str, table: Mapping[str, RuleTable]) -> list[str]:
    width = max((len(name) for name in table), default=0) + 2
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
