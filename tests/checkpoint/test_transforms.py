"""Tensors whose rows are stored in another order or in several tensors: any range of bytes, exactly."""

import itertools
import random

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from shardconv.checkpoint.engine.copy import Scratch, Span, StripeState
from shardconv.checkpoint.engine.shards import Comparer
from shardconv.checkpoint.sources.dtype_conversion import with_dtype
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.stored_tensors import open_tensors
from shardconv.checkpoint.sources.transforms import Concatenation, Rows, rotary_rows
from shardconv.files.input_files import InputFiles
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError


def filled(transform, stored, size, ranges, block_bytes=64 * 2**10):
    """The bytes of a tensor, filled range by range."""

    def read(name, start, buffer):
        buffer[:] = stored[name][start : start + len(buffer)]

    scratch, data = Scratch(block_bytes), bytearray(size)
    for start, stop in ranges:
        transform.fill(memoryview(data)[start:stop], start, read, scratch)
    return bytes(data)


def cuts(size, count, seed):
    """Consecutive ranges with random boundaries."""
    bounds = sorted({0, size, *random.Random(seed).sample(range(1, size), count)})
    return list(itertools.pairwise(bounds))


@pytest.mark.parametrize("to_halves", [True, False])
@pytest.mark.parametrize("block_bytes", [16, 40, 4096])
def test_rows_of_heads_are_reordered_in_any_range(to_halves, block_bytes):
    heads, half, row = 5, 4, 6
    data = random.Random(0).randbytes(heads * 2 * half * row)
    neighbors = [data[at : at + row] for at in range(0, len(data), row)]
    halves = [
        neighbors[head * 2 * half + 2 * pair + side] for head in range(heads) for side in (0, 1) for pair in range(half)
    ]
    stored, expected = (neighbors, halves) if to_halves else (halves, neighbors)
    transform = rotary_rows("w", TensorSpec("U8", (heads * 2 * half, row)), 2 * half, to_halves=to_halves)
    for seed in range(20):
        ranges = cuts(len(data), 7, seed)
        assert filled(transform, {"w": b"".join(stored)}, len(data), ranges, block_bytes) == b"".join(expected)


def test_rows_of_several_tensors_are_joined_in_any_range():
    stored = {name: random.Random(name).randbytes(size) for name, size in (("a", 30), ("b", 12), ("c", 6))}
    transform = Concatenation.of_rows((Rows("a", 0, 30), Rows("b", 30, 42), Rows("c", 42, 48)), 6)
    for seed in range(20):
        assert filled(transform, stored, 48, cuts(48, 9, seed)) == b"".join(stored.values())


def test_literals_and_zeros_between_rows_are_joined_in_any_range():
    rows, transform = random.Random(0).randbytes(20), Concatenation()
    parts = ((b"ab", 2, 0), ("a", 9, 11), (b"cd", 5, 0), (b"e", 1, 0), (b"f", 3, 0), (b"gh", 2, 1), ("a", 4, 0))
    for part, size, offset in parts:
        transform.add(part, size, offset)
    expected = b"ab" + rows[11:] + b"cd\0\0\0" + b"ef\0\0" + b"h\0" + rows[:4]
    assert transform.size == len(expected)
    for seed in range(20):
        assert filled(transform, {"a": rows}, len(expected), cuts(len(expected), 9, seed)) == expected


@pytest.mark.parametrize("block_bytes", [256, 4096])
def test_layers_of_transforms_do_not_share_buffers(tmp_path, block_bytes):
    """Rows are reordered, converted and reordered back: the same elements in another dtype."""
    heads, half, columns = 6, 4, 8
    elements = np.random.default_rng(0).standard_normal((heads * 2 * half, columns)).astype("<f4")
    save_file({"w": elements}, tmp_path / "model.safetensors")
    source = open_source(tmp_path / "model.safetensors")
    stored = source.stored.with_layer({"w": rotary_rows("w", source.specs["w"], 2 * half)})
    converted = with_dtype(replace(source, converted_from=stored), "fp16")
    stored = converted.stored.with_layer({"w": rotary_rows("w", converted.specs["w"], 2 * half, to_halves=False)})
    reader, inputs = open_tensors(replace(converted, converted_from=stored), converted.specs, None)
    block = memoryview(bytearray(elements.size * 2))
    with inputs:
        reader.gather(StripeState(0), Span(0, 0, len(block)), block, Scratch(block_bytes))
    assert bytes(block) == elements.astype("<f2").tobytes()


def test_heads_are_read_once_where_blocks_are_compared_in_parts(tmp_path, monkeypatch):
    """Heads of 768 KiB, of which parts of 512 KiB would each read a whole one."""
    heads, head_rows, columns = 5, 12, 2**14
    elements = np.random.default_rng(0).standard_normal((heads * head_rows, columns)).astype("<f4")
    save_file({"w": elements}, tmp_path / "model.safetensors")
    source = open_source(tmp_path / "model.safetensors")
    stored = source.stored.with_layer({"w": rotary_rows("w", source.specs["w"], head_rows)})
    reader, inputs = open_tensors(replace(source, converted_from=stored), source.specs, None)
    expected = elements.reshape(heads, head_rows // 2, 2, columns).swapaxes(1, 2).tobytes()
    block, state, read = memoryview(bytearray(expected)), StripeState(0), []
    read_ranges = InputFiles.read_ranges

    def count(self, number, buffer, ranges):
        read.append(len(buffer))
        read_ranges(self, number, buffer, ranges)

    monkeypatch.setattr(InputFiles, "read_ranges", count)
    with inputs:
        comparer = Comparer(reader, ["w"], ["w"], reader.tensors)
        comparer.put(state, [Span(0, 0, len(block))], block, Scratch(4 * 2**20))
        assert (state.problem, sum(read)) == ("", len(block))
        block[-1] ^= 1
        comparer.put(state, [Span(0, 0, len(block))], block, Scratch(4 * 2**20))
    assert state.problem == f"w: byte {len(block) - 1} of the tensor differs from the source"


@pytest.mark.parametrize("to_halves", [True, False])
def test_rows_of_a_head_form_pairs(to_halves):
    with pytest.raises(PlanError, match=r"w: has heads of 3 rows \(expected an even number\): correct head_dim"):
        rotary_rows("w", TensorSpec("U8", (12, 2)), 3, to_halves=to_halves)
