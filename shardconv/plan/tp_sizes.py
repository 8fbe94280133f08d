"""Reports about tensor parallel sizes: supported sizes, sizes that need padding and its cost, and unsupported ones."""

from dataclasses import dataclass

#: The tensor parallel sizes that reports cover.
CANDIDATE_TPS = (*range(1, 65), 72, 80, 96, 128, 256)

#: The largest tensor parallel size of a plan.
MAX_TP = 4096


@dataclass(frozen=True, slots=True)
class BlockedTp:
    """A tensor parallel size that is not supported without padding.

    Attributes:
        tp: the tensor parallel size.
        tensor: the first tensor that cannot be sharded for it.
        reason: why the tensor cannot be sharded.
    """

    tp: int
    tensor: str
    reason: str


@dataclass(frozen=True, slots=True)
class PaddedTp:
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


@dataclass(frozen=True, slots=True)
class TpSizes:
    """The tensor parallel sizes that a checkpoint can be split for.

    Attributes:
        supported: sizes that are supported without padding, ascending.
        blocked: the other sizes of :data:`CANDIDATE_TPS`, with the reason.
        padded: those of ``blocked`` that are supported with padding.
        rank_bytes: for each supported size the bytes of the tensors of the rank that has most.
    """

    supported: tuple[int, ...]
    blocked: tuple[BlockedTp, ...]
    padded: tuple[PaddedTp, ...] = ()
    rank_bytes: tuple[int, ...] = ()

    def usable(self, *, pad: bool) -> tuple[int, ...]:
        """The supported sizes, ascending; with ``pad``, including those that need padding."""
        return tuple(sorted({*self.supported, *(size.tp for size in self.padded if pad)}))


@dataclass(frozen=True, slots=True)
class PaddedUnit:
    """A unit that is padded.

    Attributes:
        name: the unit; if elements are padded, the pattern of the module of the tensor in every layer.
        size: number of units without padding.
        padded_size: number of units with padding.
    """

    name: str
    size: int
    padded_size: int


@dataclass(frozen=True, slots=True)
class PaddingReport:
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
