"""Commands with a console, whose options are data. ``--help`` lists the options under headings.

The ``params`` of a command are options of ``options.py`` and its own, which ``--help`` shows in this order.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from itertools import pairwise, takewhile
from typing import Any

import click

from shardconv.files.fileio import reuse_freed_memory
from shardconv.support.console import Console
from shardconv.support.errors import WorldSizeError

SOURCE, PLAN, OUTPUT, ADAPTERS = "Source", "Plan", "Output", "Adapters"
GENERATION, MODEL, REPORT, CHECKS, COST, DISPLAY = "Generation", "Model", "Report", "Checks", "Cost", "Display"
#: The headings, in the order of ``--help``.
HEADINGS = (SOURCE, PLAN, ADAPTERS, OUTPUT, GENERATION, MODEL, REPORT, CHECKS, COST, DISPLAY)
#: The most characters of an option and its values before their help text starts on the next line.
_MAX_WIDTH = 26
#: The most options that the error for an unknown one proposes, and the least similarity of one that does not begin with
#: the text, from 0 to 1.
_MAX_PROPOSED, _SIMILAR = 3, 0.75


class Option(click.Option):
    """An option of a command.

    Args:
        heading: one of :data:`HEADINGS`.
        names: its names, and the name of its argument if that is another, with spaces between them.
        text: its help text.
        meant_by: options of other programs, whose errors propose this one.
        settings: settings of click's option.
    """

    def __init__(self, heading: str, names: str, text: str, *, meant_by: str = "", **settings: Any) -> None:
        super().__init__(names.split(), help=text, **settings)
        self.heading, self.meant_by = heading, meant_by.split()


class Flag(Option):
    """An option without a value; ``--x/--no-x`` is one that is on by default."""

    def __init__(self, heading: str, names: str, text: str, **settings: Any) -> None:
        super().__init__(heading, names, text, is_flag=True, **{"default": "/" in names, **settings})


def chosen(values: dict[str, Any], options: Iterable[click.Parameter]) -> dict[str, Any]:
    """The values of some options of a command."""
    return {str(option.name): values[str(option.name)] for option in options}


def _nearest(option: str, options: Iterable[str]) -> list[str]:
    """The options that a user may have meant: all that begin with the text, else the most similar one."""
    known = sorted(name for name in options if name.startswith("--"))
    begun = [name for name in known if name.startswith(option)]
    return begun[:_MAX_PROPOSED] or get_close_matches(option, known, n=1, cutoff=_SIMILAR)


def _check_dashes(context: click.Context, args: Iterable[str], options: Mapping[str, click.Parameter]) -> None:
    """Refuse a long option with one dash. click reads -tp as -t p, and -overwrite as -o verwrite.

    Arguments after -- are paths.
    """
    for before, text in pairwise(["", *takewhile("--".__ne__, args)]):
        name, option = text.partition("=")[0], options.get(before)
        has_value = isinstance(option, click.Option) and not option.is_flag
        if name.startswith("-") and f"-{name}" in options and not has_value:
            raise click.NoSuchOption(name, possibilities=[f"-{name}"], ctx=context)


class Command(click.Command):
    """A command whose ``--help`` lists options under headings and ends with examples, its ``epilog``.

    Its function gets a ``console``, which replaces the options of the output, ``as_json`` and ``quiet``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; errors propose the nearest options for an unknown one, and -o for a second path."""
        params = self.get_params(ctx)
        options = {name: one for one in params for name in (*one.opts, *one.secondary_opts)}
        _check_dashes(ctx, args, options)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = [one.opts[0] for one in params if isinstance(one, Option) and error.option_name in one.meant_by]
            error.possibilities = meant or _nearest(error.option_name, options)  # type: ignore[misc] # its filter is lenient
            raise
        except click.UsageError as error:
            if error.message.startswith("Got unexpected extra argument") and (remedy := self.extra_remedy(options)):
                raise click.UsageError(f"{error.message}: {remedy}", ctx) from error
            raise

    def extra_remedy(self, options: Collection[str]) -> str:
        """The remedy for an argument too many, given the command's options; "" if there is none."""
        return "for the output pass -o PATH" if "-o" in options else ""

    def invoke(self, ctx: click.Context) -> object:
        """Run the function of the command with its console."""
        ctx.params["console"] = Console(as_json=ctx.params.pop("as_json"), quiet=ctx.params.pop("quiet"))
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, in columns that are equally wide under all headings."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (row := option.get_help_record(ctx)):
                rows.setdefault(getattr(option, "heading", DISPLAY), []).append((f"{row[0]:<{_MAX_WIDTH}}", row[1]))
        for heading in sorted(rows, key=HEADINGS.index):
            with formatter.section(heading):
                formatter.write_dl(rows[heading], _MAX_WIDTH)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, one per line."""
        del ctx
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class CopyCommand(Command):
    """A command that copies tensors."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Freed memory is kept for later allocations."""
        reuse_freed_memory()
        return super().invoke(ctx)


class OneProcessCommand(CopyCommand):
    """A command that is refused under torchrun, where each process would do all of its work."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command in a single process.

        Raises:
            WorldSizeError: in each of several processes that torchrun started.
        """
        world_size = os.environ.get("WORLD_SIZE", "1")
        if "TORCHELASTIC_RUN_ID" in os.environ and world_size != "1":
            error = WorldSizeError(
                f"{self.name} is not shared between processes (got {world_size}, expected 1): start it without torchrun"
            )
            error.is_repeated = os.environ.get("RANK") != "0"
            raise error
        return super().invoke(ctx)
