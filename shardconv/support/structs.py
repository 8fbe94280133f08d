"""Typed data: one definition of each manifest and table, which decodes, checks and encodes it."""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of immutable data that is stored as an object of JSON or TOML. Fields that have their default are left out.

    A ``__post_init__`` that raises ValueError refuses values that the types allow.
    """


def parse_table(data: object, kind: type[T], *, without: tuple[str, ...] = (), **given: object) -> T:
    """Parse a table of a TOML file.

    Args:
        data: the table.
        kind: a subclass of :class:`Data`.
        without: fields that the table may not have.
        given: values of such fields.

    Raises:
        ValueError: if it is not a table, a key is unknown or missing, or a value has the wrong type.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{data!r:.60} is not a table")  # noqa: TRY004 - all of them become one PlanError
    known = [name for name in kind.__struct_fields__ if name not in without]  # type: ignore[attr-defined]
    if unknown := next((key for key in data if key not in known), None):
        raise ValueError(f"key {unknown!r} is unknown (expected {', '.join(known)})")
    return convert({**data, **given}, kind)


def convert(data: object, kind: type[T]) -> T:
    """Convert dicts, lists, strings and numbers to typed data.

    Raises:
        ValueError: if they do not have the type; the message names the field.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(located(error)) from error


def located(error: Exception) -> str:
    """The message of a decoder, with the field that is wrong before it."""
    text, _, path = str(error).partition(" - at `$")
    where = path.rstrip("`").lstrip(".")
    return f"{where}: {text}" if where else text


def to_builtins(data: object) -> Any:  # noqa: ANN401 - of any type
    """Convert typed data to the dicts, lists, strings and numbers that it is stored as."""
    return msgspec.to_builtins(data, str_keys=True)
