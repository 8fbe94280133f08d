"""Split, merge, reshard, pad and verify checkpoints, and report on their plans."""

from typing import TYPE_CHECKING

from shardconv.support import modules_on_use

__all__ = ["foreign_writer", "megatron_writer", "meta_writer"]

if TYPE_CHECKING:
    from shardconv.checkpoint.operations import foreign_writer, megatron_writer, meta_writer
else:
    __getattr__ = modules_on_use(__name__, __all__)
