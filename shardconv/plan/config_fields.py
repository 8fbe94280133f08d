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


#: The place in a list that an expression reads for the stage that a tensor or module is in.
STAGE = "stage"


class Fields:
    """The fields of one config, seen through one family.

    Args:
        config: what config.json holds; None where there is none.
        defaults: field name to expression, for fields that a config may leave out.
        stage: the place of ``field[stage]`` in lists; None where there is none.
    """

    def __init__(
        self, config: Mapping[str, Any] | None, defaults: Mapping[str, str | int], stage: int | None = None
    ) -> None:
        self._config = {} if config is None else config
        self._source = "there is no config" if config is None else "the config has none"
        self._defaults = defaults
        self._stage = stage
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
            case ast.Subscript(value=field, slice=place):
                return self._item(ast.unparse(field), place)
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](self._value(left), self._value(right))
        raise AssertionError(f"expression was not checked: {ast.dump(node)}")

    def _item(self, name: str, place: ast.expr) -> int:
        """The number at a place of a list; each stage of a model has its own."""
        number = place.value if isinstance(place, ast.Constant) else self._stage
        values = lookup(self._config, name)
        if values is None:
            raise PlanError(f"field {name} is needed and {self._source}: pass --config FILE with it")
        if type(number) is not int:
            raise PlanError(f"{name}[{STAGE}]: is read for a name without the number of a stage")
        if not isinstance(values, list | tuple) or number >= len(values) or type(values[number]) is not int:
            raise PlanError(
                f"config field {name} is {values!r:.60}, where a list with a number at place {number} is needed: pass "
                f"--config FILE with it"
            )
        self.read[f"{name}[{number}]"] = values[number]
        return int(values[number])

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
            case ast.Subscript(value=value):
                return found(value)
            case ast.BinOp(left=left, right=right):
                return found(left) | found(right)
            case ast.Name() | ast.Attribute():
                return {ast.unparse(node)}
        return set()

    return found(ast.parse(str(expression), mode="eval").body)


def reads_stage(expression: str | int, defaults: Mapping[str, str | int]) -> bool:
    """Whether a checked expression reads ``field[stage]``, itself or by the defaults of config fields."""
    waiting, seen = {expression}, set[str | int]()
    while waiting:
        one = waiting.pop()
        seen.add(one)
        tree = ast.walk(ast.parse(str(one), mode="eval"))
        if any(isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name) for node in tree):
            return True
        waiting |= {defaults[name] for name in fields_in(one) if name in defaults} - seen
    return False


def _check_node(node: ast.expr, expression: str | int) -> None:
    match node:
        case ast.Constant(value=int()) | ast.Name():
            return
        case ast.Attribute(value=ast.Name() | ast.Attribute() as value):
            _check_node(value, expression)
            return
        case ast.Subscript(value=ast.Name() | ast.Attribute() as value, slice=place) if _is_place(place):
            _check_node(value, expression)
            return
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            _check_node(left, expression)
            _check_node(right, expression)
            return
    raise ValueError(f"{expression!r:.60}: only fields, whole numbers, + - * // and brackets may stand there")


def _is_place(node: ast.expr) -> bool:
    """Whether this is a place in a list: a whole number, or that of the stage."""
    match node:
        case ast.Constant(value=value):
            return type(value) is int
        case ast.Name(id=name):
            return name == STAGE
    return False
