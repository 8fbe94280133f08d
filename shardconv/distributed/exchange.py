"""Small messages between ranks of one machine, through memory that they share.

What a decoder says to its other ranks is a few KiB, twice a layer and token, and a socket costs more than the words: by
then the peer's threads sleep. Here a rank writes into its slot, posts a semaphore for each peer, and looks for theirs.

There are two slots a rank, used in turn. No rank can be two messages ahead of another, since each waits for all; so
nobody writes to what is still read, and nothing else has to be agreed.
"""

import ctypes
import mmap
import os
import time
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
    """What the ranks of one machine give each other; see :meth:`open`.

    Attributes:
        rank: of this process.
        pids: the processes of all ranks.
    """

    def __init__(self, memory: mmap.mmap, rank: int, pids: list[int], libc: Any) -> None:
        self.rank, self.pids = rank, pids
        self._libc, self._turn = libc, 0
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        count = len(pids)
        semaphores, slots = whole.split(_split(count))
        self._first_semaphore = semaphores.data_ptr()
        slots = slots.view(2, count, _HEADER_BYTES + SLOT_BYTES)
        self._sizes = slots[..., :8].view(torch.int64)[..., 0]
        self._slots = slots[..., _HEADER_BYTES:]
        self._peers = [other for other in range(count) if other != rank]

    @classmethod
    def open(cls, ranks: int, rank: int, group: Any) -> Self | None:
        """Share memory with the other ranks of a group; all call it.

        The memory has no name, so nothing of it can outlive the processes.

        Returns:
            The same on every rank: an exchange, or None where the ranks are not all on one machine, or it is not Linux.
        """
        size, token = sum(_split(ranks)), os.urandom(16)
        descriptor = -1
        offer: Any = None
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
        pids, found = [pid for pid, _ in said], None
        if said[0][1] is not None:
            path, token = said[0][1]
            found = (memory, libc) if rank == 0 else _join(path, token, size)
        everywhere = torch.tensor(int(found is not None))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
        if descriptor >= 0:
            os.close(descriptor)
        return cls(found[0], rank, pids, found[1]) if found is not None and everywhere else None

    def fits(self, message: Tensor) -> bool:
        """Whether a message can be given; ranks that give messages of one shape and dtype agree about it."""
        return message.device.type == "cpu" and message.nbytes <= SLOT_BYTES

    def give(self, message: Tensor) -> Tensor:
        """Give a message to the others, and take theirs; all ranks call it.

        Args:
            message: [*], of the same shape and dtype on every rank.

        Returns:
            [ranks, *], all messages in the order of the ranks; to be read before the next call but one.

        Raises:
            PeerError: if a rank has ended.
            RuntimeError: if one gives a message of another size.
        """
        self._turn ^= 1
        slots, sizes, nbytes = self._slots[self._turn], self._sizes[self._turn], message.nbytes
        everyones = slots[:, :nbytes].view(message.dtype).view(len(self.pids), *message.shape)
        everyones[self.rank].copy_(message)
        sizes[self.rank] = nbytes
        for other in self._peers:
            self._libc.sem_post(self._semaphore(self.rank, other))
        for other in self._peers:
            self._wait(other)
        if sizes.tolist() != [nbytes] * len(self.pids):
            raise RuntimeError(f"the ranks give messages of {sizes.tolist()} bytes: they have to call the same")
        return everyones

    def _semaphore(self, source: int, target: int) -> int:
        return self._first_semaphore + (source * len(self.pids) + target) * _SEMAPHORE_BYTES

    def _wait(self, other: int) -> None:
        semaphore = self._semaphore(other, self.rank)
        end = time.perf_counter() + _LOOK_SECONDS
        while time.perf_counter() < end:
            if self._libc.sem_trywait(semaphore) == 0:
                return
            os.sched_yield()
        while not self._sleep(semaphore):
            try:
                os.kill(self.pids[other], 0)
            except ProcessLookupError:
                raise PeerError(f"rank {other} of the group, process {self.pids[other]}, has ended") from None

    def _sleep(self, semaphore: int) -> bool:
        """Sleep until a semaphore is posted, or a while; whether it was."""
        until = time.time() + _WATCH_SECONDS
        return bool(self._libc.sem_timedwait(semaphore, _TimeSpec(int(until), int(until % 1 * 1e9))) == 0)


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
