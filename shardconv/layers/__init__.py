"""Tensor-parallel layers: parameters are sharded over the ranks of the tensor axis, results equal torch's."""

from shardconv.layers import functional, init
from shardconv.layers.clipping import clip_grad_norm_
from shardconv.layers.dropout import ParallelDropout
from shardconv.layers.embedding import ParallelEmbedding, VocabParallelEmbedding
from shardconv.layers.features import RegisterParallelDim, get_parallel_dim
from shardconv.layers.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear, VocabParallelClassifier
from shardconv.layers.lora import LoRALinear
from shardconv.layers.loss import ParallelCrossEntropyLoss
from shardconv.layers.parallel_module import ParallelModule

__all__ = [
    "ColumnParallelLinear",
    "LoRALinear",
    "ParallelCrossEntropyLoss",
    "ParallelDropout",
    "ParallelEmbedding",
    "ParallelLinear",
    "ParallelModule",
    "RegisterParallelDim",
    "RowParallelLinear",
    "VocabParallelClassifier",
    "VocabParallelEmbedding",
    "clip_grad_norm_",
    "functional",
    "get_parallel_dim",
    "init",
]
