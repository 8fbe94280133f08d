"""Loading into vLLM's workers: shardconv's load format compared with vLLM's, on two workers.

The workers run in :mod:`benchmarks.vllm_worker`, in the environment of ``make test-vllm``; each constructs the model
that vLLM would run on its rank, and loads its weights, without an engine.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
RANKS = 2


def workers(folder: str | Path, load_format: str | Path, *options: str | Path) -> list[dict[str, Any]]:
    """The reports of all workers of one run."""
    with tempfile.TemporaryDirectory() as meeting:
        processes = [
            subprocess.Popen(
                [
                    PYTHON, "-m", "benchmarks.vllm_worker", folder, load_format, str(RANKS), str(rank), meeting,
                    *options,
                ],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a worker failed: {load_format} of {folder}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


Form = tuple[str | Path, ...]


def prepare(work: Path, write: Any) -> dict[str, Form]:  # noqa: ANN401 - a function
    """Write the compared forms of the model; returns name to folder, load format and options of a worker."""
    source, split, state = work / "source", work / "split", work / "state"
    write(source)
    command = [sys.executable, "-m", "shardconv", "split", str(source), "-o", str(split), "-q"]
    subprocess.run([*command, "--tp", str(RANKS), "--for", "vllm"], check=True)
    shutil.copytree(source, state, ignore=shutil.ignore_patterns("*.safetensors*"))
    workers(source, "auto", "--save", str(state))
    return {
        "vLLM's default, source": (source, "auto"),
        "vLLM's default, then a hash of the rank's file": (source, "auto", "--hash", split),
        "vLLM's sharded_state": (state, "sharded_state"),
        "shardconv, source": (source, "shardconv"),
        "shardconv, split": (split, "shardconv"),
        "shardconv, split, without verification": (split, "shardconv", "--extra", '{"verify": false}'),
    }


def measure(forms: dict[str, Form], rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the figures of each form: medians of the slower worker over rounds, in which the forms alternate.

    Linux caches in small or large units, depending on what reads, and small ones take longer to map: cold loads of each
    form leave other units. So the cache is warm from a read of the files from beginning to end, before each load.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in forms}
    for number in range(rounds):
        for name in sorted(forms, reverse=bool(number % 2)):
            cold, warm = workers(*forms[name], "--cold"), workers(*forms[name])
            worst = {key: max(one[key] for one in warm) for key in warm[0]}
            found[name].append({
                **worst,
                "cold_seconds": max(one["seconds"] for one in cold),
                "cold_bytes": max(one["storage_bytes"] for one in cold),
                "all_bytes": sum(one["storage_bytes"] for one in cold),
            })  # fmt: skip
    for name, runs in found.items():
        yield name, {key: median(run[key] for run in runs) for key in runs[0]}
