"""Low-rank adaptation (LoRA; Hu et al., 2021) of a parallel linear layer."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from shardconv.distributed import copy_to_tp
from shardconv.layers.init import fill_shard_, linear_weight_
from shardconv.layers.linear import ParallelLinear
from shardconv.layers.parallel_module import ParallelModule


class LoRALinear(ParallelModule):
    """A parallel linear layer plus a low-rank product: Y = X A + b + alpha / rank * X A_l B_l.

    The low-rank product is zero after construction. It is added before the collective of the layer, so that it does not
    need another one; hooks on ``layer`` are not called. The parameters of ``layer`` stay trainable: call
    ``layer.requires_grad_(False)`` to freeze them.

    Args:
        layer: the layer: a :class:`~shardconv.layers.ParallelLinear` of any ``dim``, new or converted.
        rank: rank of the low-rank product.
        alpha: the product is scaled by ``alpha / rank``; by default by 1.

    Shape:
        - lora_a: [rank, in_features], or [rank, in_features / tp] where the layer is row parallel.
        - lora_b: [out_features, rank], or [out_features / tp, rank] where the layer is column parallel.
        - input and output: those of the layer.

    Raises:
        ValueError: if ``rank`` is less than 1.

    Example:
        >>> adapted = LoRALinear(ColumnParallelLinear(20, 30, gather_output=True), rank=4)
        >>> adapted(torch.randn(128, 20)).shape
        torch.Size([128, 30])
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def __init__(self, layer: ParallelLinear, rank: int, alpha: float | None = None) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank is not supported (got {rank}, expected at least 1)")
        self.layer, self.rank, self.scale = layer, rank, 1.0 if alpha is None else alpha / rank
        self.axis, self.dim, self.placements = layer.axis, layer.dim, {}
        if (placement := layer.placements.get("weight")) is not None:
            sharded = ("lora_a", 1) if layer.dim == 0 else ("lora_b", 0)
            self.placements[sharded[0]] = replace(placement, dim=sharded[1])
        register = partial(self.register_shard, device=layer.weight.device, dtype=layer.weight.dtype)
        register("lora_a", (rank, layer.in_features))
        register("lora_b", (layer.out_features, rank))
        self.describe_parameters()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw ``lora_a`` as nn.Linear draws its weight, and set ``lora_b`` to zero; all ranks must call it."""
        fill_shard_(self.lora_a, self.placements.get("lora_a"), self.axis, linear_weight_)
        nn.init.zeros_(self.lora_b)

    def forward(self, input: Tensor) -> Any:  # as the layer's
        """Compute the output, or ``(output, bias)`` with ``skip_bias_add``; for shapes see the layer."""
        local = self.layer.localize(input)
        low_rank = functional.linear(functional.linear(local, self._used("lora_a")), self._used("lora_b"))
        return self.layer.complete(self.layer.multiply(local) + low_rank * self.scale)

    def _used(self, name: str) -> Tensor:
        """Return a matrix for use in forward; the gradient of a replicated one is summed over the ranks."""
        if name in self.placements or self.dim is None:
            return self.shard(name)
        return copy_to_tp(self.own_tensor(name), group=self.axis)

    def extra_repr(self) -> str:
        """The rank and the scale."""
        return f"rank={self.rank}, scale={self.scale:g}"
