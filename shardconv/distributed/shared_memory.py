"""All-gather of small CPU tensors through shared memory, for ranks of one machine.

A decoding step sends a few KiB twice per layer and token. A socket adds more latency than the transfer takes, because
the peer's threads are asleep by then. Here each rank writes into its slot, posts one semaphore per peer, and polls for
the semaphores of the others.

Each rank has two slots and alternates between them. Every call waits for all ranks, so no rank is two calls ahead of
another, and no slot is overwritten while a peer reads it. Each message carries a sequence number and a checksum of its
dtype, shape and purpose, so mismatched calls raise an error on every rank. An interrupted call closes the channel for
further use.
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
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardconv.support.errors import PeerError

#: Maximum bytes of a message. The latency of a socket matters little for longer ones.
SLOT_BYTES = 1 << 18
_SEMAPHORE_BYTES, _HEADER_BYTES = 64, 64
#: Seconds of polling before a rank sleeps, and seconds between two checks that its peers are alive.
_POLL_SECONDS, _CHECK_SECONDS = 0.002, 1.0


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMemoryChannel:
    """All-gather between the ranks of one machine; created by :meth:`open`. Use it from one thread per rank.

    Attributes:
        rank: rank of this process.
        pids: process ids of all ranks.
    """

    def __init__(
        self, memory: mmap.mmap, libc: ctypes.CDLL, rank: int, pidfds: dict[int, int], timeout: timedelta
    ) -> None:
        self.rank, self.pids = rank, list(pidfds)
        self._libc, self._timeout = libc, timeout.total_seconds()
        self._sequence, self._is_broken, self._lock = 0, False, threading.Lock()
        self._peers = {peer: pidfds[pid] for peer, pid in enumerate(self.pids) if peer != rank}
        weakref.finalize(self, _close, list(pidfds.values()))
        count = len(self.pids)
        with torch.inference_mode(mode=False):
            semaphores, slots = torch.frombuffer(memory, dtype=torch.uint8).split(_section_sizes(count))
            slots = slots.view(2, count, _HEADER_BYTES + SLOT_BYTES)
            self._headers = slots[..., :_HEADER_BYTES].view(torch.int64)[..., :2]
            self._slots = slots[..., _HEADER_BYTES:]
        self._first_semaphore = semaphores.data_ptr()

    @classmethod
    def open(cls, ranks: int, rank: int, group: dist.ProcessGroup) -> Self | None:
        """Open a channel between the ranks of a group. All ranks call it.

        The memory is anonymous, so it is freed when the processes exit.

        Args:
            ranks: number of ranks of the group.
            rank: rank of this process in the group.
            group: torch's process group; it must support CPU tensors.

        Returns:
            A channel on every rank, or None on every rank if they are on several machines or the system is not Linux.
        """
        size, token = sum(_section_sizes(ranks)), os.urandom(16)
        created = _create(ranks, size, token) if rank == 0 else None
        location = None if created is None else (f"/proc/{os.getpid()}/fd/{created[0]}", token)
        gathered: list[tuple[int, tuple[str, bytes] | None]] = [(0, None)] * ranks
        dist.all_gather_object(gathered, (os.getpid(), location), group=group)
        opened = None
        if (location := gathered[0][1]) is not None:
            opened = _join(location[0], location[1], size) if created is None else created[1:]
        pidfds = None if opened is None else _open_pidfds([pid for pid, _ in gathered])
        is_open_everywhere = torch.tensor(int(pidfds is not None))
        dist.all_reduce(is_open_everywhere, op=dist.ReduceOp.MIN, group=group)
        if created is not None:
            os.close(created[0])
        if opened is None or pidfds is None or not is_open_everywhere:
            _close([] if pidfds is None else pidfds.values())
            return None
        return cls(*opened, rank, pidfds, group._get_backend(torch.device("cpu")).options._timeout)  # noqa: SLF001

    def fits(self, message: Tensor) -> bool:
        """Whether a tensor can be sent. The same on all ranks if its shape, dtype and device type are."""
        return message.device.type == "cpu" and message.nbytes <= SLOT_BYTES

    def all_gather(self, message: Tensor, purpose: str = "") -> Tensor:
        """All-gather a tensor. All ranks call it.

        Args:
            message: [*], of the same shape and dtype on every rank.
            purpose: operation that the message belongs to, the same on every rank.

        Returns:
            [ranks, *], a view of the shared memory; valid until the next call but one.

        Raises:
            PeerError: if the process of a rank has exited.
            RuntimeError: if the ranks make different calls, a rank does not call within the timeout of the group, an
                earlier call was interrupted, or another thread of this process is in a call.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"rank {self.rank}: two threads use the shared-memory channel at once, so the order of messages is "
                f"undefined: run the model in one thread per rank"
            )
        try:
            if self._is_broken:
                raise RuntimeError(
                    f"rank {self.rank}: an earlier call on the shared-memory channel was interrupted: restart all ranks"
                )
            self._is_broken = True  # until the call has finished
            messages = self._all_gather(message, purpose)
            self._is_broken = False
            return messages
        finally:
            self._lock.release()

    def _all_gather(self, message: Tensor, purpose: str) -> Tensor:
        self._sequence += 1
        turn = self._sequence % 2
        messages = self._slots[turn][:, : message.nbytes].view(message.dtype).view(len(self.pids), *message.shape)
        messages[self.rank].copy_(message)
        checksum = zlib.crc32(f"{message.dtype} {tuple(message.shape)} {purpose}".encode())
        self._headers[turn, self.rank, 0], self._headers[turn, self.rank, 1] = self._sequence, checksum
        for peer in self._peers:
            self._libc.sem_post(self._semaphore(self.rank, peer))
        for peer in self._peers:
            self._wait(peer)
        if self._headers[turn].tolist() != [[self._sequence, checksum]] * len(self.pids):
            raise RuntimeError(
                f"ranks made different calls on the shared-memory channel (rank {self.rank}: {purpose or 'message'} of "
                f"shape {list(message.shape)}, {message.dtype}): run the same operations in the same order on all ranks"
            )
        return messages

    def _semaphore(self, source: int, target: int) -> int:
        return self._first_semaphore + (source * len(self.pids) + target) * _SEMAPHORE_BYTES

    def _wait(self, peer: int) -> None:
        semaphore, start = self._semaphore(peer, self.rank), time.perf_counter()
        while time.perf_counter() < start + _POLL_SECONDS:
            if self._libc.sem_trywait(semaphore) == 0:
                return
            os.sched_yield()
        while not self._sleep(semaphore):
            if select.select([self._peers[peer]], [], [], 0)[0] and self._libc.sem_trywait(semaphore):
                raise PeerError(f"rank {peer} of the group (process {self.pids[peer]}) exited: restart all ranks")
            if time.perf_counter() > start + self._timeout:
                raise RuntimeError(
                    f"rank {peer} of the group sent no message within {self._timeout:.0f} s: check that it is running "
                    f"and makes the same calls"
                )

    def _sleep(self, semaphore: int) -> bool:
        """Sleep until a semaphore is posted or it is time to check the peers. Return whether it was posted."""
        until = time.time() + _CHECK_SECONDS
        return bool(self._libc.sem_timedwait(semaphore, _TimeSpec(int(until), int(until % 1 * 1e9))) == 0)


