"""Sums over classes that are sharded over ranks, for the cross entropy."""

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardconv.distributed import Axis, copy_to_tp


class LocalClasses(NamedTuple):
    """The classes of this rank: ``size`` from ``first`` on, of ``total``; further columns of its logits are padding."""

    first: int
    size: int
    total: int
    axis: Axis

    def select(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's classes of a tensor over all classes, or over this rank's classes and padding."""
        first = self.first if values.shape[dim] == self.total else 0
        return values.narrow(dim, min(first, values.shape[dim]), self.size)


def class_sums(
    logits: Tensor, target: Tensor | None, weight: Tensor | None, classes: LocalClasses
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over the classes of all ranks: log(sum of exp(logits)), the target's logit, and the weighted sum of logits.

    All three are computed from the logits minus the largest one, which cancels in a loss.

    Args:
        logits: [*, local classes and padding].
        target: class indices, [*]; without it, the second result is zero.
        weight: weights of the local classes, [local classes] or [*, local classes]; without it, the third result is
            zero.
        classes: the classes of this rank.

    Returns:
        Three tensors [*], the same on every rank. Differentiable with respect to ``logits``.
    """
    return _ClassSums.apply(logits, target, weight, classes)


class _Context(Protocol):
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
    classes: LocalClasses

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _ClassSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, logits: Tensor, target: Tensor | None, weight: Tensor | None, classes: LocalClasses
    ) -> tuple[Tensor, Tensor, Tensor]:
        local = _at_least_float32(classes.select(logits, -1))
        largest = local.amax(-1) if classes.size else local.new_full(local.shape[:-1], float("-inf"))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=classes.axis.group)
        local = local - largest.unsqueeze(-1)
        sums = torch.zeros((3, *largest.shape), dtype=local.dtype, device=local.device)
        index = is_local = None
        if target is not None and classes.size:
            index = target - classes.first
            is_local = (index >= 0) & (index < classes.size)
            index = index.masked_fill(~is_local, 0).unsqueeze(-1)
            sums[1] = local.gather(-1, index).squeeze(-1).masked_fill(~is_local, 0)
        if weight is not None:
            sums[2] = (local * weight).sum(-1)
        sums[0] = local.exp_().sum(-1)
        dist.all_reduce(sums, group=classes.axis.group)
        log_sum = sums[0].log()
        ctx.save_for_backward(logits, largest, log_sum, index, is_local, weight)
        ctx.classes = classes
        return log_sum, sums[1].clone(), sums[2].clone()

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, largest, log_sum, index, is_local, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # second order: gradients of replicated tensors that shards use are summed
            log_sum = copy_to_tp(log_sum, group=ctx.classes.axis)
            grads = tuple(copy_to_tp(grad, group=ctx.classes.axis) for grad in grads)
        by_log_sum, by_target, by_weighted = (grad.unsqueeze(-1) for grad in grads)
        local = _at_least_float32(ctx.classes.select(logits, -1))
        grad = (local - largest.unsqueeze(-1) - log_sum.unsqueeze(-1)).exp() * by_log_sum
        if index is not None and is_local is not None:
            grad = grad.scatter_add(-1, index, by_target * is_local.unsqueeze(-1))
        if weight is not None:
            grad = grad + by_weighted * weight
        return functional.pad(grad, (0, logits.shape[-1] - grad.shape[-1])).to(logits.dtype), None, None, None


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
