"""Containers of tensors: safetensors files, files of torch.save, and the files of torch.distributed.checkpoint.

The module of files of torch.save, which imports subprocess and pickle, is imported on first use.
"""

from typing import TYPE_CHECKING

from shardconv.support import modules_on_use

__all__ = ["torch_files"]

if TYPE_CHECKING:
    from shardconv.files.containers import torch_files
else:
    __getattr__ = modules_on_use(__name__, __all__)
