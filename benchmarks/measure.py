"""Measure processes: wall time from start to exit, and peak memory; alone or in pairs. Prepare memory and files."""

import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

Command = Sequence[str | Path]


class Usage(NamedTuple):
    """Usage of a process: wall time, user and system time in seconds, peak resident memory in MB (10^6 bytes)."""

    seconds: float
    user: float
    system: float
    peak_mb: float


def run(command: Command) -> Usage:
    """Run a command until it exits.

    Raises:
        subprocess.CalledProcessError: if it fails.
    """
    began = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, env=_environment())
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return Usage(seconds, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def read_bytes(command: Command) -> int:
    """Run a command until it exits, and return the bytes that its process read, also from the page cache.

    Raises:
        subprocess.CalledProcessError: if it fails.
    """
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, env=_environment())
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    (line,) = (one for one in Path(f"/proc/{process.pid}/io").read_text().splitlines() if one.startswith("rchar"))
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return int(line.split()[1])


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _use_memory(path: Path, num_bytes: int) -> None:
    """Write a file of a tmpfs and remove it."""
    block = bytes(2**20)
    with path.open("wb") as file:
        for _ in range(-(-num_bytes // len(block))):
            file.write(block)
    path.unlink()


def prepare_files(folders: Iterable[Path], *, is_cold: bool) -> None:
    """Read the files of folders from beginning to end, and drop them from the page cache again if it is to be cold.

    Also uses and frees as much other memory. The host of a virtual machine takes back memory that is free for some
    seconds, as while a process imports torch, and giving it out again takes longer than a load: call this directly
    before a load.
    """
    paths = [path for folder in folders for path in folder.iterdir()]
    _drop(paths)
    with mmap.mmap(-1, sum(path.stat().st_size for path in paths)) as memory:
        for start in range(0, len(memory), mmap.PAGESIZE):
            memory[start] = 1
        for path in paths:
            read_file(path)
    if is_cold:
        _drop(paths)


def read_file(path: Path) -> None:
    """Read a file in blocks, and do nothing else."""
    block = bytearray(2**20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def _drop(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, after they are written to disk."""
    os.sync()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@dataclass(frozen=True)
class Pairs:
    """Usage of two commands that run in turns.

    Attributes:
        ours: usage of the first command in each round.
        theirs: usage of the second.
    """

    ours: tuple[Usage, ...]
    theirs: tuple[Usage, ...]

    @property
    def ratio(self) -> float:
        """Median over the rounds of our wall time by theirs."""
        return statistics.median(a.seconds / b.seconds for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def fastest_ratio(self) -> float:
        """Our shortest wall time by theirs."""
        return self.fastest(self.ours).seconds / self.fastest(self.theirs).seconds

    @staticmethod
    def fastest(runs: Sequence[Usage]) -> Usage:
        """The run with the shortest wall time."""
        return min(runs, key=lambda usage: usage.seconds)

    @property
    def peak_mb(self) -> float:
        """Our highest peak memory."""
        return max(usage.peak_mb for usage in self.ours)


def run_pairs(
    ours: Command,
    theirs: Command,
    *,
    outputs: Sequence[Path] = (),
    rounds: int = 5,
    warm_bytes: int = 0,
) -> Pairs:
    """Run two commands in turns, in alternating order, after one warm-up round.

    Before each command the disk is synced and the outputs are removed; then the command starts at once, as
    recently freed memory is the fastest to reuse on a virtual machine, which may have to get other memory from its
    host.

    Args:
        ours: a command.
        theirs: the command to compare with.
        outputs: the files and folders that the commands write.
        rounds: the number of measured rounds.
        warm_bytes: of memory that is written and freed before each command, next to the first output, so that none
            of the memory that the commands use has to come from the host.
    """
    results: tuple[list[Usage], list[Usage]] = ([], [])
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            os.sync()
            for output in outputs:
                remove(output)
            if warm_bytes:
                _use_memory(outputs[0].with_name("warm"), warm_bytes)
            usage = run((ours, theirs)[which])
            if number:
                results[which].append(usage)
    for output in outputs:
        remove(output)
    return Pairs(tuple(results[0]), tuple(results[1]))
