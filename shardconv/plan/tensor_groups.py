"""Match tensors with rules, and group the tensors whose placements are equal.

Tensors of a group have the same rule, shape and other inputs of a placement. A tensor that no rule matches is an error.
"""

import re
from collections.abc import Mapping, Sequence
from math import lcm, prod
from typing import NamedTuple, Self

from msgspec.structs import replace

from shardconv.plan.experts import find_experts
from shardconv.plan.families.config_fields import lookup
from shardconv.plan.families.family import NAMES_FAMILY
from shardconv.plan.families.matcher import Matcher, PatternMatch, layer_key, layer_keys, pattern_for
from shardconv.plan.families.rule import Rule
from shardconv.plan.grid import Grid
from shardconv.plan.plan import TensorSpec
from shardconv.plan.rule_set import ModelRules, RuleSet, UsedRules
from shardconv.plan.tensor_placement import TensorGroup
from shardconv.support.errors import PlanError, option

#: Names of tensors that hold several projections: never sharded without a rule that gives their segments.
FUSED = re.compile(r"(qkv|query_key_value|c_attn|W_?pack|gate_up|in_proj|fused|packed)", re.IGNORECASE)

#: The rule of a tensor of at most one element that no other rule matches.
SCALAR = Rule("(one element or none)", "replicate", origin="any model")


class TensorGroups(NamedTuple):
    """The groups of the tensors of a checkpoint.

    Attributes:
        of_name: name of a tensor to its group.
        of_kind: name and dtype, shape and grid of a tensor to its group. Of tensors that are equal to all rules, since
            their names differ only in numbers that no rule reads, one stands for the others.
    """

    of_name: dict[str, TensorGroup]
    of_kind: dict[tuple[str, TensorSpec], TensorGroup]

    def layers_by_rule(self) -> UsedRules:
        """For each rule that matches a tensor the names of the layers that it matches, and of other parameters."""
        found: dict[Rule, set[str]] = {}
        for (name, _), group in self.of_kind.items():
            found.setdefault(group.rule, set()).add(name.removesuffix(f".{group.leaf}"))
        return UsedRules((rule, frozenset(names)) for rule, names in found.items())

    def padding_blocks(self) -> dict[str, int]:
        """For each pattern that shards quantized matrices the elements of a block of padding along the sharded dim."""
        found: dict[str, int] = {}
        for group in dict.fromkeys(self.of_kind.values()):
            padding = group.spec.grid.padding if group.spec.grid is not None else ()
            if padding and (dim := group.dim) is not None and padding[dim]:
                found[group.rule.pattern] = lcm(found.get(group.rule.pattern, 1), padding[dim])
        return found

    def with_rules(self, rules: RuleSet) -> Self:
        """The same groups with another rule set, whose models have the same rules."""
        changed = {
            group: replace(group, rules=rules, model_rules=rules.models[group.rules.models.index(group.model_rules)])
            for group in dict.fromkeys(self.of_kind.values())
        }
        of_name = {name: changed[group] for name, group in self.of_name.items()}
        return type(self)(of_name, {kind: changed[group] for kind, group in self.of_kind.items()})


def group_tensors(tensors: Mapping[str, TensorSpec], rules: RuleSet) -> TensorGroups:
    """Group the tensors.

    Raises:
        PlanError: if no rule matches a tensor.
    """
    grouping = _Grouping(tensors, rules)
    of_name: dict[str, TensorGroup] = {}
    of_kind: dict[tuple[str, TensorSpec], TensorGroup | None] = {}
    unmatched: list[str] = []
    for kind, (name, spec) in zip(zip(grouping.keys, tensors.values(), strict=True), tensors.items(), strict=True):
        if (group := of_kind.get(kind)) is None:
            group = of_kind[kind] = None if kind in of_kind else grouping.group_for(name, spec)
        if group is None:
            unmatched.append(name)
        else:
            of_name[name] = group
    if unmatched:
        raise grouping.no_rule(unmatched)
    return TensorGroups(of_name, {kind: group for kind, group in of_kind.items() if group is not None})


