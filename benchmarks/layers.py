"""A transformer block over two ranks: shardconv compared with torch's ``parallelize_module``, and its memory.

The blocks run in :mod:`benchmarks.block`, one process per rank.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

#: Width, tokens in a batch, and how many steps are timed each turn.
SMALL, LARGE = (128, 64, 20), (1024, 1024, 2)
#: For memory: weights and their gradients are most of it, as in a large model.
HEAVY = (4096, 128, 1)


def measure(
    kinds: tuple[str, ...], size: tuple[int, int, int], folder: Path, turns: int, *, ranks: int = 2
) -> list[dict[str, Any]]:
    """Time forward and backward passes on every rank, alternating between the kinds in the same processes.

    Returns:
        For each rank: kind to seconds per step of each turn, and ``peak_bytes``, the increase of the peak
        memory of the process during the steps.
    """
    for path in folder.glob("rendezvous*"):
        path.unlink()
    arguments = [str(word) for word in (folder, ",".join(kinds), *size, turns, ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.block", str(rank), *arguments], stdout=subprocess.PIPE, env=environment
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank failed: {[process.returncode for process in processes]}")
    return [json.loads(output) for output in outputs]


def ratio(report: list[dict[str, Any]], ours: str, theirs: str) -> tuple[float, float, float]:
    """Median over turns of theirs by ours, and the median seconds of both; a turn takes as long as its slower rank."""
    turns = {
        kind: [max(pair) for pair in zip(*(rank[kind] for rank in report), strict=True)] for kind in (ours, theirs)
    }
    each = [b / a for a, b in zip(turns[ours], turns[theirs], strict=True)]
    return median(each), median(turns[ours]), median(turns[theirs])
