"""One worker of the benchmark of loading into vLLM; :mod:`benchmarks.vllm_loading` starts it, in vLLM's environment.

``python -m benchmarks.vllm_worker FOLDER LOAD_FORMAT TP RANK MEETING [--cold] [--save FOLDER] [--extra JSON]
[--hash SPLIT]``: the model is constructed first; then all workers of a run load at the same time. Prints one JSON
object.
"""

import argparse
import json
import os
import threading
import time
from pathlib import Path
from typing import Self

from xxhash import xxh3_128

from benchmarks.measure import prepare_files
from shardconv.engines.check import construct, one_rank


def status_bytes(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def read_bytes() -> int:
    """Bytes read from storage for this process, by calls and page faults."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


class Peak:
    """Peak private memory in a context, sampled every few milliseconds."""

    def __init__(self) -> None:
        self.start = self.most = status_bytes("RssAnon")
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._is_done.wait(0.005):
            self.most = max(self.most, status_bytes("RssAnon"))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()


def meet(folder: Path, reason: str, rank: int, tp: int) -> None:
    """Wait for all workers of a run."""
    (folder / f"{reason}-{rank}").touch()
    while len(list(folder.glob(f"{reason}-*"))) < tp:
        time.sleep(0.001)


def read_and_hash(folder: Path, rank: int) -> None:
    """Read and hash the file of a rank in a split checkpoint, in blocks, and do nothing else."""
    running, block = xxh3_128(), memoryview(bytearray(256 * 2**10))
    with sorted(folder.glob("*.safetensors"))[rank].open("rb", buffering=0) as file:
        while count := file.readinto(block):
            running.update(block[:count])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("load_format")
    parser.add_argument("tp", type=int)
    parser.add_argument("rank", type=int)
    parser.add_argument("meeting", type=Path)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--extra", type=json.loads, default={})
    parser.add_argument("--hash", type=Path)
    given = parser.parse_args()
    with one_rank(given.folder, tp=given.tp, rank=given.rank, dtype="bfloat16") as config:
        from vllm.config.load import LoadConfig  # noqa: PLC0415 - after the environment is set
        from vllm.model_executor.model_loader import get_model_loader  # noqa: PLC0415
        from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader  # noqa: PLC0415

        from shardconv.engines.vllm_plugin import register  # noqa: PLC0415

        register()
        model = construct(config, "cpu")
        loader = get_model_loader(LoadConfig(
            load_format=given.load_format, use_tqdm_on_load=False, model_loader_extra_config=given.extra
        ))  # fmt: skip
        meet(given.meeting, "constructed", given.rank, given.tp)
        if given.rank == 0:
            prepare_files({given.folder, given.hash} - {None}, is_cold=given.cold)
        meet(given.meeting, "prepared", given.rank, given.tp)
        storage = read_bytes()
        with Peak() as peak:
            began = time.perf_counter()
            loader.load_weights(model, config.model_config)
            if given.hash is not None:
                read_and_hash(given.hash, given.rank)
            seconds = time.perf_counter() - began
        if given.save is not None:
            ShardedStateLoader.save_model(model, str(given.save))
        size = sum(tensor.nbytes for tensor in model.state_dict().values())
        found = {
            "seconds": seconds, "storage_bytes": read_bytes() - storage, "model_bytes": size,
            "memory_bytes": peak.most - peak.start,
        }  # fmt: skip
    print(json.dumps(found), flush=True)
    os._exit(0)  # do not wait for threads of vLLM


if __name__ == "__main__":
    main()
