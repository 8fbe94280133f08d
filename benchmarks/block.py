"""One rank of the benchmark of layers; :mod:`benchmarks.layers` starts it."""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardconv.convert import convert_parallel_linear

HEAD = 32


class Block(nn.Module):
    """Attention with separate q, k and v, and an MLP; in a sharded block, over local heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [1, tokens, width] to the same shape."""
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, HEAD)).transpose(-3, -2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(-3, -2).flatten(-2))
        output: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return output


COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")


def split_block(kind: str, width: int) -> nn.Module:
    """Build the block sharded by shardconv (``ours``) or by ``torch``, or ``unsharded``."""
    torch.manual_seed(0)
    block = Block(width)
    if kind == "ours":
        convert_parallel_linear(nn.ModuleList([getattr(block, name) for name in COLUMNS]), -1)
        convert_parallel_linear(nn.ModuleList([getattr(block, name) for name in ROWS]), 0)
    elif kind == "torch":
        plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
        plan |= {name: RowwiseParallel() for name in ROWS}
        parallelize_module(block, init_device_mesh("cpu", (2,)), plan)
    return block


def run_rank(rank: int, folder: Path, kinds: list[str], size: tuple[int, int, int], turns: int, ranks: int) -> None:
    """Time the steps of each kind in turns, and print the report."""
    width, tokens, steps = size
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    x = torch.randn(1, tokens, width)
    before = _resident()
    blocks = {kind: split_block(kind, width) for kind in kinds}
    report: dict[str, Any] = {kind: [] for kind in kinds}

    def step(block: nn.Module) -> None:
        given = x.clone().requires_grad_()
        block(given).sum().backward()
        block.zero_grad()

    for block in blocks.values():
        step(block)
    _forget_peak()
    for turn in range(turns):
        for kind in kinds if turn % 2 else reversed(kinds):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                step(blocks[kind])
            report[kind].append((time.perf_counter() - began) / steps)
    report["peak_bytes"] = _peak() - before
    print(json.dumps(report))
    dist.destroy_process_group()


def _status(field: str) -> int:
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def _resident() -> int:
    return _status("VmRSS:") if Path("/proc/self/status").exists() else 0


def _forget_peak() -> None:
    """Reset the peak memory, to exclude the conversion; a large model would be built on the meta device."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    if Path("/proc/self/status").exists():
        return _status("VmHWM:")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    number, where, names, width, tokens, steps, turns, ranks = sys.argv[1:]
    run_rank(int(number), Path(where), names.split(","), (int(width), int(tokens), int(steps)), int(turns), int(ranks))
