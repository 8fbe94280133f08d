"""Split the checkpoint of a custom module with a plan file, and load it on two ranks.

torchrun --standalone --nproc-per-node 2 examples/own_module.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import shardconv

PLAN = """
[units]
hidden = { count = 96 }       # boundaries are between units

[rules]                       # a rule for every tensor
"up"   = { style = "colwise", unit = "hidden" }
"down" = { style = "rowwise", unit = "hidden" }
"""


class Mlp(nn.Module):
    """Two layers with an inner dim of 96."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [*, 32] to the same shape."""
        output: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return output


def main(folder: Path) -> None:
    """Split on the first rank, load on all, and compare."""
    checkpoint, plan, split = folder / "mlp.safetensors", folder / "plan.toml", folder / "mlp-tp2"
    if dist.get_rank() == 0:
        save_file(Mlp().state_dict(), checkpoint)
        plan.write_text(PLAN)
        print(shardconv.split(checkpoint, split, tp=2, rules=plan))
    dist.barrier()
    model = shardconv.load(split, model=Mlp, device="cpu")
    unsharded = Mlp()
    unsharded.load_state_dict(load_file(checkpoint))
    x = torch.ones(4, 32)
    error = (model(x) - unsharded(x)).abs().max().item()
    print(f"rank {dist.get_rank()}: {model}, off by {error:.1e}")
    if error > 1e-5:
        raise SystemExit("not equal")


if __name__ == "__main__":
    shardconv.init_parallel(tensor=2, device_type="cpu")
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    main(Path(box[0]))
    shardconv.destroy_parallel()
