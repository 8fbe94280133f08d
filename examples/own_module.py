"""Split the checkpoint of a custom module with a plan file, and load it on two ranks.

torchrun --standalone --nproc-per-node 2 examples/own_module.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

import shardconv

PLAN = """
[units]                       # boundaries are between units
head   = { count = 4, size = 8 }
hidden = { count = 96 }

[rules]                       # a rule for every tensor
"qkv"     = { style = "packed_colwise", segments = ["head", "head", "head"] }
"out"     = { style = "rowwise", unit = "head" }
"gate_up" = { style = "packed_colwise", segments = ["hidden", "hidden"] }
"down"    = { style = "rowwise", unit = "hidden" }

[modules]                     # numbers that forward reads, per rank; "" is the module itself
"" = { attributes = { num_heads = "head" } }
"""


class Net(nn.Module):
    """Attention with 4 heads of 8 features, and a gated MLP of width 96, with fused projections."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(32, 3 * 32), nn.Linear(32, 32)
        self.gate_up, self.down = nn.Linear(32, 2 * 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, tokens, 32] to the same shape."""
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        output: torch.Tensor = self.down(functional.silu(gate) * up)
        return output


def main(folder: Path) -> None:
    """Split on the first rank, load on all, and compare."""
    checkpoint, plan, split = folder / "net.safetensors", folder / "plan.toml", folder / "net-tp2"
    if dist.get_rank() == 0:
        save_file(Net().state_dict(), checkpoint)
        plan.write_text(PLAN)
        print(shardconv.split(checkpoint, split, tp=2, rules=plan))
    dist.barrier()
    model = shardconv.load(split, model=Net, device="cpu")
    unsharded = Net()
    unsharded.load_state_dict(load_file(checkpoint))
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
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
