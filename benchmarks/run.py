"""Loading and running a split checkpoint or a source, compared with transformers' tensor parallelism on the source.

The ranks run in :mod:`benchmarks.runner`, two processes of one thread each on gloo.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

#: A llama-shaped model of about 1 GB in bf16.
CONFIG = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
RANKS, PROMPT, TOKENS = 2, 128, 32
#: Tokens of the first pass, which reads the values that are mapped: few, so that their computation takes little time.
FIRST = 8
#: Largest difference of outputs, in bf16: values of some units are rounded to multiples of 2^-7.
_TOLERANCE = 0.05

WRITE = """
import json, sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(**json.loads(sys.argv[2]), dtype="bfloat16")
transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""


def write_model(folder: Path) -> None:
    """Write the model with transformers, in a new process."""
    subprocess.run([sys.executable, "-c", WRITE, str(folder), json.dumps(CONFIG)], check=True, capture_output=True)


def run_ranks(
    kind: str, path: Path, work: Path, *arguments: str, module: str = "benchmarks.runner"
) -> list[dict[str, Any]]:
    """The reports of all ranks of one run; ``load`` of the module lists the kinds, and ``main`` its arguments."""
    rendezvous = work / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, kind, str(path), str(rank), str(RANKS), str(rendezvous), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank failed: {[process.returncode for process in processes]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


class Figure(NamedTuple):
    """A figure of the slower rank, as the median of the rounds.

    Attributes:
        ratio: ours by theirs, median of the pairs.
        ours: median.
        theirs: median.
    """

    ratio: float
    ours: float
    theirs: float


def compare(
    source: Path,
    split: Path,
    work: Path,
    rounds: int,
    names: Iterable[str] = ("load", "first", "prefill", "decode", "memory", "bytes"),
    module: str = "benchmarks.runner",
) -> dict[str, Figure]:
    """Measure loading and running in pairs of alternating order; returns the named figures of the slower rank.

    Raises:
        RuntimeError: if outputs differ, of a module that reports them.
    """
    runs: dict[str, list[list[dict[str, Any]]]] = {"ours": [], "theirs": []}
    for number in range(rounds):
        for kind in sorted(runs, reverse=bool(number % 2)):
            runs[kind].append(run_ranks(kind, split if kind == "ours" else source, work, module=module))
    outputs = [run[0].get("output", []) for kind in runs for run in runs[kind]]
    if any(abs(one - other) > _TOLERANCE for output in outputs for one, other in zip(output, outputs[0], strict=True)):
        raise RuntimeError("the outputs differ")
    figures = {}
    for name in names:
        ours, theirs = ([max(rank[name] for rank in run) for run in runs[kind]] for kind in ("ours", "theirs"))
        each = [our / their for our, their in zip(ours, theirs, strict=True)]
        figures[name] = Figure(median(each), median(ours), median(theirs))
    return figures


def compare_cold(forms: dict[str, Path], work: Path, rounds: int) -> dict[tuple[str, bool], dict[str, float]]:
    """Measure loading and the first pass with cold and warm page cache, the kinds in alternating order.

    Args:
        forms: kind to the folder that it loads.
        work: folder for the rendezvous.
        rounds: rounds of each kind.

    Returns:
        Kind, and whether the cache was cold, to figures of the slower rank, as medians; ``all`` is ``storage`` of all
        ranks together.
    """
    runs: dict[tuple[str, bool], list[dict[str, float]]] = {}
    names = ("load", "first", "second", "memory", "touched")
    for number in range(rounds):
        for kind in sorted(forms, reverse=bool(number % 2)):
            for is_cold in (True, False):
                reports = run_ranks(kind, forms[kind], work, "cold" if is_cold else "warm")
                worst = {name: max(rank[name] for rank in reports) for name in names}
                stored = [rank["storage"] for rank in reports]
                runs.setdefault((kind, is_cold), []).append({**worst, "storage": max(stored), "all": sum(stored)})
    return {key: {name: median(run[name] for run in of_kind) for name in of_kind[0]} for key, of_kind in runs.items()}
