"""Attention modules on a rank's heads, where attributes of the module are not enough to say how many it has.

Owns what the module overrides ``full_width``, ``locals`` and ``output`` make of a module, and torch's own multi-head
attention. Each computes what the module did, with its own code.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardconv.convert.modules import Sharded
from shardconv.distributed import copy_to_tp, gather_from_tp
from shardconv.errors import PlanError
from shardconv.layers.sharding import ParallelModule, take_shard
from shardconv.plan.placement import Placement

_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape)


class FullWidth(ParallelModule):
    """Attention whose code joins heads to the full width of its input, or divides that by the heads, of all ranks.

    Attributes:
        full_width: the features of all heads.
    """

    full_width: int

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        with _LocalWidth(self.full_width, self.axis.size):
            return super().forward(*inputs, **options)


class _LocalWidth(TorchFunctionMode):
    """Reshape to a rank's part of the last dim where all of it has ``tp`` times the elements, and would fail.

    Only for last dims that divide the full width: all heads, or one of all heads over those of the rank.
    """

    def __init__(self, full: int, tp: int) -> None:
        super().__init__()
        self.full, self.tp = full, tp

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RESHAPES and len(args) > 1:
            shape = tuple(args[1]) if isinstance(args[1], tuple | list) else tuple(args[1:])
            is_width = len(shape) > 1 and shape[-1] > 0 and self.full % shape[-1] == 0
            if is_width and math.prod(shape) == args[0].numel() * self.tp and shape[-1] % self.tp == 0:
                args = (args[0], (*shape[:-1], shape[-1] // self.tp))
        return func(*args, **(kwargs or {}))


class LocalNames(ParallelModule):
    """A module whose code has a number in a local variable that is another one on a rank.

    Attributes:
        local_values: name of each variable to its value on the rank.
    """

    local_values: Mapping[str, int]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own, with these values."""
        plain: Any = super().forward
        return with_locals(plain.__func__, tuple(self.local_values))(self, *inputs, **options)


class _Values(ast.NodeTransformer):
    """Let assignments to names take what the module has for them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.found = names, set[str]()

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in self.names:
            node.value = ast.parse(f"self.local_values[{target.id!r}]", mode="eval").body
            self.found.add(target.id)
        return node


@lru_cache
def with_locals(forward: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A module's forward, compiled anew from its source with other values in local variables.

    Raises:
        PlanError: if it does not assign each of them.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    values = _Values(names)
    values.visit(tree)
    if missing := sorted(set(names) - values.found):
        raise PlanError(f"{forward.__qualname__} assigns no {', '.join(missing)}: its rules are for other code")
    namespace: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(forward), "exec")
    exec(code, forward.__globals__, namespace)  # noqa: S102 - the module's own source
    changed: Callable[..., Any] = namespace[forward.__name__]
    return changed


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
    """A module that gives something for each unit of all ranks, of which a rank goes on with its own.

    Attributes:
        item: which of several outputs that is; None where there is one.
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


class SlicedTensors(ParallelModule):
    """A module with tensors that hold something for each unit of all ranks, of which it computes with the rank's.

    Attributes:
        slices: name of each to what of it is the rank's.
    """

    slices: Mapping[str, Placement]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        whole = {name: copy_to_tp(getattr(self, name), group=self.axis) for name in self.slices}
        sliced = {name: part_of(value, self.slices[name], self.axis.rank, name) for name, value in whole.items()}
        self.__dict__.update(sliced)  # found before parameters and buffers are
        try:
            return super().forward(*inputs, **options)
        finally:
            for name in sliced:
                del self.__dict__[name]


class ParallelMultiheadAttention(Sharded):
    """torch's multi-head attention, over the heads of a rank: q, k and v in one tensor, sharded by heads each."""

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
        """[batch, tokens, features], or tokens first if the module says so, to the same; without weights.

        Args:
            query: what asks.
            key: what is compared with it.
            value: what is taken.
            key_padding_mask: [batch, key tokens]; what is True is left out, numbers are added.
            need_weights: may not be True; where it is left out, there are none all the same.
            attn_mask: [query tokens, key tokens], or these behind each example and head of the rank; as the other.
            average_attn_weights: not read.
            is_causal: says that ``attn_mask`` is causal.

        Raises:
            ValueError: if weights are asked for, or a causal mask is to be made.
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
        """Query, key and value of each head, [batch, heads of the rank, tokens, head_dim]."""
        weights = self.shard("in_proj_weight").chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.shard("in_proj_bias").chunk(3)
        for input, weight, bias in zip(inputs, weights, biases, strict=True):
            made = F.linear(copy_to_tp(input, group=self.axis), weight, bias).unflatten(-1, (-1, self.head_dim))
            yield made.transpose(1, 2) if self.batch_first else made.permute(1, 2, 0, 3)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


class GatheredOutput(ParallelModule):
    """A module over a rank's features whose output goes to what needs those of all ranks."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        return gather_from_tp(super().forward(*inputs, **options), group=self.axis)
