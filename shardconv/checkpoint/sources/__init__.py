"""Source checkpoints: their files, tensors and quantization settings, in any format and layout."""

from typing import TYPE_CHECKING

from shardconv.support.lazy import modules_on_use

__all__ = ["strides"]

if TYPE_CHECKING:
    from shardconv.checkpoint.sources import strides
else:
    __getattr__ = modules_on_use(__name__, __all__)
