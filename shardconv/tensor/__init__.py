"""Sharded tensors over torch's DTensor: specs, redistribution, hooks, and what communication costs."""

from shardconv.tensor.hooks import use_param_hooks
from shardconv.tensor.interop import as_dtensor
from shardconv.tensor.phases import ParamHook

__all__ = ["ParamHook", "as_dtensor", "use_param_hooks"]
