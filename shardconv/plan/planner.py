"""The planner: the plan of a checkpoint at a tensor parallel size, and reports about sizes.

A plan follows from the names and shapes of the tensors and a rule set. Sizes are supported, need padding, which has a
cost, or are not supported.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from math import prod
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from shardconv.plan.experts import find_experts
from shardconv.plan.families.matcher import pattern_for
from shardconv.plan.families.rule import REPLICATE_OPTION
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan, TensorPlan, TensorSpec
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.stages import MAX_RANKS, StageChoice, StageFinder, Stages
from shardconv.plan.tensor_groups import TensorGroups, group_tensors
from shardconv.plan.tensor_placement import BlockedError, PaddedRule, TensorGroup
from shardconv.support.errors import PlanError, UsageError, check_count, option
from shardconv.support.formatting import ranges

#: The number of bits in the name of a dtype; BOOL has none, and is a byte.
_BITS = re.compile(r"\d+")


class PlacedTensors(NamedTuple):
    """Tensors of one dtype, shape and placement.

    Attributes:
        placement: placement of each tensor.
        spec: dtype and shape of each tensor.
        number: number of tensors.
    """

    placement: Placement
    spec: TensorSpec
    number: int

    @property
    def rank_bits(self) -> list[int]:
        """Bits on each rank."""
        placement, shape = self.placement, self.spec.shape
        bits = self.number * _element_bits(self.spec.dtype)
        if placement.dim is None:
            return [bits * prod(shape)] * placement.num_ranks
        bits *= prod(shape[: placement.dim] + shape[placement.dim + 1 :])
        return [bits * placement.local_size(rank) for rank in range(placement.num_ranks)]

    @property
    def padding_bits(self) -> int:
        """Bits of padding on all ranks together."""
        elements = self.placement.num_padding * (prod(self.spec.shape) // max(self.placement.size, 1))
        return self.number * _element_bits(self.spec.dtype) * elements


@cache
def _element_bits(dtype: str) -> int:
    found = _BITS.search(dtype)
    return int(found[0]) if found else 8


def rank_bytes(placed: Sequence[PlacedTensors]) -> list[int]:
    """The bytes of all tensors on each rank."""
    return [sum(bits) // 8 for bits in zip(*(tensors.rank_bits for tensors in placed), strict=True)]


def padding_share(placed: Sequence[PlacedTensors]) -> float:
    """The bytes of padding on all ranks, divided by all other bytes."""
    padding = sum(tensors.padding_bits for tensors in placed)
    if not padding:
        return 0.0
    return padding / max(sum(sum(tensors.rank_bits) for tensors in placed) - padding, 1)


#: The tensor parallel sizes that reports cover.
CANDIDATE_TPS = (*range(1, 65), 72, 80, 96, 128, 256)

#: The largest tensor parallel size whose cost with padding reports list.
MAX_PADDED_TP = 16

#: The largest tensor parallel size of a plan.
MAX_TP = MAX_RANKS


class BlockedTp(Struct, frozen=True):
    """A tensor parallel size that is not supported without padding.

    Attributes:
        tp: the tensor parallel size.
        tensor: a tensor that cannot be sharded for it.
        reason: why the tensor cannot be sharded.
    """

    tp: int
    tensor: str
    reason: str


class PaddedTp(Struct, frozen=True):
    """A tensor parallel size that is supported with padding only.

    Attributes:
        tp: the tensor parallel size.
        memory: bytes of padding on all ranks, divided by all other bytes.
        num_bytes: bytes on all ranks, with padding.
    """

    tp: int
    memory: float
    num_bytes: int

    def describe(self) -> str:
        """The cost of the padding in memory."""
        return _more_memory(self.memory)


class TpSizes(Struct, frozen=True):
    """The tensor parallel sizes that a checkpoint can be split for.

    Attributes:
        supported: sizes that are supported without padding, ascending.
        blocked: the other sizes of :data:`CANDIDATE_TPS`, with the reason.
        padded: the sizes in ``blocked`` up to :data:`MAX_PADDED_TP` that are supported with padding.
        rank_bytes: for each supported size, the largest number of bytes that a rank has.
    """

    supported: tuple[int, ...]
    blocked: tuple[BlockedTp, ...]
    padded: tuple[PaddedTp, ...] = ()
    rank_bytes: tuple[int, ...] = ()

    def usable(self, *, pad: bool) -> tuple[int, ...]:
        """The supported sizes, ascending; with ``pad``, including those in ``padded``."""
        return tuple(sorted({*self.supported, *(size.tp for size in self.padded if pad)}))


class PaddedUnit(Struct, frozen=True):
    """A unit that is padded.

    Attributes:
        name: the unit; if elements are padded, the pattern of the module of the tensor in every layer.
        size: number of units without padding.
        padded_size: number of units with padding.
    """

    name: str
    size: int
    padded_size: int


class PaddingReport(Struct, frozen=True):
    """The padding that a plan adds on request.

    Attributes:
        units: the padded units, with their counts.
        memory: bytes of padding on all ranks, divided by all other bytes.
    """

    units: tuple[PaddedUnit, ...] = ()
    memory: float = 0.0

    def describe(self) -> str:
        """The padded units and the cost in one line; "" without padding."""
        units = ", ".join(f"{unit.name} from {unit.size} to {unit.padded_size}" for unit in self.units)
        return f"padded with zeros: {units}; {_more_memory(self.memory)}" if units else ""


#: The report of a plan without requested padding.
NO_PADDING = PaddingReport()


class Planner:
    """A rule set over the tensors of one checkpoint, or of a model in memory. Immutable.

    Args:
        tensors: name to dtype and shape, as the headers have them.
        rules: the rules.
        assumed: assumptions and conclusions of the rules that are not read from config or plan file, as sentences.
        where: the source of the tensors, for messages.
        has_ep_option: whether the user can choose an expert parallel size, for messages.

    Attributes:
        rules: the rules.
        assumed: the assumptions.
        group_of: name of a tensor to its group.

    Raises:
        PlanError: if no rule matches a tensor, or a rule or a block of a plan file matches none.
        UsageError: if a name or pattern to replicate matches no tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorSpec],
        rules: RuleSet,
        *,
        assumed: tuple[str, ...] = (),
        where: str = "this checkpoint",
        has_ep_option: bool = False,
    ) -> None:
        self.assumed = assumed
        self._has_ep_option = has_ep_option and rules.ep == 1 and rules.engine is None
        self._with_padding: dict[int, Planner] = {}
        self._set_rules(rules, group_tensors(tensors, rules))
        _check_used(rules, frozenset(group.rule for group in self._sizes), where)
        if rules.pad:
            self._set_padding(rules.pad)

    def _set_rules(self, rules: RuleSet, groups: TensorGroups) -> None:
        self.rules, self._groups, self.group_of = rules, groups, groups.of_name
        self._sizes = Counter(groups.of_name.values())

    def _set_padding(self, pad: int) -> None:
        groups = self._groups
        rules = self.rules.with_padding(pad, groups.layers_by_rule(), groups.padding_blocks())
        self._set_rules(rules, groups.with_rules(rules))

    def padded(self, pad: int = 1) -> "Planner":
        """The planner with padding to a multiple of ``pad`` and of tp; without padding for 0.

        Raises:
            PlanError: if padding is not supported for the model.
        """
        if pad == self.rules.pad:
            return self
        if pad and (refusal := self.rules.padding_refusal):
            raise PlanError(f"{option(pad=True)} is not supported for this model: {refusal}")
        if pad not in self._with_padding:
            self._with_padding[pad] = copy(self)
            self._with_padding[pad]._set_padding(pad)  # noqa: SLF001 - of the same class
        return self._with_padding[pad]

    @property
    def groups(self) -> list[TensorGroup]:
        """The groups of equal tensors."""
        return list(self._sizes)

    def assuming(self, *sentences: str) -> "Planner":
        """The planner with these assumptions instead of its own."""
        other = copy(self)
        other.assumed, other._with_padding = sentences, {}  # noqa: SLF001 - of the same class
        return other

    def stages(self, chosen: StageChoice) -> Stages | None:
        """The pipeline stages of the model, also for an adapter; None for one.

        Raises:
            PlanError, UsageError: as :meth:`StageFinder.divide <shardconv.plan.stages.StageFinder.divide>`.
        """
        if chosen.count == 1:
            return None
        names = [group.matrix_of(name) for name, group in self.group_of.items()]
        is_adapter = any(group.spec.grid is not None and group.spec.grid.prefix for group in self._sizes)
        return StageFinder(self.rules).divide(chosen, names, is_adapter=is_adapter)

    @property
    def _num_experts(self) -> int:
        """The smallest number of experts of a module; 0 without experts."""
        return min((group.expert.total for group in self._sizes if group.expert is not None), default=0)

    def check_ep(self) -> None:
        """Refuse an expert parallel size for which ranks would lack experts.

        Raises:
            UsageError: if the checkpoint has fewer experts, or none.
        """
        ep, experts = self.rules.ep, self._num_experts
        if ep > 1 and not experts:
            raise UsageError(
                f"{option(ep=ep)}: no tensor is known to be of an expert, by a name such as "
                f"model.layers.0.mlp.experts.0.up_proj.weight: remove {option('ep')}"
            )
        if ep > max(experts, 1):
            raise UsageError(
                f"{option(ep=ep)} is more than the {experts} experts of the checkpoint: pass {option(ep=1)}, or a "
                f"multiple of {option('tp')} that is at most {experts}"
            )

    def plan(self, tp: int, stages: Stages | None = None) -> Plan:
        """The plan for ``tp`` ranks, in each of ``stages``.

        Raises:
            PlanError: if a tensor cannot be sharded for ``tp`` ranks; the message names the sizes that are supported.
            UsageError: if ``tp`` is not an integer from 1 to :data:`MAX_TP`.
        """
        check_count(tp, "tp", MAX_TP)
        ep, pp = self.rules.ep, 1 if stages is None else stages.count
        if ep > 1 and ep % tp:
            multiple = f", or a multiple such as {option(ep=tp)}" if tp <= self._num_experts else ""
            raise UsageError(f"{option(ep=ep)} is not a multiple of {option(tp=tp)}: pass {option(ep=1)}{multiple}")
        if (num_ranks := self.rules.ranks_per_stage(tp) * pp) > MAX_TP:
            given = f"{option(tp=tp)}{f', {option(ep=ep)}' * (ep > 1)} and {option(pp=pp)}"
            raise UsageError(f"{given} have {num_ranks} ranks (expected at most {MAX_TP}): correct them")
        try:
            plans = {group: group.plan(tp) for group in self._sizes}
        except BlockedError as error:
            raise unsupported_tp(self, tp, error) from error
        tensors = {name: plans[group] for name, group in self.group_of.items()}
        if stages is not None:
            tensors = self._in_stages(tensors, stages)
        return Plan.of_tensors(tp, self.rules.family, tensors, self.rules, self.assumed, stages)

    def _in_stages(self, tensors: Mapping[str, TensorPlan], stages: Stages) -> dict[str, TensorPlan]:
        """The plans of tensors, each in the stages that hold it."""
        finder = StageFinder(self.rules)
        held = {name: finder.stages_of(group.matrix_of(name), stages) for name, group in self.group_of.items()}
        return {name: replace(plan, stages=held[name]) for name, plan in tensors.items()}

    def place(self, tp: int, order: Iterable[TensorGroup] = ()) -> list[PlacedTensors]:
        """The placement of each group of equal tensors for ``tp`` ranks.

        Args:
            tp: the tensor parallel size.
            order: the groups in the order in which they are placed; empty for that of the tensors.

        Raises:
            BlockedError: if a tensor cannot be sharded for ``tp`` ranks.
        """
        sizes = self._sizes
        return [PlacedTensors(group.plan(tp).placement, group.spec, sizes[group]) for group in order or sizes]

    def blocked(self, tp: int) -> BlockedTp | None:
        """The reason why a tensor parallel size is not supported; None if it is."""
        try:
            self.place(tp)
        except BlockedError as error:
            return BlockedTp(tp, error.tensor, error.reason)
        return None

    def padded_rules(self, tp: int) -> Iterator[PaddedRule]:
        """The units that the plan for ``tp`` ranks pads on request, by rule."""
        for group in self._sizes if self.rules.pad else ():
            yield from group.padded_rules(tp)

    def supports_whole_experts(self, tp: int) -> bool:
        """Whether ``tp`` is supported without padding with as many expert parallel ranks, which the user may choose."""
        if not self._has_ep_option:
            return False
        tensors = {name: group.spec for name, group in self.group_of.items()}
        if not find_experts({name: spec.shape for name, spec in tensors.items()}):
            return False
        try:
            return Planner(tensors, replace(self.rules.with_padding(0), ep=tp)).blocked(tp) is None
        except PlanError:  # with rules for experts in a plan file
            return False


