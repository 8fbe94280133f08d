"""Output: results on stdout, everything else on stderr. No other module prints.

Owns the text and the ``--json`` form of reports, and the progress bar. Imports rich only for tables and for bars on a
terminal. Reports are dataclasses.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import click

from shardconv.exits import describe
from shardconv.formatting import size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: Seconds between two lines of progress if stderr is not a terminal.
LINE_SECONDS = 10.0

Progress = Callable[[int, int], None]


def open_streams() -> None:
    """Open the null device for each standard stream that is closed, so that no other file takes its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)  # noqa: FBT003 - a positional-only parameter; for the processes of a run
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


class Console:
    """Prints for one command.

    Args:
        as_json: print results as one JSON object.
        quiet: print no results for people, and no progress.
    """

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._as_json = as_json
        self._quiet = quiet

    def report(
        self,
        report: "DataclassInstance",
        lines: Sequence[str],
        *,
        quiet_lines: Sequence[str] = (),
        quiet_warnings: Sequence[str] = (),
    ) -> None:
        """Print a result: the dataclass as JSON, or ``lines`` for people.

        Args:
            report: the dataclass.
            lines: the result for people.
            quiet_lines: the result with ``quiet``.
            quiet_warnings: the warnings among ``lines``; with ``quiet`` they are printed on stderr.
        """
        if self._as_json:
            click.echo(json.dumps(dataclasses.asdict(report)))
            return
        if shown := quiet_lines if self._quiet else lines:
            click.echo("\n".join(shown))
        if self._quiet:
            self.warn(quiet_warnings)

    def warn(self, lines: Sequence[str]) -> None:
        """Print warnings on stderr, also with ``quiet``."""
        if lines:
            click.echo("\n".join(lines), err=True)

    def stream(self, text: str) -> None:
        """Print a piece of a result at once, unless the output is JSON."""
        if not self._as_json:
            click.echo(text, nl=False)
            sys.stdout.flush()

    def document(self, text: str, parse: Callable[[str], object]) -> None:
        """Print the text of a file; with ``--json`` its content as JSON."""
        click.echo(json.dumps(parse(text)) if self._as_json else text, nl=self._as_json)

    def note(self, lines: Sequence[str]) -> None:
        """Print measurements and other notes on stderr, except with ``quiet``."""
        if not self._quiet and lines:
            click.echo("\n".join(lines), err=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table for people."""
        if self._as_json or self._quiet:
            return
        from rich.console import Console as RichConsole
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        widths = [max(map(len, column)) + 2 for column in zip(columns, *rows, strict=True)]
        width = None if sys.stdout.isatty() else max(sum(widths), 80)
        console = RichConsole(width=width, highlight=False)
        with console.capture() as captured:
            console.print(table)
        click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))

    def progress(self, what: str, *, counts: bool = False) -> AbstractContextManager[Progress | None]:
        """A callback for progress: a bar on a terminal, a line every ten seconds elsewhere.

        Args:
            what: name of the activity.
            counts: whether amounts are counts instead of bytes.
        """
        if self._quiet:
            return nullcontext()
        return _bar(what, counts=counts) if sys.stderr.isatty() else _lines(what, counts=counts)


@contextmanager
def _bar(what: str, *, counts: bool) -> Iterator[Progress]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    amounts = (MofNCompleteColumn(),) if counts else (DownloadColumn(), TransferSpeedColumn())
    columns = ("{task.description}", BarColumn(), *amounts, TimeRemainingColumn())
    bar: RichProgress = RichProgress(*columns, console=RichConsole(stderr=True), transient=True)
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _lines(what: str, *, counts: bool) -> Iterator[Progress]:
    began = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_SECONDS and done:
            last = now
            rate = done / (now - began)
            left = (total - done) / rate
            amounts = f"{done} of {total}" if counts else f"{size(done)} of {size(total)}, {size(rate)}/s"
            click.echo(f"{what}: {amounts}, {left:.0f} s left", err=True)

    yield show


def show_error(error: BaseException, *, as_json: bool) -> int:
    """Print the message of an exception, with ``as_json`` also as an object; returns its exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    message, code = describe(error)
    if as_json:
        with suppress(OSError):  # the error may be that stdout cannot be written; it is on stderr, too
            click.echo(json.dumps({"error": message, "exit_code": code}))
    if message:
        click.echo(f"shardconv: {message}", err=True)
    return code
