"""Tables of a plan file, and their text in TOML."""

from collections.abc import Mapping
from typing import Required, TypedDict


class RuleTable(TypedDict, total=False):
    """A rule of ``[rules]``."""

    style: Required[str]
    unit: str
    segments: list[str]
    transposed: bool
    pad: bool
    optional: bool


class UnitTable(TypedDict, total=False):
    """A unit of ``[units]``."""

    count: str | int
    size: str | int
    replicate: bool
    override: bool


class OverrideTable(TypedDict, total=False):
    """Module overrides of ``[modules]``."""

    attributes: dict[str, str]


class MountTable(TypedDict, total=False):
    """A block of ``[blocks]`` with options."""

    block: Required[str]
    optional: bool


def to_toml(tables: Mapping[str, object]) -> str:
    """The text of a plan file."""
    return "\n".join(
        line for title, table in tables.items() if isinstance(table, Mapping) for line in _section(title, table)
    )


def _section(title: str, table: Mapping[str, object]) -> list[str]:
    width = min(max((len(name) for name in table), default=0), 70) + 2
    return (
        [f"[{title}]", *(f"{_quoted(name):{width}} = {_value(row)}" for name, row in table.items()), ""]
        if table
        else []
    )


def merge_rules(rules: Mapping[str, RuleTable]) -> dict[str, RuleTable]:
    """Merge equal rules whose patterns differ in the last name only: ``a.b`` and ``a.c`` into ``a.{b,c}``."""
    groups: dict[tuple[str, str], list[str]] = {}
    for pattern, rule in rules.items():
        parent, _, last = pattern.rpartition(".")
        groups.setdefault((parent, repr(rule)), []).append(last)
    merged: dict[str, RuleTable] = {}
    for (parent, _), names in groups.items():
        start = f"{parent}." if parent else ""
        rule = rules[start + names[0]]
        is_choice = len(names) > 1 and "*" not in names
        for name in [f"{{{','.join(names)}}}"] if is_choice else names:
            merged[start + name] = rule
    return merged


def _quoted(text: str) -> str:
    return f'"{text}"'


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_value(one)}' for key, one in value.items())} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return _quoted(value) if isinstance(value, str) else str(value)
