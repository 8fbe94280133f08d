"""Conversion of torch modules to parallel ones, in place; and their state dicts with full tensors."""

from shardconv.convert.converted_model import gather_state_dict, load_full_state_dict
from shardconv.convert.layers import convert_parallel_embedding, convert_parallel_linear
from shardconv.convert.model import convert_model

__all__ = [
    "convert_model",
    "convert_parallel_embedding",
    "convert_parallel_linear",
    "gather_state_dict",
    "load_full_state_dict",
]
