"""Copies and computations with numpy: the modules that import it, each imported on first use.

Importing numpy takes as long as copying some hundred megabytes, and contiguous copies do not need it. The first thread
that needs one of these modules imports it, while the others continue.
"""

from typing import TYPE_CHECKING

from shardconv.support.lazy import modules_on_use

__all__ = ["edits", "rounding", "strided"]

if TYPE_CHECKING:
    from shardconv.checkpoint.engine.arrays import edits, rounding, strided
else:
    __getattr__ = modules_on_use(__name__, __all__)
