"""The plan of a checkpoint, from the names and shapes of its tensors and a rule set."""

from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cached_property

from msgspec.structs import replace

from shardconv.plan.families.matcher import pattern_for
from shardconv.plan.families.rule import REPLICATE_OPTION
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.tensor_groups import (
    TensorGroup,
    group_tensors,
    layers_by_rule,
    matcher_of,
    padding_blocks,
    with_model_rules,
)
from shardconv.plan.tensor_placement import BlockedError, GroupPlanner, PaddedRule, ShardedDim
from shardconv.plan.tp_sizes import (
    CANDIDATE_TPS,
    MAX_TP,
    NO_PADDING,
    BlockedTp,
    PaddedTp,
    PaddedUnit,
    PaddingReport,
    PlacedTensors,
    TpSizes,
    padding_share,
    rank_bytes,
)
from shardconv.support.errors import PlanError, UsageError
from shardconv.support.formatting import ranges


class Resolver:
    """A rule set over the tensors of one checkpoint, or of a model in memory.

    Args:
        tensors: name to dtype and shape, as the headers have them.
        rules: the rules.
        where: the source of the tensors, for messages.
        has_experts_option: whether the user can choose to distribute whole experts over ranks, for messages.

    Raises:
        PlanError: if no rule matches a tensor, or a rule or a block of a plan file matches none.
        UsageError: if a name or pattern to replicate matches no tensor, or experts are to be whole on a rank, and there
            are none.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorSpec],
        rules: RuleSet,
        *,
        where: str = "this checkpoint",
        has_experts_option: bool = False,
    ) -> None:
        self.rules = rules
        self._has_experts_option = has_experts_option and rules.experts == "tensor" and rules.engine is None
        self._group_of = group_tensors(tensors, rules)
        self._with_padding: dict[int, Resolver] = {}
        self._check_used(where)
        if rules.pad:
            self._set_padding(rules.pad)

    def _check_used(self, where: str) -> None:
        """Check that every rule and block of the user matches a tensor."""
        users = [rule for model_rules in self.rules.models for rule in model_rules.family.rules if rule.by_user]
        used = {rule.mount for rule in users if rule in self._used_rules}
        for rule in users:
            if not rule.optional and rule not in self._used_rules:
                if rule.origin == REPLICATE_OPTION:
                    raise UsageError(
                        f"{REPLICATE_OPTION} {rule.pattern!r} matches no tensor of {where}: correct or remove it"
                    )
                raise PlanError(f"rule {rule.pattern!r} matches no tensor of {where}: correct or remove it")
            if rule.mount and rule.mount not in used:
                raise PlanError(
                    f"{rule.origin.partition(',')[0]}: {rule.mount}: none of its rules applies to a tensor of {where}, "
                    f"because no name matches or earlier rules match first: correct or remove it"
                )

    @cached_property
    def _sizes(self) -> Counter[TensorGroup]:
        """The number of tensors in each group."""
        return Counter(self._group_of.values())

    @cached_property
    def _planners(self) -> dict[TensorGroup, GroupPlanner]:
        return {group: GroupPlanner(group, self.rules) for group in self._sizes}

    @cached_property
    def _used_rules(self) -> frozenset[object]:
        return frozenset(group.rule for group in self._sizes)

    def padded(self, pad: int = 1) -> "Resolver":
        """The resolver with padding to a multiple of ``pad`` and of tp; without padding for 0.

        Raises:
            PlanError: if padding is not supported for the model.
        """
        if pad == self.rules.pad:
            return self
        if pad and (refusal := self.rules.padding_refusal):
            raise PlanError(f"--pad is not supported for this model: {refusal}")
        if pad not in self._with_padding:
            self._with_padding[pad] = copy(self)
            self._with_padding[pad]._set_padding(pad)  # noqa: SLF001 - of the same class
        return self._with_padding[pad]

    def _set_padding(self, pad: int) -> None:
        rules = self.rules.with_padding(pad, layers_by_rule(self._group_of), padding_blocks(self._group_of))
        self._group_of = with_model_rules(self._group_of, dict(zip(self.rules.models, rules.models, strict=True)))
        self.rules = rules
        for derived in ("_sizes", "_planners"):
            self.__dict__.pop(derived, None)

    def replaced(self, family: RuleSet) -> dict[str, tuple[str, str]]:
        """Tensors to which the user gives another style than the family: name to the family's and the user's style."""
        ruled, matcher = matcher_of(family)
        found = {}
        for name, group in self._group_of.items():
            match = matcher.match(name) if group.rule.by_user else None
            if match is not None and (style := ruled[match.pattern_index][0].style) != group.rule.style:
                found[name] = (style, group.rule.style)
        return found

    def replaced_blocks(self, family: RuleSet) -> frozenset[str]:
        """The blocks of the family all of whose tensors are matched by blocks of the user."""
        ruled, matcher = matcher_of(family)
        replaced, kept = set[str](), set[str]()
        for name, group in self._group_of.items():
            match = matcher.match(name) if group.rule.by_user else None
            if match is not None:
                (replaced if group.rule.block else kept).add(ruled[match.pattern_index][0].block)
            elif not group.rule.by_user:
                kept.add(group.rule.block)
        return frozenset(replaced - kept - {""})

    def sharded_dim(self, name: str) -> ShardedDim:
        """The dim that is sharded of a tensor, and its full size by rule and config.

        The size of that dim is not read from the tensor, which may therefore be a rank's shard.

        Raises:
            PlanError: if the config lacks a field that gives the size.
        """
        return self._planners[self._group_of[name]].sharded_dim()

    def plan(self, tp: int, *, assumed: tuple[str, ...] = ()) -> Plan:
        """The plan for ``tp`` ranks.

        Raises:
            PlanError: if a tensor cannot be sharded for ``tp`` ranks; the message names the sizes that are supported.
            UsageError: if ``tp`` is not an integer from 1 to :data:`MAX_TP`.
        """
        if type(tp) is not int or not 1 <= tp <= MAX_TP:
            raise UsageError(f"--tp is wrong (got {tp!r:.40}, expected an integer from 1 to {MAX_TP}): correct it")
        try:
            plans = {group: planner.plan(tp) for group, planner in self._planners.items()}
        except BlockedError as error:
            raise self._unsupported(tp, error) from error
        tensors = {name: plans[group] for name, group in self._group_of.items()}
        return Plan.of_tensors(tp, self.rules.family, tensors, self.rules, assumed)

    def tp_sizes(self) -> TpSizes:
        """Which of :data:`CANDIDATE_TPS` are supported, and what blocks the others."""
        unpadded, supported, blocked = self.padded(0), dict[int, int](), list[BlockedTp]()
        for tp in CANDIDATE_TPS:
            try:
                supported[tp] = max(rank_bytes(unpadded.place(tp)), default=0)
            except BlockedError as error:
                blocked.append(BlockedTp(tp, error.tensor, error.reason))
        padded = [one for found in blocked if (one := self.padded_size(found.tp)) is not None]
        return TpSizes(tuple(supported), tuple(blocked), tuple(padded), tuple(supported.values()))

    def place(self, tp: int) -> list[PlacedTensors]:
        """The placement of each group of equal tensors for ``tp`` ranks.

        Raises:
            BlockedError: if a tensor cannot be sharded for ``tp`` ranks.
        """
        groups = self._planners.items()
        return [PlacedTensors(planner.plan(tp).placement, group.spec, self._sizes[group]) for group, planner in groups]

    def padded_size(self, tp: int) -> PaddedTp | None:
        """The cost of a tensor parallel size with padding; None if it is not supported with padding either."""
        try:
            return None if self.rules.padding_refusal else PaddedTp(tp, padding_share(self.padded().place(tp)))
        except BlockedError:
            return None

    def padding(self, tp: int) -> PaddingReport:
        """The report on requested padding in the plan for ``tp`` ranks."""
        units = [PaddedUnit(one.unit or pattern_for(one.tensor), one.size, one.padded) for one in self.padded_rules(tp)]
        return PaddingReport(tuple(dict.fromkeys(units)), padding_share(self.place(tp))) if units else NO_PADDING

    def padded_rules(self, tp: int) -> Iterator[PaddedRule]:
        """The units that the plan for ``tp`` ranks pads on request, by rule."""
        for planner in self._planners.values() if self.rules.pad else ():
            yield from planner.padded_units(tp)

    def blocked(self, tp: int) -> BlockedTp | None:
        """The reason why a tensor parallel size is not supported; None if it is."""
        try:
            self.place(tp)
        except BlockedError as error:
            return BlockedTp(tp, error.tensor, error.reason)
        return None

    def _supports_whole_experts(self, tp: int) -> bool:
        """Whether a tensor parallel size is supported with whole experts on each rank, without padding."""
        if not self._has_experts_option:
            return False
        tensors = {name: group.spec for name, group in self._group_of.items()}
        try:
            return Resolver(tensors, replace(self.rules.with_padding(0), experts="expert")).blocked(tp) is None
        except (PlanError, UsageError):  # without experts, or with rules for them in a plan file
            return False

    def _unsupported(self, tp: int, error: BlockedError) -> PlanError:
        """The error for an unsupported tensor parallel size, with the supported ones and the cost of padding."""
        resolver = self if self.rules.pad else self.padded(0)
        sizes = [size for size in CANDIDATE_TPS if resolver.blocked(size) is None]
        expected = f" (expected one of {ranges(sizes)})" if sizes else f", as is every size up to {CANDIDATE_TPS[-1]},"
        padded = None if self.rules.pad else self.padded_size(tp)
        pad = f"--pad to pad with zeros ({padded.describe()})" if padded is not None else ""
        experts = "--experts expert to distribute whole experts" if self._supports_whole_experts(tp) else ""
        remedy = ", or ".join(filter(None, ["a supported size" if sizes else "", experts, pad]))
        unsupported = f"--tp {tp} is unsupported{expected} because of {error}"
        if error.is_unsure:
            return PlanError(f"{self.rules.uncertain} With this assumption, {unsupported}")
        return PlanError(f"{unsupported}{f'. Pass {remedy}' if remedy else ''}")
