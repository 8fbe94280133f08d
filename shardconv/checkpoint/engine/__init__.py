"""The copy engine: stripes from readers to sinks in one pass and in bounded memory, with checksums."""

from typing import TYPE_CHECKING

from shardconv.support import modules_on_use

__all__ = ["arrays"]

if TYPE_CHECKING:
    from shardconv.checkpoint.engine import arrays
else:
    __getattr__ = modules_on_use(__name__, __all__)
