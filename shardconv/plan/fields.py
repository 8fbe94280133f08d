"""Config fields, and the arithmetic on them that family files may write.

Owns the lookup of a field (the config's own, else the family's default) and keeps track of what was read.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from shardconv.errors import PlanError

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class Fields:
    """The fields of one config, seen through one family.

    Args:
        config: what config.json holds; None where there is none.
        defaults: field name to expression, for fields that a config may leave out.
    """

    def __init__(self, config: Mapping[str, Any] | None, defaults: Mapping[str, str | int]) -> None:
        self._config = {} if config is None else config
        self._source = "there is no config" if config is None else "the config has none"
        self._defaults = defaults
        self.read: dict[str, Any] = {}

    def has(self, name: str, value: Any) -> bool:  # noqa: ANN401 - anything JSON holds
        """Whether a field has this value, in the config or, where that leaves it out, by the family's default."""
        field = lookup(self._config, name)
        if field is None:
            field = self._defaults.get(name)
        return type(field) is type(value) and bool(field == value)

    def evaluate(self, expression: str | int) -> int:
        """The value of an expression of fields, whole numbers, ``+ - * //`` and brackets.

        Raises:
            PlanError: if a field is missing or is no whole number.
        """
        try:
            value = self._value(ast.parse(str(expression), mode="eval").body)
        except ZeroDivisionError:
            raise PlanError(f"{expression}: a config field that divides is 0") from None
        except RecursionError:
            raise PlanError(f"{expression}: the defaults of config fields go round in a circle") from None
        if value < 0:
            raise PlanError(f"{expression} is {value} with this config, where a natural number is needed")
        return value

    def _value(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.Name() | ast.Attribute():
                return self._field(ast.unparse(node))
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](self._value(left), self._value(right))
        raise AssertionError(f"expression was not checked: {ast.dump(node)}")

    def _field(self, name: str) -> int:
        if name in self.read:
            return int(self.read[name])
        value = lookup(self._config, name)
        if value is None and name in self._defaults:
            value = self.evaluate(self._defaults[name])
        if value is None:
            raise PlanError(f"field {name} is needed and {self._source}: pass --config FILE with it")
        if type(value) is not int or value < 0:
            raise PlanError(
                f"config field {name} is {value!r:.60}, where a natural number is needed: pass --config FILE with it"
            )
        self.read[name] = value
        return value


def lookup(config: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - anything JSON holds
    """A field, or one of a config in the config, with dots between; None where there is none."""
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def check_expression(expression: str | int) -> None:
    """Check that an expression holds nothing but fields, whole numbers, ``+ - * //`` and brackets.

    Raises:
        ValueError: if it holds anything else.
    """
    try:
        _check_node(ast.parse(str(expression), mode="eval").body, expression)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r:.60} is no expression, or too long a one") from error


def fields_in(expression: str | int) -> set[str]:
    """The fields that a checked expression reads; one of a config in the config with its dots."""

    def found(node: ast.expr) -> set[str]:
        match node:
            case ast.BinOp(left=left, right=right):
                return found(left) | found(right)
            case ast.Name() | ast.Attribute():
                return {ast.unparse(node)}
        return set()

    return found(ast.parse(str(expression), mode="eval").body)


def _check_node(node: ast.expr, expression: str | int) -> None:
    match node:
        case ast.Constant(value=int()) | ast.Name():
            return
        case ast.Attribute(value=ast.Name() | ast.Attribute() as value):
            _check_node(value, expression)
            return
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            _check_node(left, expression)
            _check_node(right, expression)
            return
    raise ValueError(f"{expression!r:.60}: only fields, whole numbers, + - * // and brackets may stand there")
