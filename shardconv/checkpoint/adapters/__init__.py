"""LoRA adapters of PEFT, as sources and in split checkpoints."""

from typing import TYPE_CHECKING

from shardconv.support import modules_on_use

__all__ = ["merge_adapter"]

if TYPE_CHECKING:
    from shardconv.checkpoint.adapters import merge_adapter
else:
    __getattr__ = modules_on_use(__name__, __all__)
