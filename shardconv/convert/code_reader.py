"""Partial evaluation of Python functions: what names and expressions in them stand for.

Nothing is executed except reads of attributes. Both branches are read where a condition is not known.
"""

import ast
import inspect
import operator
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any

from shardconv.convert.code_values import (
    UNKNOWN,
    Value,
    calculated,
    either,
    item_of,
    items_of,
    joined,
    subscript,
    unpacked,
)

_MAX_DEPTH = 16
#: Functions that are read for one module; what others do is not known.
_MAX_CALLS = 1000
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


@dataclass
class Names:
    """The values of names in a function."""

    values: dict[str, Value]
    globals: Mapping[str, object]
    outer: "Names | None" = None
    kind: type | None = None
    returns: list[Value] = field(default_factory=list)

    def find(self, name: str) -> Value:
        """Return the value of a name, also of a global name or a builtin."""
        if name in self.values:
            return self.values[name]
        if self.outer is not None:
            return self.outer.find(name)
        builtins = self.globals.get("__builtins__", {})
        builtins = builtins if isinstance(builtins, dict) else vars(builtins)
        return Value(self.globals.get(name, builtins.get(name, UNKNOWN)))

    def copy(self) -> "Names":
        """Copy the names of the function, for one of several branches."""
        return replace(self, values=dict(self.values))


