"""Cross entropy over logits that are split by class, without gathering them.

With x the logits, y the target, w the class weights, W their sum, C the number of classes, e the label smoothing and
lse = log(sum over c of exp(x_c)), torch's definition is

    loss = (1 - e) w_y (lse - x_y) + e / C * (W lse - sum over c of w_c x_c)

divided, for ``mean``, by the sum of w_y. All sums over classes are sums over ranks: one all-reduce finds the largest
logit, a second one carries all sums. The gradient needs no communication, unless it is to have one itself.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch import Tensor, nn

from shardconv.distributed import Axis, GroupLike, as_axis, copy_to_tp, reduce_from_tp
from shardconv.layers.features import output_placement
from shardconv.plan.placement import Placement, Unit, cut


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
    """``F.cross_entropy`` over logits sharded by class.

    Args:
        input: logits, [N, C / tp], [N, C / tp, d1, ...] or [C / tp]; where C does not divide, the last ranks' further
            columns are padding, and ignored. Or the full logits, the same on every rank.
        target: class indices, [N], [N, d1, ...] or []; or probabilities, split as ``input`` is or of all classes. The
            same on every rank, as far as not split.
        weight: of each class, [C], on every rank.
        size_average: deprecated, as torch's.
        ignore_index: the target that does not count.
        reduce: deprecated, as torch's.
        reduction: ``none``, ``mean`` or ``sum``.
        label_smoothing: from 0 to 1.
        num_classes: C, by which full logits are told from sharded ones. Not needed with ``weight``, for the direct
            output of a column parallel layer, and with one rank: there C is known.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        The loss, the same on every rank: [], or the target's shape with ``reduction="none"``. Computed in float32 at
        least, given in the dtype of ``input``.

    Raises:
        IndexError: if a target is no class; on CUDA a device-side assertion, as torch's.
        ValueError: if shapes or options do not fit, or C is not known.

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
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.promote_types(input.dtype, torch.float32))  # as torch does there
    if axis.size == 1 or width == num_classes:
        full = input.narrow(class_dim, 0, num_classes)
        return F.cross_entropy(full, target, weight, None, ignore_index, None, reduction, label_smoothing)
    if width != -(-num_classes // axis.size):
        raise ValueError(
            f"input of shape {list(input.shape)} has {width} classes (expected {num_classes} in full logits, or "
            f"{-(-num_classes // axis.size)} per rank in logits sharded over {axis.size} ranks)"
        )
    if weight is not None and tuple(weight.shape) != (num_classes,):
        raise ValueError(f"weight of shape {list(weight.shape)}: one of [{num_classes}] is needed")
    if not 0 <= label_smoothing <= 1 or reduction not in ("none", "mean", "sum"):
        raise ValueError(f"label_smoothing = {label_smoothing}, reduction = {reduction!r}: not within torch's")
    first = axis.rank * width
    classes = _Classes(first, max(min(width, num_classes - first), 0), num_classes, axis)
    logits = input.movedim(class_dim, -1)
    if target.is_floating_point():
        loss = _against_probabilities(logits, target.movedim(class_dim, -1), weight, label_smoothing, classes)
        count: Any = loss.numel()
    else:
        loss, count = _against_indices(logits, target, weight, ignore_index, label_smoothing, classes)
    loss = loss.sum() if reduction == "sum" else loss.sum() / count if reduction == "mean" else loss
    return loss.to(input.dtype)


def _total_classes(input: Tensor, class_dim: int, weight: Tensor | None, given: int | None, axis: Axis) -> int:
    """The number of classes of all ranks: as given, or as the class weights or the layer of the logits have it.

    Raises:
        ValueError: if none of them has it, or they contradict each other.
    """
    width = input.shape[class_dim]
    given = weight.shape[0] if given is None and weight is not None and weight.dim() else given
    placement = output_placement(input) if class_dim == input.dim() - 1 else None
    if placement is not None:
        _check_placement(placement, width, given)
        return placement.size if given is None else given
    if given is not None or axis.size == 1:
        return width if given is None else given
    raise ValueError(
        f"input of shape {list(input.shape)}: it is unknown whether the logits are full or sharded over {axis.size} "
        f"ranks, as they are not the direct output of a column parallel layer: pass num_classes ({width} for full "
        f"logits; {width * axis.size}, or less with padding, for sharded logits)"
    )


def _check_placement(placement: Placement, width: int, given: int | None) -> None:
    """Refuse logits whose layer has other classes than this loss assumes.

    Raises:
        ValueError: if ``given`` counts the shard only, or the classes of a rank are not consecutive.
    """
    if given == width != placement.size:
        raise ValueError(
            f"num_classes = {given}, but the logits are this rank's shard of the {placement.size} classes of a column "
            f"parallel layer: pass num_classes={placement.size}, or gather_output=True to the layer"
        )
    if placement.ranks != cut(0, [Unit(placement.size, pad=True)], placement.tp).ranks:
        raise ValueError(
            f"the logits are sharded as {placement.describe()}: the loss needs consecutive classes on each rank. Use a "
            f"layer without split_sizes and placement, or gather_output=True"
        )


class _Classes(NamedTuple):
    """The classes of this rank: ``size`` from ``first`` of ``total``; what follows in its logits is padding."""

    first: int
    size: int
    total: int
    axis: Axis

    def own(self, values: Tensor, dim: int = 0) -> Tensor:
        """Of a tensor over all classes, or over those of this rank and padding, what belongs to this rank's."""
        first = self.first if values.shape[dim] == self.total else 0
        return values.narrow(dim, min(first, values.shape[dim]), self.size)


def _against_indices(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float, classes: _Classes
) -> tuple[Tensor, Tensor]:
    """The loss of each target, and what their mean is divided by."""
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"target of shape {list(target.shape)}: {list(logits.shape[:-1])} is needed")
    counts = target != ignore_index
    _check_targets(target, counts, classes.total)
    target = target.masked_fill(~counts, 0)
    weight = logits.new_ones(classes.total, dtype=torch.float32) if weight is None else weight
    own_weight = classes.own(weight) if smoothing else None
    log_sum, target_logit, weighted = _ClassSums.apply(logits, target, own_weight, classes)
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
        torch._assert_async(~is_wrong.any())  # noqa: SLF001 - as torch's own checks: no wait for the device
    elif is_wrong.any():
        raise IndexError(f"Target {int(target[is_wrong][0])} is out of bounds.")


