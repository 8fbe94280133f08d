"""torch's multi-head attention over local heads, and modules of torch that read the parameters of layers in them.

Owns the class that nn.MultiheadAttention becomes. Modules that compute with the weight of a layer, and do not call it,
would compute with a shard: their fused paths are turned off, or they are refused.
"""

from collections.abc import Iterator, Mapping
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from shardconv.convert.modules import GlobalLayerNorm, GlobalRMSNorm, Sharded, ShardedOptions
from shardconv.distributed import Axis, copy_to_tp
from shardconv.layers import RowParallelLinear
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.sharding import take_shard
from shardconv.plan.placement import Placement

#: Classes of torch, by name, whose forward reads the parameters of this layer and does not call it.
_READERS = {"MultiheadAttention": "out_proj", "LinearCrossEntropyLoss": "linear"}
#: Classes of torch with a fused path that reads the parameters of layers in them, and the attribute that turns it off.
_FUSED = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
#: Classes of torch with norms over all features.
_TRANSFORMERS = (*_FUSED, nn.TransformerDecoderLayer, nn.TransformerDecoder)
_NORMS = (GlobalLayerNorm, GlobalRMSNorm)


def check_readers(module: nn.Module, replacements: Mapping[nn.Module, ParallelModule]) -> None:
    """Check that no module of torch reads the shard of a layer in it instead of calling the layer.

    Args:
        module: the module that is converted.
        replacements: the parallel modules that modules of it become.

    Raises:
        ValueError: if one does; names both.
    """
    for name, reader in module.named_modules():
        if isinstance(reader, nn.Module) and isinstance(reader, _TRANSFORMERS):
            _check_norms(name, reader, replacements)
        for kind, own in _READERS.items():
            if type(reader).forward is not getattr(getattr(nn, kind, None), "forward", None):
                continue
            layer, label = reader.get_submodule(own), f"{name}.{own}" if name else own
            is_row = isinstance(replacements.get(layer, layer), RowParallelLinear)
            if isinstance(replacements.get(reader), ParallelMultiheadAttention):
                if not is_row:
                    raise ValueError(f"{label}: must be row parallel by heads, as q, k and v are sharded by heads")
            elif layer in replacements or isinstance(layer, ParallelModule):
                raise ValueError(
                    f"{label}: a {kind} computes with the parameters of this layer and does not call it: replicate "
                    f"them{', or shard in_proj_weight by heads, too' * is_row}"
                )


def _check_norms(name: str, module: nn.Module, replacements: Mapping[nn.Module, ParallelModule]) -> None:
    """Check that norms of modules of torch, which are over all features, are not sharded."""
    norms = [own for own, layer in module.named_children() if isinstance(replacements.get(layer), _NORMS)]
    if norms:
        raise ValueError(f"{name}: {norms[0]} of a {type(module).__name__} is over all features: replicate it")


def turn_off_fused_paths(module: nn.Module) -> None:
    """Make modules of torch call the layers in them, some of which are parallel, on every path."""
    for child in module.modules():
        for kind, (attribute, value) in _FUSED.items():
            if isinstance(child, kind) and any(isinstance(one, ParallelModule) for one in child.modules()):
                setattr(child, attribute, value)


