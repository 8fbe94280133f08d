"""A common script to compare split with: a slice of every tensor for every rank, then save_file."""

import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ROWS = ("o_proj", "down_proj")


def main(source: str, target: str, tp: int) -> None:
    """Split a llama-shaped file for ``tp`` ranks."""
    Path(target).mkdir()
    for rank in range(tp):
        shard: dict[str, torch.Tensor] = {}
        with safe_open(source, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                tensor = file.get_slice(name)
                shape = tensor.get_shape()
                if len(shape) == 1:
                    shard[name] = tensor[:]
                elif any(word in name for word in ROWS):
                    size = shape[1] // tp
                    shard[name] = tensor[:, rank * size : (rank + 1) * size].contiguous()
                else:
                    size = shape[0] // tp
                    shard[name] = tensor[rank * size : (rank + 1) * size]
        save_file(shard, f"{target}/rank{rank}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
