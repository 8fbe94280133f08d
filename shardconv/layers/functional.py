"""Functional forms of the parallel layers, which take the rank's shards, like ``torch.nn.functional``."""

from shardconv.layers.embedding import parallel_embedding
from shardconv.layers.linear import parallel_linear
from shardconv.layers.loss import parallel_cross_entropy

__all__ = ["parallel_cross_entropy", "parallel_embedding", "parallel_linear"]
