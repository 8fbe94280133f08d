"""Reports as JSON text, and text for people: sizes, durations, ranges, counts, and names without control characters."""

import json
import math
import re
import unicodedata
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Context

from msgspec import Struct


def json_text(report: Struct | dict[str, object]) -> str:
    """A report, or several by name, as one JSON object in ASCII, with its fields in order."""
    return json.dumps(report, default=_fields)


def _fields(report: Struct) -> dict[str, object]:
    """The fields of a report, without copies of their values: a plan has millions of numbers."""
    names = zip(report.__struct_encode_fields__, report.__struct_fields__, strict=True)
    return {shown: getattr(report, name) for shown, name in names}


#: Categories of characters without a shape. Some change the direction of text, so that one name looks like another.
_SHAPELESS = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}


def visible(text: str, *, keep: str = "") -> str:
    """Text with escapes instead of control characters and the like, except for the characters of ``keep``."""
    if text.isprintable():
        return text
    return "".join(
        f"\\u{{{ord(each):x}}}" if unicodedata.category(each) in _SHAPELESS and each not in keep else each
        for each in text
    )


#: Rounds as the scripts of the HTML page do.
_THREE_DIGITS = Context(prec=3, rounding=ROUND_HALF_UP)


def _three_digits(number: float) -> str:
    return f"{_THREE_DIGITS.create_decimal(number).normalize():f}"


def size(num_bytes: float) -> str:
    """Bytes for people, in powers of ten."""
    if num_bytes < 999.5:
        return f"{math.floor(num_bytes + 0.5)} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{_three_digits(num_bytes)} {unit}"
    return f"{_three_digits(num_bytes / 1000)} TB"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs of three and more as ``first-last``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(texts)


def duration(seconds: float) -> str:
    """Seconds, in the unit that fits."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def time_left(seconds: float) -> str:
    """A duration for people, without fractions of a second."""
    for longest, factor, unit in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < longest:
            return f"{seconds / factor:.0f} {unit}"
    return f"{seconds / 3600:.1f} h"


def sizes(rank_bytes: tuple[int, ...]) -> str:
    """Bytes per rank: one size, or the range from the smallest to the largest."""
    low, high = size(min(rank_bytes)), size(max(rank_bytes))
    return low if low == high else f"{low} to {high}"


def counted(number: int, thing: str) -> str:
    """A number and a noun, in the singular or plural."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def rate(num_bytes: int, seconds: float) -> str:
    """Duration and throughput."""
    return f"{seconds:.1f} s, {size(num_bytes / seconds)}/s"


_UNITS = {prefix: 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))}
_UNITS |= {f"{prefix}I": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)}


def parse_size(text: str) -> int:
    """Bytes of a size such as ``5GB`` or ``5G`` (powers of ten), or ``5GiB`` or ``5Gi`` (powers of two).

    Raises:
        ValueError: if it is not one, does not have a unit, or is less than a byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]+)", text.strip(), re.ASCII)
    unit = _UNITS.get(match[2].upper().removesuffix("B")) if match else None
    if match is None or unit is None or (num_bytes := int(float(match[1]) * unit)) < 1:
        is_number = re.fullmatch(r"0*[1-9]\d*", text, re.ASCII)
        expected = f"a unit: {text}GB, {text}GiB or {text}B" if is_number else "one such as 500MB, 5GB or 5GiB"
        raise ValueError(f"is not a size (got {text!r:.40}, expected {expected})")
    return num_bytes


def exact_size(num_bytes: int) -> str:
    """A size that :func:`parse_size` converts to this number of bytes, in the largest power of 1000 that divides it."""
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
    return next(f"{num_bytes // factor}{unit}" for unit, factor in units if num_bytes % factor == 0)
