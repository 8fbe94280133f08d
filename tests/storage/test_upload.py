"""Uploads get the bytes that threads wrote in any order, in bounded memory."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from obstore.store import LocalStore

from shardconv.files.storage import upload
from shardconv.files.storage.clients import Key
from shardconv.files.storage.read_ahead import Budget
from shardconv.files.storage.upload import UploadFiles
from shardconv.support.errors import OutputError
from tests.support.matrix import MATRIX


@pytest.fixture
def store(tmp_path) -> LocalStore:
    """A store that frees the memory of a part when it has its bytes; one in memory keeps it."""
    return LocalStore(tmp_path)


@pytest.fixture
def _small(monkeypatch):
    """Parts of a page, of which memory has room for four."""
    monkeypatch.setattr(upload, "part_bytes", lambda _: 4096)
    monkeypatch.setattr(upload, "MEMORY_BYTES", 4 * 4096)


def ranges(size: int, chooser: random.Random) -> list[tuple[int, int]]:
    """Ranges that cover a file, each up to two and a half parts long."""
    bounds = [0]
    while bounds[-1] < size:
        bounds.append(min(size, bounds[-1] + chooser.randint(1, 10_000)))
    return list(pairwise(bounds))


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=MATRIX) for seed in range(1, 40))])
def test_files_have_the_bytes_that_threads_wrote_in_any_order(store, seed):
    chooser = random.Random(seed)
    sizes = [chooser.choice([8, 4095, 4096, 4097, 8192, 100_000, 300_000]) for _ in range(chooser.randint(1, 5))]
    contents = [
        np.random.default_rng(seed + at).integers(0, 256, size, dtype=np.uint8).tobytes()
        for at, size in enumerate(sizes)
    ]
    files = UploadFiles(
        [Key(store, f"file-{at}", "file://x") for at in range(len(sizes))], [one[:8] for one in contents], sizes
    )
    jobs = [(at, *one) for at, size in enumerate(sizes) for one in ranges(size - 8, chooser)]
    chooser.shuffle(jobs)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda job: write(files, contents, *job), jobs))
    files.flush()
    assert store.list().collect() == []
    files.complete()
    assert [bytes(store.get(f"file-{at}").bytes()) for at in range(len(sizes))] == contents


def write(files: UploadFiles, contents: list[bytes], at: int, start: int, stop: int) -> None:
    files.write_ranges(at, memoryview(contents[at])[8 + start : 8 + stop], [(8 + start, stop - start)])


@pytest.mark.usefixtures("_small")
def test_parts_beyond_the_memory_are_in_a_temporary_file(store):
    files = UploadFiles([Key(store, "file", "file://x")], [b""], [100 * 4096])
    for number in range(1, 90):
        files.write_ranges(0, memoryview(bytes(4096)), [(number * 4096, 4096)])
    stored = files.uploads[0]._parts.values()
    assert sum(part.spool is None for part in stored) == 4
    assert sum(part.spool is not None for part in stored) == 85


@pytest.mark.usefixtures("_small")
def test_parts_without_room_in_the_budget_are_in_a_temporary_file(store, monkeypatch):
    monkeypatch.setattr(upload, "BUDGET", budget := Budget(6 * 4096))
    keys, prefixes, sizes = [Key(store, "file", "file://x")], [b"12345678"], [3 * 4096]
    first, second = (UploadFiles(keys, prefixes, sizes) for _ in range(2))
    assert first.uploads[0]._parts[0].spool is None
    assert second.uploads[0]._parts[0].spool is not None
    first.release()
    second.release()
    monkeypatch.setattr(upload.Upload, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        UploadFiles(keys, prefixes, sizes)
    assert budget.take(6 * 4096)


@pytest.mark.usefixtures("_small")
def test_a_full_temporary_disk_is_one_error(store, monkeypatch):
    files = UploadFiles([Key(store, "file", "file://x")], [b""], [100 * 4096])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(upload.os, "pwrite", full)
    with pytest.raises(OutputError, match="cannot store data that is uploaded later: No space left on device: free"):
        files.write_ranges(0, memoryview(bytes(89 * 4096)), [(4096, 89 * 4096)])


@pytest.mark.usefixtures("_small")
def test_a_file_with_bytes_that_were_not_written_is_an_error(store):
    files = UploadFiles([Key(store, "file", "file://x")], [b""], [8192])
    files.write_ranges(0, memoryview(bytes(8000)), [(0, 8000)])
    with pytest.raises(AssertionError, match="bytes of part 1 were not written"):
        files.flush()


@pytest.mark.usefixtures("_small")
def test_cancelling_wakes_threads_that_wait_for_memory(store, monkeypatch):
    monkeypatch.setattr(upload.PartMemory, "free", lambda *_: None)  # a store that never takes a part
    files = UploadFiles([Key(store, "file", "file://x")], [b""], [100 * 4096])
    raised = threading.Event()

    def fill() -> None:
        try:
            files.write_ranges(0, memoryview(bytes(99 * 4096)), [(0, 99 * 4096)])
        except InterruptedError:
            raised.set()

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    files.cancel()
    thread.join(10)
    assert raised.is_set()


def test_large_files_have_few_parts():
    assert upload.part_bytes(80 * 10**9) == 8 * 2**20
    assert upload.part_bytes(10**12) == 96 * 2**20
    assert upload.part_bytes(10**12) * upload.MAX_PARTS >= 10**12
