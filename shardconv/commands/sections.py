"""Help texts of commands: options under headings, and examples.

To add an option, pass it to :func:`section` with one of :data:`HEADINGS`: in ``options.py`` if several commands have
it, or above the function of its command. The options under a heading have the order of the decorators.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Protocol, TypeVar

import click

from shardconv.support.errors import WorldSizeError

Function = TypeVar("Function", bound=Callable[..., object])


class Decorator(Protocol):
    """A decorator that adds options to a function."""

    def __call__(self, function: Function, /) -> Function:
        """Add them."""
        ...


SOURCE, PLAN, OUTPUT, ADAPTERS = "Source", "Plan", "Output", "Adapters"
GENERATION, MODEL, REPORT, CHECKS, COST, DISPLAY = "Generation", "Model", "Report", "Checks", "Cost", "Display"
#: The headings, in the order of ``--help``.
HEADINGS = (SOURCE, PLAN, ADAPTERS, OUTPUT, GENERATION, MODEL, REPORT, CHECKS, COST, DISPLAY)
#: The most characters of an option and its values before their help text starts on the next line.
_MAX_WIDTH = 26
#: The most options that the error for an unknown one proposes, and the least similarity of one that does not begin with
#: the text, from 0 to 1.
_MAX_PROPOSED, _SIMILAR = 3, 0.75
_RANGE = re.compile(r"(; )?([\d.]+<=)?x[<>]=[\d.]+")

_heading_of: dict[click.Parameter, str] = {}


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order of ``--help``."""

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def section(heading: str, *options: Decorator) -> Decorator:
    """Options that ``--help`` lists under a heading, as one decorator."""

    def add(function: Function) -> Function:
        before = len(_parameters(function))
        function = together(*options)(function)
        _heading_of.update(dict.fromkeys(_parameters(function)[before:], heading))
        return function

    return add


def _parameters(function: Callable[..., object]) -> list[click.Parameter]:
    """The options and arguments that click has collected for a function."""
    collected: list[click.Parameter] = vars(function).get("__click_params__", [])
    return collected


def _without_range(text: str) -> str:
    """A help text without the range of numbers that click adds; errors name it."""
    return _RANGE.sub("", text).replace("[; ", "[").replace("  []", "")


def _nearest(option: str, options: Iterable[str]) -> list[str]:
    """The options that a user may have meant: those that begin with the text, else the most similar one."""
    known = sorted(name for name in options if name.startswith("--"))
    begun = [name for name in known if name.startswith(option)]
    return begun[:_MAX_PROPOSED] or get_close_matches(option, known, n=1, cutoff=_SIMILAR)


class Command(click.Command):
    """A command whose ``--help`` lists options under headings and ends with examples, its ``epilog``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; errors propose the nearest options for an unknown one, and -o for a second path."""
        options = [name for one in self.get_params(ctx) for name in (*one.opts, *one.secondary_opts)]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            error.possibilities = _nearest(error.option_name, options)  # type: ignore[misc] # its filter is lenient
            raise
        except click.UsageError as error:
            if error.message.startswith("Got unexpected extra argument") and (remedy := self.extra_remedy(options)):
                raise click.UsageError(f"{error.message}: {remedy}", ctx) from error
            raise

    def extra_remedy(self, options: Collection[str]) -> str:
        """The remedy for an argument too many, given the command's options; "" if there is none."""
        return "for the output pass -o PATH" if "-o" in options else ""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, in columns that are equally wide under all headings."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (row := option.get_help_record(ctx)):
                rows.setdefault(_heading_of.get(option, DISPLAY), []).append(row)
        for heading in sorted(rows, key=HEADINGS.index):
            with formatter.section(heading):
                aligned = [(f"{name:<{_MAX_WIDTH}}", _without_range(text)) for name, text in rows[heading]]
                formatter.write_dl(aligned, _MAX_WIDTH)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, one per line."""
        del ctx
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class OneProcessCommand(Command):
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
