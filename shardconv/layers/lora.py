"""Low-rank adaptation of parallel layers (LoRA; Hu et al., 2021), also of direction only (DoRA; Liu et al., 2024)."""

from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional

from shardconv.distributed import copy_to_tp, reduce_from_tp
from shardconv.layers.embedding import ParallelEmbedding, look_up
from shardconv.layers.init import fill_shard_, linear_weight_
from shardconv.layers.linear import ParallelLinear, num_replicas
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.sharding import gather_shards

#: Rows of a weight whose norms are computed at once.
_NORM_ROWS = 1024


class LoRALayer(ParallelModule):
    """A parallel layer plus a low-rank product.

    With a magnitude m, the weight W' of layer and product becomes m W' / norm(W'), with the norm over input features.
    Norms are constants of the gradient. In eval mode they are computed in the first pass, and again after ``train()``.

    Attributes:
        layer: the layer without the product.
        rank: rank of the product.
        scale: factor of the product.
    """

    layer: ParallelLinear | ParallelEmbedding
    rank: int
    scale: float
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    magnitude: nn.Parameter | None
    lora_bias: nn.Parameter | None

    @property
    def weight(self) -> nn.Parameter:
        """The weight of the layer without the product."""
        return self.layer.weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias of the layer without the product."""
        return self.layer.bias

    def train(self, mode: bool = True) -> "LoRALayer":
        """Set the mode; norms are computed again, as values may change."""
        self._factor: Tensor | None = None
        super().train(mode)
        return self

    def magnitude_factor(self) -> Tensor:
        """The magnitude divided by the norm of each output feature of this rank."""
        is_constant = not self.training and not torch.is_grad_enabled()
        if is_constant and self._factor is not None:
            return self._factor
        assert self.magnitude is not None
        with torch.no_grad():
            norms = self._squares().sqrt()
        factor = self.magnitude / norms.where(norms > 0, 1).to(self.magnitude.dtype)  # norms of padding are 0
        self._factor = factor if is_constant else None
        return factor

    def _add_product(
        self,
        layer: Any,  # a linear layer or an embedding
        rank: int,
        alpha: float | None,
        sizes: tuple[int, int],
        device: torch.device | str | None,
        **used: bool,
    ) -> None:
        """Set all attributes, and add the parameters for an input and an output of these sizes, uninitialized."""
        self.layer, self.rank, self.scale = layer, rank, 1.0 if alpha is None else alpha / rank
        self.axis, self.dim, self.placements, self._factor = layer.axis, layer.dim, {}, None
        if (placement := layer.placements.get("weight")) is not None:
            sharded = {"lora_a": 1} if layer.dim == 0 else {"lora_b": 0, "magnitude": 0, "lora_bias": 0}
            self.placements = {name: replace(placement, dim=dim) for name, dim in sharded.items()}
        shapes = {
            "lora_a": (rank, sizes[0]),
            "lora_b": (sizes[1], rank),
            "magnitude": sizes[1:],
            "lora_bias": sizes[1:],
        }
        for name, shape in shapes.items():
            if used.get(name, True):
                self.register_shard(name, shape, device=device or layer.weight.device, dtype=layer.weight.dtype)
            else:
                self.register_parameter(name, None)
        self.describe_parameters()

    def _squares(self) -> Tensor:
        """The squared norm of each output feature of this rank, over all ranks."""
        weight = self._weight_by_output()
        sums = [
            (rows.float() + self.scale * (low.float() @ self.lora_a.float())).square().sum(1)
            for rows, low in zip(weight.split(_NORM_ROWS), self.lora_b.split(_NORM_ROWS), strict=True)
        ]
        squares = torch.cat(sums)
        placement = self.placements.get("lora_a")  # whose input features are sharded
        if placement is None:
            return squares
        return reduce_from_tp(squares, group=self.axis) / num_replicas(placement)

    def _weight_by_output(self) -> Tensor:
        """This rank's shard of the weight, with output features in its first dim."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The rank and the scale."""
        return f"rank={self.rank}, scale={self.scale:g}"


