"""Values of quantization settings: read one value of a table, and refuse what is not understood."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from shardconv.formats.patterns import check_pattern
from shardconv.formats.scheme import Block
from shardconv.support.errors import PlanError

_Value = TypeVar("_Value", int, str)
#: Bits of a word that holds packed values.
WORD_BITS = 32


def word_block(bits: int) -> Block:
    """Elements and entries of the smallest number of full words of 32 bits."""
    return (WORD_BITS // bits, 1) if WORD_BITS % bits == 0 else (WORD_BITS, bits)


def group_block(table: Mapping[str, object]) -> Block:
    """Elements of a group with one scale; 0 for one group over all input features."""
    size = table.get("group_size", 128)
    if type(size) is not int or (size < 1 and size != -1):
        raise _invalid("group_size", size, "a positive integer or -1")
    return (max(size, 0), 1)


def rows_and_columns(table: Mapping[str, object], key: str) -> dict[str, Block]:
    """The rows and columns of a block with one scale, as a list or a text such as ``128x128``."""
    value = table.get(key)
    sizes = re.split("[x, ]+", value) if isinstance(value, str) else value
    if not isinstance(sizes, list | tuple) or len(sizes) != 2:
        raise _invalid(key, value, "rows and columns")
    rows, columns = (int(size) if isinstance(size, str) and size.isdecimal() else size for size in sizes)
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
        raise _invalid(key, value, "two positive integers")
    return {"rows": (rows, 1), "columns": (columns, 1)}


def positive_integer(table: Mapping[str, object], key: str) -> int:
    """A positive integer."""
    value = table.get(key)
    if type(value) is not int or value < 1:
        raise _invalid(key, value, "a positive integer")
    return value


def one_of(table: Mapping[str, object], key: str, choices: Sequence[_Value], default: object = None) -> _Value:
    """One of some integers or texts."""
    value = table.get(key, default)
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    raise _invalid(key, value, f"one of {', '.join(map(str, filter(None, choices)))}")


def list_of_names(table: Mapping[str, object], key: str) -> list[str]:
    """A list of names and patterns; empty if the settings do not have it."""
    value = table.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _invalid(key, value, "a list of names")
    for name in value:
        if name.startswith("re:"):
            check_pattern(name.removeprefix("re:"), key)
    return value


def _invalid(key: str, value: object, expected: str) -> PlanError:
    return PlanError(
        f"quantization_config: {key} is {value!r:.60} (expected {expected}): pass --config FILE with the "
        f"quantization_config of this checkpoint"
    )
