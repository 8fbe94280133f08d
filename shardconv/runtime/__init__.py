"""Loading and running split checkpoints, one process per rank, and estimating their memory and communication."""

from shardconv.runtime.load import load

__all__ = ["load"]