class _Grouping:
    """Finds the group of each tensor.

    Attributes:
        keys: for each tensor the same name for all names that the rules match alike, and for which they give equal
            placements.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec], rules: RuleSet) -> None:
        self._tensors, self._rules = tensors, rules
        self._ruled, self._matcher = matcher_of(rules)
        self._staged = {id(rule) for rule, model_rules in self._ruled if model_rules.reads_stage(rule)}
        is_whole = rules.ep > 1
        self._experts = find_experts({name: spec.shape for name, spec in tensors.items()}) if is_whole else {}
        reads_names = is_whole or self._staged or any(rule.beside for rule, _ in self._ruled)
        patterns = (pattern for model_rules in rules.models for pattern in model_rules.patterns())
        self.keys = layer_keys(tensors, str if reads_names else layer_key(patterns))
        self._groups: dict[tuple[object, ...], TensorGroup] = {}

    def group_for(self, name: str, spec: TensorSpec) -> TensorGroup | None:
        """The group of a tensor; None if no rule matches it."""
        match = self._matcher.match(name)
        if spec.grid is not None:
            match = _match_of_matrix(name, spec.grid, match, self._matcher, self._ruled)
        if match is None and prod(spec.shape) > 1:
            return None
        rule, model_rules = (SCALAR, self._rules.models[0]) if match is None else self._ruled[match.pattern_index]
        rows = _rows_beside(name, rule, model_rules, self._tensors) if rule.beside else None
        stage = model_rules.stage_of(name) if id(rule) in self._staged else None
        key = (match, spec, rows, stage, self._experts.get(name))
        if (group := self._groups.get(key)) is None:
            leaf = "weight" if match is None else match.leaf
            group = self._groups[key] = TensorGroup(name, rule, model_rules, self._rules, leaf, *key[1:])
            _check_expert(group)
        return group

    def no_rule(self, unmatched: Sequence[str]) -> PlanError:
        """The error for tensors that no rule matches."""
        used = {group.rule for group in self._groups.values()}
        unused = [rule for rule, _ in self._ruled if rule.by_user and not rule.optional and rule not in used]
        return PlanError(_no_rule_message(unmatched, self._tensors, self._rules, unused))


def matcher_of(rules: RuleSet) -> tuple[list[tuple[Rule, ModelRules]], Matcher]:
    """Pairs of an applicable rule and the rules of its model, and the matcher that returns a tensor's index in them."""
    ruled = [(rule, model_rules) for model_rules in rules.models for rule in model_rules.rules()]
    key = layer_key(f"{model_rules.at}.{rule.pattern}" for rule, model_rules in ruled)
    return ruled, Matcher([(rule.pattern, model_rules.regex) for rule, model_rules in ruled], key)


def _check_expert(group: TensorGroup) -> None:
    if group.expert is not None and group.rule.by_user:
        raise PlanError(
            f"{group.name}: rule {group.rule.pattern!r} shards this expert, and with {option(ep=group.rules.ep)} ranks "
            "have whole experts: remove one of the two"
        )


def _rows_beside(name: str, rule: Rule, model_rules: ModelRules, tensors: Mapping[str, TensorSpec]) -> int:
    """Rows of the weight of another layer in the module of a tensor's layer."""
    module = name.rpartition(".")[0].rpartition(".")[0]
    weight = tensors.get(other := f"{module}.{rule.beside}.weight")
    if weight is None or len(weight.shape) < 2:
        value = lookup(model_rules.config or {}, rule.beside_field)
        reason = "" if value is None else f" (got {rule.beside_field} = {value} in the config)"
        raise PlanError(
            f"{name}: its rule reads the rows of {other}, which is not in the checkpoint{reason}: "
            f"add the tensor if it is missing, or pass {option(rules='FILE')} with rules that replicate {module}, and "
            "its unsharded number of heads in [modules]"
        )
    return weight.shape[0]


def _match_of_matrix(
    name: str, grid: Grid, own_match: PatternMatch | None, matcher: Matcher, ruled: Sequence[tuple[Rule, ModelRules]]
) -> PatternMatch | None:
    """The match of a tensor of a quantized layer: the match of its logical matrix."""
    matrix = grid.logical_name(name)
    match = matcher.match(matrix)
    if own_match is not None and match is not None and own_match.pattern_index != match.pattern_index:
        own_rule, rule = (ruled[each.pattern_index][0] for each in (own_match, match))
        if own_rule.by_user or rule.by_user:
            raise PlanError(
                f"{name}: rule {own_rule.pattern!r} matches this tensor, but {rule.pattern!r} its weight {matrix}, and "
                f"both have to be sharded alike: add a rule for their module, {matrix.removesuffix('.weight')!r}"
            )
    return match


def _no_rule_message(
    names: Sequence[str], tensors: Mapping[str, TensorSpec], rules: RuleSet, unused: Sequence[Rule]
) -> str:
    """The error for tensors that no rule matches, which names the first fused tensor if there is one.

    Args:
        names: the tensors.
        tensors: dtype and shape of each.
        rules: the rules that were tried.
        unused: rules of a plan file that match no tensor, one of which may have been meant for them.
    """
    name = next(filter(FUSED.search, names), names[0])
    spec = tensors[name]
    fused = ""
    if FUSED.search(name):
        fused = "; by its name it is a fused tensor, and the order of its segments is unknown"
    others = f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
    no_rule = f"no rule of family {rules.family} matches it"
    if rules.family == NAMES_FAMILY:
        no_rule = "no family is known for this model, and its name alone does not determine how to shard it"
    problem = f"{name} ({spec.dtype} {list(spec.shape)}): {no_rule}{others}{fused}"
    if unused:
        return f"{problem}; rule {unused[0].pattern!r} of {unused[0].origin} matches no tensor: correct its pattern"
    return (
        f"{problem}: {rules.config_remedy}pass {option('rules')} with a family or a plan file that has a rule for it, "
        f"or {option(replicate=[pattern_for(name)])} to replicate it"
    )
