"""Measure a run that continues an interrupted one."""

import os
import subprocess
import time
from pathlib import Path

from benchmarks.measure import Command, Pairs, Usage, remove, run


def interrupted(command: Command, target: Path, num_stripes: int) -> None:
    """Run a command, and kill it when its journal has this many stripes.

    Raises:
        RuntimeError: if it finished before.
    """
    journal = target.parent / f".{target.name}.partial" / "journal"
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= num_stripes + 2:
            break
        time.sleep(0.001)
    process.kill()
    if process.wait() == 0:
        raise RuntimeError("the command finished before it was killed")


def compare(command: Command, target: Path, num_stripes: int, rounds: int) -> Pairs:
    """Measure a command that continues a run with this many stripes, and the command alone, in alternating order."""
    results: tuple[list[Usage], list[Usage]] = ([], [])
    for number in range(rounds):
        for is_alone in (False, True) if number % 2 else (True, False):
            remove(target)
            if not is_alone:
                interrupted(command, target, num_stripes)
            os.sync()
            results[is_alone].append(run(command if is_alone else (*command, "--resume")))
    remove(target)
    return Pairs(tuple(results[0]), tuple(results[1]))
