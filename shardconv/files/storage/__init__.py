"""Remote files: URLs, object stores, HTTP servers and the Hugging Face Hub, read by ranges of bytes; no torch.

Modules that import asyncio, which is slow and which local files do not need, are imported on first use.
"""

from typing import TYPE_CHECKING

from shardconv.support import modules_on_use

__all__ = ["folders", "read_ahead", "remote_output"]

if TYPE_CHECKING:
    from shardconv.files.storage import folders, read_ahead, remote_output
else:
    __getattr__ = modules_on_use(__name__, __all__)
