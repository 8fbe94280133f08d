"""Small messages between ranks of one machine, through memory that they share.

What a decoder says to its other ranks is a few KiB, twice a layer and token, and a socket costs more than the words: by
then the peer's threads sleep. Here a rank writes into its slot, posts a semaphore for each peer, and looks for theirs.

There are two slots a rank, used in turn. No rank can be two messages ahead of another, since each waits for all; so
nobody writes to what is still read. Each message says which one it is, and of what kind: ranks that do not call the
same are told, and whoever was interrupted in the middle cannot go on.
"""

import ctypes
import mmap
import os
import select
import threading
import time
import weakref
import zlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardconv.errors import PeerError

#: The longest message in bytes; for longer ones what a socket costs counts little.
SLOT_BYTES = 1 << 18
_SEMAPHORE_BYTES, _HEADER_BYTES = 64, 64
#: How long to look for a message before the processor is left to others, and how often the peers are looked after then.
_LOOK_SECONDS, _WATCH_SECONDS = 0.002, 1.0


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Exchange:
    """What the ranks of one machine give each other; see :meth:`open`. For one thread of each rank.

    Attributes:
        rank: of this process.
        pids: the processes of all ranks.
    """

    def __init__(self, memory: mmap.mmap, libc: Any, rank: int, processes: dict[int, int], timeout: timedelta) -> None:
        self.rank, self.pids = rank, list(processes)
        self._libc, self._timeout = libc, timeout.total_seconds()
        self._number, self._is_broken, self._lock = 0, False, threading.Lock()
        self._peers = {other: processes[pid] for other, pid in enumerate(self.pids) if other != rank}
        weakref.finalize(self, _close, list(processes.values()))
        count = len(self.pids)
        with torch.inference_mode(mode=False):
            semaphores, slots = torch.frombuffer(memory, dtype=torch.uint8).split(_split(count))
            slots = slots.view(2, count, _HEADER_BYTES + SLOT_BYTES)
            self._headers = slots[..., :_HEADER_BYTES].view(torch.int64)[..., :2]
            self._slots = slots[..., _HEADER_BYTES:]
        self._first_semaphore = semaphores.data_ptr()

    @classmethod
    def open(cls, ranks: int, rank: int, group: Any) -> Self | None:
        """Share memory with the other ranks of a group; all call it.

        The memory has no name, so nothing of it can outlive the processes.

        Returns:
            The same on every rank: an exchange, or None where the ranks are not all on one machine, or it is not Linux.
        """
        size, token = sum(_split(ranks)), os.urandom(16)
        descriptor, offer = -1, None
        if rank == 0:
            try:
                libc, descriptor = _libc(), os.memfd_create("shardconv")
                os.ftruncate(descriptor, size)
                memory = mmap.mmap(descriptor, size)
                memory[-len(token) :] = token
                first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                if any(libc.sem_init(first + i * _SEMAPHORE_BYTES, 1, 0) for i in range(ranks**2)):
                    raise OSError("no semaphores between processes")
                offer = f"/proc/{os.getpid()}/fd/{descriptor}", token
            except (OSError, AttributeError):
                offer = None
        said: list[Any] = [None] * ranks
        dist.all_gather_object(said, (os.getpid(), offer), group=group)
        found = None
        if said[0][1] is not None:
            path, token = said[0][1]
            found = (memory, libc) if rank == 0 else _join(path, token, size)
        processes = _watch([pid for pid, _ in said]) if found is not None else None
        everywhere = torch.tensor(int(processes is not None))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
        if descriptor >= 0:
            os.close(descriptor)
        if found is None or processes is None or not everywhere:
            _close([] if processes is None else processes.values())
            return None
        return cls(*found, rank, processes, group._get_backend(torch.device("cpu")).options._timeout)  # noqa: SLF001

    def fits(self, message: Tensor) -> bool:
        """Whether a message can be given; ranks that give messages of one shape and dtype agree about it."""
        return message.device.type == "cpu" and message.nbytes <= SLOT_BYTES

    def give(self, message: Tensor, purpose: str = "") -> Tensor:
        """Give a message to the others, and take theirs; all ranks call it.

        Args:
            message: [*], of the same shape and dtype on every rank.
            purpose: what it is for, the same on every rank.

        Returns:
            [ranks, *], all messages in the order of the ranks; to be read before the next call but one.

        Raises:
            PeerError: if a rank has ended.
            RuntimeError: if the ranks do not call the same, if one is not heard of for as long as the group waits, if
                an earlier call was interrupted, or if another thread is in one.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("two threads of a rank are in a message at once: their order is not the other ranks'")
        try:
            if self._is_broken:
                raise RuntimeError("an earlier message between the ranks was interrupted: start the processes anew")
            self._is_broken = True  # until all is through
            everyones = self._give(message, purpose)
            self._is_broken = False
            return everyones
        finally:
            self._lock.release()

    def _give(self, message: Tensor, purpose: str) -> Tensor:
        self._number += 1
        turn = self._number % 2
        everyones = self._slots[turn][:, : message.nbytes].view(message.dtype).view(len(self.pids), *message.shape)
        everyones[self.rank].copy_(message)
        kind = zlib.crc32(f"{message.dtype} {tuple(message.shape)} {purpose}".encode())
        self._headers[turn, self.rank, 0], self._headers[turn, self.rank, 1] = self._number, kind
        for other in self._peers:
            self._libc.sem_post(self._semaphore(self.rank, other))
        for other in self._peers:
            self._wait(other)
        if self._headers[turn].tolist() != [[self._number, kind]] * len(self.pids):
            raise RuntimeError(
                f"the ranks do not call the same: here it is {purpose or 'a message'} of {tuple(message.shape)}, "
                f"{message.dtype}"
            )
        return everyones

    def _semaphore(self, source: int, target: int) -> int:
        return self._first_semaphore + (source * len(self.pids) + target) * _SEMAPHORE_BYTES

    def _wait(self, other: int) -> None:
        semaphore, began = self._semaphore(other, self.rank), time.perf_counter()
        while time.perf_counter() < began + _LOOK_SECONDS:
            if self._libc.sem_trywait(semaphore) == 0:
                return
            os.sched_yield()
        while not self._sleep(semaphore):
            if select.select([self._peers[other]], [], [], 0)[0] and self._libc.sem_trywait(semaphore):
                raise PeerError(f"rank {other} of the group, process {self.pids[other]}, has ended")
            if time.perf_counter() > began + self._timeout:
                raise RuntimeError(f"rank {other} of the group was not heard of for {self._timeout:.0f} s")

    def _sleep(self, semaphore: int) -> bool:
        """Sleep until a semaphore is posted, or a while; whether it was."""
        until = time.time() + _WATCH_SECONDS
        return bool(self._libc.sem_timedwait(semaphore, _TimeSpec(int(until), int(until % 1 * 1e9))) == 0)


def _watch(pids: list[int]) -> dict[int, int] | None:
    """For each process a descriptor that can be read when it has ended; None where there are none."""
    found: dict[int, int] = {}
    try:
        for pid in pids:
            found[pid] = os.pidfd_open(pid)
    except (OSError, AttributeError):
        _close(found.values())
        return None
    return found


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _split(ranks: int) -> list[int]:
    """Bytes of the semaphores, and of the slots."""
    return [ranks**2 * _SEMAPHORE_BYTES, 2 * ranks * (_HEADER_BYTES + SLOT_BYTES)]


def _libc() -> Any:
    libc = ctypes.CDLL(None)
    for name in ("sem_init", "sem_post", "sem_trywait", "sem_timedwait"):
        getattr(libc, name).restype = ctypes.c_int
    libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    libc.sem_post.argtypes = libc.sem_trywait.argtypes = (ctypes.c_void_p,)
    libc.sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_TimeSpec))
    return libc


def _join(path: str, token: bytes, size: int) -> tuple[mmap.mmap, Any] | None:
    """The memory that the first rank offers, if it is on this machine."""
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return (memory, _libc()) if memory[-len(token) :] == token else None
    except (OSError, ValueError, AttributeError):
        return None
