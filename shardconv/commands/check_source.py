"""The comparison of a source with its model class, for the commands that offer it."""

import gc
from typing import TYPE_CHECKING

from shardconv.commands.options import SourceFlags, SourcePath
from shardconv.support.exits import ImportPhase

if TYPE_CHECKING:
    from shardconv.proof.model_check import ModelCheck

#: The start of its help text.
CHECK_MODEL = "Compare the names and shapes of tensors with the model class in transformers first."


def check_source(src: SourcePath, options: SourceFlags) -> "ModelCheck":
    """Compare a source with the model that its config names; ``options`` are the command's."""
    gc.enable()
    with ImportPhase():
        from shardconv.proof.model_check import check_source as run
    return run(
        src,
        config=options["config"],
        follow_links=options["follow_links"],
        ignore=options["ignore"],
        source_layout=options["source_layout"],
    )
