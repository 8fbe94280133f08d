"""Types of options with numbers, whose errors show the value and which numbers are expected."""

import math

import click


class _Count(click.IntRange):
    """A positive integer."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The integer."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"got {value!r}, expected an integer from 1", param, ctx)


class _Tp(_Count):
    """A tensor parallel size."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        """The end of the error for a missing value."""
        del param, ctx
        return "shardconv plan SRC lists the supported sizes"


class Number(click.FloatRange):
    """A number from 0, up to ``maximum`` if it is given."""

    def __init__(self, maximum: float | None = None) -> None:
        super().__init__(min=0, max=maximum)

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; NaN is not one, although it is in every range of click."""
        try:
            number = float(super().convert(value, param, ctx))
        except click.BadParameter:
            number = math.nan
        if math.isnan(number):
            end = "" if self.max is None else f" to {self.max:g}"
            self.fail(f"got {value!r}, expected a number from 0{end}", param, ctx)
        return number


COUNT, TP = _Count(), _Tp()
