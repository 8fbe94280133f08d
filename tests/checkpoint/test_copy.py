"""The copy engine with random tensors and placements, compared with numpy indexing."""

import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import shardconv
from shardconv.checkpoint.engine import copy as engine
from shardconv.checkpoint.engine import geometry as byte_ranges
from shardconv.checkpoint.engine.copy import CopyJob, FileRows, Shards, held_stripes, split_into_stripes
from shardconv.checkpoint.engine.geometry import geometry, unsharded
from shardconv.checkpoint.engine.shards import ShardReader, ShardWriter
from shardconv.files.fileio import _WRITE_BYTES, LocalOutputFiles
from shardconv.files.input_files import InputFiles
from shardconv.plan.placement import Interval, Padding, Placement, Unit, shard_dim
from shardconv.support.errors import IntegrityError
from tests.support.checkpoints import llama_config, write_checkpoint
from tests.support.matrix import cases
from tests.support.placements import shard_of

DTYPES = {"U8": np.uint8, "BF16": np.uint16, "F32": np.uint32, "C64": np.uint64}


@st.composite
def placements(draw, tp: int):
    """A shape and a placement for it: any dim, fused, grouped, with replicas, padded or replicated."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    if not shape or draw(st.booleans()):
        return tuple(shape), Placement.replicated(tp)
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["even", "fused", "grouped", "replicas", "padded"]))
    if kind == "even":
        placement = shard_dim(dim, [Unit(tp * draw(st.integers(1, 3)), draw(st.integers(1, 3)))], tp)
    elif kind == "fused":
        placement = shard_dim(
            dim, [Unit(tp * n) for n in draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))], tp
        )
    elif kind == "grouped":
        groups = draw(st.sampled_from([n for n in range(1, 9) if tp % n == 0]))
        placement = shard_dim(dim, [Unit(tp, 2), Unit(1, 2, replicate=True)], tp, groups=groups)
    elif kind == "replicas":
        heads = draw(st.sampled_from([n for n in range(1, 9) if tp % n == 0]))
        placement = shard_dim(dim, [Unit(heads, draw(st.integers(1, 3)), replicate=True)], tp)
    else:
        parts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=2))
        placement = shard_dim(dim, [Unit(n, pad=True) for n in parts], tp)
    shape[dim] = placement.size
    return tuple(shape), placement


@st.composite
def tensors_and_placements(draw):
    """Some tensors, each with a placement for N ranks and one for M ranks."""
    tensors = []
    old_tp, new_tp = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 4, 6]))
    for _ in range(draw(st.integers(1, 4))):
        shape, old = draw(placements(old_tp))
        new_shape, new = draw(placements(new_tp))
        if new_shape != shape:
            new = Placement.replicated(new_tp)
        tensors.append((draw(st.sampled_from(sorted(DTYPES))), shape, old, new))
    return tensors


def side(arrays, placements_, rows=None, ranks=None) -> tuple[list[Shards], list[bytes]]:
    """The positions of shards, and the files, built by numpy.

    ``rows`` has those of the shards of each tensor, with zeros between them; None for contiguous shards. ``ranks`` has
    the ranks whose files there are; None for all.
    """
    chosen = range(placements_[0].num_ranks) if ranks is None else ranks
    rows = rows or [None] * len(arrays)
    files = [b""] * len(chosen)
    shards = []
    names = {value: key for key, value in DTYPES.items()}
    for array, placement, one in zip(arrays, placements_, rows, strict=True):
        positions = [len(file) for file in files]
        of_tensor = geometry(placement, names[array.dtype.type], array.shape, ranks)
        in_file = None if one is None else [one] * len(chosen)
        shards.append(Shards(of_tensor, range(len(chosen)), positions, rows=in_file))
        files = [
            file + in_rows(shard_of(array, placement, rank), one) for rank, file in zip(chosen, files, strict=True)
        ]
    return shards, files


def in_rows(shard: np.ndarray, rows: FileRows | None) -> bytes:
    """The bytes of a shard in a file."""
    data = shard.tobytes()
    if rows is None:
        return data
    after = bytes(rows.stride - rows.size)
    return b"".join(data[at : at + rows.size] + after for at in range(0, len(data), rows.size))


def write(folder: Path, prefix: str, files: list[bytes]) -> list[Path]:
    paths = [folder / f"{prefix}{number}" for number in range(len(files))]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    return paths


def run(folder, old, old_files, new, new_sizes, *, stripe_bytes, checksums=None, threads=2):
    """Copy what new shards need from one placement to another; returns the new files and their checksums."""
    sizes = [shards.geometry.num_bytes for shards in old]
    stripes = held_stripes(split_into_stripes(sizes, stripe_bytes), new)
    inputs = InputFiles(write(folder, "old", old_files), [b""] * len(old_files), [len(file) for file in old_files])
    paths = [folder / f"new{number}" for number in range(len(new_sizes))]
    for path in paths:
        path.unlink(missing_ok=True)
    with inputs, LocalOutputFiles(paths, [b""] * len(paths), new_sizes, 0o666, may_exist=False) as outputs:
        labels, names = [f"old{n}" for n in range(len(old_files))], [f"t{n}" for n in range(len(old))]
        reader = ShardReader(old, inputs, labels=labels, names=names, checksums=checksums)
        writer = ShardWriter(new, outputs, num_stripes=len(stripes), with_checksums=True)
        CopyJob(stripes, reader, [writer]).run(threads=threads)
    return [path.read_bytes() for path in paths], writer.checksums


def random_rows(rng: np.random.Generator) -> FileRows | None:
    """Rows of some bytes, with bytes of other tensors between them, or None."""
    size, space = int(rng.integers(1, 24)), int(rng.integers(0, 4))
    return FileRows(size, size + space) if space else None


@pytest.mark.parametrize(
    ("processors", "processes", "threads"),
    [(1, 1, 1), (2, 1, 2), (64, 1, 8), (16, 2, 8), (16, 8, 2), (64, 8, 8), (2, 8, 1)],
)
def test_threads_share_the_processors_of_a_host(monkeypatch, processors, processes, threads):
    monkeypatch.setattr(engine.os, "sched_getaffinity", lambda _: range(processors))
    assert engine.default_threads(processes) == threads


def test_blocks_of_many_threads_have_the_memory_of_a_few(tmp_path, monkeypatch):
    """And buffers have the size of a block, also of row parallel weights that are larger than a block."""
    blocks, buffers = [], set()

    class Recorded(engine.Scratch):
        def __init__(self, block_bytes: int, *arguments: object) -> None:
            super().__init__(block_bytes, *arguments)
            if self._shared is not None:
                blocks.append(block_bytes)

        def take(self, name: str, size: int) -> memoryview:
            buffers.add(size)
            return super().take(name, size)

    monkeypatch.setattr(engine, "Scratch", Recorded)
    monkeypatch.setattr("shardconv.checkpoint.split.manifest.STRIPE_BYTES", 2**16)
    config = llama_config(layers=1, hidden=256, intermediate=8192)
    shardconv.split(write_checkpoint(tmp_path / "source", config=config), tmp_path / "out", tp=2, threads=10_000)
    assert len(blocks) > 8
    assert sum(blocks) <= 4 * 2**20
    assert 0 < max(buffers) <= engine.BLOCK_BYTES


@pytest.mark.parametrize("fails", [False, True])
def test_few_threads_keep_parts_of_tensors_at_a_time(fails):
    """A thread that waits for such buffers gets them when a stripe is copied, or when its thread fails."""
    lock, room, holders, most = threading.Lock(), [], {}, []

    class Reader:
        tensors, is_remote = [Shards(unsharded(1024), [0], [0])], False

        def prefetch(self, _stripe: object) -> None: ...
        def cancel(self) -> None: ...

        def gather(self, state: object, _span: object, _block: object, scratch: engine.Scratch) -> None:
            outer, inner = scratch.parts(), scratch.nested("inner").parts()
            assert outer.nested("inner") is inner is not outer
            with lock:
                assert holders.setdefault(id(outer), state) is state
                room.append(outer.kept_bytes)
                most.append(len(holders))
            time.sleep(0.002)

        def finish(self, state: object, _stripe: object) -> None:
            with lock:
                del holders[next(key for key, holder in holders.items() if holder is state)]
            if fails and len(room) > 20:
                raise IntegrityError("damaged")

    stripes = split_into_stripes([1024], 16)
    job = CopyJob(stripes, Reader(), [])
    if fails:
        with pytest.raises(IntegrityError, match="damaged"):
            job.run(threads=8)
    else:
        job.run(threads=8)
        assert len(room) == len(stripes) == 64
    assert 1 <= max(most) == engine.KEPT_BYTES // max(room) < 8


@pytest.mark.parametrize("examples", cases([25, 75], lambda examples: examples == 25))
def test_copy_between_any_two_placements(tmp_path, monkeypatch, examples):
    """split, reshard and merge are such copies; each result equals that of numpy."""

    @settings(max_examples=examples)
    @given(
        case=tensors_and_placements(),
        stripe_bytes=st.integers(1, 200),
        block_bytes=st.integers(1, 200),
        seed=st.integers(0, 9),
    )
    def check(case, stripe_bytes, block_bytes, seed):
        monkeypatch.setattr(engine, "BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(engine, "BLOCK_BYTES_PER_SHARD", 1)
        rng = np.random.default_rng(seed)
        arrays = random_arrays(rng, case)
        old, old_files = side(arrays, [old for _, _, old, _ in case], [random_rows(rng) for _ in arrays])
        new, new_files = side(arrays, [new for _, _, _, new in case], [random_rows(rng) for _ in arrays])
        source, source_file = in_one_file(arrays)

        split, checksums = run(
            tmp_path, source, [source_file], old, [len(file) for file in old_files], stripe_bytes=stripe_bytes
        )
        assert split == old_files
        resharded, _ = run(
            tmp_path, old, split, new, [len(file) for file in new_files], stripe_bytes=stripe_bytes, checksums=checksums
        )
        assert resharded == new_files
        merged, _ = run(
            tmp_path, old, split, source, [len(source_file)], stripe_bytes=stripe_bytes, checksums=checksums
        )
        assert merged == [source_file]

    check()


@pytest.mark.parametrize("examples", cases([20, 50], lambda examples: examples == 20))
def test_copy_to_some_ranks(tmp_path, monkeypatch, examples):
    """Whatever is not read, files are those of numpy, and checksums those of a copy to all ranks."""

    @settings(max_examples=examples)
    @given(
        case=tensors_and_placements(),
        stripe_bytes=st.integers(1, 200),
        gap=st.integers(1, 40),
        seed=st.integers(0, 9),
        data=st.data(),
    )
    def check(case, stripe_bytes, gap, seed, data):
        monkeypatch.setattr(byte_ranges, "GAP_BYTES", gap)
        geometry.cache_clear()
        tp = case[0][2].num_ranks
        ranks = tuple(data.draw(st.lists(st.integers(0, tp - 1), min_size=1, unique=True)))
        arrays = random_arrays(np.random.default_rng(seed), case)
        source, source_file = in_one_file(arrays)
        placements_ = [old for _, _, old, _ in case]
        (every, files), (some, expected) = side(arrays, placements_), side(arrays, placements_, ranks=ranks)
        _, checksums = run(
            tmp_path, source, [source_file], every, [len(file) for file in files], stripe_bytes=stripe_bytes
        )
        found, some_checksums = run(
            tmp_path, source, [source_file], some, [len(file) for file in expected], stripe_bytes=stripe_bytes
        )
        assert found == expected
        assert some_checksums == [checksums[rank] for rank in ranks]

    check()


@pytest.mark.parametrize("rank", [0, 1])
def test_copy_of_padding_before_everything_else(tmp_path, monkeypatch, rank):
    """The padding at the beginning of a shard, and a shard of padding only, have their checksum."""
    monkeypatch.setattr(byte_ranges, "GAP_BYTES", 1)
    geometry.cache_clear()
    placement = Placement(0, 200, ((Padding(2),), (Padding(3), Interval(150, 200)), (Interval(0, 150),)))
    array = np.arange(1, 201, dtype=np.uint8)
    source, source_file = in_one_file([array])
    (every, files), (some, expected) = side([array], [placement]), side([array], [placement], ranks=(rank,))
    _, checksums = run(tmp_path, source, [source_file], every, list(map(len, files)), stripe_bytes=70)
    found, some_checksums = run(tmp_path, source, [source_file], some, list(map(len, expected)), stripe_bytes=70)
    assert found == expected
    assert some_checksums == [checksums[rank]]


def random_arrays(rng: np.random.Generator, case) -> list[np.ndarray]:
    return [
        rng.integers(1, 256, (*shape, np.dtype(DTYPES[dtype]).itemsize), np.uint8).view(DTYPES[dtype]).reshape(shape)
        for dtype, shape, _, _ in case
    ]


def in_one_file(arrays) -> tuple[list[Shards], bytes]:
    """Full tensors in one file: their positions, and the file."""
    starts = np.cumsum([0, *(array.nbytes for array in arrays)])
    shards = [Shards(unsharded(one.nbytes), (0,), (int(start),)) for one, start in zip(arrays, starts, strict=False)]
    return shards, b"".join(array.tobytes() for array in arrays)


def test_overlapping_intervals_are_compared(tmp_path):
    """Intervals of two ranks overlap without being equal; the bytes that both hold are compared."""
    array = np.arange(1, 13, dtype=np.uint8).reshape(6, 2)
    shards, files = side([array], [Placement(0, 6, ((Interval(0, 4),), (Interval(2, 6),)))])
    source, source_file = in_one_file([array])
    merged, _ = run(tmp_path, shards, files, source, [array.nbytes], stripe_bytes=100)
    assert merged == [source_file]
    files[1] = b"\xff" + files[1][1:]
    with pytest.raises(IntegrityError, match="old1: t0 differs from the shard of a lower rank"):
        run(tmp_path, shards, files, source, [array.nbytes], stripe_bytes=100)


@given(sizes=st.lists(st.integers(0, 100), max_size=12), stripe_bytes=st.integers(1, 50))
def test_stripes_cover_every_byte_once_and_in_order(sizes, stripe_bytes):
    stripes = split_into_stripes(sizes, stripe_bytes)
    covered = [(span.tensor, byte) for stripe in stripes for span in stripe for byte in range(span.start, span.stop)]
    assert covered == [(tensor, byte) for tensor, size in enumerate(sizes) for byte in range(size)]
    assert all(sum(span.stop - span.start for span in stripe) <= stripe_bytes for stripe in stripes)


@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [_WRITE_BYTES], [_WRITE_BYTES + 1], [3, 0, 2 * _WRITE_BYTES, 5], [5, 2 * _WRITE_BYTES - 1]]
)
@pytest.mark.parametrize("gap", [0, 7])
def test_ranges_of_any_sizes_are_written(tmp_path, sizes, gap):
    """Also those that are written in pieces, adjacent or between bytes that stay zero."""
    path = tmp_path / "out"
    starts = [gap + sum(sizes[:number]) + gap * number for number in range(len(sizes))]
    data = random.Random(0).randbytes(sum(sizes))
    with LocalOutputFiles([path], [b""], [sum(sizes) + gap * (len(sizes) + 1)], 0o666, may_exist=False) as outputs:
        outputs.write_ranges(0, memoryview(data), zip(starts, sizes, strict=True))
    parts = [data[sum(sizes[:number]) : sum(sizes[: number + 1])] for number in range(len(sizes))]
    assert path.read_bytes() == bytes(gap) + b"".join(part + bytes(gap) for part in parts)


def small_tensors(count: int, tp: int) -> tuple[list[np.ndarray], list[Shards], list[bytes]]:
    """Matrices of different shapes whose columns are sharded, with the positions of the shards and the files."""
    arrays = [np.arange(number + 1, dtype="u1").repeat(8 * tp).reshape(-1, 2 * tp) for number in range(count)]
    return arrays, *side(arrays, [shard_dim(1, [Unit(2 * tp)], tp)] * count)


def test_small_tensors_are_written_together(tmp_path, monkeypatch):
    """Their shards are hashed and written at once, unlike those of larger tensors."""
    arrays, shards, files = small_tensors(20, 4)
    source, source_file = in_one_file(arrays)
    written, write_to = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *arguments: written.append(len(arguments[1])) or write_to(*arguments))
    sizes = [len(file) for file in files]
    split, checksums = run(tmp_path, source, [source_file], shards, sizes, stripe_bytes=len(source_file))
    assert split == files
    assert checksums == [[xxhash.xxh3_128_hexdigest(file)] for file in files]
    assert written == sizes
    written.clear()
    merged, _ = run(tmp_path, shards, files, source, [len(source_file)], stripe_bytes=len(source_file))
    assert merged == [source_file]
    assert written == [len(source_file)]


def test_number_of_tensors_of_a_block_is_limited(tmp_path, monkeypatch):
    """Otherwise the memory for them would grow with the number of ranks."""
    monkeypatch.setattr(engine, "_MAX_SPANS", 3)
    arrays, shards, files = small_tensors(20, 4)
    source, source_file = in_one_file(arrays)
    put, counts = ShardWriter.put, []

    def record(self: ShardWriter, state: object, spans: Sequence[object], *arguments: Any) -> None:
        counts.append(len(spans))
        put(self, state, spans, *arguments)

    monkeypatch.setattr(ShardWriter, "put", record)
    split, _ = run(tmp_path, source, [source_file], shards, [len(file) for file in files], stripe_bytes=2**20)
    assert split == files
    assert counts == [3] * 6 + [2]


def test_bytes_of_a_rank_with_several_files_are_hashed_in_the_order_of_the_tensors(tmp_path):
    arrays = [np.full(size, size, "u1") for size in (3, 5, 7, 11)]
    source, source_file = in_one_file(arrays)
    places = [(0, 0), (1, 0), (0, 3), (1, 5)]
    new = [Shards(one.geometry, [file], [at]) for one, (file, at) in zip(source, places, strict=True)]
    stripes = split_into_stripes([array.nbytes for array in arrays])
    inputs = InputFiles(write(tmp_path, "old", [source_file]), [b""], [len(source_file)])
    paths = [tmp_path / "first", tmp_path / "second"]
    with inputs, LocalOutputFiles(paths, [b"", b""], [10, 16], 0o666, may_exist=False) as outputs:
        reader = ShardReader(source, inputs, labels=["old"], names=["t"] * len(arrays))
        writer = ShardWriter(new, outputs, num_stripes=1, with_checksums=True, rank_of=[0, 0])
        CopyJob(stripes, reader, [writer]).run()
    assert [path.read_bytes() for path in paths] == [bytes([3] * 3 + [7] * 7), bytes([5] * 5 + [11] * 11)]
    assert writer.checksums == [[xxhash.xxh3_128_hexdigest(source_file)]]


def test_files_that_are_free_come_first(tmp_path, monkeypatch):
    arrays, shards, files = small_tensors(1, 4)
    source, source_file = in_one_file(arrays)
    written, write_ranges = [], LocalOutputFiles.write_ranges

    def record(self: LocalOutputFiles, number: int, *arguments: Any) -> None:
        written.append(number)
        write_ranges(self, number, *arguments)

    monkeypatch.setattr(LocalOutputFiles, "write_ranges", record)
    monkeypatch.setattr(LocalOutputFiles, "would_wait", lambda _, number: number in {0, 2} and len(written) < 3)
    split, _ = run(tmp_path, source, [source_file], shards, [len(file) for file in files], stripe_bytes=2**20)
    assert split == files
    assert written == [1, 3, 0, 2]
