"""Values of quantization settings: read one value of a table, and refuse what is not understood."""

import re
from collections.abc import Mapping

from shardconv.errors import PlanError
from shardconv.formats.patterns import check_pattern
from shardconv.formats.scheme import Block

_WORD_BITS = 32


def word_block(bits: int) -> Block:
    """Elements and entries of the smallest number of full words of 32 bits."""
    return (_WORD_BITS // bits, 1) if _WORD_BITS % bits == 0 else (_WORD_BITS, bits)


def group_block(table: Mapping[str, object]) -> Block:
    """Elements of a group with one scale; 0 for one group over all input features."""
    size = table.get("group_size", 128)
    if type(size) is not int or (size < 1 and size != -1):
        raise PlanError(f"group_size is {size!r:.40} (expected a positive integer or -1)")
    return (max(size, 0), 1)


def rows_and_columns(table: Mapping[str, object], key: str) -> dict[str, Block]:
    """The rows and columns of a block with one scale, as a list or a text such as ``128x128``."""
    value = table.get(key)
    sizes = re.split("[x, ]+", value) if isinstance(value, str) else value
    if not isinstance(sizes, list | tuple) or len(sizes) != 2:
        raise PlanError(f"{key} is {value!r:.40} (expected rows and columns): pass --config FILE with it")
    rows, columns = (int(size) if isinstance(size, str) and size.isdecimal() else size for size in sizes)
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
        raise PlanError(f"{key} is {value!r:.40} (expected two positive integers): pass --config FILE with it")
    return {"rows": (rows, 1), "columns": (columns, 1)}


def positive_integer(table: Mapping[str, object], key: str) -> int:
    """A positive integer."""
    value = table.get(key)
    if type(value) is not int or value < 1:
        raise PlanError(f"quantization_config: {key} is {value!r:.40} (expected a positive integer)")
    return value


def one_of(table: Mapping[str, object], key: str, choices: tuple[int | str, ...], default: object = None) -> int:
    """One of some values; 0 for a text."""
    value = table.get(key, default)
    if value not in choices or isinstance(value, bool):
        raise PlanError(f"quantization_config: {key} is {value!r:.40} (expected {', '.join(map(str, choices))})")
    return value if isinstance(value, int) else 0


def list_of_names(table: Mapping[str, object], key: str) -> list[str]:
    """A list of names and patterns; empty if the settings do not have it."""
    value = table.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise PlanError(f"quantization_config: {key} is {value!r:.60} (expected a list of names)")
    for name in value:
        if name.startswith("re:"):
            check_pattern(name.removeprefix("re:"), key)
    return value
