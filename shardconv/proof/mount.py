"""Blocks in place of the rules of a proposal, where they say the same.

Owns the comparison: with the block, every tensor of the small model has the same style and placement, and every module
the same overrides.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardconv.convert.model import DTYPE_NAMES
from shardconv.errors import PlanError
from shardconv.plan.family import PLAN_FILE, Family
from shardconv.plan.family_file import expand_family
from shardconv.plan.matcher import Matcher
from shardconv.plan.module_override import ModuleRule
from shardconv.plan.plan import TensorSpec
from shardconv.plan.resolve import Resolver
from shardconv.plan.rule_format import parse_family, parse_module
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.submodels import rules_for
from shardconv.proof.propose import Proposal, RuleTable, to_tables

#: For how many ranks plans are compared.
_TP = 2

#: The blocks that are proposed: those of modules that many models have.
_COMMON = (
    "attention", "bert_embeddings", "bert_heads", "bert_layer", "decoder", "gated_delta_net", "heads",
    "latent_attention", "layer", "layer_without_attention", "mamba2", "mlp", "mlp_of_any_width", "moe", "norms",
    "packed_experts", "vit_embeddings",
)  # fmt: skip


def with_blocks(proposal: Proposal, model: Any) -> Proposal:
    """Replace rules by blocks where that changes nothing: outer modules first, then blocks of more rules.

    Args:
        proposal: rules for the modules of a model.
        model: the small model.
    """
    specs = {name: TensorSpec(DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in model.state_dict().items()}
    config = model.config.to_dict()
    expected = _effect(proposal, specs, config, model)
    for path in [] if expected is None else _paths(proposal):
        for block in _candidates(proposal, path):
            found = _mounted(proposal, path, block)
            if found is not None and _effect(found, specs, config, model) == expected:
                proposal = found
    return replace(proposal, units=_used_units(proposal))


def expanded(proposal: Proposal) -> Family:
    """The rules of a proposal, with those of its blocks."""
    return expand_family(parse_family("proposal", to_tables(proposal), PLAN_FILE), Family("proposal"))


def _paths(proposal: Proposal) -> list[str]:
    """The modules of rules, and the modules around them, outer ones first."""
    parts = [pattern.split(".") for pattern in proposal.rules]
    return sorted(
        {".".join(part[:end]) for part in parts for end in range(len(part))}, key=lambda path: path.count(".")
    )


def _candidates(proposal: Proposal, path: str) -> list[str]:
    """The blocks that cover rules below a module: those that cover most first, and of these the smallest."""
    families = {block: _at(path, block) for block in _COMMON}
    covered = {block: len(_covered(proposal, path, family)) for block, family in families.items()}
    found = [block for block, count in covered.items() if count > 1]
    return sorted(found, key=lambda block: (-covered[block], len(families[block].rules)))


def _at(path: str, block: str) -> Family:
    return expand_family(parse_family("block", {"blocks": {path: block}}, "block"), Family("block"))


def _covered(proposal: Proposal, path: str, family: Family) -> set[str]:
    """The patterns of rules below a module whose tensors a family covers with the same style."""
    (scope,) = rules_for(family, {}).models
    matcher = Matcher([(rule.pattern, scope.regex(rule.pattern)) for rule in family.rules])
    start = f"{path}." if path else ""
    below = ((pattern, rule) for pattern, rule in proposal.rules.items() if pattern.startswith(start))
    matches = ((pattern, rule, matcher.match(f"{pattern.replace('*', '0')}.weight")) for pattern, rule in below)
    return {
        pattern
        for pattern, rule, match in matches
        if match is not None and family.rules[match.pattern_index].style == rule["style"]
    }


def _mounted(proposal: Proposal, path: str, block: str) -> Proposal | None:
    """The proposal with a block in place of the rules that it covers; None where that are less than two."""
    mounts = {**proposal.blocks, path: [*proposal.blocks.get(path, []), block]}
    family = _at(path, block)
    (scope,) = rules_for(family, {}).models
    gone = _covered(proposal, path, family)
    if len(gone) < 2:
        return None
    rules = {pattern: rule for pattern, rule in proposal.rules.items() if pattern not in gone}
    overridden = [re.compile(scope.regex(module.pattern)) for module in family.modules]
    told = {
        pattern: one
        for pattern, one in proposal.told.items()
        if not any(regex.fullmatch(pattern.replace("*", "0")) for regex in overridden)
    }
    return Proposal(proposal.units, rules, told, mounts)


def _effect(
    proposal: Proposal, specs: Mapping[str, TensorSpec], config: Mapping[str, Any], model: Any
) -> tuple[Any, Any] | None:
    """Style and placement of every tensor, and the overrides of every module; None where there is no plan."""
    rules = rules_for(expanded(proposal), config)
    try:
        plan = Resolver(specs, rules).plan(_TP)
        tensors = {name: (one.style, one.placement) for name, one in plan.tensors.items()}
        return tensors, dict(_overrides(rules, model))
    except PlanError:
        return None


def _overrides(rules: RuleSet, model: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """By module name the attributes that it has and that are set, with their values on a rank."""
    (scope,) = rules.models
    modules = list(scope.modules())
    for name, module in model.named_modules():
        found = ModuleRule.joined([rule for regex, rule in modules if re.fullmatch(regex, name)])
        values = {key: scope.on_rank(value, _TP) for key, value in found.attributes.items() if hasattr(module, key)}
        yield name, {key: value for key, value in values.items() if getattr(module, key) != value}


def _used_units(proposal: Proposal) -> dict[str, RuleTable]:
    """The units that the rules and overrides that are left name."""
    named = {unit for rule in proposal.rules.values() for unit in (rule.get("unit"), *rule.get("parts", ()))}
    for pattern, told in proposal.told.items():
        named |= parse_module(pattern, told, "proposal").reads()
    return {name: unit for name, unit in proposal.units.items() if name in named}
