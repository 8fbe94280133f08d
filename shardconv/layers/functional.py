"""The layers as functions on shards that the caller has made; as ``torch.nn.functional`` is to ``torch.nn``."""

from shardconv.layers.embedding import parallel_embedding
from shardconv.layers.linear import parallel_linear
from shardconv.layers.loss import parallel_cross_entropy

__all__ = ["parallel_cross_entropy", "parallel_embedding", "parallel_linear"]
