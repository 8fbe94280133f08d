"""Multi-head attention of torch over local heads: nn.MultiheadAttention, and its function.

Owns the class of nn.MultiheadAttention and the class behind the module override ``functional``.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from shardconv.convert.modules import Sharded
from shardconv.distributed import Axis, copy_to_tp, reduce_from_tp
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.sharding import take_shard
from shardconv.plan.placement import Placement


class ParallelMultiheadAttention(Sharded):
    """torch's multi-head attention over local heads; q, k and v are segments of one tensor, each sharded by heads."""

    in_proj_bias: Tensor | None
    head_dim: int
    batch_first: bool
    dropout: float
    out_proj: nn.Module

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
        """Attend as nn.MultiheadAttention, without attention weights.

        Args:
            query: [batch, tokens, features]; [tokens, batch, features] if not ``batch_first``. So is the output.
            key: likewise.
            value: likewise.
            key_padding_mask: [batch, key tokens]; True excludes a token, numbers are added to the scores.
            need_weights: may not be True; no weights are returned if it is omitted, either.
            attn_mask: [query tokens, key tokens] or [batch * local heads, query tokens, key tokens]; likewise.
            average_attn_weights: ignored.
            is_causal: a hint that ``attn_mask`` is causal.

        Raises:
            ValueError: if weights are requested, or ``is_causal`` comes without a mask.
        """
        if need_weights:
            raise ValueError("need_weights: each rank has the attention of its own heads only: pass need_weights=False")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal without attn_mask: pass the causal mask, as torch's attention requires, too")
        del average_attn_weights
        masks = [] if key_padding_mask is None else [_additive_mask(key_padding_mask, query)[:, None, None]]
        if attn_mask is not None:
            added = _additive_mask(attn_mask, query)
            masks.append(added if added.dim() == 2 else added.unflatten(0, (query.shape[not self.batch_first], -1)))
        mask = sum(masks[1:], masks[0]) if masks else None
        queries, keys, values = self._heads(query, key, value)
        dropout = self.dropout if self.training else 0.0
        heads = scaled_dot_product_attention(queries, keys, values, mask, dropout)
        output = heads.transpose(1, 2).flatten(2)
        return self.out_proj(output if self.batch_first else output.transpose(0, 1)), None

    def _heads(self, *inputs: Tensor) -> Iterator[Tensor]:
        """Compute query, key and value of each head, [batch, local heads, tokens, head_dim]."""
        weights = self.shard("in_proj_weight").chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.shard("in_proj_bias").chunk(3)
        for input, weight, bias in zip(inputs, weights, biases, strict=True):
            made = linear(copy_to_tp(input, group=self.axis), weight, bias).unflatten(-1, (-1, self.head_dim))
            yield made.transpose(1, 2) if self.batch_first else made.permute(1, 2, 0, 3)


class FunctionalAttention(ParallelModule):
    """A module that calls torch.nn.functional.multi_head_attention_forward with the weights of its layers.

    Attributes:
        heads: the placement of the heads.
    """

    heads: Placement

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward, without attention weights."""
        with _LocalHeads(self.heads, self.axis):
            return super().forward(*inputs, **options)


class _LocalHeads(TorchFunctionMode):
    """Compute torch's multi-head attention over local heads, from sharded weights.

    Inputs, masks and output are replicated.
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
        others = (call.bias_k, call.bias_v, call.static_k, call.static_v)
        if not call.use_separate_proj_weight or call.add_zero_attn or any(one is not None for one in others):
            raise ValueError("multi_head_attention_forward: only separate weights, and no further keys, are sharded")
        head_dim: int = call.embed_dim_to_check // call.num_heads
        biases = (None,) * 3 if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
        weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
        queries, keys, values = (
            linear(copy_to_tp(one, group=self.axis), weight, bias).unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)
            for one, weight, bias in zip((call.query, call.key, call.value), weights, biases, strict=True)
        )
        dropout = call.dropout_p if call.training else 0.0
        found = scaled_dot_product_attention(queries, keys, values, self._mask(call), dropout)
        features = found.permute(2, 0, 1, 3).flatten(2)
        output = reduce_from_tp(linear(features, call.out_proj_weight), group=self.axis)
        return output if call.out_proj_bias is None else output + call.out_proj_bias

    def _mask(self, call: SimpleNamespace) -> Tensor | None:
        """Sum all masks, to be added to the scores of the local heads."""
        padding, mask = call.key_padding_mask, call.attn_mask
        masks = [] if padding is None else [_additive_mask(padding, call.query)[:, None, None]]
        if mask is not None and mask.dim() == 3:
            full = copy_to_tp(_additive_mask(mask, call.query), group=self.axis).unflatten(0, (-1, call.num_heads))
            masks.append(take_shard(full, replace(self.heads, dim=1), self.axis.rank))
        elif mask is not None:
            masks.append(_additive_mask(mask, call.query))
        return sum(masks[1:], masks[0]) if masks else None


def _additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Convert a mask to numbers that are added to scores."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask
