"""A check of the first gradient of each replicated parameter, which has to be the same on all ranks.

Owns the guard against a silent error in training: a parameter that a policy replicates although the model uses it on
local heads, such as the weight of a norm over each head. Each rank then has the gradient of its local heads only.
"""

from functools import partial

import torch
from torch import Tensor, nn

from shardconv.distributed import Axis, reduce_from_tp
from shardconv.layers.parallel_module import description

#: The largest difference of norm or sum, relative to the norm: above rounding, below the effect of a rank's heads.
_TOLERANCE = 0.01


def check_first_gradients(model: nn.Module, axis: Axis) -> None:
    """Compare the first nonzero gradient of each replicated parameter over the ranks, when it is computed."""
    for name, parameter in model.named_parameters():
        if axis.size > 1 and parameter.requires_grad and description(parameter) is None:
            handles: list[torch.utils.hooks.RemovableHandle] = []
            handles.append(parameter.register_hook(partial(_compare, name, axis, handles)))


def _compare(name: str, axis: Axis, handles: list[torch.utils.hooks.RemovableHandle], gradient: Tensor) -> None:
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach().float()
    local = torch.stack([values.norm(), values.sum()])
    most = reduce_from_tp(torch.cat([local, -local]), op=torch.distributed.ReduceOp.MAX, group=axis)
    norm, spread = most[0], (most[:2] + most[2:]).max()
    if spread > _TOLERANCE * norm:
        raise RuntimeError(
            f"{name}: its gradient is not the same on all ranks. It is replicated, as no layer of the policy shards "
            f"it; if it is used on local heads, as a norm over each head, name it in the policy's on_shards(). "
            f"Otherwise the ranks had different inputs or seeds"
        )
    if norm > 0:
        handles.pop().remove()
