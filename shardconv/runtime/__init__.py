"""A split checkpoint in memory: the processes, the model, and each rank's own file on its own device."""

from shardconv.runtime.load import load

__all__ = ["load"]