class ParallelMultiheadAttention(Sharded):
    """nn.MultiheadAttention over local heads; q, k and v are segments of ``in_proj_weight``, each sharded by heads."""

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    head_dim: int
    batch_first: bool
    dropout: float
    out_proj: nn.Module
    add_zero_attn: bool
    bias_k: Tensor | None

    def set_up(self, axis: Axis, **options: Unpack[ShardedOptions]) -> None:
        """See :meth:`ParallelModule.set_up`.

        Raises:
            ValueError: if the module has options that are not supported, or is not sharded by heads.
        """
        if self.in_proj_weight is None or self.bias_k is not None or self.add_zero_attn:
            raise ValueError(
                f"{self.name_in_model}: a MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn is not "
                f"supported"
            )
        super().set_up(axis, **options)
        weight, bias = (self.placements.get(name) for name in ("in_proj_weight", "in_proj_bias"))
        is_same = self.in_proj_bias is None or bias == weight
        if not (weight and is_same) or any(_heads_of(weight, one, self.head_dim) is None for one in range(axis.size)):
            raise ValueError(
                f"{self.name_in_model}: in_proj_weight and in_proj_bias of a MultiheadAttention are sharded by heads: "
                f"give both the style packed_colwise and 3 segments, each with a unit of {self.head_dim} rows"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Compute the output of nn.MultiheadAttention with ``need_weights=False``.

        Args:
            query: [batch, query tokens, features], or [query tokens, batch, features] if not ``batch_first``.
            key: [batch, key tokens, features], or [key tokens, batch, features].
            value: like ``key``.
            key_padding_mask: [batch, key tokens]: booleans, where True excludes a token, or numbers that are added to
                the scores.
            need_weights: must not be True; None and False are equivalent.
            attn_mask: [query tokens, key tokens], or [batch * heads, query tokens, key tokens] for all or for local
                heads; values as in ``key_padding_mask``.
            average_attn_weights: ignored, as no weights are returned.
            is_causal: a hint that ``attn_mask`` is causal.

        Returns:
            The output, of the shape of ``query``, and None instead of the attention weights.

        Raises:
            ValueError: if weights are requested, inputs do not have 3 dims, or ``is_causal`` is True without a mask.
        """
        if need_weights:
            raise ValueError(
                "need_weights: each rank has the attention weights of its local heads only: pass need_weights=False"
            )
        if query.dim() != 3:
            raise ValueError(f"query has shape {list(query.shape)} (expected 3 dims): add a batch dim")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal without attn_mask: pass the causal mask, which torch's attention also requires")
        del average_attn_weights
        queries, keys, values = self._heads(query, key, value)
        if attn_mask is not None:
            attn_mask = self._mask_of_heads(_additive_mask(attn_mask, query), *queries.shape[:2])
        mask = _with_key_padding(attn_mask, key_padding_mask, query)
        dropout = self.dropout if self.training else 0.0
        attended = scaled_dot_product_attention(queries, keys, values, mask, dropout)
        output = attended.transpose(1, 2).flatten(2)
        return self.out_proj(output if self.batch_first else output.transpose(0, 1)), None

    def _mask_of_heads(self, mask: Tensor, batch: int, num_heads: int) -> Tensor:
        """Take the local heads of a mask [batch * heads, query tokens, key tokens]; return a mask without heads."""
        if mask.dim() < 3:
            return mask
        mask = mask.unflatten(0, (batch, -1))
        if mask.shape[1] == num_heads:
            return mask
        heads = _heads_of(self.placements["in_proj_weight"], self.axis.rank, self.head_dim)
        assert heads is not None
        return copy_to_tp(mask, group=self.axis)[:, heads.clamp(min=0).to(mask.device)]  # padding is never read

    def _heads(self, *inputs: Tensor) -> Iterator[Tensor]:
        """Compute query, key and value of each head, [batch, local heads, tokens, head_dim]."""
        weights = self.shard("in_proj_weight").chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.shard("in_proj_bias").chunk(3)
        for input, weight, bias in zip(inputs, weights, biases, strict=True):
            heads = linear(copy_to_tp(input, group=self.axis), weight, bias).unflatten(-1, (-1, self.head_dim))
            yield heads.transpose(1, 2) if self.batch_first else heads.permute(1, 2, 0, 3)


def _heads_of(placement: Placement, rank: int, head_dim: int) -> Tensor | None:
    """The numbers of a rank's heads, -1 for padding; None if its rows are not the q, k and v of full heads."""
    rows = take_shard(torch.arange(1, placement.size + 1, device="cpu"), placement, rank) - 1
    if placement.dim != 0 or rows.numel() % (3 * head_dim):
        return None
    found, one_head = rows.view(3, -1, head_dim), torch.arange(head_dim, device="cpu")
    first = found[0, :, :1]
    segments = torch.arange(3, device="cpu")[:, None, None] * (placement.size // 3)
    is_by_heads = torch.equal(found, torch.where(first < 0, first, first + one_head + segments))
    is_full = not (first % head_dim)[first >= 0].any()
    return first.flatten().div(head_dim, rounding_mode="floor") if is_by_heads and is_full else None


def _additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Convert a mask to numbers that are added to scores."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


def _with_key_padding(mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Add a mask of keys, [batch, key tokens], to an additive mask that broadcasts to the scores; None for neither."""
    if key_padding_mask is None:
        return mask
    padding = _additive_mask(key_padding_mask, query)[:, None, None]
    return padding if mask is None else padding + mask
