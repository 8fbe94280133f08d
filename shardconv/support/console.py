"""Output: results on stdout, everything else on stderr. No other module prints.

Owns the text and the ``--json`` form of reports, and progress of long operations: a bar on a terminal, lines elsewhere,
with rate and time left. Imports rich only for bars.
"""

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from shardconv.support import Progress
from shardconv.support.formatting import json_text, size, time_left, visible

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

#: Characters without a shape that text for people may have: breaks, and the joiners of scripts and emoji.
_KEPT = "\n\t\u200c\u200d"


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text for people: text of a checkpoint cannot control the terminal, or change its direction."""
    click.echo(visible(text, keep=_KEPT), err=err, nl=nl)


def open_streams() -> None:
    """Open the null device for each standard stream that is closed, so that no other file takes its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)  # noqa: FBT003 - a positional-only parameter; for the processes of a run
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def discard_unwritten() -> list[str]:
    """Discard the output of streams that cannot be written, which Python would try to write again at exit.

    Returns:
        The names of these streams.
    """
    names = []
    for name, stream in (("standard output", sys.stdout), ("standard error", sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            names.append(name)
    return names


#: Seconds before the first bar, and between two lines.
BAR_SECONDS, LINE_SECONDS = 0.5, 10.0
#: Characters of a bar; with the amounts it fits 80 columns.
_BAR_WIDTH = 20


class Display:
    """Shows the progress of activities, which follow each other; nothing before the first call of one.

    Args:
        write: prints a line for the current activity at intervals; None for a bar, on the terminal of stderr.
    """

    _bars: "RichProgress | None" = None
    _current: "tuple[str, TaskID] | None" = None

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write
        self._began = self._last_call = self._shown = time.monotonic()

    def close(self) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()

    def activity(self, what: str, *, counts: bool) -> Progress:
        """The callback of an activity. Its time begins with the last call of the activity before it.

        Args:
            what: its name.
            counts: whether amounts are counts instead of bytes.
        """
        began: float | None = None

        def report(done: int, total: int) -> None:
            nonlocal began
            began = self._last_call if began is None else began
            now = self._last_call = time.monotonic()
            amounts = _amounts(done, total, now - began, counts=counts)
            if self._write is not None and now - self._shown >= LINE_SECONDS:
                self._shown = now
                self._write(f"{what}: {amounts}")
            if self._write is None and now - self._began >= BAR_SECONDS:
                self._show_bar(what, done, total, amounts)

        return report

    def _show_bar(self, what: str, done: int, total: int, amounts: str) -> None:
        """Show the bar of an activity, and no other bar."""
        bars = self._bars = self._bars or _start_bars()
        if self._current is None or self._current[0] != what:
            if self._current is not None:
                bars.remove_task(self._current[1])
            self._current = what, bars.add_task(what, amounts="")
        bars.update(self._current[1], completed=done, total=total, amounts=amounts)


def _start_bars() -> "RichProgress":
    from rich.console import Console
    from rich.progress import BarColumn
    from rich.progress import Progress as RichProgress

    columns = ("{task.description}", BarColumn(_BAR_WIDTH), "{task.fields[amounts]}")
    bars = RichProgress(*columns, console=Console(stderr=True), transient=True)
    bars.start()
    return bars


def _amounts(done: int, total: int, seconds: float, *, counts: bool) -> str:
    """The finished amount and the total; once something is finished, also the rate and the time left."""
    text = f"{done} of {total}" if counts else f"{size(done)} of {size(total)}"
    if not done or not seconds:
        return text
    rate = "" if counts else f", {size(done / seconds)}/s"
    return f"{text}{rate}, {time_left((total - done) * seconds / done)} left"


class Console:
    """Prints for one command.

    Args:
        as_json: print results as one JSON object.
        quiet: print no results for people, and no progress.
    """

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json, self.quiet = as_json, quiet
        self._shown: Display | None = None

    def report(
        self,
        report: Struct,
        lines: Sequence[str],
        *,
        quiet_lines: Sequence[str] = (),
        quiet_warnings: Sequence[str] = (),
    ) -> None:
        """Print a result: the report as JSON, or ``lines`` for people.

        Args:
            report: the result as data.
            lines: the result for people.
            quiet_lines: the result with ``quiet``.
            quiet_warnings: the warnings among ``lines``; with ``quiet`` they are printed on stderr.
        """
        if self.as_json:
            click.echo(json_text(report))
            return
        if shown := quiet_lines if self.quiet else lines:
            echo("\n".join(shown))
        if self.quiet:
            self.warn(quiet_warnings)

    def warn(self, lines: Sequence[str]) -> None:
        """Print warnings on stderr, also with ``quiet``."""
        if lines:
            echo("\n".join(lines), err=True)

    def stream(self, text: str) -> None:
        """Print a piece of a result at once, unless the output is JSON."""
        if not self.as_json:
            echo(text, nl=False)
            sys.stdout.flush()

    def document(self, text: str, parse: Callable[[str], object]) -> None:
        """Print the text of a file; with ``--json`` its content as JSON."""
        if self.as_json:
            click.echo(json.dumps(parse(text)))
        else:
            click.echo(visible(text, keep=_KEPT) if sys.stdout.isatty() else text, nl=False)

    def note(self, lines: Sequence[str]) -> None:
        """Print measurements and other notes on stderr, except with ``quiet``."""
        if not self.quiet and lines:
            echo("\n".join(lines), err=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, ends_with_remark: bool = False) -> None:
        """Print a table for people, in color on a terminal; on one that is too narrow, some lines for each row.

        Args:
            columns: the headings.
            rows: the cells of each row.
            ends_with_remark: whether the last column is dim, and goes below its row on a narrow terminal.
        """
        if self.as_json or self.quiet:
            return
        rows = [[visible(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) + 2 for column in zip(columns, *rows, strict=True)]
        terminal_width = _terminal_width() if sys.stdout.isatty() else sum(widths)
        if sum(widths) - 2 <= terminal_width:
            lines = [_aligned(row, widths, is_last_dim=ends_with_remark) for row in rows]
        elif ends_with_remark and sum(widths[:-1]) - 2 <= terminal_width:
            columns = columns[:-1]
            lines = [line for row in rows for line in _above_remark(row, widths[:-1], terminal_width)]
        else:
            click.echo("\n".join(_entries(columns, rows, terminal_width)))
            return
        click.echo("\n".join([_styled(_aligned(columns, widths[: len(columns)]), bold=True, fg="cyan"), *lines]))

    @contextmanager
    def progress(self, what: str, *, counts: bool = False) -> Iterator[Progress | None]:
        """A callback for progress: a bar on a terminal, a line every ten seconds elsewhere.

        It is shown from the first call on. Activities can be nested: each has a bar, and its time begins with its
        first call.

        Args:
            what: name of the activity.
            counts: whether amounts are counts instead of bytes.
        """
        if self.quiet:
            yield None
            return
        outer = self._shown
        write = None if sys.stderr.isatty() else lambda line: click.echo(line, err=True)
        display = self._shown = outer or Display(write)
        try:
            yield display.activity(visible(what), counts=counts)
        finally:
            self._shown = outer
            if outer is None:
                display.close()


def _terminal_width() -> int:
    import shutil  # slow, and only tables on a terminal need it

    return shutil.get_terminal_size().columns


def _aligned(cells: Sequence[str], widths: Sequence[int], *, is_last_dim: bool = False) -> str:
    """A line of a table."""
    *others, last = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return "".join([*others, _styled(last.rstrip(), dim=is_last_dim)]).rstrip()


def _above_remark(cells: Sequence[str], widths: Sequence[int], width: int) -> list[str]:
    """A line of a table, and the last cell below it."""
    below = textwrap.wrap(cells[-1], width, initial_indent="  ", subsequent_indent="  ")
    return [_aligned(cells[:-1], widths), *(_styled(line, dim=True) for line in below)]


def _styled(text: str, *, bold: bool = False, dim: bool = False, fg: str | None = None) -> str:
    """A text with a style, on a terminal that shows styles."""
    if not (bold or dim) or not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    return click.style(text, bold=bold, dim=dim, fg=fg)


def _entries(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """The lines of a table with the first cell of each row above the others, which are named."""
    for name, *cells in rows:
        yield from textwrap.wrap(name, width)
        named = ", ".join(f"{column} {cell}" for column, cell in zip(columns[1:], cells, strict=True))
        yield from textwrap.wrap(named, width, initial_indent="  ", subsequent_indent="  ")
