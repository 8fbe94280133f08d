"""Attention modules over local heads, where it is not enough to set the number of heads of the module.

Owns the classes behind the module overrides ``full_width``, ``locals``, ``unsharded``, ``slices``, ``output``,
``gathered_output`` and ``functional``, and torch's own multi-head attention. Each computes what the unsharded module
computes, with the module's own code.
"""

import ast
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardconv.convert.classes import Recompiled, class_factory, new_class
from shardconv.convert.modules import Sharded
from shardconv.convert.recompile import recompiled
from shardconv.convert.substitution import Substitutable, Substituted
from shardconv.distributed import Axis, copy_to_tp, gather_from_tp, reduce_from_tp
from shardconv.errors import PlanError
from shardconv.layers import ColumnParallelLinear, ParallelLinear
from shardconv.layers.sharding import ParallelModule, take_shard
from shardconv.plan.placement import Placement

_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape)


class FullWidth(ParallelModule):
    """Attention whose code reshapes local heads to the width of all heads, or divides that width by the local heads.

    Attributes:
        full_width: the features of all heads.
    """

    full_width: int

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        with _LocalWidth(self.full_width, self._local_width()):
            return super().forward(*inputs, **options)

    def _local_width(self) -> int:
        """The features of the local heads, with the padding of the projections."""
        layers = (one for one in self.children() if isinstance(one, ParallelLinear))
        found = (one.placements["weight"] for one in layers if "weight" in one.placements)
        widths = (one.local_size(self.axis.rank) for one in found if one.size == self.full_width and one.is_padded)
        return next(widths, self.full_width // self.axis.size)


class _LocalWidth(TorchFunctionMode):
    """Reshape to the local last dim where a reshape to the full one would fail, as the tensor has too few elements.

    Only for last dims that divide the full width: all heads, or one of all heads over the local ones.
    """

    def __init__(self, full: int, local: int) -> None:
        super().__init__()
        self.full, self.local = full, local

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RESHAPES and len(args) > 1:
            shape = tuple(args[1]) if isinstance(args[1], tuple | list) else tuple(args[1:])
            is_width = len(shape) > 1 and shape[-1] > 0 and self.full % shape[-1] == 0
            if is_width and math.prod(shape) * self.local == args[0].numel() * self.full:
                width, rest = divmod(shape[-1] * self.local, self.full)
                args = args if rest else (args[0], (*shape[:-1], width))
        return func(*args, **(kwargs or {}))


class LocalNames(Recompiled, ParallelModule):
    """A module whose code assigns numbers to local variables that differ on a rank: see :func:`with_local_values`.

    Attributes:
        local_values: the value of each variable on this rank.
    """

    local_values: Mapping[str, int]


class _Values(ast.NodeTransformer):
    """Replace the values that are assigned to local variables by those of ``local_values``."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.found = names, set[str]()

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in self.names:
            node.value = ast.parse(f"self.local_values[{target.id!r}]", mode="eval").body
            self.found.add(target.id)
        return node


@class_factory
def with_local_values(plain: type[nn.Module], names: tuple[str, ...]) -> type[LocalNames]:
    """A class derived from a module's, with its forward recompiled to read local variables from ``local_values``.

    Args:
        plain: the class of the module.
        names: the variables.

    Raises:
        PlanError: if its forward does not assign each of them.
    """
    values = _Values(names)
    forward = recompiled(plain.forward, values)
    if missing := sorted(set(names) - values.found):
        raise PlanError(f"{plain.forward.__qualname__} assigns no {', '.join(missing)}: its rules are for other code")
    made: type[LocalNames] = new_class(plain, (LocalNames, plain), {"forward": forward})
    return made


def part_of(value: Tensor, placement: Placement, rank: int, name: str) -> Tensor:
    """A rank's shard of a tensor along a dim that may be counted from the end.

    Raises:
        PlanError: if the dim does not have the elements of the placement.
    """
    assert placement.dim is not None
    if not -value.dim() <= placement.dim < value.dim() or value.shape[placement.dim] != placement.size:
        raise PlanError(
            f"{name} of shape {list(value.shape)} does not have {placement.size} elements along dim {placement.dim}: "
            f"correct the dim or the unit of its module override"
        )
    return take_shard(value, replace(placement, dim=placement.dim % value.dim()), rank)


class SlicedOutput(ParallelModule):
    """A replicated module with an output for each unit, of which a rank uses those of its local units.

    Attributes:
        item: the index of this output among several; None if there is one.
        output_dim: the dim that counts units.
        output_units: the placement of the units.
    """

    item: int | None
    output_dim: int
    output_units: Placement

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        outputs = super().forward(*inputs, **options)
        if self.item is None:
            return self._sliced(outputs)
        return (*outputs[: self.item], self._sliced(outputs[self.item]), *outputs[self.item + 1 :])

    def _sliced(self, value: Tensor) -> Tensor:
        placement = replace(self.output_units, dim=self.output_dim)
        return part_of(copy_to_tp(value, group=self.axis), placement, self.axis.rank, "an output")


class MixedHeads(ParallelModule):
    """A module with methods that mix heads: they compute over all heads, and each rank uses the local ones.

    Attributes:
        unsharded: the placement of the heads in the output of each of these methods.
        full_attributes: the values of overridden attributes in the unsharded module.
    """

    unsharded: Mapping[str, Placement]
    full_attributes: Mapping[str, Any]

    def on_all_heads(self, name: str, method: Callable[[], Tensor]) -> Tensor:
        """The local part of a method's output; while it runs, column parallel layers gather their output."""
        local = {attribute: getattr(self, attribute) for attribute in self.full_attributes}
        columns = [one for one in self.children() if isinstance(one, ColumnParallelLinear)]
        columns = [one for one in columns if not one.gather_output]
        try:
            self._set(self.full_attributes, columns, gathers=True)
            full = copy_to_tp(method(), group=self.axis)
        finally:
            self._set(local, columns, gathers=False)
        return take_shard(full, self.unsharded[name], self.axis.rank)

    def _set(self, attributes: Mapping[str, Any], columns: list[ColumnParallelLinear], *, gathers: bool) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)
        for layer in columns:
            layer.gather_output = gathers


