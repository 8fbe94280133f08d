"""Cross entropy over logits that are sharded by class, without gathering them.

With x the logits, y the target, w the class weights, W their sum, C the number of classes, e the label smoothing and
lse = log(sum over c of exp(x_c)), the loss of nn.CrossEntropyLoss (as its documentation defines it) is

    loss = (1 - e) w_y (lse - x_y) + e / C * (W lse - sum over c of w_c x_c)

divided, for ``mean``, by the sum of w_y. Sums over classes are all-reduced: one all-reduce for the largest logit, a
second one for all sums. The gradient needs no communication, except for gradients of higher order.
"""

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardconv.distributed import Axis, GroupLike, as_axis, copy_to_tp, reduce_from_tp
from shardconv.layers.features import check_tag, output_placement
from shardconv.plan.placement import Placement, Unit, shard_dim


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


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    num_classes: int | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Compute ``F.cross_entropy`` over logits sharded by class.

    Args:
        input: this rank's logits, [N, C_r], [N, C_r, d1, ...] or [C_r] with C_r = ceil(C / tp), the last of which are
            padding if C is not a multiple of tp. Or the full logits with C classes, the same on every rank.
        target: class indices, [N], [N, d1, ...] or [], the same on every rank; or probabilities, sharded as ``input``
            is, or over all classes and the same on every rank.
        weight: weight of each class, [C], the same on every rank.
        size_average: deprecated, as in torch.
        ignore_index: target index that does not contribute.
        reduce: deprecated, as in torch.
        reduction: ``none``, ``mean`` or ``sum``.
        label_smoothing: from 0 to 1.
        num_classes: C, which distinguishes full logits from sharded ones. Not needed where C is known: with ``weight``,
            for the direct output of a column parallel layer, and on one rank.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        The loss in nats, the same on every rank: [], or one value per index or row of probabilities of the target with
        ``reduction="none"``. Computed in float32 or float64, returned in the dtype of ``input``.

    Raises:
        IndexError: if a target index is not a class; on CUDA a device-side assertion, as torch's.
        ValueError: if shapes or options contradict each other, C is unknown, or a tag contradicts how a tensor is
            sharded (see :class:`~shardconv.layers.RegisterParallelDim`).

    Example:
        >>> logits = torch.randn(3, 5, requires_grad=True)
        >>> parallel_cross_entropy(logits, torch.tensor([1, 0, 4])).backward()
    """
    if size_average is not None or reduce is not None:
        reduction = nn.CrossEntropyLoss(size_average=size_average, reduce=reduce).reduction
    axis = as_axis(group)
    class_dim = 0 if input.dim() == 1 else 1
    width = input.shape[class_dim]
    num_classes = _total_classes(input, class_dim, weight, num_classes, axis)
    _check_width(input, width, num_classes, axis)
    _check_tags(input, target, weight, class_dim, num_classes, axis)
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.promote_types(input.dtype, torch.float32))  # as torch does under autocast
    if axis.size == 1 or width == num_classes:
        full = input.narrow(class_dim, 0, num_classes)
        return functional.cross_entropy(full, target, weight, None, ignore_index, None, reduction, label_smoothing)
    _check_options(weight, label_smoothing, reduction, num_classes)
    first = axis.rank * width
    classes = LocalClasses(first, max(min(width, num_classes - first), 0), num_classes, axis)
    logits = input.movedim(class_dim, -1)
    if target.is_floating_point():
        loss = _against_probabilities(logits, target.movedim(class_dim, -1), weight, label_smoothing, classes)
        count: Tensor | int = loss.numel()
    else:
        loss, count = _against_indices(logits, target, weight, ignore_index, label_smoothing, classes)
    loss = loss.sum() if reduction == "sum" else loss.sum() / count if reduction == "mean" else loss
    return loss.to(input.dtype)


def _check_options(weight: Tensor | None, label_smoothing: float, reduction: str, num_classes: int) -> None:
    if weight is not None and tuple(weight.shape) != (num_classes,):
        raise ValueError(f"weight has shape {list(weight.shape)} (expected [{num_classes}])")
    if not 0 <= label_smoothing <= 1 or reduction not in ("none", "mean", "sum"):
        raise ValueError(
            f"options are not supported (got label_smoothing {label_smoothing} and reduction {reduction!r}, expected 0 "
            f"to 1, and none, mean or sum)"
        )


def _check_width(input: Tensor, width: int, num_classes: int, axis: Axis) -> None:
    local_classes = -(-num_classes // axis.size)
    if axis.size > 1 and width not in (num_classes, local_classes):
        raise ValueError(
            f"input of shape {list(input.shape)} has {width} classes (expected {num_classes} in full logits, or "
            f"{local_classes} per rank in logits sharded over {axis.size} ranks)"
        )


def _check_tags(
    input: Tensor, target: Tensor, weight: Tensor | None, class_dim: int, num_classes: int, axis: Axis
) -> None:
    """Check the tags of the tensors against the sharding that their sizes imply."""
    describe = "parallel_cross_entropy".__str__
    check_tag(input, [None if input.shape[class_dim] == num_classes else class_dim], axis, describe)
    is_sharded = target.dim() == input.dim() and target.shape[class_dim] != num_classes
    check_tag(target, [class_dim if is_sharded else None], axis, describe, "target")
    if weight is not None:
        check_tag(weight, [None], axis, describe, "weight")


def _total_classes(input: Tensor, class_dim: int, weight: Tensor | None, passed: int | None, axis: Axis) -> int:
    """Determine the number of classes from ``num_classes``, the class weights, or the layer that computed the logits.

    Raises:
        ValueError: if it is unknown, or they contradict each other.
    """
    width = input.shape[class_dim]
    expected = weight.shape[0] if passed is None and weight is not None and weight.dim() else passed
    placement = output_placement(input) if class_dim == input.dim() - 1 else None
    if placement is not None:
        _check_placement(placement, width, expected)
        return placement.size if expected is None else expected
    if expected is not None or axis.size == 1:
        return width if expected is None else expected
    raise ValueError(
        f"input of shape {list(input.shape)} may be full logits or sharded over {axis.size} ranks, as it is not the "
        f"direct output of a column parallel layer: pass num_classes ({width} for full logits; {width * axis.size}, or "
        f"less with padding, for sharded logits)"
    )


def _check_placement(placement: Placement, width: int, num_classes: int | None) -> None:
    """Check that the layer that computed the logits has the classes that the loss assumes.

    Raises:
        ValueError: if ``num_classes`` is the size of the shard, or the classes of a rank are not consecutive.
    """
    if num_classes == width != placement.size:
        raise ValueError(
            f"num_classes is the size of one shard (got {num_classes}, expected {placement.size} of the column "
            f"parallel layer): pass num_classes={placement.size}, or gather_output=True to the layer"
        )
    if placement.ranks != shard_dim(0, [Unit(placement.size, pad=True)], placement.num_ranks).ranks:
        raise ValueError(
            f"the logits do not have consecutive classes on each rank (got {placement.describe()}): use a layer "
            f"without split_sizes and placement, or with gather_output=True"
        )


def _against_indices(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float, classes: LocalClasses
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each target index, and the sum of class weights that divides their mean."""
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"target has shape {list(target.shape)} (expected {list(logits.shape[:-1])})")
    counts = target != ignore_index
    _check_targets(target, counts, classes.total)
    target = target.masked_fill(~counts, 0)
    weight = logits.new_ones(classes.total, dtype=torch.float32) if weight is None else weight
    local_weight = classes.select(weight) if smoothing else None
    log_sum, target_logit, weighted = class_sums(logits, target, local_weight, classes)
    factor = weight.to(log_sum.dtype)[target] * counts
    loss = (1 - smoothing) * factor * (log_sum - target_logit)
    if smoothing:
        loss = loss + smoothing / classes.total * (weight.sum() * log_sum - weighted)
    return loss.masked_fill(~counts, 0), factor.sum()


