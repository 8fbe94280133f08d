"""The bytes of tensors on ranks, by their placements, for reports about tensor parallel sizes."""

import re
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from shardconv.plan.placement import Placement
from shardconv.plan.plan import TensorSpec

#: The number of bits in the name of a dtype; BOOL has none, and is a byte.
_BITS = re.compile(r"\d+")


class PlacedTensors(NamedTuple):
    """Tensors of one dtype, shape and placement.

    Attributes:
        placement: of each tensor.
        spec: of each tensor.
        number: number of tensors.
    """

    placement: Placement
    spec: TensorSpec
    number: int

    @property
    def rank_bits(self) -> list[int]:
        """Bits on each rank."""
        sizes = [self.placement.shard_numel(self.spec.shape, rank) for rank in range(self.placement.tp)]
        return [self.number * self._element_bits * size for size in sizes]

    @property
    def padding_bits(self) -> int:
        """Bits of padding on all ranks together."""
        elements = self.placement.num_padding * (prod(self.spec.shape) // max(self.placement.size, 1))
        return self.number * self._element_bits * elements

    @property
    def _element_bits(self) -> int:
        found = _BITS.search(self.spec.dtype)
        return int(found[0]) if found else 8


def rank_bytes(placed: Sequence[PlacedTensors]) -> list[int]:
    """The bytes of all tensors on each rank."""
    return [sum(bits) // 8 for bits in zip(*(tensors.rank_bits for tensors in placed), strict=True)]


def padding_share(placed: Sequence[PlacedTensors]) -> float:
    """The bytes of padding on all ranks, divided by all other bytes."""
    padding = sum(tensors.padding_bits for tensors in placed)
    return padding / max(sum(sum(tensors.rank_bits) for tensors in placed) - padding, 1)
