"""Dequantize the shards of a rank: the weight of a layer from the tensors that store it, by their grids.

Owns the reading of packed integers and small floating-point numbers. Values are computed in float32 and rounded once.
A grid holds everything that is needed, so no quantization settings are read here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import lcm, prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardconv.layers.sharding import bytes_of
from shardconv.plan.grid import (
    DIVISOR,
    FACTOR,
    GROUP_INDEX,
    PACKED,
    PACKED_BYTE,
    PLAIN,
    SCALE,
    VALUES,
    ZERO_POINT,
    Grid,
    GridDim,
)

#: Elements of a weight that are computed at once.
_BAND_ELEMENTS = 1 << 24

#: The values of E2M1, the floating-point format of 4 bits of MXFP4 and NVFP4, by code.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

#: The position in its word of each of 8 values, as AWQ packs them.
_AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


class Stored(NamedTuple):
    """A stored tensor, or a shard of it, and its grid."""

    tensor: Tensor
    grid: Grid


def dequantize(stored: Sequence[Stored], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Dequantize one weight.

    Args:
        stored: the tensors that store it, full or of one rank.
        shape: shape of the result.
        dtype: dtype of the result.

    Returns:
        (values - zero point) * (scale * factor / divisor), computed in float32.
    """
    result = torch.empty(tuple(shape), dtype=dtype)
    for start, stop in _bands(stored, shape):
        band = [one._replace(tensor=_narrow(one, start, stop)) for one in stored]
        result[start:stop] = _weight(band, (stop - start, *shape[1:]))
    return result


def _bands(stored: Sequence[Stored], shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of dim 0 of the weight, of full blocks and few elements, as temporary tensors are larger."""
    if not prod(shape):
        return
    block = lcm(*(dim.elements for one in stored for dim in one.grid.dims if dim.dim == 0))
    size = max(_BAND_ELEMENTS // prod(shape[1:]) // block, 1) * block
    yield from ((start, min(start + size, shape[0])) for start in range(0, shape[0], size))


def _narrow(stored: Stored, start: int, stop: int) -> Tensor:
    """The part of a stored tensor for a range of dim 0 of the weight; all of a tensor that does not have this dim."""
    for at, dim in enumerate(stored.grid.dims):
        if dim.dim == 0:
            first, last = start // dim.elements * dim.entries, -(-stop // dim.elements) * dim.entries
            return stored.tensor.narrow(at, first, last - first)
    return stored.tensor


def _weight(stored: Sequence[Stored], shape: Sequence[int]) -> Tensor:
    by_role = {one.grid.role: one for one in stored if one.grid.role}
    groups = by_role[GROUP_INDEX].tensor.long() if GROUP_INDEX in by_role else None
    term = {
        role: partial(_expanded, one, shape, groups) for role, one in by_role.items() if role != GROUP_INDEX
    }  # evaluated one after the other, as each may be as large as the weight
    weight = term[VALUES]()
    if ZERO_POINT in term:
        weight -= term[ZERO_POINT]()
    scale = term[SCALE]()
    if FACTOR in term:
        scale = scale * term[FACTOR]()
    if DIVISOR in term:
        scale = scale / term[DIVISOR]()
    return weight.mul_(scale)


def _expanded(stored: Stored, shape: Sequence[int], groups: Tensor | None) -> Tensor:
    """Read the numbers of a stored tensor as float32, and repeat each over its block of the weight.

    Args:
        stored: the tensor.
        shape: shape of the weight.
        groups: the group of each input feature, where groups are not consecutive.

    Returns:
        A tensor that can be broadcast to ``shape``, with its order of dims.
    """
    numbers, dims = _unpacked(stored)
    order = [dim.dim for dim in dims]
    for at, dim in enumerate(dims):
        if dim.dim is not None:
            if dim.elements > 1:
                numbers = numbers.repeat_interleave(dim.elements, at)
            numbers = numbers.narrow(at, 0, shape[dim.dim])  # the last block may not be full
        elif groups is not None:
            numbers = numbers.index_select(at, groups)
            order[at] = next(axis for axis in range(len(shape)) if axis not in order)
    axes = [at for at in order if at is not None]
    kept = numbers.reshape([size for at, size in zip(order, numbers.shape, strict=True) if at is not None])
    ordered = kept.permute([axes.index(at) for at in sorted(axes)])
    return ordered.reshape([shape[at] if at in axes else 1 for at in range(len(shape))])


def _unpacked(stored: Stored) -> tuple[Tensor, tuple[GridDim, ...]]:
    """Return the numbers of a tensor as float32, and its dims, of which none is packed."""
    tensor, (dims, kind) = stored.tensor, (stored.grid.dims, stored.grid.numbers)
    if kind not in _UNPACKED:
        return _READ[kind](tensor), dims
    if all(dim.kind not in PACKED for dim in dims):  # the entries of a block have a dim of their own, the last
        dims = (*dims[:-2], dims[-2]._replace(entries=tensor.shape[-1], kind=PACKED_BYTE))
        tensor = tensor.flatten(-2)
    at = next(at for at, dim in enumerate(dims) if dim.kind in PACKED)
    codes, bits = _codes(tensor, at, dims[at])
    return _UNPACKED[kind](codes, at, bits), (*dims[:at], GridDim(dims[at].dim), *dims[at + 1 :])


def _codes(tensor: Tensor, at: int, dim: GridDim) -> tuple[Tensor, int]:
    """Unpack the integers of a dim, the first in the lowest bits; return them as int16, and the bits of each."""
    words = tensor.movedim(at, -1)
    grid = (*words.shape[:-1], words.shape[-1] // dim.entries, dim.entries * words.element_size())
    octets = bytes_of(words).view(grid).short()
    bits = 8 * octets.shape[-1] // dim.elements
    starts = torch.arange(dim.elements) * bits
    first, shift = starts // 8, (starts % 8).short()
    pairs = octets[..., first] | octets[..., (first + 1).clamp_(max=octets.shape[-1] - 1)] << 8
    return (pairs >> shift & (1 << bits) - 1).flatten(-2).movedim(-1, at), bits


def _awq(codes: Tensor, at: int, _bits: int) -> Tensor:
    return codes.unflatten(at, (-1, 8)).index_select(at + 1, torch.tensor(_AWQ_POSITIONS)).flatten(at, at + 1).float()


#: :attr:`Grid.numbers` to the function that decodes packed codes along a dim.
_UNPACKED: Mapping[str, Callable[[Tensor, int, int], Tensor]] = {
    "uint": lambda codes, _at, _bits: codes.float(),
    "uint_minus_1": lambda codes, _at, bits: (codes + 1 & (1 << bits) - 1).float(),
    "offset_binary": lambda codes, _at, bits: (codes - (1 << bits - 1)).float(),
    "awq": _awq,
    "e2m1": lambda codes, _at, _bits: torch.tensor(_E2M1)[codes.int()],
}
#: The same for tensors that are not packed.
_READ: Mapping[str, Callable[[Tensor], Tensor]] = {
    PLAIN: Tensor.float,
    "e8m0": lambda tensor: tensor.view(torch.float8_e8m0fnu).float(),
    "int8_absmax": lambda tensor: tensor.float() / 127,
}


def is_readable(grid: Grid) -> bool:
    """Whether the numbers of a stored tensor can be read."""
    return grid.numbers in _UNPACKED or grid.numbers in _READ