def _create(ranks: int, size: int, token: bytes) -> tuple[int, mmap.mmap, ctypes.CDLL] | None:
    """Create the shared memory: its descriptor, its mapping and libc; None if the system does not support it."""
    descriptor = -1
    try:
        libc, descriptor = _libc(), os.memfd_create("shardconv")
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        memory[-len(token) :] = token
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if any(libc.sem_init(first + i * _SEMAPHORE_BYTES, 1, 0) for i in range(ranks**2)):
            raise OSError("semaphores shared between processes are not supported")
    except (OSError, AttributeError):
        _close([] if descriptor < 0 else [descriptor])
        return None
    return descriptor, memory, libc


def _join(path: str, token: bytes, size: int) -> tuple[mmap.mmap, ctypes.CDLL] | None:
    """Map the memory that rank 0 created; None if it is not accessible, as on another machine."""
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return (memory, _libc()) if memory[-len(token) :] == token else None
    except (OSError, ValueError, AttributeError):
        return None


def _open_pidfds(pids: list[int]) -> dict[int, int] | None:
    """Process id to a descriptor that becomes readable when the process exits; None if unsupported."""
    pidfds: dict[int, int] = {}
    try:
        for pid in pids:
            pidfds[pid] = os.pidfd_open(pid)
    except (OSError, AttributeError):
        _close(pidfds.values())
        return None
    return pidfds


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _section_sizes(ranks: int) -> list[int]:
    """Bytes of all semaphores and bytes of all slots."""
    return [ranks**2 * _SEMAPHORE_BYTES, 2 * ranks * (_HEADER_BYTES + SLOT_BYTES)]


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    for name in ("sem_init", "sem_post", "sem_trywait", "sem_timedwait"):
        getattr(libc, name).restype = ctypes.c_int
    libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    libc.sem_post.argtypes = libc.sem_trywait.argtypes = (ctypes.c_void_p,)
    libc.sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_TimeSpec))
    return libc
