"""Source checkpoints: their files, tensors and quantization settings, in any format and layout.

The module of rank files of other tools, which imports readers of many formats, is imported on first use.
"""

from typing import TYPE_CHECKING

from shardconv.support import modules_on_use

__all__ = ["layout_source"]

if TYPE_CHECKING:
    from shardconv.checkpoint.sources import layout_source
else:
    __getattr__ = modules_on_use(__name__, __all__)