def _check_used(rules: RuleSet, used: frozenset[object], where: str) -> None:
    """Check that every rule and block of the user matches a tensor."""
    users = [rule for model_rules in rules.models for rule in model_rules.family.rules if rule.by_user]
    mounts = {rule.mount for rule in users if rule in used}
    for rule in users:
        if not rule.optional and rule not in used:
            if rule.origin == REPLICATE_OPTION:
                raise UsageError(
                    f"{option(replicate=[rule.pattern])} matches no tensor of {where}: correct or remove it"
                )
            raise PlanError(f"rule {rule.pattern!r} matches no tensor of {where}: correct or remove it")
        if rule.mount and rule.mount not in mounts:
            raise PlanError(
                f"{rule.origin.partition(',')[0]}: {rule.mount}: none of its rules applies to a tensor of {where}, "
                f"because no name matches or earlier rules match first: correct or remove it"
            )


def _more_memory(fraction: float) -> str:
    return f"{fraction:.1%} more memory"


def tp_sizes(planner: Planner) -> TpSizes:
    """The supported sizes of :data:`CANDIDATE_TPS`, and the tensors that block the others."""
    unpadded, supported, blocked = planner.padded(0), dict[int, int](), list[BlockedTp]()
    order = unpadded.groups
    for tp in CANDIDATE_TPS:
        try:
            supported[tp] = max(rank_bytes(unpadded.place(tp, order)), default=0)
        except BlockedError as error:
            blocked.append(BlockedTp(tp, error.tensor, error.reason))
            # What blocks one size blocks most others, and is tried first.
            order = sorted(order, key=lambda group: group.matrix != blocked[-1].tensor)
    few = [found.tp for found in blocked if found.tp <= MAX_PADDED_TP]
    padded = [one for tp in few if (one := padded_size(planner, tp)) is not None]
    return TpSizes(tuple(supported), tuple(blocked), tuple(padded), tuple(supported.values()))


