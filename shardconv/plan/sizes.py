"""Tensor parallel sizes: which are supported, which with padding only and at what cost, and what blocks the others.

Plain data, for reports.
"""

from dataclasses import dataclass

#: The tensor parallel sizes that a report looks at.
CANDIDATE_TPS = (*range(1, 65), 72, 80, 96, 128, 256)

#: The largest tensor parallel size of a plan.
MAX_TP = 4096


@dataclass(frozen=True, slots=True)
class BlockedTp:
    """A tensor parallel size that is not supported without padding.

    Attributes:
        tp: the size.
        tensor: the first tensor that blocks it.
        reason: why it does.
    """

    tp: int
    tensor: str
    reason: str


@dataclass(frozen=True, slots=True)
class PaddedTp:
    """A tp size that is supported with padding only.

    Attributes:
        tp: the size.
        memory: the bytes of padding on all ranks, as a share of all other bytes.
    """

    tp: int
    memory: float

    def describe(self) -> str:
        """The cost."""
        return more_memory(self.memory)


@dataclass(frozen=True, slots=True)
class TpSizes:
    """The tp sizes that a checkpoint can be split for.

    Attributes:
        supported: the sizes, ascending.
        blocked: the other candidates, each with what blocks it.
        padded: those of them that are supported with padding.
    """

    supported: tuple[int, ...]
    blocked: tuple[BlockedTp, ...]
    padded: tuple[PaddedTp, ...] = ()

    def usable(self, *, pad: bool) -> tuple[int, ...]:
        """The sizes, ascending, with those that need padding or without."""
        return tuple(sorted({*self.supported, *(one.tp for one in self.padded if pad)}))


@dataclass(frozen=True, slots=True)
class PaddedUnit:
    """A unit of which there are more with padding.

    Attributes:
        name: of the unit; where elements are padded, the module of the tensor, in every layer.
        size: how many there are.
        padded_size: how many there are with padding.
    """

    name: str
    size: int
    padded_size: int


@dataclass(frozen=True, slots=True)
class PaddingReport:
    """What a plan pads as asked.

    Attributes:
        units: what has padding, from which count to which.
        memory: the bytes of padding on all ranks, as a share of all other bytes.
    """

    units: tuple[PaddedUnit, ...] = ()
    memory: float = 0.0

    def describe(self) -> str:
        """All of it in one line; "" where nothing is padded."""
        units = ", ".join(f"{unit.name} from {unit.size} to {unit.padded_size}" for unit in self.units)
        return f"padded with zeros: {units}; {more_memory(self.memory)}" if units else ""


#: Where nothing is padded as asked.
NO_PADDING = PaddingReport()


def more_memory(share: float) -> str:
    """What padding costs."""
    return f"{share:.1%} more memory"
