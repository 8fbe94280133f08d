"""Progress of long operations: a bar on a terminal, lines elsewhere; with rate and time left.

Knows no command. Imports rich only where a bar is shown.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from shardconv.support.formatting import size, time_left

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

#: Seconds before the first bar, and between two lines.
BAR_SECONDS, LINE_SECONDS = 0.5, 10.0
#: Characters of a bar; with the amounts it fits 80 columns.
_BAR_WIDTH = 20

Progress = Callable[[int, int], None]


class Display(ABC):
    """Shows the progress of activities, which follow each other."""

    def __init__(self) -> None:
        self._began = self._last_call = time.monotonic()

    def __enter__(self) -> Self:
        """Show nothing before the first call of an activity."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave what is shown."""
        return

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
            self._last_call = time.monotonic()
            self._show(what, done, total, _amounts(done, total, self._last_call - began, counts=counts))

        return report

    @abstractmethod
    def _show(self, what: str, done: int, total: int, amounts: str) -> None:
        """Show that an activity has done a part of the total, which ``amounts`` describes."""


class Lines(Display):
    """Prints a line for the current activity at intervals."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write
        self._shown = self._began

    def _show(self, what: str, done: int, total: int, amounts: str) -> None:
        del done, total
        if self._last_call - self._shown >= LINE_SECONDS:
            self._shown = self._last_call
            self._write(f"{what}: {amounts}")


class Bars(Display):
    """A bar for the current activity, on the terminal of stderr."""

    _bars: "RichProgress | None" = None
    _current: "tuple[str, TaskID] | None" = None

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()

    def _show(self, what: str, done: int, total: int, amounts: str) -> None:
        if self._last_call - self._began < BAR_SECONDS:
            return
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
    """What is done, and once it is something the rate and the time left."""
    text = f"{done} of {total}" if counts else f"{size(done)} of {size(total)}"
    if not done or not seconds:
        return text
    rate = "" if counts else f", {size(done / seconds)}/s"
    return f"{text}{rate}, {time_left((total - done) * seconds / done)} left"
