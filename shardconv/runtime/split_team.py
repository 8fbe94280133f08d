"""Processes under torchrun that write one split checkpoint together.

Detects which processes share a disk, and stops all processes if one fails. Values are exchanged through the store of
torch.distributed; a gloo group detects a process that has died, as its connections are closed.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardconv.checkpoint.output.destination import NewFolder, joined_folder
from shardconv.checkpoint.output.staging import as_output_errors, parent_folders
from shardconv.checkpoint.output.writer import Checksums, Team
from shardconv.distributed.agreement import View, difference
from shardconv.files.folder import AnyPath
from shardconv.support import Progress
from shardconv.support.errors import PeerError, RunError, UsageError
from shardconv.support.exits import Removal

#: Time that a process waits for the slowest one. Processes that have died are detected at once.
_PATIENCE = timedelta(days=2)
#: Seconds between two checks for a failure of another process.
_LOOK_SECONDS = 0.2
#: Seconds in which the other processes stop, before the folder of a failed split is removed.
_STOP_SECONDS = 3.0
_ADDRESS = "MASTER_ADDR"
#: Variables that torchrun sets, and the form of numbers among them.
_VARIABLES = ("RANK", "WORLD_SIZE", _ADDRESS, "MASTER_PORT")
_NUMBER = re.compile(r"[0-9]{1,5}")
_REMEDY = "start the processes with torchrun, or unset RANK to split in one process"


class SplitTeam(Team):
    """The team of the processes that write a split checkpoint together.

    Args:
        store: the store of all processes.
        rank: the number of this process.
        size: number of processes.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self.size = store, rank, size
        self.is_first = self.is_leader = rank == 0
        self._step = 0
        self._members = list(range(size))
        self._looked = 0.0
        self._has_failed = self._is_later = False

    # --- agreement ---------------------------------------------------------------------------------------------------

    def meet(self, target: AnyPath, facts: Callable[[], Mapping[str, object]]) -> None:
        """See :class:`Team`."""
        views = [View(*view) for view in self._exchange(View.here(target, facts()))]
        remedy = "pass the same source and options to all processes"
        if (error := difference(target, views, "process", remedy)) is not None:
            raise error
        assert isinstance(target, Path)  # URLs are written by one process
        self._members = self._find_members(target.absolute().parent)
        self.is_leader = self._rank == self._members[0]

    def _find_members(self, folder: Path) -> list[int]:
        """The processes that share a folder with this one: a new file that one of them creates is there for all."""
        others = list(range(self.size))
        while True:
            leader = others[0]
            name = self._exchange(f".shardconv-{secrets.token_hex(8)}")[leader]  # no system has cached its absence
            with _new_file(folder / name) if self._rank == leader else nullcontext():
                self._wait()
                with as_output_errors(str(folder)):
                    is_there = (folder / name).exists()
                sees = self._exchange(is_there)
            members = [process for process in others if sees[process]]
            others = [process for process in others if not sees[process]]
            if self._rank in members:
                found = members
            if not others:
                return found

    def folder_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """See :class:`Team`."""
        found = tuple(rank for process in self._members for rank in _share(ranks, process, self.size))
        if not found:
            raise UsageError(
                f"there are more hosts than ranks (got {self.size} processes for {len(ranks)} ranks): start fewer"
            )
        return found

    def own_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """See :class:`Team`; ``ranks`` are the ranks of the folder."""
        return _share(ranks, self._members.index(self._rank), len(self._members))

    # --- one folder --------------------------------------------------------------------------------------------------

    @contextmanager
    def staging(
        self, target: Path, open_staging: Callable[[], AbstractContextManager[NewFolder]]
    ) -> Iterator[NewFolder]:
        """See :class:`Team`."""
        with open_staging() if self.is_leader else joined_folder(target) as folder:
            try:
                self._wait()  # until all folders are there
                yield folder
                self._wait()  # until all processes have written their files
            except BaseException:
                self._fail()  # waits until no process writes into the folder, which is then removed
                raise
        self._wait()  # until all folders have their final names

    def gather(self, rows: Checksums) -> Checksums:
        """See :class:`Team`."""
        every = self._exchange(rows)
        return tuple(tuple(row) for process in self._members for row in every[process])

    # --- communication -----------------------------------------------------------------------------------------------

    def _exchange(self, value: object) -> list[Any]:
        """The values of all processes, as JSON represents them."""
        self._step += 1
        self._store.set(f"{self._step}/{self._rank}", json.dumps(value))
        self._wait()
        return [json.loads(self._store.get(f"{self._step}/{process}")) for process in range(self.size)]

    def _wait(self) -> None:
        """Wait until all processes call this method.

        Raises:
            PeerError: if another process fails meanwhile.
            RunError: if another process has died.
        """
        try:
            work = dist.barrier(async_op=True)
            while not work.is_completed():
                self._look()
                time.sleep(0.01)
            work.wait()
        except RuntimeError as error:  # its connections are closed
            self._look(at_once=True)
            raise _lost() from error

    def watch(self, progress: Progress | None) -> Progress:
        """See :class:`Team`."""

        def report(done: int, total: int) -> None:
            self._look()
            if progress is not None:
                progress(done, total)

        return report

    def _look(self, *, at_once: bool = False) -> None:
        """Raise PeerError if another process has failed."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS and not at_once:
            return
        self._looked = now
        try:
            has_failed = self._store.check(["failed"])
        except RuntimeError as error:  # the process with the store was killed
            raise _lost() from error
        if has_failed:
            raise PeerError("another process failed and reported why")

    def leave(self) -> None:
        """Leave the team; the first process, which has the store, waits until all others have left."""
        with suppress(RuntimeError):
            self._store.add("left", 1)
            end = time.monotonic() + _STOP_SECONDS
            while self.is_first and self._store.add("left", 0) < self.size and time.monotonic() < end:
                time.sleep(0.02)

    @contextmanager
    def fails_together(self) -> Iterator[None]:
        """Stop all processes if one fails: the first to fail raises its error, all others raise PeerError."""
        try:
            yield
        except BaseException as error:
            if self._fail():
                raise PeerError("another process failed and reported why") from error
            raise

    def _fail(self) -> bool:
        """Report the failure of this process to the others, and wait until they have stopped.

        Returns:
            Whether one of them has failed before.
        """
        with suppress(RuntimeError):  # the store may have died with its process
            if not self._has_failed:
                self._has_failed = True
                self._is_later = self._store.add("failed", 1) > 1
                end = time.monotonic() + _STOP_SECONDS
                while self._store.add("failed", 0) < self.size and time.monotonic() < end:
                    time.sleep(0.02)
        return self._is_later


def _share(ranks: tuple[int, ...], at: int, count: int) -> tuple[int, ...]:
    """The ranks of one of ``count`` processes: neighbors, so that a host has the ranks that it runs."""
    return ranks[at * len(ranks) // count : (at + 1) * len(ranks) // count]


@contextmanager
def _new_file(path: Path) -> Iterator[None]:
    """An empty file that exists in this context, as do the parent folders that are created for it.

    Raises:
        OutputError: if it cannot be created or removed.
    """
    with as_output_errors(str(path.parent)), parent_folders(path):
        try:
            path.touch()
            yield
        finally:
            with Removal():
                path.unlink(missing_ok=True)


def _lost() -> RunError:
    return RunError("another process was killed, or its host failed: see its output, and start all processes again")


def _check_variables() -> None:
    """Check the variables that torchrun sets.

    Raises:
        UsageError: if one is not set, or is not a number in its range.
    """
    for name in _VARIABLES:
        text = os.environ.get(name, "")
        if not text or (name != _ADDRESS and not _NUMBER.fullmatch(text)):
            malformed = f"malformed (got {text!r:.60}, expected a number)"
            problem = malformed if text else "not set (expected the variables that torchrun sets)"
            raise UsageError(f"{name} is {problem}: {_REMEDY}")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= size:
        raise UsageError(f"RANK is too large (got {rank}, expected less than the WORLD_SIZE of {size}): {_REMEDY}")


@contextmanager
def join() -> Iterator[Team]:
    """Join the processes that torchrun started, for one split.

    Raises:
        UsageError: if the variables that torchrun sets are incomplete or malformed.
    """
    _check_variables()
    store, rank, size = next(iter(rendezvous("env://", timeout=_PATIENCE)))
    store.set_timeout(_PATIENCE)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "") + os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    own = PrefixStore(f"shardconv split {run}", store)
    dist.init_process_group("gloo", store=PrefixStore("group", own), rank=rank, world_size=size, timeout=_PATIENCE)
    team = SplitTeam(own, rank, size)
    with team.fails_together():
        yield team
        team.leave()
    dist.destroy_process_group()