def _check_targets(target: Tensor, counts: Tensor, num_classes: int) -> None:
    if torch.compiler.is_compiling():
        return
    is_wrong = counts & ((target < 0) | (target >= num_classes))
    if target.is_cuda:
        torch._assert_async(~is_wrong.any())  # noqa: SLF001 - does not synchronize, as torch's checks
    elif is_wrong.any():
        raise IndexError(f"Target {int(target[is_wrong][0])} is out of bounds.")


def _against_probabilities(
    logits: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, classes: LocalClasses
) -> Tensor:
    """Compute the loss of each row of probabilities."""
    if target.shape[:-1] != logits.shape[:-1] or target.shape[-1] not in (logits.shape[-1], classes.total):
        raise ValueError(
            f"target has shape {list(target.shape)} with the classes last (expected {list(logits.shape)}, or "
            f"{classes.total} classes)"
        )
    if target.requires_grad:
        raise ValueError("target probabilities get no gradient where logits are sharded: detach them")
    mass = classes.select(target, -1) * (1 - smoothing) + smoothing / classes.total
    mass = mass if weight is None else mass * classes.select(weight)
    log_sum, _, weighted = class_sums(logits, None, mass, classes)
    return reduce_from_tp(mass.sum(-1), group=classes.axis) * log_sum - weighted


class ParallelCrossEntropyLoss(nn.CrossEntropyLoss):
    """nn.CrossEntropyLoss over logits sharded by class, as of :class:`~shardconv.layers.VocabParallelClassifier`.

    Args:
        weight: [C], for all classes. This argument and the next five are as in nn.CrossEntropyLoss.
        size_average: deprecated.
        ignore_index: target that does not count.
        reduce: deprecated.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: between 0 and 1.
        num_classes: number of classes of all ranks, C; with it, full logits are supported, too. Required on several
            ranks, unless ``weight`` is passed or the logits are the direct output of a column parallel layer; see
            :func:`parallel_cross_entropy`.
        group: see :func:`~shardconv.distributed.as_axis`.

    Shape:
        - input: [N, C_r], [N, C_r, d1, ...] or [C_r] with C_r = ceil(C / tp); or the full logits.
        - target: [N], [N, d1, ...] or [], the same on every rank; or probabilities, sharded as the input is, or of all
          classes.
        - output: [], or the target's shape with ``reduction="none"``; the same on every rank.

    Example:
        >>> loss = ParallelCrossEntropyLoss(label_smoothing=0.1)
        >>> loss(torch.zeros(2, 4), torch.tensor([0, 3]))  # log(4)
        tensor(1.3863)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        num_classes: int | None = None,
        group: GroupLike = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.num_classes = num_classes
        self.axis = as_axis(group)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss; for shapes see the class, for errors :func:`parallel_cross_entropy`."""
        return parallel_cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            num_classes=self.num_classes,
            group=self.axis,
        )
