"""Replace rules of a proposal by blocks that give the same plan.

Owns this comparison: with the block, every tensor of the small model has the same style and placement, and every module
the same overrides.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from shardconv.convert.model import DTYPE_NAMES
from shardconv.convert.protocols import PretrainedModel
from shardconv.plan.family import PLAN_FILE, Family
from shardconv.plan.family_file import expand_family
from shardconv.plan.family_format import parse_family, parse_module
from shardconv.plan.matcher import Matcher
from shardconv.plan.module_override import ModuleRule
from shardconv.plan.placement import Placement
from shardconv.plan.plan import TensorSpec
from shardconv.plan.resolver import Resolver
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.submodels import rules_for
from shardconv.proof.plan_file import UnitTable
from shardconv.proof.proposal import Proposal
from shardconv.support.errors import PlanError

#: The tensor parallel size of the plans that are compared.
_TP = 2

#: The blocks to propose: those of modules that many models have.
_COMMON = (
    "attention", "bert_embeddings", "bert_heads", "bert_layer", "decoder", "gated_delta_net", "heads",
    "latent_attention", "layer", "layer_without_attention", "mamba2", "mlp", "mlp_of_any_width", "moe", "norms",
    "packed_experts", "vit_embeddings",
)  # fmt: skip


class _Effect(NamedTuple):
    """The plan that rules give for a model.

    Attributes:
        tensors: style and placement of every tensor.
        overrides: overrides of every module.
    """

    tensors: dict[str, tuple[str, Placement]]
    overrides: dict[str, dict[str, int]]


def with_blocks(proposal: Proposal, model: PretrainedModel) -> Proposal:
    """Replace rules by blocks that give the same plan: outer modules first, and blocks with more rules first.

    Args:
        proposal: rules for the modules of a model.
        model: the small model.
    """
    specs = {name: TensorSpec(DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in model.state_dict().items()}
    expected = _effect(proposal, specs, model)
    for path in [] if expected is None else _paths(proposal):
        for block in _candidates(proposal, path):
            found = _with_block(proposal, path, block)
            if found is not None and _effect(found, specs, model) == expected:
                proposal = found
    return replace(proposal, units=_used_units(proposal))


def expanded(proposal: Proposal) -> Family:
    """The rules of a proposal, including those of its blocks."""
    return expand_family(parse_family("proposal", proposal.tables(), PLAN_FILE), Family("proposal"))


def _paths(proposal: Proposal) -> list[str]:
    """The modules with rules and the modules around them, outer ones first."""
    names = [pattern.split(".") for pattern in proposal.rules]
    return sorted(
        {".".join(path[:end]) for path in names for end in range(len(path))}, key=lambda path: path.count(".")
    )


def _candidates(proposal: Proposal, path: str) -> list[str]:
    """The blocks that cover rules below a module, by the number of these rules; of equal ones the smallest first."""
    families = {block: _mounted(path, block) for block in _COMMON}
    covered = {block: len(_covered(proposal, path, family)) for block, family in families.items()}
    found = [block for block, count in covered.items() if count > 1]
    return sorted(found, key=lambda block: (-covered[block], len(families[block].rules)))


def _mounted(path: str, block: str) -> Family:
    """A family that consists of one block."""
    return expand_family(parse_family("block", {"blocks": {path: block}}, "block"), Family("block"))


def _covered(proposal: Proposal, path: str, family: Family) -> set[str]:
    """The patterns of rules below a module whose tensors have the same style in a family."""
    (model_rules,) = rules_for(family, {}).models
    matcher = Matcher([(rule.pattern, model_rules.regex(rule.pattern)) for rule in family.rules])
    start = f"{path}." if path else ""
    below = ((pattern, rule) for pattern, rule in proposal.rules.items() if pattern.startswith(start))
    matches = ((pattern, rule, matcher.match(f"{pattern.replace('*', '0')}.weight")) for pattern, rule in below)
    return {
        pattern
        for pattern, rule, match in matches
        if match is not None and family.rules[match.pattern_index].style == rule["style"]
    }


def _with_block(proposal: Proposal, path: str, block: str) -> Proposal | None:
    """The proposal with a block instead of the rules that it covers; None if these are fewer than two."""
    family = _mounted(path, block)
    (model_rules,) = rules_for(family, {}).models
    covered = _covered(proposal, path, family)
    if len(covered) < 2:
        return None
    rules = {pattern: rule for pattern, rule in proposal.rules.items() if pattern not in covered}
    overridden = [re.compile(model_rules.regex(module.pattern)) for module in family.modules]
    overrides = {
        pattern: one
        for pattern, one in proposal.overrides.items()
        if not any(regex.fullmatch(pattern.replace("*", "0")) for regex in overridden)
    }
    blocks = {**proposal.blocks, path: [*proposal.blocks.get(path, []), block]}
    return Proposal(proposal.units, rules, overrides, blocks)


def _effect(proposal: Proposal, specs: Mapping[str, TensorSpec], model: PretrainedModel) -> _Effect | None:
    """The plan of a proposal; None if there is none."""
    rules = rules_for(expanded(proposal), model.config.to_dict())
    try:
        plan = Resolver(specs, rules).plan(_TP)
        tensors = {name: (one.style, one.placement) for name, one in plan.tensors.items()}
        return _Effect(tensors, dict(_overrides(rules, model)))
    except PlanError:
        return None


def _overrides(rules: RuleSet, model: PretrainedModel) -> Iterator[tuple[str, dict[str, int]]]:
    """By module name the attributes that rules change, with their local values."""
    (model_rules,) = rules.models
    modules = list(model_rules.modules())
    for name, module in model.named_modules():
        found = ModuleRule.joined([rule for regex, rule in modules if re.fullmatch(regex, name)])
        values = {
            key: model_rules.on_rank(value, _TP) for key, value in found.attributes.items() if hasattr(module, key)
        }
        yield name, {key: value for key, value in values.items() if getattr(module, key) != value}


def _used_units(proposal: Proposal) -> dict[str, UnitTable]:
    """The units that the rules and overrides of a proposal name."""
    used = {unit for rule in proposal.rules.values() for unit in (rule.get("unit"), *rule.get("segments", ()))}
    for pattern, overrides in proposal.overrides.items():
        used |= parse_module(pattern, overrides, "proposal").reads()
    return {name: unit for name, unit in proposal.units.items() if name in used}
