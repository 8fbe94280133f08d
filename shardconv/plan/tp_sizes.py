"""Reports about tensor parallel sizes: supported sizes, sizes that need padding and its cost, and unsupported ones."""

import re
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from shardconv.plan.families.matcher import pattern_for
from shardconv.plan.placement import Placement
from shardconv.plan.plan import TensorSpec
from shardconv.plan.tensor_placement import BlockedError
from shardconv.support.errors import PlanError, option
from shardconv.support.formatting import ranges

if TYPE_CHECKING:
    from shardconv.plan.planner import Planner

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
MAX_TP = 4096


class BlockedTp(Struct, frozen=True):
    """A tensor parallel size that is not supported without padding.

    Attributes:
        tp: the tensor parallel size.
        tensor: the first tensor that cannot be sharded for it.
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
    """

    tp: int
    memory: float

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


def _more_memory(fraction: float) -> str:
    return f"{fraction:.1%} more memory"


def tp_sizes(planner: "Planner") -> TpSizes:
    """The supported sizes of :data:`CANDIDATE_TPS`, and the tensors that block the others."""
    unpadded, supported, blocked = planner.padded(0), dict[int, int](), list[BlockedTp]()
    for tp in CANDIDATE_TPS:
        try:
            supported[tp] = max(rank_bytes(unpadded.place(tp)), default=0)
        except BlockedError as error:
            blocked.append(BlockedTp(tp, error.tensor, error.reason))
    few = [found.tp for found in blocked if found.tp <= MAX_PADDED_TP]
    padded = [one for tp in few if (one := padded_size(planner, tp)) is not None]
    return TpSizes(tuple(supported), tuple(blocked), tuple(padded), tuple(supported.values()))


def padded_size(planner: "Planner", tp: int) -> PaddedTp | None:
    """The cost of a tensor parallel size with padding; None if it is not supported with padding either."""
    try:
        return None if planner.rules.padding_refusal else PaddedTp(tp, padding_share(planner.padded().place(tp)))
    except BlockedError:
        return None


def padding_report(planner: "Planner", tp: int) -> PaddingReport:
    """The padding that the plan for ``tp`` ranks adds on request."""
    units = [
        PaddedUnit(one.unit or pattern_for(one.group.name), one.size, one.padded) for one in planner.padded_rules(tp)
    ]
    return PaddingReport(tuple(dict.fromkeys(units)), padding_share(planner.place(tp))) if units else NO_PADDING


def unsupported_tp(planner: "Planner", tp: int, error: BlockedError) -> PlanError:
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
        return PlanError(f"{rules.uncertain}. With this assumption, {unsupported}", f"pass {option('head_dim')}")
    return PlanError(unsupported, f"pass {remedy}") if remedy else PlanError(unsupported)
