"""Clip gradients of shards by the norm of all gradients."""

from collections.abc import Iterable, Iterator
from functools import partial, reduce

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardconv.distributed import Axis, gather_from_tp
from shardconv.layers.sharding import description
from shardconv.plan.placement import Placement, own_intervals
from shardconv.support.arguments import checked


@checked
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip gradients by the norm that the unsharded model's gradients have.

    ``torch.nn.utils.clip_grad_norm_`` computes the norm of one rank's shards, so ranks would scale replicated
    parameters differently. All ranks of the tensor axis call this function with the same parameters; with data
    parallelism, after gradients were averaged.

    Args:
        parameters: shards, replicated parameters, or both.
        max_norm: the largest norm of all gradients together.
        norm_type: p of the p-norm; ``float("inf")`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is NaN or infinite.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is true.
        TypeError: if a parameter is a DTensor.

    Example:
        >>> layer = ParallelLinear(4, 2, bias=False)
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> clip_grad_norm_(layer.parameters(), max_norm=1.0)
        tensor(2.8284)
        >>> bool(layer.weight.grad.norm() <= 1.0001)
        True
    """
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(isinstance(parameter, DTensor) for parameter in found):
        raise TypeError("a parameter is a DTensor: clip DTensors with torch.nn.utils.clip_grad_norm_")
    replicated: list[Tensor] = []
    sharded: dict[tuple[int, ...], tuple[Axis, list[Tensor]]] = {}
    for parameter in found:
        if (described := description(parameter)) is None:
            replicated += [] if parameter.grad is None else [parameter.grad]
        else:
            placement, axis = described
            _, own = sharded.setdefault(axis.ranks, (axis, []))
            own += [] if parameter.grad is None else _own_elements(parameter.grad, placement, axis.rank)
    # the same on all ranks, also on those without elements of their own
    dtype = reduce(torch.promote_types, (parameter.dtype for parameter in found), torch.float32)
    norm = partial(_norm, norm_type=norm_type, dtype=dtype, device=next((one.device for one in found), None))
    norms = [norm(replicated), *(gather_from_tp(norm(own), 0, group=axis) for axis, own in sharded.values())]
    total = torch.linalg.vector_norm(torch.cat(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of the gradients is not finite (got {total.item()}), so they cannot be clipped")
    torch.nn.utils.clip_grads_with_norm_(found, max_norm, total)
    return total


def _norm(gradients: list[Tensor], *, norm_type: float, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """The norm of some tensors, [1], in a dtype."""
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=dtype).to(device) for gradient in gradients]
    if not norms:
        return torch.zeros(1, dtype=dtype, device=device)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type).view(1)


def _own_elements(gradient: Tensor, placement: Placement, rank: int) -> Iterator[Tensor]:
    """The elements of a shard, without padding and elements that a lower rank also holds."""
    if placement.dim is None:
        return iter([gradient] if rank == 0 else [])
    dim = placement.dim
    return (gradient.narrow(dim, start, own.size) for own, start in own_intervals(placement, rank))
