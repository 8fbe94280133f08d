"""Sharded tensors over torch's DTensor: specs, redistribution, hooks, and what communication costs."""

from shardconv.tensor.interop import as_dtensor

__all__ = ["as_dtensor"]