@class_factory
def mixing_heads(names: tuple[str, ...]) -> type[MixedHeads]:
    """The class of modules in which these methods compute over all heads."""

    def over_all(name: str) -> Callable[..., Tensor]:
        def method(self: MixedHeads, *inputs: Any, **options: Any) -> Tensor:
            return self.on_all_heads(name, partial(getattr(super(kind, self), name), *inputs, **options))

        return method

    kind: type[MixedHeads] = new_class(MixedHeads, (MixedHeads,), {name: over_all(name) for name in names})
    return kind


class SlicedTensors(Substitutable, ParallelModule):
    """A module with replicated tensors that have elements for each unit, and that computes with the local ones."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        full = {name: copy_to_tp(self.own_tensor(name), group=self.axis) for name in self.slices}
        rank = self.axis.rank
        with Substituted({(self, name): part_of(full[name], self.slices[name], rank, name) for name in full}):
            return super().forward(*inputs, **options)


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
        masks = [] if key_padding_mask is None else [_added(key_padding_mask, query)[:, None, None]]
        if attn_mask is not None:
            added = _added(attn_mask, query)
            masks.append(added if added.dim() == 2 else added.unflatten(0, (query.shape[not self.batch_first], -1)))
        mask = sum(masks[1:], masks[0]) if masks else None
        queries, keys, values = self._heads(query, key, value)
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
        output = heads.transpose(1, 2).flatten(2)
        return self.out_proj(output if self.batch_first else output.transpose(0, 1)), None

    def _heads(self, *inputs: Tensor) -> Iterator[Tensor]:
        """Query, key and value of each head, [batch, local heads, tokens, head_dim]."""
        weights = self.shard("in_proj_weight").chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.shard("in_proj_bias").chunk(3)
        for input, weight, bias in zip(inputs, weights, biases, strict=True):
            made = F.linear(copy_to_tp(input, group=self.axis), weight, bias).unflatten(-1, (-1, self.head_dim))
            yield made.transpose(1, 2) if self.batch_first else made.permute(1, 2, 0, 3)


class FunctionalAttention(ParallelModule):
    """A module that calls torch.nn.functional.multi_head_attention_forward with the weights of its layers.

    Attributes:
        heads: the placement of the heads.
    """

    heads: Placement

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own, without attention weights."""
        with _LocalHeads(self.heads, self.axis):
            return super().forward(*inputs, **options)


class _LocalHeads(TorchFunctionMode):
    """Compute torch's multi-head attention over local heads, from sharded weights.

    Inputs, masks and output are replicated.
    """

    def __init__(self, heads: Placement, axis: Axis) -> None:
        super().__init__()
        self.heads, self.axis = heads, axis

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        call = inspect.signature(func).bind(*args, **(kwargs or {}))
        call.apply_defaults()
        return self._attend(SimpleNamespace(**call.arguments)), None

    def _attend(self, call: Any) -> Tensor:
        """[tokens, batch, features] to the same."""
        others = (call.bias_k, call.bias_v, call.static_k, call.static_v)
        if not call.use_separate_proj_weight or call.add_zero_attn or any(one is not None for one in others):
            raise ValueError("multi_head_attention_forward: only separate weights, and no further keys, are sharded")
        head_dim = call.embed_dim_to_check // call.num_heads
        biases = (None,) * 3 if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
        weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
        queries, keys, values = (
            F.linear(copy_to_tp(one, group=self.axis), weight, bias).unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)
            for one, weight, bias in zip((call.query, call.key, call.value), weights, biases, strict=True)
        )
        dropout = call.dropout_p if call.training else 0.0
        found = F.scaled_dot_product_attention(queries, keys, values, self._mask(call), dropout)
        features = found.permute(2, 0, 1, 3).flatten(2)
        output = reduce_from_tp(F.linear(features, call.out_proj_weight), group=self.axis)
        return output if call.out_proj_bias is None else output + call.out_proj_bias

    def _mask(self, call: Any) -> Tensor | None:
        """The sum of all masks, to be added to the scores of the local heads."""
        padding, mask = call.key_padding_mask, call.attn_mask
        masks = [] if padding is None else [_added(padding, call.query)[:, None, None]]
        if mask is not None and mask.dim() == 3:
            full = copy_to_tp(_added(mask, call.query), group=self.axis).unflatten(0, (-1, call.num_heads))
            masks.append(take_shard(full, replace(self.heads, dim=1), self.axis.rank))
        elif mask is not None:
            masks.append(_added(mask, call.query))
        return sum(masks[1:], masks[0]) if masks else None


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add to scores."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


class GatheredOutput(ParallelModule):
    """A module over local features whose output is all-gathered."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        return gather_from_tp(super().forward(*inputs, **options), group=self.axis)
