"""One rank of the benchmark of loading and running; :mod:`benchmarks.run` starts it."""

import json
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig
from transformers.models.llama import modeling_llama  # noqa: F401 - imported before anything is timed

import shardconv
import shardconv.runtime
from benchmarks.measure import prepare_files, read_file
from benchmarks.run import FIRST, PROMPT, TOKENS


def load(kind: str, path: str) -> Any:  # noqa: ANN401 - a model of transformers
    """Load the model: a split checkpoint (``ours``, ``verified``) or a source, or with transformers (``theirs``).

    ``plain`` is transformers without tensor parallelism, by which shardconv builds and loads the model. With ``read``,
    the rank's file is read once before it is loaded: the least that a verification does.
    """
    if kind == "read":
        read_file(Path(path, f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.safetensors"))
    if kind in {"ours", "verified", "read"}:
        return shardconv.load(path, device="cpu", verify=kind == "verified")  # transformers does not verify
    if kind == "source":
        return shardconv.load(path, device="cpu", tp=dist.get_world_size())
    config = None if kind == "plain" else DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    return transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=config, dtype="auto").eval()


class Watch:
    """Peak private memory, and peak bytes of a folder's files in memory, sampled every few milliseconds."""

    def __init__(self, folder: str) -> None:
        self.own_bytes = self.mapped_bytes = 0
        self._folder = folder
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._is_done.wait(0.005):
            self.own_bytes = max(self.own_bytes, own_bytes())
            self.mapped_bytes = max(self.mapped_bytes, mapped_bytes(self._folder))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()


def own_bytes() -> int:
    """Anonymous memory of this process."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


def mapped_bytes(folder: str) -> int:
    """Bytes of the files in a folder that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = (line.split()[0].split("-") for line in lines if folder in line)
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def read_bytes() -> int:
    """Bytes that this process has read from files by calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def resident_bytes(folder: str) -> int:
    """Bytes of the files in a folder that this process maps and that are in its resident memory."""
    resident, is_mapped = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_mapped = folder in line
        elif is_mapped and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


def storage_bytes() -> int:
    """Bytes that were read from storage for this process."""
    return next(
        int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes")
    )


def seconds(function: Callable[[], object]) -> float:
    """The seconds that a function takes, until all ranks have called it."""
    dist.barrier()
    began = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - began


def main(kind: str, path: str, rank: int, ranks: int, rendezvous: str, cache: str = "") -> None:
    """Load the model, read a prompt and continue it; print the duration of each.

    Before the load, the page cache is made ``cold`` or ``warm``, or stays as it is.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    if cache and rank == 0:
        prepare_files([Path(path)], is_cold=cache == "cold")
    dist.barrier()
    memory, read, storage = own_bytes(), read_bytes(), storage_bytes()
    with Watch(path) as watch:
        began = time.perf_counter()
        model = load(kind, path)
        dist.barrier()
        load_seconds = time.perf_counter() - began
        read = read_bytes() - read
    ids = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        began = time.perf_counter()
        model(ids[:, :FIRST], logits_to_keep=1)
        first = time.perf_counter() - began
        storage, resident = storage_bytes() - storage, resident_bytes(path)
        began = time.perf_counter()
        model(ids, logits_to_keep=1)
        prefill = time.perf_counter() - began
        times: list[float] = []
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        tokens = model.generate(ids[:, :16], **options, streamer=Clock(times))
    report = {
        "load": load_seconds,
        "first": first,
        "prefill": prefill,
        "decode": (times[-1] - times[1]) / (len(times) - 2),
        "memory": watch.own_bytes - memory,
        "bytes": watch.mapped_bytes + read,
        "storage": storage,
        "touched": resident + read,
        "tokens": tokens[0, 16:].tolist(),
    }
    del model
    report["second"] = seconds(lambda: load(kind, path))
    print(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


class Clock:
    """A streamer that records the time of each token."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def put(self, _: object) -> None:
        """Record the time of the prompt or of a token."""
        self._times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing at the end of the text."""


if __name__ == "__main__":
    kind, path, rank, ranks, rendezvous, *cache = sys.argv[1:]
    main(kind, path, int(rank), int(ranks), rendezvous, *cache)
