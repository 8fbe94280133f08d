"""The bytes of tensors on ranks, by their placements, for reports about tensor parallel sizes."""

import re
from collections.abc import Sequence
from functools import cache
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
        placement, shape = self.placement, self.spec.shape
        bits = self.number * _element_bits(self.spec.dtype)
        if placement.dim is None:
            return [bits * prod(shape)] * placement.tp
        bits *= prod(shape[: placement.dim] + shape[placement.dim + 1 :])
        return [bits * placement.local_size(rank) for rank in range(placement.tp)]

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
