"""Reading ahead: the right bytes, each fetched once, and no more of them in memory than allowed."""

import mmap
import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from weakref import ref

import pytest

from shardconv.files import fileio, input_files
from shardconv.files.input_files import InputFiles
from shardconv.files.storage import read_ahead
from shardconv.files.storage.read_ahead import ReadAhead

CHUNK, ROOM = 64, 256
DATA = bytes(range(256)) * 40


class File:
    """A file whose ranges arrive at once.

    Attributes:
        fetched: how often each byte was fetched.
    """

    def __init__(self) -> None:
        self.fetched = [0] * len(DATA)
        self._lock = threading.Lock()

    def fetch(self, start: int, stop: int) -> Future[memoryview]:
        with self._lock:
            for at in range(start, stop):
                self.fetched[at] += 1
        future: Future[memoryview] = Future()
        future.set_result(memoryview(DATA)[start:stop])
        return future


class Budget(read_ahead.Budget):
    """A budget that remembers its use."""

    def __init__(self) -> None:
        super().__init__(ROOM)
        self.least = ROOM

    def take(self, size: int) -> bool:
        taken = super().take(size)
        self.least = min(self.least, self._room)
        return taken


@pytest.fixture
def budget(monkeypatch) -> Budget:
    made = Budget()
    monkeypatch.setattr(read_ahead, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(read_ahead, "BUDGET", made)
    return made


def read_stripe(ahead: ReadAhead, file: File, start: int, stop: int, block: int, *, may_view: bool = False) -> bytes:
    """Announce a range and read it block by block, as the copy engine does, from memory where that is allowed."""
    ahead.announce([(file, start, stop)])
    result = bytearray(stop - start)
    for at in range(start, stop, block):
        end = min(at + block, stop)
        view = ahead.view(file, at, end - at) if may_view else None
        if view is None:
            ahead.read(file, memoryview(result)[at - start : end - start], at)
        else:
            result[at - start : end - start] = view
        del view
    return bytes(result)


def read_now(ahead: ReadAhead, file: File, start: int, size: int) -> bytes:
    """Read a range without an announcement of it."""
    result = bytearray(size)
    ahead.read(file, memoryview(result), start)
    return bytes(result)


@pytest.mark.parametrize("block", [1, 48, 64, 100, 1000])
@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("may_view", [False, True])
def test_every_byte_is_right_and_fetched_once(budget, may_view, threads, block):
    ahead, file, size = ReadAhead(), File(), 640
    with ThreadPoolExecutor(threads) as pool:
        starts = range(0, len(DATA), size)
        stripe = partial(read_stripe, ahead, file, block=block, may_view=may_view)
        read = list(pool.map(lambda start: stripe(start, start + size), starts))
    assert b"".join(read) == DATA
    assert set(file.fetched) == {1}
    assert budget.least >= 0


@pytest.mark.parametrize("may_view", [False, True])
def test_the_room_is_used_and_given_back(budget, may_view):
    ahead, file = ReadAhead(), File()
    read_stripe(ahead, file, 0, len(DATA), 100, may_view=may_view)
    assert budget.least == 0
    ahead.cancel()
    assert budget.take(ROOM)


@pytest.mark.parametrize("may_view", [False, True])
def test_a_range_that_was_read_is_freed_before_the_next_one_is_fetched(budget, may_view):
    """The bytes that exist at any time, not those that are counted as used."""
    ahead, file, made, exist = ReadAhead(), File(), [], []

    def fetch(start: int, stop: int) -> Future[memoryview]:
        exist.append(stop - start + sum(len(data) for one in made if (data := one()) is not None))
        data = memoryview(bytearray(DATA[start:stop]))
        made.append(ref(data))
        future: Future[memoryview] = Future()
        future.set_result(data)
        return future

    file.fetch = fetch
    assert read_stripe(ahead, file, 0, len(DATA), 48, may_view=may_view) == DATA
    assert max(exist) == ROOM


def test_memory_is_viewed_where_one_request_has_a_range(budget):
    ahead, file = ReadAhead(), File()
    ahead.announce([(file, 0, 2 * CHUNK)])
    sizes = [view and len(view) for view in (ahead.view(file, at, 48) for at in (0, 48, 64))]
    assert sizes == [48, None, 48]
    assert ahead.view(file, 5000, 8) is None  # it was not announced


def test_what_was_announced_and_not_read_is_forgotten(budget):
    ahead, file = ReadAhead(), File()
    ahead.announce([(file, 0, 1000)])
    assert read_stripe(ahead, file, 5000, 5640, 64) == DATA[5000:5640]
    ahead.cancel()
    assert budget.take(ROOM)


def test_reads_after_a_cancellation_raise(budget):
    ahead, file = ReadAhead(), File()
    ahead.cancel()
    file.fetch = lambda start, stop: Future()
    with pytest.raises(InterruptedError):
        ahead.read(file, memoryview(bytearray(10)), 0)


#: An announced range, the reads, each with its position and size, and whether memory is full before the first one.
READS = {
    "more than was announced": ((100, 400), [(0, 600)], False),
    "every other range": ((0, 192), [(at, 8) for at in (*range(0, 192, 16), *range(8, 192, 16))], False),
    "before an announced range": ((100, 200), [(0, 200)], True),
    "out of order": ((0, 640), [(320, 320), (0, 320)], True),
}


@pytest.mark.parametrize("case", READS)
def test_ranges_are_fetched_once(budget, case):
    (start, stop), reads, is_full = READS[case]
    assert not is_full or budget.take(ROOM)
    ahead, file = ReadAhead(), File()
    ahead.announce([(file, start, stop)])
    for at, size in reads:
        assert read_now(ahead, file, at, size) == DATA[at : at + size]
        if is_full:
            budget.give(ROOM)
            ahead._fill()
            is_full = False
    end = max(at + size for at, size in reads)
    assert file.fetched[:end] == [1] * end
    assert budget.take(ROOM)


def test_ranges_that_alternate_make_room(budget):
    ahead, file = ReadAhead(), File()
    ahead.announce([(file, 0, 640)])
    for at in range(0, 640, 16):
        assert read_now(ahead, file, at, 8) == DATA[at : at + 8]
        assert any(chunk.range.start <= at < chunk.range.stop for chunk in ahead._ahead.chunks)
    for at in range(8, 640, 16):
        assert read_now(ahead, file, at, 8) == DATA[at : at + 8]
    assert sum(file.fetched) <= 2 * 640  # at most once for each of the two tensors


@pytest.mark.parametrize("is_full", [False, True])
def test_the_time_of_a_read_does_not_depend_on_the_ranges_to_come(budget, monkeypatch, is_full):
    """With room for a few of them and without any, counted as the ranges that a read is compared with."""
    ahead, file, compared, contains = ReadAhead(), File(), [], read_ahead._contains
    monkeypatch.setattr(read_ahead, "MAX_BYTES", ROOM)
    monkeypatch.setattr(read_ahead, "_contains", lambda *one: compared.append(one) or contains(*one))
    assert not is_full or budget.take(ROOM)
    assert read_stripe(ahead, file, 0, len(DATA), 16) == DATA
    assert len(compared) <= 4 * len(DATA) // 16
    assert set(file.fetched) == {1}


def test_a_cancellation_before_a_request_is_registered_cancels_it(budget):
    ahead, file, future = ReadAhead(), File(), Future()

    def fetch(start: int, stop: int) -> Future[memoryview]:
        ahead.cancel()
        return future

    file.fetch = fetch
    ahead.announce([(file, 0, 1000)])
    assert future.cancelled()
    assert budget.take(ROOM)


@pytest.mark.parametrize(
    ("ranges", "calls"),
    [
        ([(0, 0, 4), (1, 2, 3), (0, 4, 5), (1, 5, 1)], 2),
        ([(0, 6, 4), (0, 0, 6)], 2),
        ([(0, 0, 6), (0, 3, 4), (0, 9, 0)], 3),
        ([], 0),
    ],
    ids=["touch", "descend", "overlap", "none"],
)
def test_local_files_are_prefetched_in_few_calls(tmp_path, monkeypatch, ranges, calls):
    asked = []
    monkeypatch.setattr(input_files, "will_need", lambda *one: asked.append(one))
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(bytes(10))
    with InputFiles(paths, [b"", b""], [10, 10]) as files:
        number_of = {file.descriptor: number for number, file in enumerate(files._files)}
        files.prefetch(iter(ranges))
    wanted = {(number, at) for number, start, size in ranges for at in range(start, start + size)}
    assert {(number_of[one], at) for one, start, size in asked for at in range(start, start + size)} == wanted
    assert len(asked) == calls


def test_mapped_files_are_read_as_the_system_reads_ahead(tmp_path, monkeypatch):
    asked, enlarged = [], []
    monkeypatch.setattr(input_files, "will_need", lambda *one: asked.append(one))
    monkeypatch.setattr(input_files, "enlarge_read_ahead", enlarged.append)
    (tmp_path / "a").write_bytes(bytes(10))
    with InputFiles([tmp_path / "a"], [b""], [10]) as files:
        assert files.views() == [bytes(10)]
        assert (asked, enlarged) == ([], [files._files[0].descriptor])


#: Prints the pages that the kernel provides for buffers which were used before, after a command.
REUSE = """
import resource, sys
from contextlib import suppress
from shardconv.cli import cli

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [b"x" * 2**23 for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with suppress(Exception):
    cli.main(sys.argv[1:], standalone_mode=False)
pages()
print(pages())
"""


def number_from(script: Path, *arguments: object) -> int:
    """The number that a script prints, in a process of its own, whose memory no other one has used."""
    command = [sys.executable, script, *map(str, arguments)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def has_small_pages():
    """Whether memory consists of pages of 4 KiB, unless a program asks for other ones."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return mmap.PAGESIZE == 4096 and not (setting.exists() and "[always]" in setting.read_text())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets options of glibc")
@pytest.mark.skipif(not has_small_pages(), reason="counts pages of 4 KiB")
def test_commands_that_copy_keep_the_memory_of_freed_buffers(tmp_path):
    script = tmp_path / "reuse.py"
    script.write_text(REUSE)
    kept, provided = (number_from(script, command, tmp_path / "none") for command in ("verify", "plan"))
    assert kept < 100 < 5000 < provided


#: Prints the number of arenas of the C library when threads allocate memory after a command.
ARENAS = """
import ctypes, sys, threading
from contextlib import suppress
from shardconv.cli import cli

with suppress(Exception):
    cli.main(sys.argv[2:], standalone_mode=False)
barrier = threading.Barrier(5)

def allocate():
    held = [bytes(1000 + size) for size in range(100)]
    barrier.wait()  # the memory is in use at the same time

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
barrier.wait()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
assert libc.malloc_info(0, file) == libc.fclose(file) == 0
print(open(sys.argv[1]).read().count("<heap "))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets options of glibc")
def test_threads_of_commands_that_copy_share_an_arena(tmp_path):
    script = tmp_path / "arenas.py"
    script.write_text(ARENAS)
    commands = (["verify", tmp_path / "none"], ["plan", tmp_path / "none"])
    shared, own = (number_from(script, tmp_path / "info", *command) for command in commands)
    assert shared == 1 < own


@pytest.mark.skipif(fileio.fadvise is None or not hasattr(os, "RWF_NOWAIT"), reason="uses calls of Linux")
@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_only_ranges_that_are_not_in_memory_are_asked_for(missing, monkeypatch):
    """Linux reads a page without waiting only if it is in memory; one of three inner pages may not be."""
    offset, size, page, looked, asked = 100, 10 * mmap.PAGESIZE, mmap.PAGESIZE, [], []

    def preadv(_descriptor, buffers, at, flags):
        assert flags == os.RWF_NOWAIT
        looked.append(at)
        if len(looked) - 1 == missing:
            raise BlockingIOError
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(fileio, "fadvise", lambda *given: asked.append(given))
    fileio.will_need(3, offset, size)
    assert asked == ([] if missing is None else [(3, offset, size, os.POSIX_FADV_WILLNEED)])
    assert all(offset // page < at // page < (offset + size - 1) // page for at in looked)
