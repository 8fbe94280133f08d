"""Partial evaluation of Python functions: the values of names and expressions in them.

Nothing is executed except reads of attributes. Both branches are read where a condition is not known.
"""

import ast
import builtins
import inspect
import operator
import sys
import textwrap
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any

from shardconv.convert.code_values import UNKNOWN, Value, calculated, either, joined

_MAX_DEPTH = 16
#: Maximum number of functions that are read for one module; results of others are unknown.
_MAX_CALLS = 1000
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


@dataclass
class Names:
    """The values of names in a function, and the values that it returns."""

    values: ChainMap[str, Value]
    globals: Mapping[str, object]
    returns: list[Value] = field(default_factory=list)

    def __getitem__(self, name: str) -> Value:
        """Return the value of a name, also of a global name or a builtin."""
        return (
            self.values[name]
            if name in self.values
            else Value(self.globals.get(name, vars(builtins).get(name, UNKNOWN)))
        )

    def inner(self) -> "Names":
        """The names of a function or comprehension in the function."""
        return Names(self.values.new_child(), self.globals)

    def branch(self) -> "Names":
        """Copy the names of the function, for one of several branches."""
        return replace(self, values=self.values.copy())


class CodeReader(ABC):
    """Evaluates functions; derived classes evaluate calls and attributes."""

    def __init__(self) -> None:
        self._active: list[ast.AST] = []
        self._calls = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether calls exceed the maximum, so that further ones are not read."""
        return self._calls > _MAX_CALLS

    @abstractmethod
    def _attribute(self, base: Value, name: str) -> Value:
        """Evaluate an attribute of a value."""

    @abstractmethod
    def _on_call(self, node: ast.Call, names: Names) -> Value:
        """Evaluate a call."""

    @abstractmethod
    def _on_binop(self, node: ast.BinOp, names: Names) -> Value:
        """Evaluate an operator."""

    @abstractmethod
    def _on_subscript(self, node: ast.Subscript, names: Names) -> Value:
        """Evaluate an index or a slice."""

    def _call_function(self, function: Any, inputs: Sequence[Value], options: Mapping[str, Value]) -> Value:
        """Read a function or method of Python."""
        if isinstance(function, MethodType):
            inputs, function = [Value(function.__self__), *inputs], function.__func__
        function = inspect.unwrap(function)
        code = _source(function.__code__) if isinstance(function, FunctionType) else None
        if code is None:
            return joined((*inputs, *options.values()))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        enclosing = ChainMap({name: Value(_content(cell)) for name, cell in cells})
        return self._call_code(code, inputs, options, Names(enclosing, function.__globals__))

    def _call_code(
        self,
        code: ast.Lambda | ast.FunctionDef,
        inputs: Sequence[Value],
        options: Mapping[str, Value],
        enclosing: Names,
    ) -> Value:
        self._calls += 1
        if code in self._active or len(self._active) > _MAX_DEPTH or self.is_exhausted:
            return joined((*inputs, *options.values()))
        names = enclosing.inner()
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
                before = names[target.id] if isinstance(target, ast.Name) else Value()
                self._assign(target, calculated(op, before, self._value(value, names)), names)
            case ast.If(test=test, body=body, orelse=orelse):
                return self._branch(test, body, orelse, names)
            case ast.Raise():
                return True
            case _:
                return self._leaves_inside(statement, names)
        return False

    def _leaves_inside(self, statement: ast.stmt, names: Names) -> bool:
        match statement:
            case ast.FunctionDef(name=name):
                names.values[name] = Value(function=(statement, names))
            case ast.ImportFrom(module=module, names=imported, level=0):
                found = sys.modules.get(module or "")
                names.values.update(
                    (one.asname or one.name, Value(getattr(found, one.name, UNKNOWN))) for one in imported
                )
            case ast.For(target=target, iter=items, body=body, orelse=orelse):
                for item in self._value(items, names).known_items:
                    self._assign(target, item, names)
                    self._run(body, names)
                self._run(orelse, names)
            case _:
                return self._run_parts(statement, names)
        return False

    def _branch(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], names: Names) -> bool:
        if (is_true := self._truth(test, names)) is not None:
            return self._run(body if is_true else orelse, names)
        branches = [(names.branch(), body), (names.branch(), orelse)]
        going = [one.values.maps[0] for one, statements in branches if not self._run(statements, one)]
        for name in dict.fromkeys(name for values in going for name in values):
            names.values[name] = either([values[name] for values in going if name in values])
        return not going

    def _truth(self, test: ast.expr, names: Names) -> bool | None:
        """The value of a test that depends on attributes only, and so does not change; None for all other tests."""
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
                truths, decides = [self._truth(one, names) for one in values], isinstance(op, ast.Or)
                return decides if decides in truths else None if None in truths else not decides
        return value.object if _is_kept(test) and type(value.object) is bool else None

    def _run_parts(self, statement: ast.AST, names: Names) -> bool:
        """Read the statements and expressions inside a statement in their order."""
        for part in ast.iter_child_nodes(statement):
            match part:
                case ast.expr():
                    self._value(part, names)
                case ast.withitem(context_expr=value, optional_vars=target):
                    self._assign(target, self._value(value, names), names)
                case ast.stmt():
                    if self._leaves(part, names) and isinstance(statement, ast.With):
                        return True
                case _:
                    self._run_parts(part, names)
        return False

    def _assign(self, target: ast.expr | None, value: Value, names: Names) -> None:
        match target:
            case ast.Name(id=name):
                names.values[name] = value
            case ast.Starred(value=inner):
                self._assign(inner, value.item, names)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for one, item in zip(targets, value.unpacked(len(targets)), strict=True):
                    self._assign(one, item, names)

    def _value(self, node: ast.expr, names: Names) -> Value:
        """Evaluate an expression."""
        match node:
            case ast.Constant(value=value):
                found = Value(value)
            case ast.Name(id=name):
                found = names[name]
            case ast.Attribute(value=base, attr=name):
                found = self._attribute(self._value(base, names), name)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                found = Value(items=tuple(self._spread(items, names)))
            case ast.Lambda():
                found = Value(function=(node, names))
            case ast.NamedExpr(target=target, value=assigned):
                self._assign(target, found := self._value(assigned, names), names)
            case ast.Call():
                found = self._on_call(node, names)
            case ast.BinOp():
                found = self._on_binop(node, names)
            case ast.Subscript():
                found = self._on_subscript(node, names)
            case _:
                found = self._combined(node, names)
        return found

    def _combined(self, node: ast.expr, names: Names) -> Value:
        """Evaluate an expression of one or several values."""
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._value(operand, names).negated()
            case ast.IfExp(test=test, body=body, orelse=orelse):
                is_true = self._truth(test, names)
                taken = [one for one, skipped in ((body, False), (orelse, True)) if is_true is not skipped]
                return either([self._value(one, names) for one in taken])
            case ast.BoolOp(values=values):
                return either([self._value(one, names) for one in values])
            case ast.ListComp(elt=item, generators=loops) | ast.GeneratorExp(elt=item, generators=loops):
                return self._items(item, loops, names.inner())
        parts = [self._value(one, names) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        return Value() if isinstance(node, ast.Compare) else joined(parts)

    def _items(self, item: ast.expr, loops: Sequence[ast.comprehension], names: Names) -> Value:
        """The items of a comprehension."""
        first, *others = loops
        found = []
        for one in (items := self._value(first.iter, names).known_items):
            self._assign(first.target, one, names)
            for other in others:
                self._assign(other.target, self._value(other.iter, names).item, names)
            found.append(self._value(item, names))
        return found[0] if len(items) == 1 else Value(items=tuple(found))

    def _spread(self, nodes: Iterable[ast.expr], names: Names) -> Iterator[Value]:
        for node in nodes:
            value = self._value(node.value if isinstance(node, ast.Starred) else node, names)
            if not isinstance(node, ast.Starred):
                yield value
            else:
                yield from (replace(value, is_many=True),) if value.items is None else value.items


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
    """Name to value of the arguments."""
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    given = [one for one in inputs if not one.is_many]
    yield from ((name, Value()) for name in (*names, *(one.arg for one in arguments.kwonlyargs)))
    yield from zip(names, given, strict=False)
    if arguments.vararg is not None:
        yield arguments.vararg.arg, Value(items=tuple(given[len(names) :]))
    if arguments.kwarg is not None:
        yield arguments.kwarg.arg, Value()
    yield from options.items()
