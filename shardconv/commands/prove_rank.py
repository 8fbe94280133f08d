"""The hidden command of one rank of ``shardconv plan --prove``."""

import gc
from pathlib import Path

import click

from shardconv.commands.options import PATH


@click.command(hidden=True)
@click.argument("folder", type=PATH)
def prove_rank(folder: Path) -> None:
    """Run one rank of a proof."""
    gc.enable()
    from shardconv.proof.ranks import prove_rank as run
    from shardconv.runtime.launch import join, leave

    join()
    run(folder)
    leave()
