"""torch's multi-head attention over local heads.

Owns the class that nn.MultiheadAttention becomes, and that of the module override ``functional``, for modules that call
``torch.nn.functional.multi_head_attention_forward``.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from shardconv.convert.modules import Sharded, ShardedOptions
from shardconv.distributed import Axis, copy_to_tp, reduce_from_tp
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.sharding import take_shard
from shardconv.plan.placement import Placement


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
            ValueError: if the module has options that are not supported.
        """
        if self.in_proj_weight is None or self.bias_k is not None or self.add_zero_attn:
            raise ValueError(
                f"{self.name_in_model}: a MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn is not "
                f"supported"
            )
        super().set_up(axis, **options)

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
        """Compute what nn.MultiheadAttention computes with ``need_weights=False``.

        Args:
            query: [batch, query tokens, features], or [query tokens, batch, features] if not ``batch_first``.
            key: [batch, key tokens, features], or [key tokens, batch, features].
            value: like ``key``.
            key_padding_mask: [batch, key tokens]; True excludes a token, numbers are added to the scores.
            need_weights: must not be True; None and False are equivalent.
            attn_mask: [query tokens, key tokens] or [batch * local heads, query tokens, key tokens]; likewise.
            average_attn_weights: ignored, as no weights are returned.
            is_causal: a hint that ``attn_mask`` is causal.

        Returns:
            The output, of the shape of ``query``, and None in place of the attention weights.

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
        if attn_mask is not None:
            attn_mask = _additive_mask(attn_mask, query)
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (query.shape[0 if self.batch_first else 1], -1))
        mask = _with_key_padding(attn_mask, key_padding_mask, query)
        queries, keys, values = self._heads(query, key, value)
        dropout = self.dropout if self.training else 0.0
        attended = scaled_dot_product_attention(queries, keys, values, mask, dropout)
        output = attended.transpose(1, 2).flatten(2)
        return self.out_proj(output if self.batch_first else output.transpose(0, 1)), None

    def _heads(self, *inputs: Tensor) -> Iterator[Tensor]:
        """Compute query, key and value of each head, [batch, local heads, tokens, head_dim]."""
        weights = self.shard("in_proj_weight").chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.shard("in_proj_bias").chunk(3)
        for input, weight, bias in zip(inputs, weights, biases, strict=True):
            heads = linear(copy_to_tp(input, group=self.axis), weight, bias).unflatten(-1, (-1, self.head_dim))
            yield heads.transpose(1, 2) if self.batch_first else heads.permute(1, 2, 0, 3)


class FunctionalAttention(ParallelModule):
    """A module that calls torch.nn.functional.multi_head_attention_forward with the weights of its layers.

    Attributes:
        heads: the placement of the heads.
    """

    heads: Placement

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward, in which torch's function returns None in place of attention weights."""
        with _LocalHeads(self.heads, self.axis):
            return super().forward(*inputs, **options)


class _LocalHeads(TorchFunctionMode):
    """A mode in which torch's function computes attention over local heads, from sharded weights.

    Inputs, masks and output are replicated.

    Args:
        heads: the placement of the heads.
        axis: the ranks.
    """

    def __init__(self, heads: Placement, axis: Axis) -> None:
        super().__init__()
        self.heads, self.axis = heads, axis

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is not multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        call = inspect.signature(func).bind(*args, **(kwargs or {}))
        call.apply_defaults()
        return self._attend(SimpleNamespace(**call.arguments)), None

    def _attend(self, call: SimpleNamespace) -> Tensor:
        """Compute [tokens, batch, features] from the arguments of torch's function."""
        added_keys = (call.bias_k, call.bias_v, call.static_k, call.static_v)
        if not call.use_separate_proj_weight or call.add_zero_attn or any(tensor is not None for tensor in added_keys):
            raise ValueError(
                "multi_head_attention_forward is supported only with use_separate_proj_weight, and without bias_k, "
                "bias_v, static_k, static_v and add_zero_attn"
            )
        head_dim: int = call.embed_dim_to_check // call.num_heads
        biases = (None,) * 3 if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
        weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
        queries, keys, values = (
            linear(copy_to_tp(input, group=self.axis), weight, bias).unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)
            for input, weight, bias in zip((call.query, call.key, call.value), weights, biases, strict=True)
        )
        dropout = call.dropout_p if call.training else 0.0
        attended = scaled_dot_product_attention(queries, keys, values, self._mask(call), dropout)
        features = attended.permute(2, 0, 1, 3).flatten(2)
        output = reduce_from_tp(linear(features, call.out_proj_weight), group=self.axis)
        return output if call.out_proj_bias is None else output + call.out_proj_bias

    def _mask(self, call: SimpleNamespace) -> Tensor | None:
        """Sum all masks, to be added to the scores of the local heads."""
        mask: Tensor | None = None if call.attn_mask is None else _additive_mask(call.attn_mask, call.query)
        if mask is not None and mask.dim() == 3:
            full = copy_to_tp(mask, group=self.axis).unflatten(0, (-1, call.num_heads))
            mask = take_shard(full, replace(self.heads, dim=1), self.axis.rank)
        return _with_key_padding(mask, call.key_padding_mask, call.query)


def _additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Convert a mask to numbers that are added to scores."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


def _with_key_padding(mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Add a mask of keys, [batch, key tokens], to an additive mask that broadcasts to the scores; None for neither."""
    if key_padding_mask is None:
        return mask
    padding = _additive_mask(key_padding_mask, query)[:, None, None]
    return padding if mask is None else padding + mask
