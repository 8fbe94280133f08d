"""Options that several commands take.

Owns their names, types and help. Knows nothing of what a command does with them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from shardconv.checkpoint.paths import local_path
from shardconv.layouts.choice import LAYOUTS
from shardconv.plan.engines import ENGINES, OWN

Command = TypeVar("Command", bound=Callable[..., Any])


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in their order."""

    def add(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return add


class _LocalPath(click.Path):
    """A path that is not a URL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """Check it as it was given: in a Path a URL has lost a slash."""
        return super().convert(local_path(value), param, ctx)


PATH = _LocalPath(path_type=Path)
common_options = together(
    click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object."),
    click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
)
output_options = together(
    click.option("-q", "--quiet", is_flag=True, help="Print no result for people and no progress."), common_options
)
ignore_option = click.option(
    "--ignore",
    metavar="PATTERN",
    multiple=True,
    help="Leave out the files of SRC that match this glob pattern. Repeatable.",
)


def engine_option(default: str) -> Callable[[Command], Command]:
    """``--for``; ``default`` is named in its help."""
    text = f"Shard at the boundaries of this engine. [default: {default}]"
    return click.option("--for", "engine", type=click.Choice([*ENGINES, OWN.name]), help=text)


pad_option = click.option("--pad", is_flag=True, help="Pad heads and widths that do not divide with zeros.")
plan_options = together(
    click.option("--plan", type=PATH, help="TOML or JSON file with rules that come before the family's."),
    click.option("--family", metavar="NAME", help="Use this family, whatever the config says."),
    click.option("--replicate", metavar="NAME", multiple=True, help="Put this tensor whole on every rank. Repeatable."),
    click.option("--head-dim", type=click.IntRange(min=1), metavar="N", help="Head size, if no config says it."),
    click.option(
        "--experts",
        type=click.Choice(["tensor", "expert"]),
        default="tensor",
        help="Cut each expert over all ranks, or deal experts out. [default: tensor]",
    ),
    engine_option("those of shardconv run"),
    pad_option,
    click.option("--config", type=PATH, help="config.json to use instead of the one beside the weights."),
    click.option("--follow-links", is_flag=True, help="Read files that are links out of their folder."),
    ignore_option,
)
write_options = together(
    click.option("--overwrite", is_flag=True, help="Replace what is at the destination."),
    click.option("--dry-run", is_flag=True, help="Plan and check, write nothing."),
    click.option(
        "--threads", type=click.IntRange(min=1), metavar="N", help="Threads that copy. [default: processors, up to 8]"
    ),
)
checksum_option = click.option(
    "--checksums/--no-checksums", default=True, help="Take checksums while the data passes. [default: on]"
)


def layout_option(default: str) -> Callable[[Command], Command]:
    """``--layout``; ``default`` ends its help."""
    text = (
        "Write the source's tensor names (native), also with offsets for torch.distributed.checkpoint (dcp), or the "
        f"files of vLLM's sharded_state (vllm). {default}"
    )
    return click.option("--layout", type=click.Choice(LAYOUTS), help=text)


#: What the comparison of a checkpoint with its model does, for --help.
CHECK_MODEL = "Compare names and shapes of tensors with those of the model class in transformers first."
tp_option = click.option("--tp", type=click.IntRange(min=1), required=True, metavar="N", help="Number of ranks.")