class LoRALinear(LoRALayer):
    """A parallel linear layer plus a low-rank product: Y = X A + b + alpha / rank * X A_l B_l.

    The low-rank product is zero after construction. It is added before the collective of the layer, so that it does not
    need another one; hooks on ``layer`` are not called. The parameters of ``layer`` stay trainable: call
    ``layer.requires_grad_(False)`` to freeze them.

    Args:
        layer: the layer: a :class:`~shardconv.layers.ParallelLinear` of any ``dim``, new or converted.
        rank: rank of the low-rank product.
        alpha: the product is scaled by ``alpha / rank``; by default by 1.
        has_magnitude: add a ``magnitude``, initially the norms (DoRA).
        has_bias: add a ``lora_bias``, which is scaled like the product; initially zero.
        device: device of these parameters, which may be ``meta``; by default the layer's device.

    Shape:
        - lora_a: [rank, in_features], or [rank, in_features / tp] where the layer is row parallel.
        - lora_b: [out_features, rank], or [out_features / tp, rank] where the layer is column parallel.
        - magnitude, lora_bias: [out_features], or [out_features / tp] where the layer is column parallel.
        - input and output: as for the layer.

    Raises:
        ValueError: if ``rank`` is less than 1.

    Example:
        >>> adapted = LoRALinear(ColumnParallelLinear(20, 30, gather_output=True), rank=4)
        >>> adapted(torch.randn(128, 20)).shape
        torch.Size([128, 30])
    """

    layer: ParallelLinear

    def __init__(
        self,
        layer: ParallelLinear,
        rank: int,
        alpha: float | None = None,
        *,
        has_magnitude: bool = False,
        has_bias: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank is not supported (got {rank}, expected at least 1)")
        sizes = layer.in_features, layer.out_features
        self._add_product(layer, rank, alpha, sizes, device, magnitude=has_magnitude, lora_bias=has_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw ``lora_a`` as nn.Linear draws its weight, and set ``lora_b`` to zero; all ranks must call it."""
        fill_shard_(self.lora_a, self.placements.get("lora_a"), self.axis, linear_weight_)
        nn.init.zeros_(self.lora_b)
        if self.lora_bias is not None:
            nn.init.zeros_(self.lora_bias)
        if self.magnitude is not None and not self.magnitude.is_meta:
            with torch.no_grad():
                self.magnitude.copy_(self._squares().sqrt())

    def forward(self, input: Tensor) -> Any:  # as the layer's
        """Compute the output, or ``(output, bias)`` with ``skip_bias_add``; for shapes see the layer."""
        local = self.layer.localize(input)
        product = self.layer.multiply(local)
        low = functional.linear(local.to(self.lora_a.dtype), self._used("lora_a"))
        low = functional.linear(low, self._used("lora_b")) * self.scale
        if self.lora_bias is not None:
            low = low + self._used("lora_bias") * (self.scale * self._bias_share())
        return self.layer.complete(self._with_magnitude(product + low.to(product.dtype)))

    def _bias_share(self) -> int:
        """The factor of the bias on this rank, so that the output of the layer has the bias once."""
        placement = self.placements.get("lora_a")
        if placement is None:
            return 1
        return num_replicas(placement) if self.axis.rank == 0 else 0

    def _with_magnitude(self, total: Tensor) -> Tensor:
        """Scale the products of this rank, without the bias that they include, by the magnitude."""
        if self.magnitude is None:
            return total
        factor = self.magnitude_factor().to(total.dtype)
        if self.dim == 0 or self.layer.bias is None or self.layer.skip_bias_add:
            return total * factor
        return (total - self.layer.bias) * factor + self.layer.bias

    def _used(self, name: str) -> Tensor:
        """Return a matrix for use in forward; the gradient of a replicated one is summed over the ranks."""
        if name in self.placements or self.dim is None:
            return self.shard(name)
        return copy_to_tp(self.own_tensor(name), group=self.axis)

    def _weight_by_output(self) -> Tensor:
        return self.layer.weight.t() if self.layer.transposed else self.layer.weight


class LoRAEmbedding(LoRALayer):
    """A parallel embedding plus a low-rank product: row i of the table plus alpha / rank * B A_i, for inference.

    Args:
        layer: the embedding, without ``max_norm``.
        rank: rank of the low-rank product.
        alpha: the product is scaled by ``alpha / rank``; by default by 1.
        has_magnitude: add a ``magnitude`` of each column of the table (DoRA).
        device: device of these parameters, which may be ``meta``; by default the layer's device. Their values are not
            initialized.

    Shape:
        - lora_a: [rank, num_embeddings], or [rank, ceil(num_embeddings / tp)] where the vocabulary is sharded.
        - lora_b: [embedding_dim, rank], or [embedding_dim / tp, rank] where the embedding dim is sharded.
        - magnitude: [embedding_dim], or [embedding_dim / tp] where the embedding dim is sharded.
        - input and output: as for the layer.

    Raises:
        ValueError: if ``rank`` is less than 1, or the layer has a ``max_norm``.
    """

    layer: ParallelEmbedding

    def __init__(
        self,
        layer: ParallelEmbedding,
        rank: int,
        alpha: float | None = None,
        *,
        has_magnitude: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rank < 1 or layer.max_norm is not None:
            raise ValueError(f"got rank {rank} and max_norm {layer.max_norm} (expected at least 1, and None)")
        sizes = layer.num_embeddings, layer.embedding_dim
        self._add_product(layer, rank, alpha, sizes, device, magnitude=has_magnitude, lora_bias=False)

    @property
    def embedding_dim(self) -> int:
        """Size of a row of the full table."""
        return self.layer.embedding_dim

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows of ids, [*]; for the shape of the output see the layer."""
        output = self.layer(input)
        rows, of_table = self.placements.get("lora_a"), self.placements.get("lora_b")
        options = (None, None, 2.0, False, False)
        by_id = None if rows is None else replace(rows, dim=0)
        low = look_up(input, self.lora_a.t(), options, by_id, self.axis, gather_output=True)
        low = functional.linear(low, self.lora_b) * self.scale
        factor = None if self.magnitude is None else self.magnitude_factor()
        if of_table is not None and self.layer.gather_output:
            low = gather_shards(low, of_table, self.axis, dim=-1)
            factor = None if factor is None else gather_shards(factor, of_table, self.axis, dim=-1)
        output = output + low.to(output.dtype)
        return output if factor is None else output * factor.to(output.dtype)

    def _weight_by_output(self) -> Tensor:
        return self.layer.weight.t()
