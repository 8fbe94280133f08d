"""Parse the tables of units, rules and module overrides in family files and plan files.

docs/plan-files.md describes the format. Unknown keys are errors.
"""

from shardconv.plan.module_override import ModuleRule
from shardconv.plan.rule import Rule, UnitRule
from shardconv.support.structs import parse_table

#: Fields of rules and module overrides that follow from the file, or from the place of a table in it.
_GIVEN = ("pattern", "origin", "by_user", "mount", "block")


def parse_unit(name: str, data: object) -> UnitRule:
    """Parse the table of a unit.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        return parse_table(data, UnitRule)
    except ValueError as error:
        raise ValueError(f"unit {name}: {error}") from error


def parse_rule(pattern: str, data: object, origin: str, *, by_user: bool = False) -> Rule:
    """Parse the table of a rule.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        return parse_table(data, Rule, without=_GIVEN, pattern=pattern, origin=origin, by_user=by_user)
    except ValueError as error:
        raise ValueError(f"rule {pattern!r}: {error}") from error


def parse_module(pattern: str, data: object, origin: str, *, by_user: bool = False) -> ModuleRule:
    """Parse the table of a module override.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        return parse_table(data, ModuleRule, without=_GIVEN, pattern=pattern, origin=origin, by_user=by_user)
    except ValueError as error:
        raise ValueError(f"modules {pattern!r}: {error}") from error