def padded_size(planner: Planner, tp: int) -> PaddedTp | None:
    """The cost of a tensor parallel size with padding; None if it is not supported with padding either."""
    if planner.rules.padding_refusal:
        return None
    try:
        placed = planner.padded().place(tp)
    except BlockedError:
        return None
    return PaddedTp(tp, padding_share(placed), sum(rank_bytes(placed)))


def padding_report(planner: Planner, tp: int) -> PaddingReport:
    """The padding that the plan for ``tp`` ranks adds on request."""
    units = [
        PaddedUnit(one.unit or pattern_for(one.group.name), one.size, one.padded) for one in planner.padded_rules(tp)
    ]
    return PaddingReport(tuple(dict.fromkeys(units)), padding_share(planner.place(tp))) if units else NO_PADDING


def unsupported_tp(planner: Planner, tp: int, error: BlockedError) -> PlanError:
    """The error for an unsupported tensor parallel size, with the supported ones and the cost of padding."""
    rules = planner.rules
    sizes = [size for size in CANDIDATE_TPS if planner.blocked(size) is None]
    expected = f" (expected one of {ranges(sizes)})" if sizes else f", as is every size up to {CANDIDATE_TPS[-1]},"
    padded = None if rules.pad else padded_size(planner, tp)
    pad = f"{option(pad=True)} to pad with zeros ({padded.describe()})" if padded is not None else ""
    experts = f"{option(ep=tp)} for whole experts on each rank" if planner.supports_whole_experts(tp) else ""
    other = f"another {option('ep')}" if rules.ep > 1 else ""
    remedy = ", or ".join(filter(None, ["a supported size" if sizes else "", other, experts, pad]))
    unsupported = f"{option(tp=tp)} is unsupported{expected} because of {error}"
    if error.is_unsure:
        remedy = f"{rules.config_remedy}pass {option('head_dim')}"
        return PlanError(f"{rules.uncertain}. With this assumption, {unsupported}", remedy)
    return PlanError(unsupported, f"pass {remedy}") if remedy else PlanError(unsupported)