def _against_probabilities(
    logits: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, classes: _Classes
) -> Tensor:
    """The loss of each row of probabilities."""
    if target.shape[:-1] != logits.shape[:-1] or target.shape[-1] not in (logits.shape[-1], classes.total):
        raise ValueError(
            f"target of shape {list(target.shape)}, classes last: {list(logits.shape)} is needed, or all "
            f"{classes.total} classes"
        )
    if target.requires_grad:
        raise ValueError("target probabilities get no gradient over split classes: detach them")
    mass = classes.own(target, -1) * (1 - smoothing) + smoothing / classes.total
    mass = mass if weight is None else mass * classes.own(weight)
    log_sum, _, weighted = _ClassSums.apply(logits, None, mass, classes)
    return reduce_from_tp(mass.sum(-1), group=classes.axis) * log_sum - weighted


class _ClassSums(torch.autograd.Function):
    """Sums over the classes of all ranks: of exp(logits) the logarithm, the target's logit, and a weighted sum.

    All three are of logits less the largest one, which cancels out in a loss. What is not asked for is zero.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor | None, weight: Tensor | None, classes: _Classes
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = _at_least_float32(classes.own(logits, -1))
        largest = own.amax(-1) if classes.size else own.new_full(own.shape[:-1], float("-inf"))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=classes.axis.group)
        own = own - largest.unsqueeze(-1)
        sums = torch.zeros((3, *largest.shape), dtype=own.dtype, device=own.device)
        index = is_own = None
        if target is not None and classes.size:
            index = target - classes.first
            is_own = (index >= 0) & (index < classes.size)
            index = index.masked_fill(~is_own, 0).unsqueeze(-1)
            sums[1] = own.gather(-1, index).squeeze(-1).masked_fill(~is_own, 0)
        if weight is not None:
            sums[2] = (own * weight).sum(-1)
        sums[0] = own.exp_().sum(-1)
        dist.all_reduce(sums, group=classes.axis.group)
        log_sum = sums[0].log()
        ctx.save_for_backward(logits, largest, log_sum, index, is_own, weight)
        ctx.classes = classes
        return log_sum, sums[1].clone(), sums[2].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        logits, largest, log_sum, index, is_own, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a gradient of the gradient: what is equal on all ranks is used by each apart
            log_sum = copy_to_tp(log_sum, group=ctx.classes.axis)
            grads = tuple(copy_to_tp(grad, group=ctx.classes.axis) for grad in grads)
        by_log_sum, by_target, by_weighted = (grad.unsqueeze(-1) for grad in grads)
        own = _at_least_float32(ctx.classes.own(logits, -1))
        grad = (own - largest.unsqueeze(-1) - log_sum.unsqueeze(-1)).exp() * by_log_sum
        if index is not None:
            grad = grad.scatter_add(-1, index, by_target * is_own.unsqueeze(-1))
        if weight is not None:
            grad = grad + by_weighted * weight
        return F.pad(grad, (0, logits.shape[-1] - grad.shape[-1])).to(logits.dtype), None, None, None


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class ParallelCrossEntropyLoss(nn.CrossEntropyLoss):
    """nn.CrossEntropyLoss over logits sharded by class, as of :class:`~shardconv.layers.VocabParallelClassifier`.

    Args:
        weight: as nn.CrossEntropyLoss, of all classes.
        size_average: likewise, deprecated.
        ignore_index: likewise.
        reduce: likewise, deprecated.
        reduction: likewise.
        label_smoothing: likewise.
        num_classes: of all ranks together; with it, full logits work, too. It is required with several ranks, unless
            ``weight`` is given or the logits are the direct output of a column parallel layer; see
            :func:`parallel_cross_entropy`.
        group: see :func:`~shardconv.distributed.as_axis`.

    Shape:
        - input: [N, C / tp], [N, C / tp, d1, ...] or [C / tp].
        - target: [N], [N, d1, ...] or [], on every rank; or probabilities, split as the input is or of all classes.
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
        """The loss."""
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
