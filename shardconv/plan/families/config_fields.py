"""Config fields, and expressions of config fields in families and plan files.

A field that the config does not have is the family's default. The fields that are read are recorded.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from shardconv.support.errors import ConfigError, PlanError, option

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}

#: The remedy for a field of a checkpoint's config.
_REMEDY = f"pass {option(config='FILE')} with it"
#: In an expression, the index of the stage of a tensor or module: ``field[stage]``.
STAGE = "stage"
#: A name in an expression; with dots for fields of nested configs.
NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9.]*")


class Fields:
    """The fields of one config, with the defaults of a family.

    Args:
        config: the contents of config.json; None without a config.
        defaults: field name to the expression that is its default.
        stage: the index that ``field[stage]`` reads; None without a stage.

    Attributes:
        read: the fields read so far, with their values.
    """

    def __init__(
        self, config: Mapping[str, object] | None, defaults: Mapping[str, str | int], stage: int | None = None
    ) -> None:
        self._config = {} if config is None else config
        self._missing = "is missing (no config.json)" if config is None else "is missing"
        self._defaults = defaults
        self._stage = stage
        self.read: dict[str, int] = {}

    def has(self, name: str, value: object) -> bool:
        """Whether a field of the config, or else its default, has this value."""
        actual = lookup(self._config, name)
        if actual is None:
            actual = self._defaults.get(name)
        return type(actual) is type(value) and bool(actual == value)

    def evaluate(self, expression: str | int) -> int:
        """The value of an expression of fields, integers, ``+ - * //`` and parentheses.

        Raises:
            PlanError: if a field is missing or not an integer, or the value is negative.
        """
        try:
            value = self._value(_parse(str(expression)))
        except ZeroDivisionError:
            raise PlanError(f"{expression}: division by a config field that is 0") from None
        except RecursionError:
            raise PlanError(f"{expression}: the defaults of config fields refer to each other in a cycle") from None
        if value < 0:
            raise PlanError(f"{expression} is {value} with this config (expected a non-negative integer)")
        return value

    def evaluate_known(self, expression: str | int | None) -> int | None:
        """The value of an expression; None if it is None, or the config does not have one of its fields.

        Raises:
            PlanError: as :meth:`evaluate`.
        """
        if expression is None or not all(map(self._is_known, fields_in(expression))):
            return None
        return self.evaluate(expression)

    def _is_known(self, name: str) -> bool:
        """Whether the config has a field, or the fields of its default."""
        if lookup(self._config, name) is not None:
            return True
        return name in self._defaults and all(map(self._is_known, fields_in(self._defaults[name])))

    def _value(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.Name() | ast.Attribute():
                return self._field(ast.unparse(node))
            case ast.Subscript(value=field, slice=index):
                return self._item(ast.unparse(field), index)
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](self._value(left), self._value(right))
        raise AssertionError(f"expression was not checked: {ast.dump(node)}")

    def _item(self, name: str, node: ast.expr) -> int:
        """The item of a list at a constant index or at the index of the stage."""
        index = node.value if isinstance(node, ast.Constant) else self._stage
        values = lookup(self._config, name)
        if values is None:
            raise ConfigError(f"config field {name} {self._missing}", _REMEDY)
        if type(index) is not int:
            raise PlanError(f"{name}[{STAGE}]: the name of the tensor or module does not contain the number of a stage")
        if not isinstance(values, list | tuple) or index >= len(values) or type(values[index]) is not int:
            raise ConfigError(
                f"config field {name} is {values!r:.60} (expected a list with an integer at index {index})", _REMEDY
            )
        self.read[f"{name}[{index}]"] = values[index]
        return int(values[index])

    def _field(self, name: str) -> int:
        if name in self.read:
            return self.read[name]
        value = lookup(self._config, name)
        if value is None and name in self._defaults:
            value = self.evaluate(self._defaults[name])
        if value is None:
            raise ConfigError(
                f"config field {name} {self._missing}", f"{_REMEDY}, or set it in [config] of a plan file"
            )
        if type(value) is float and value.is_integer():  # such as the ratio of two widths
            value = int(value)
        if type(value) is not int or value < 0:
            raise ConfigError(f"config field {name} is {value!r:.60} (expected a non-negative integer)", _REMEDY)
        self.read[name] = value
        return value


def lookup(config: Mapping[str, object], name: str) -> object:
    """The value of a field, or with dots of a field of a nested config; None if it is missing."""
    value: object = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def with_field(config: Mapping[str, object], name: str, value: object) -> dict[str, object]:
    """A copy of a config with a new value of a field, or with dots of a field of a nested config."""
    first, _, rest = name.partition(".")
    nested = config.get(first)
    return {**config, first: with_field(nested if isinstance(nested, Mapping) else {}, rest, value) if rest else value}


def select_fields(config: Mapping[str, object], names: Iterable[str]) -> dict[str, object]:
    """The config with only these fields, as far as it has them."""
    selected: dict[str, object] = {}
    for name in sorted(names):
        if (value := lookup(config, name)) is not None:
            selected = with_field(selected, name, value)
    return selected


@lru_cache(1024)
def _parse(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def check_expression(expression: str | int) -> None:
    """Check that an expression consists of fields, integers, ``+ - * //`` and parentheses.

    Raises:
        ValueError: if it does not.
    """
    try:
        fields_in(expression)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r:.60} is not an expression, or too long") from error


@lru_cache(maxsize=4096)
def fields_in(expression: str | int) -> frozenset[str]:
    """The fields that an expression reads; with dots for fields of nested configs.

    Raises:
        ValueError: if it is not an expression.
    """

    def names(node: ast.expr) -> frozenset[str]:
        match node:
            case ast.Constant(value=int()):
                return frozenset()
            case ast.Name(id=name):
                return frozenset({name})
            case ast.Attribute(value=ast.Name() | ast.Attribute() as value) if names(value):
                return frozenset({ast.unparse(node)})
            case ast.Subscript(value=ast.Name() | ast.Attribute() as value, slice=index) if _is_index(index):
                return names(value)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return names(left) | names(right)
        raise ValueError(
            f"{expression!r:.60} is not an expression of config fields, integers, + - * // and parentheses"
        )

    return names(_parse(str(expression)))


def _is_index(node: ast.expr) -> bool:
    """Whether a node is an index of a list: an integer or ``stage``."""
    return type(node.value) is int if isinstance(node, ast.Constant) else ast.unparse(node) == STAGE


def replaced(expression: str | int, names: Mapping[str, str | int]) -> str | int:
    """Replace names in an expression by other names or expressions."""
    if isinstance(expression, int) or fields_in(expression).isdisjoint(names):
        return expression

    def replacement(match: re.Match[str]) -> str:
        value = names.get(match[0], match[0])
        is_atom = isinstance(value, int) or NAME.fullmatch(value)
        return str(value) if is_atom or match[0] == expression else f"({value})"

    text = NAME.sub(replacement, expression)
    return int(text) if text.isdigit() else text


def with_defaults(names: Iterable[str], defaults: Mapping[str, str | int]) -> set[str]:
    """These fields, and the fields that their defaults read, directly or through the defaults of other fields."""
    read, pending = set[str](), {*names}
    while pending:
        read.add(name := pending.pop())
        pending |= fields_in(defaults.get(name, 0)) - read
    return read


def reads_stage(expression: str | int, defaults: Mapping[str, str | int]) -> bool:
    """Whether an expression reads ``field[stage]``, directly or through the defaults of config fields."""
    names = with_defaults(fields_in(expression), defaults)
    return any(map(_has_stage, (expression, *map(defaults.get, names))))


@lru_cache(4096)
def _has_stage(expression: str | int | None) -> bool:
    """Whether an expression has the index ``[stage]``."""
    return f"[{STAGE}]" in ast.unparse(_parse(str(expression)))
