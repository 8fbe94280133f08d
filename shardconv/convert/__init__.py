"""A torch module in, the same module with parallel layers out; and its state dict as the plain model has it."""

from shardconv.convert.model import convert_model
from shardconv.convert.state import gather_state_dict, load_full_state_dict
from shardconv.layers.conversion import convert_parallel_embedding, convert_parallel_linear

__all__ = [
    "convert_model",
    "convert_parallel_embedding",
    "convert_parallel_linear",
    "gather_state_dict",
    "load_full_state_dict",
]
