"""Tensors that are stored with strides: every range has the elements that numpy finds, and reads are small."""

from collections.abc import Callable

import numpy as np
import pytest

from shardconv.checkpoint.engine import arrays
from shardconv.checkpoint.engine.arrays import StridedTensor
from shardconv.checkpoint.engine.copy import KEPT_BYTES, Scratch

#: Views of an array of 12 x 10 x 14 elements.
VIEWS = {
    "transposed": lambda array: array.transpose(2, 1, 0),
    "middle dim last": lambda array: array.transpose(0, 2, 1),
    "columns": lambda array: array[:, :, 3:9],
    "every third": lambda array: array[::3, ::2, ::5],
    "rows": lambda array: array[2:7],
    "one dim": lambda array: array[:, 4, 2],
    "halves of columns in turn": lambda array: array.reshape(12, 10, 7, 2).transpose(0, 3, 2, 1),
    "expanded": lambda array: np.broadcast_to(array[0], (4, 10, 14)),
    "expanded in the middle": lambda array: np.broadcast_to(array[:, None, 0, :], (12, 5, 14)),
}


#: Bytes of a gap that is read, and of a part that is kept.
LIMITS = [(8, 64), (64, 1000), (400, 8000), (arrays._MAX_GAP, KEPT_BYTES)]


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize(("gap", "kept"), LIMITS)
def test_ranges_have_the_elements_of_the_view(name, dtype, gap, kept, monkeypatch):
    monkeypatch.setattr(arrays, "_MAX_GAP", gap)
    array = np.random.default_rng(0).integers(0, 256, 12 * 10 * 14).astype(dtype).reshape(12, 10, 14)
    view = VIEWS[name](array)
    size = array.itemsize
    stored = memoryview(array.reshape(-1).view(np.uint8))[view.ctypes.data - array.ctypes.data :]
    tensor = StridedTensor("x", size, view.shape, tuple(stride // size for stride in view.strides))
    reads, kept_sizes = [], [0]

    class Recorded(Scratch):
        def keep(self, name: str, key: object, size: int, fill: Callable[[memoryview], None]) -> memoryview:
            kept_sizes.append(size)
            return super().keep(name, key, size, fill)

    def read(label: str, start: int, buffer: memoryview) -> None:
        assert label == "x"
        reads.append(len(buffer))
        buffer[:] = stored[start : start + len(buffer)]

    expected = view.tobytes()
    rng, scratch = np.random.default_rng(1), Recorded(1, kept)
    for _ in range(20):
        start, stop = np.sort(rng.choice(view.size + 1, 2, replace=False)) * size
        block = memoryview(bytearray(int(stop - start)))
        tensor.fill(block, int(start), read, scratch)
        assert bytes(block) == expected[start:stop]
    assert max(reads) <= max(kept // 8, size)
    assert max(kept_sizes) <= kept
