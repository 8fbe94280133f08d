"""A look at the first gradients of what is whole on every rank: they have to be the same on all.

Owns what would go wrong without a word in training: a parameter that a policy leaves whole, and that the model uses on
a rank's part, as a norm over each head. Each rank then has the gradient of its own heads only.
"""

from functools import partial

import torch
from torch import Tensor, nn

from shardconv.distributed import Axis, reduce_from_tp
from shardconv.layers.sharding import description

#: How far norm and sum may differ, by the norm: more than rounding makes, less than one rank's heads for all.
_TOLERANCE = 0.01


def watch(model: nn.Module, axis: Axis) -> None:
    """Compare the first gradient of each trainable parameter that is no shard, when it comes, over the ranks."""
    for name, parameter in model.named_parameters():
        if axis.size > 1 and parameter.requires_grad and description(parameter) is None:
            handles: list[torch.utils.hooks.RemovableHandle] = []
            handles.append(parameter.register_hook(partial(_compare, name, axis, handles)))


def _compare(name: str, axis: Axis, handles: list[torch.utils.hooks.RemovableHandle], gradient: Tensor) -> None:
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach().float()
    mine = torch.stack([values.norm(), values.sum()])
    most = reduce_from_tp(torch.cat([mine, -mine]), op=torch.distributed.ReduceOp.MAX, group=axis)
    norm, spread = most[0], (most[:2] + most[2:]).max()
    if spread > _TOLERANCE * norm:
        raise RuntimeError(
            f"{name}: its gradient is not the same on all ranks. It is whole, as no layer of the policy cuts it; if it "
            f"is used on a rank's part, as a norm over each head, name it in the policy's on_parts(). Otherwise the "
            f"ranks had different inputs or seeds"
        )
    if norm > 0:
        handles.pop().remove()