class CodeReader(ABC):
    """Evaluates functions; derived classes evaluate calls and attributes."""

    def __init__(self) -> None:
        self._active: list[object] = []
        self._calls = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether there are more calls than are read."""
        return self._calls > _MAX_CALLS

    @abstractmethod
    def _attribute(self, base: Value, name: str) -> Value:
        """Evaluate an attribute of a value."""

    @abstractmethod
    def _call(self, node: ast.Call, names: Names) -> Value:
        """Evaluate a call."""

    def _call_function(self, function: Any, inputs: Sequence[Value], options: Mapping[str, Value]) -> Value:
        """Read a function or method of Python."""
        if isinstance(function, MethodType):
            inputs, function = [Value(function.__self__), *inputs], function.__func__
        function = inspect.unwrap(function)
        code = _source(function.__code__) if isinstance(function, FunctionType) else None
        self._calls += 1
        if code is None or code in self._active or len(self._active) > _MAX_DEPTH or self.is_exhausted:
            return joined((*inputs, *options.values()))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        outer = Names({name: Value(_content(cell)) for name, cell in cells}, function.__globals__)
        kind = outer.values["__class__"].object if "__class__" in outer.values else None
        return self._call_code(code, inputs, options, Names({}, function.__globals__, outer, kind))

    def _call_code(
        self,
        code: ast.Lambda | ast.FunctionDef,
        inputs: Sequence[Value],
        options: Mapping[str, Value],
        names: Names,
    ) -> Value:
        names.values.update(_bound(code.args, inputs, options))
        self._active.append(code)
        try:
            if isinstance(code, ast.Lambda):
                return self._value(code.body, names)
            self._run(code.body, names)
        finally:
            self._active.pop()
        return either(names.returns)

    def _run(self, body: Iterable[ast.stmt], names: Names) -> bool:
        """Read statements; return whether they leave the function."""
        return any(self._leaves(statement, names) for statement in body)

    def _leaves(self, statement: ast.stmt, names: Names) -> bool:
        match statement:
            case ast.Return(value=value):
                names.returns.append(Value() if value is None else self._value(value, names))
                return True
            case ast.Assign(targets=targets, value=value):
                assigned = self._value(value, names)
                for target in targets:
                    self._assign(target, assigned, names)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self._value(value, names), names)
            case ast.AugAssign(target=target, value=value, op=op):
                before = self._value(ast.copy_location(_as_load(target), target), names)
                self._assign(target, calculated(op, before, self._value(value, names)), names)
            case ast.FunctionDef() | ast.ImportFrom():
                names.values.update(_defined(statement, names))
            case ast.If(test=test, body=body, orelse=orelse):
                return self._branch(test, body, orelse, names)
            case ast.For():
                self._repeat(statement, names)
            case ast.Raise():
                return True
            case _:
                return self._run_parts(statement, names)
        return False

    def _repeat(self, loop: ast.For, names: Names) -> None:
        for item in items_of(self._value(loop.iter, names)):
            self._assign(loop.target, item, names)
            self._run(loop.body, names)
        self._run(loop.orelse, names)

    def _branch(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], names: Names) -> bool:
        if (is_true := self._truth(test, names)) is not None:
            return self._run(body if is_true else orelse, names)
        before, other = names.copy(), names.copy()
        leaves, other_leaves = self._run(body, before), self._run(orelse, other)
        if leaves and other_leaves:
            return True
        going = [one.values for one, left in ((before, leaves), (other, other_leaves)) if not left]
        names.values.update({
            name: either([values[name] for values in going if name in values])
            for name in dict.fromkeys(name for values in going for name in values)
        })  # fmt: skip
        return False

    def _truth(self, test: ast.expr, names: Names) -> bool | None:
        """The value of a test of attributes, which keep it; None for all other tests."""
        value = self._value(test, names)
        match test:
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as how], comparators=[ast.Constant(value=None)]):
                value = self._value(left, names)
                known = value.object is not UNKNOWN and not isinstance(left, ast.Name)
                return (value.object is None) is isinstance(how, ast.Is) if known else None
            case ast.Compare(left=left, ops=[how], comparators=[right]) if _is_kept(left) and _is_kept(right):
                numbers = self._value(left, names).number, self._value(right, names).number
                compare = _COMPARISONS.get(type(how))
                return compare(*numbers) if compare and None not in numbers else None
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                found = self._truth(operand, names)
                return None if found is None else not found
            case ast.BoolOp(op=op, values=values):
                return _combined([self._truth(one, names) for one in values], is_or=isinstance(op, ast.Or))
        return value.object if _is_kept(test) and type(value.object) is bool else None

    def _run_parts(self, statement: ast.AST, names: Names) -> bool:
        """Read the statements and expressions inside a statement in their order."""
        for part in ast.iter_child_nodes(statement):
            match part:
                case ast.expr():
                    self._value(part, names)
                case ast.withitem(context_expr=value, optional_vars=target):
                    found = self._value(value, names)
                    if target is not None:
                        self._assign(target, found, names)
                case ast.stmt():
                    if self._leaves(part, names) and isinstance(statement, ast.With):
                        return True
                case _:
                    self._run_parts(part, names)
        return False

    def _assign(self, target: ast.expr, value: Value, names: Names) -> None:
        match target:
            case ast.Name(id=name):
                names.values[name] = value
            case ast.Starred(value=inner):
                self._assign(inner, item_of(value), names)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for one, item in zip(targets, unpacked(value, len(targets)), strict=True):
                    self._assign(one, item, names)

    def _value(self, node: ast.expr, names: Names) -> Value:
        """Evaluate an expression."""
        evaluate: Callable[[ast.expr, Names], Value] = getattr(
            self, f"_on_{type(node).__name__.lower()}", self._joined_parts
        )
        return evaluate(node, names)

    def _joined_parts(self, node: ast.expr, names: Names) -> Value:
        return joined([self._value(one, names) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)])

    def _on_constant(self, node: ast.Constant, _: Names) -> Value:
        return Value(node.value)

    def _on_name(self, node: ast.Name, names: Names) -> Value:
        return names.find(node.id)

    def _on_attribute(self, node: ast.Attribute, names: Names) -> Value:
        return self._attribute(self._value(node.value, names), node.attr)

    def _on_tuple(self, node: ast.Tuple | ast.List, names: Names) -> Value:
        return Value(items=tuple(self._spread(node.elts, names)))

    _on_list = _on_tuple

    def _on_unaryop(self, node: ast.UnaryOp, names: Names) -> Value:
        value = self._value(node.operand, names)
        is_negative = isinstance(node.op, ast.USub) and value.number is not None
        return replace(value, object=-value.object) if is_negative else value

    def _on_binop(self, node: ast.BinOp, names: Names) -> Value:
        return calculated(node.op, self._value(node.left, names), self._value(node.right, names))

    def _on_compare(self, node: ast.Compare, names: Names) -> Value:
        self._joined_parts(node, names)
        return Value()

    def _on_subscript(self, node: ast.Subscript, names: Names) -> Value:
        return subscript(self._value(node.value, names), node.slice, self._value(node.slice, names))

    def _on_call(self, node: ast.Call, names: Names) -> Value:
        return self._call(node, names)

    def _on_lambda(self, node: ast.Lambda, names: Names) -> Value:
        return Value(function=(node, names))

    def _on_namedexpr(self, node: ast.NamedExpr, names: Names) -> Value:
        value = self._value(node.value, names)
        self._assign(node.target, value, names)
        return value

    def _on_ifexp(self, node: ast.IfExp, names: Names) -> Value:
        if (is_true := self._truth(node.test, names)) is not None:
            return self._value(node.body if is_true else node.orelse, names)
        return either([self._value(node.body, names), self._value(node.orelse, names)])

    def _on_boolop(self, node: ast.BoolOp, names: Names) -> Value:
        return either([self._value(one, names) for one in node.values])

    def _on_listcomp(self, node: ast.ListComp | ast.GeneratorExp, names: Names) -> Value:
        inner = Names({}, names.globals, names, names.kind)
        first, *others = node.generators
        found = []
        for item in (items := items_of(self._value(first.iter, names))):
            self._assign(first.target, item, inner)
            for one in others:
                self._assign(one.target, item_of(self._value(one.iter, inner)), inner)
            found.append(self._value(node.elt, inner))
        return found[0] if len(items) == 1 else Value(items=tuple(found))

    _on_generatorexp = _on_listcomp

    def _spread(self, nodes: Iterable[ast.expr], names: Names) -> Iterator[Value]:
        for node in nodes:
            if not isinstance(node, ast.Starred):
                yield self._value(node, names)
            elif (value := self._value(node.value, names)).items is not None:
                yield from value.items
            else:
                yield replace(value, is_many=True)


def _defined(statement: ast.FunctionDef | ast.ImportFrom, names: Names) -> Iterator[tuple[str, Value]]:
    """The names that a statement defines."""
    if isinstance(statement, ast.FunctionDef):
        yield statement.name, Value(function=(statement, names))
        return
    module = None if statement.level else sys.modules.get(statement.module or "")
    for one in statement.names:
        yield one.asname or one.name, Value(getattr(module, one.name, UNKNOWN))


def _combined(found: Sequence[bool | None], *, is_or: bool) -> bool | None:
    """The value of tests that ``or``, or else ``and``, combines; None if it is not known."""
    if is_or in found:
        return is_or
    return None if None in found else not is_or


def _is_kept(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute | ast.Constant)


@cache
def _source(code: CodeType) -> ast.FunctionDef | None:
    """The source of a function's code; None where it is not available."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None
    return tree.body[0] if isinstance(tree.body[0], ast.FunctionDef) else None


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return UNKNOWN


def _bound(
    arguments: ast.arguments, inputs: Sequence[Value], options: Mapping[str, Value]
) -> Iterator[tuple[str, Value]]:
    """The names of arguments with the values that they get."""
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    given = [one for one in inputs if not one.is_many]
    yield from ((name, Value()) for name in (*names, *(one.arg for one in arguments.kwonlyargs)))
    yield from zip(names, given, strict=False)
    if arguments.vararg is not None:
        yield arguments.vararg.arg, Value(items=tuple(given[len(names) :]))
    if arguments.kwarg is not None:
        yield arguments.kwarg.arg, Value()
    yield from options.items()


def _as_load(target: ast.expr) -> ast.expr:
    """An expression that reads what a target writes."""
    match target:
        case ast.Name(id=name):
            return ast.Name(name, ast.Load())
    return ast.Constant(None)
