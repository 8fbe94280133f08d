"""Edits: integers of a quantization format that are checked, and most of which depend on the rank.

Indices of groups count from the first group of a rank, and the stored shape of a packed weight is the shard's: an
integer is subtracted from the values of a shard, and added again when the full tensor is read. The values of the full
tensor follow from the quantization settings, and are compared with them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardconv.checkpoint.engine.copy import Edits
from shardconv.files.fileio import Bytes
from shardconv.plan.grid import PLAIN, SHAPE, ZERO, Grid, GridDim
from shardconv.support.errors import option

_DTYPES = {"I32": "<i4", "I64": "<i8", "U8": "<u1"}

_DAMAGED = f"the checkpoint is damaged, or it needs {option(config='FILE')} with another quantization_config"


def add(data: Bytes, dtype: str, offset: int, values: Sequence[int], *, sign: int = 1) -> None:
    """Add integers to the elements of a shard, in place. Results that are too large for the dtype wrap around.

    Args:
        data: bytes of the shard.
        dtype: its dtype in safetensors, ``I32`` or ``I64``.
        offset: offset of ``data`` in the shard, in bytes.
        values: one integer for all elements, or one for each element of the shard.
        sign: -1 to subtract.
    """
    elements = np.frombuffer(data, _DTYPES[dtype])
    first = offset // elements.itemsize
    elements += sign * np.array(values if len(values) == 1 else values[first : first + len(elements)], elements.dtype)


def fill(data: Bytes, edits: Edits, offset: int) -> None:
    """Write the values of a full tensor that follow from its grid; arguments as for :func:`difference`."""
    elements = np.frombuffer(data, _DTYPES[edits.dtype])
    elements[:] = _expected(edits.grid, np.arange(len(elements)) + offset // elements.itemsize)


def _expected(grid: Grid, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values of a full tensor at these positions."""
    if grid.content == SHAPE:
        return np.array(grid.shape)[positions]
    positions = positions % grid.shape[grid.dims[-1].dim or 0]
    return positions // grid.group if grid.group and grid.numbers != ZERO else np.zeros_like(positions)


def difference(data: Bytes, edits: Edits, offset: int) -> str:
    """Compare values of a full tensor with the values that its grid allows.

    Args:
        data: bytes of the full tensor.
        edits: of the tensor.
        offset: offset of ``data`` in the full tensor, in bytes.

    Returns:
        The first difference and how to fix it; "" if there is none.
    """
    elements, grid = np.frombuffer(data, _DTYPES[edits.dtype]), edits.grid
    positions = np.arange(len(elements)) + offset // elements.itemsize
    if grid.numbers == ZERO:
        return f"{edits.name}: is {elements[0]} (expected 0, the order of rows): {_DAMAGED}" if elements.any() else ""
    if grid.content == PLAIN:
        return _group_outside(edits.name, grid, elements, positions)
    expected = _expected(grid, positions)
    different = np.flatnonzero(elements != expected)
    if not len(different):
        return ""
    at = different[0]
    if grid.content == SHAPE:
        return (
            f"{edits.name}: dim {positions[at]} is {elements[at]} (expected {expected[at]}, from the shape of the "
            f"stored weight): {_DAMAGED}"
        )
    return (
        f"{edits.name}: input feature {positions[at]} is in group {elements[at]} (expected {expected[at]}, from "
        f"quantization_config): pass {option(config='FILE')} with the quantization_config of this checkpoint. It has "
        "desc_act (GPTQ) or actorder (compressed-tensors) if groups are in the order of activations"
    )


def _group_outside(name: str, grid: Grid, elements: NDArray[np.int64], positions: NDArray[np.int64]) -> str:
    """The first index of a group that does not exist, where groups are not consecutive; "" if there is none."""
    size = grid.shape[grid.dims[-1].dim or 0]
    last = GridDim(None, grid.group).count(size) - 1
    outside = np.flatnonzero((elements < 0) | (elements > last))
    if not len(outside):
        return ""
    at = outside[0]
    return (
        f"{name}: input feature {positions[at] % size} is in group {elements[at]} (expected 0 to {last}, as "
        f"quantization_config has groups of {grid.group}): {_DAMAGED}"
    )
