"""Support for serving engines: a vLLM plugin that loads rank files, and a check of split checkpoints against vLLM.

Modules that import vLLM, which is an extra and reads the environment on import, are imported on first use.
"""

from typing import TYPE_CHECKING

from shardconv.support import modules_on_use

__all__ = ["vllm_loader", "vllm_process"]

if TYPE_CHECKING:
    from shardconv.engines import vllm_loader, vllm_process
else:
    __getattr__ = modules_on_use(__name__, __all__)
