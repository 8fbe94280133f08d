"""The commands of the command line, and the options and reports that they share.

The module of a command is imported when the command is used.
"""

from typing import TYPE_CHECKING

from shardconv.support import modules_on_use

__all__ = ["merge", "pad", "plan", "reshard", "run", "split", "verify"]

if TYPE_CHECKING:
    from shardconv.commands import merge, pad, plan, reshard, run, split, verify
else:
    __getattr__ = modules_on_use(__name__, __all__)
