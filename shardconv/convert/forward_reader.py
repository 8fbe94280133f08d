"""Reading of the code of a module: how its forward divides the local features of column parallel layers.

Owns a partial evaluation of Python code: it follows outputs of column parallel layers through assignments, methods,
functions and objects that get the module, and evaluates the sizes that they are reshaped to. Nothing is executed except
reads of attributes; both branches are read.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from shardconv.layers import ParallelLinear
from shardconv.layers.parallel_module import ParallelModule

#: A value that is not known.
_UNKNOWN: Any = object()
_MAX_DEPTH = 16
#: Classes whose output does not have the features of their input.
_MIXING = (nn.Linear, nn.Embedding, ParallelLinear, nn.modules.conv._ConvNd)  # noqa: SLF001 - of all convolutions
#: Operations that divide features.
_DIVIDING = ("view", "reshape", "unflatten", "chunk", "tensor_split", "rearrange")
_VIEWS = ("T", "mT", "data")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.FloorDiv: int.__floordiv__,
    ast.Div: int.__floordiv__, ast.Mod: int.__mod__,
}  # fmt: skip


class Count(NamedTuple):
    """An attribute with a number that a forward reads.

    Attributes:
        owner: the object that has it.
        attribute: its name.
        value: the number.
    """

    owner: object
    attribute: str
    value: int


class Shard(NamedTuple):
    """The local features of a column parallel layer.

    Attributes:
        layer: the name of the layer.
        full: the number of features of all ranks.
        local: the number of features of this rank.
        is_fused: whether they consist of several intervals, as those of several segments do.
    """

    layer: str
    full: int
    local: int
    is_fused: bool


class Problem(NamedTuple):
    """A division of local features by a number of the unsharded model.

    Attributes:
        shard: the features.
        count: the attribute with the number; None for a number in the code.
        number: the number.
    """

    shard: Shard
    count: Count | None
    number: int


@dataclass(frozen=True, eq=False)
class _Value:
    """A value in the code.

    Attributes:
        object: the object, if it is known.
        counts: the attributes that a number is computed from.
        is_local: whether it is computed from an attribute that has its local value.
        shard: the features of a tensor, of its shape, or of the size of its last dim.
        kind: which of these: "tensor", "shape" or "size".
        is_split: whether the tensor was divided already.
        items: the items of a tuple or list.
        is_many: whether it is a sequence of unknown length among items.
        function: the code of a function inside the function, and the names that it sees.
    """

    object: Any = _UNKNOWN
    counts: tuple[Count, ...] = ()
    is_local: bool = False
    shard: Shard | None = None
    kind: str = ""
    is_split: bool = False
    items: "tuple[_Value, ...] | None" = None
    is_many: bool = False
    function: "tuple[ast.Lambda | ast.FunctionDef, _Names] | None" = None

    @property
    def number(self) -> int | None:
        return self.object if type(self.object) is int else None

    @property
    def is_tensor(self) -> bool:
        return self.kind == "tensor"

    @property
    def is_raw(self) -> bool:
        """Whether the last dim are all local features of a layer."""
        return (self.is_tensor and not self.is_split) or any(one.is_raw for one in self.items or ())


@dataclass
class _Names:
    """The values of names in a function."""

    values: dict[str, _Value]
    globals: Mapping[str, object]
    outer: "_Names | None" = None
    kind: type | None = None
    returns: list[_Value] = field(default_factory=list)

    def find(self, name: str) -> _Value:
        if name in self.values:
            return self.values[name]
        if self.outer is not None:
            return self.outer.find(name)
        builtins = self.globals.get("__builtins__", {})
        builtins = builtins if isinstance(builtins, dict) else vars(builtins)
        return _Value(self.globals.get(name, builtins.get(name, _UNKNOWN)))

    def copy(self) -> "_Names":
        return replace(self, values=dict(self.values))


class ForwardReader:
    """Reads the forward of a module that has column parallel layers.

    Args:
        outputs: the layers that become parallel or are: the features of the output; None where it is not sharded.
        modules: all modules that are or contain layers with shards.
        changed: attributes of objects, by id and name, that have their local value, and that value.

    Attributes:
        problems: divisions of local features by numbers of the unsharded model.
        is_understood: whether local features are divided in a way that is right on each rank.
        reads: all attributes with numbers that were read.
    """

    def __init__(
        self,
        outputs: Mapping[nn.Module, Shard | None],
        modules: Collection[nn.Module],
        changed: Mapping[tuple[int, str], object],
    ) -> None:
        self._outputs, self._modules, self._changed = outputs, {id(one) for one in modules}, changed
        self._active: list[object] = []
        self.problems: list[Problem] = []
        self.is_understood = False
        self.reads: list[Count] = []

    def read(self, module: nn.Module) -> None:
        """Read the forward of a module, and the code that it calls."""
        self._call_function(module.forward, [], {})

    def _call_function(self, function: Any, inputs: Sequence[_Value], options: Mapping[str, _Value]) -> _Value:
        """Read a function or method of Python."""
        if isinstance(function, MethodType):
            inputs, function = [_Value(function.__self__), *inputs], function.__func__
        function = inspect.unwrap(function)
        code = _source(function) if isinstance(function, FunctionType) else None
        if code is None or code in self._active or len(self._active) > _MAX_DEPTH:
            return _joined((*inputs, *options.values()))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        outer = _Names({name: _Value(_content(cell)) for name, cell in cells}, function.__globals__)
        kind = outer.values["__class__"].object if "__class__" in outer.values else None
        return self._call_code(code, inputs, options, _Names({}, function.__globals__, outer, kind))

    def _call_code(
        self,
        code: ast.Lambda | ast.FunctionDef,
        inputs: Sequence[_Value],
        options: Mapping[str, _Value],
        names: _Names,
    ) -> _Value:
        names.values.update(_bound(code.args, inputs, options))
        self._active.append(code)
        try:
            if isinstance(code, ast.Lambda):
                return self._value(code.body, names)
            self._run(code.body, names)
        finally:
            self._active.pop()
        return _either(names.returns)

    def _run(self, body: Iterable[ast.stmt], names: _Names) -> bool:
        """Read statements; return whether they leave the function."""
        return any(self._leaves(statement, names) for statement in body)

    def _leaves(self, statement: ast.stmt, names: _Names) -> bool:
        match statement:
            case ast.Return(value=value):
                names.returns.append(_Value() if value is None else self._value(value, names))
                return True
            case ast.Assign(targets=targets, value=value):
                found = self._value(value, names)
                for target in targets:
                    self._assign(target, found, names)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self._value(value, names), names)
            case ast.AugAssign(target=target, value=value, op=operator):
                before = self._value(ast.copy_location(_as_load(target), target), names)
                self._assign(target, _calculated(operator, before, self._value(value, names)), names)
            case ast.FunctionDef(name=name):
                names.values[name] = _Value(function=(statement, names))
            case ast.If(test=test, body=body, orelse=orelse):
                return self._branch(test, body, orelse, names)
            case ast.For(target=target, iter=sequence, body=body, orelse=orelse):
                self._assign(target, _item(self._value(sequence, names)), names)
                self._run(body, names)
                self._run(orelse, names)
            case ast.Raise():
                return True
            case _:
                return self._run_parts(statement, names)
        return False

    def _branch(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], names: _Names) -> bool:
        if (is_true := self._truth(test, names)) is not None:
            return self._run(body if is_true else orelse, names)
        before, other = names.copy(), names.copy()
        leaves, other_leaves = self._run(body, before), self._run(orelse, other)
        if leaves and other_leaves:
            return True
        going = [one.values for one, left in ((before, leaves), (other, other_leaves)) if not left]
        names.values.update({
            name: _either([values[name] for values in going if name in values])
            for name in dict.fromkeys(name for values in going for name in values)
        })  # fmt: skip
        return False

    def _truth(self, test: ast.expr, names: _Names) -> bool | None:
        """The value of a comparison with None, which attributes keep; None for all other tests."""
        value = self._value(test, names)
        match test:
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as how], comparators=[ast.Constant(value=None)]):
                value = self._value(left, names)
                known = value.object is not _UNKNOWN and not isinstance(left, ast.Name)
                return (value.object is None) is isinstance(how, ast.Is) if known else None
        return None

    def _run_parts(self, statement: ast.AST, names: _Names) -> bool:
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

    def _assign(self, target: ast.expr, value: _Value, names: _Names) -> None:
        match target:
            case ast.Name(id=name):
                names.values[name] = value
            case ast.Starred(value=inner):
                self._assign(inner, _item(value), names)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for one, item in zip(targets, _unpacked(value, len(targets)), strict=True):
                    self._assign(one, item, names)

    def _value(self, node: ast.expr, names: _Names) -> _Value:
        """Evaluate an expression."""
        match node:
            case ast.Constant(value=value):
                return _Value(value)
            case ast.Name(id=name):
                return names.find(name)
            case ast.Attribute(value=base, attr=name):
                return self._attribute(self._value(base, names), name)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return _Value(items=tuple(self._spread(elements, names)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self._value(operand, names)
                return replace(value, object=-value.number) if value.number is not None else value
            case ast.BinOp(left=left, op=operator, right=right):
                return _calculated(operator, self._value(left, names), self._value(right, names))
            case ast.Subscript(value=base, slice=index):
                return _subscript(self._value(base, names), index, self._value(index, names))
            case ast.Call():
                return self._call(node, names)
            case ast.Lambda():
                return _Value(function=(node, names))
            case ast.NamedExpr(target=target, value=inner):
                value = self._value(inner, names)
                self._assign(target, value, names)
                return value
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._value(test, names)
                return _either([self._value(body, names), self._value(orelse, names)])
            case ast.BoolOp(values=values):
                return _either([self._value(one, names) for one in values])
            case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element):
                inner_names = _Names({}, names.globals, names, names.kind)
                for one in node.generators:
                    self._assign(one.target, _item(self._value(one.iter, names)), inner_names)
                return self._value(element, inner_names)
        found = [self._value(one, names) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        return _Value() if isinstance(node, ast.Compare) else _joined(found)

    def _spread(self, nodes: Iterable[ast.expr], names: _Names) -> Iterator[_Value]:
        for node in nodes:
            if not isinstance(node, ast.Starred):
                yield self._value(node, names)
            elif (value := self._value(node.value, names)).items is not None:
                yield from value.items
            else:
                yield replace(value, is_many=True)

    def _attribute(self, base: _Value, name: str) -> _Value:
        if base.kind:
            if name == "shape" and base.is_tensor and not base.is_split:
                return replace(base, kind="shape")
            return base if name in _VIEWS else _Value()
        if base.object is _UNKNOWN:
            return _Value()
        if (id(base.object), name) in self._changed:
            return _Value(self._changed[id(base.object), name], is_local=True)
        try:
            found = getattr(base.object, name)
        except Exception:  # noqa: BLE001 - a property may raise whatever it wants
            return _Value()
        if name == "training":
            return _Value()
        if type(found) is not int or isinstance(base.object, ModuleType):
            return _Value(found)
        count = Count(base.object, name, found)
        self.reads.append(count)
        return _Value(found, counts=(count,))

    def _call(self, node: ast.Call, names: _Names) -> _Value:
        inputs = list(self._spread(node.args, names))
        options = {one.arg: self._value(one.value, names) for one in node.keywords if one.arg is not None}
        if isinstance(node.func, ast.Attribute):
            base = self._value(node.func.value, names)
            if base.kind or base.items is not None:
                return self._operation(node.func.attr, base, inputs, options)
            return self._call_value(self._attribute(base, node.func.attr), inputs, options)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not inputs and names.kind is not None:
            owner = next(iter(names.values.values()), _Value()).object
            return _Value(super(names.kind, owner)) if isinstance(owner, names.kind) else _Value()
        return self._call_value(self._value(node.func, names), inputs, options)

    def _call_value(self, function: _Value, inputs: list[_Value], options: dict[str, _Value]) -> _Value:
        given = (*inputs, *options.values())
        if function.function is not None:
            code, outer = function.function
            return self._call_code(code, inputs, options, _Names({}, outer.globals, outer, outer.kind))
        found = function.object
        name = getattr(found, "__name__", "")
        if found is map and len(inputs) == 2:
            return self._call_value(inputs[0], [_item(inputs[1])], {})
        if found is getattr and len(inputs) >= 2 and isinstance(inputs[1].object, str):
            return self._attribute(inputs[0], inputs[1].object)
        if (found is tuple or found is list) and len(inputs) == 1:
            return inputs[0]
        if isinstance(found, nn.Module):
            return self._call_module(found, inputs, options)
        if inputs and inputs[0].is_tensor and name in _DIVIDING + ("split",):
            return self._operation(name, inputs[0], inputs[1:], options)
        if not any(one.is_raw or id(one.object) in self._modules for one in (*given, _owner(found))):
            return _joined(given)
        if inspect.isroutine(found):
            is_torch = (getattr(found, "__module__", None) or "torch").split(".")[0] in ("torch", "_operator")
            return _joined(given) if is_torch else self._call_function(found, inputs, options)
        called = getattr(type(found), "__call__", None)  # noqa: B004 - the method is read
        if found is _UNKNOWN or isinstance(found, type) or not inspect.isfunction(called):
            return replace(_joined(given), is_split=True)
        return self._call_function(MethodType(called, found), inputs, options)

    def _call_module(self, module: nn.Module, inputs: list[_Value], options: dict[str, _Value]) -> _Value:
        if module in self._outputs or isinstance(module, _MIXING):
            shard = self._outputs.get(module)
            return _Value() if shard is None else _Value(shard=shard, kind="tensor")
        given = (*inputs, *options.values())
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            value = inputs[0] if inputs else _Value()
            for one in module:
                value = self._call_module(one, [value], {})
            return value
        is_known = type(module).__module__.startswith("torch.") or isinstance(module, ParallelModule)
        if is_known or not any(one.is_raw or id(one.object) in self._modules for one in given):
            return _joined(given)
        return self._call_function(module.forward, inputs, options)

    def _operation(self, name: str, base: _Value, inputs: list[_Value], options: dict[str, _Value]) -> _Value:
        """Read a method of a tensor, or a function of the same name."""
        if base.kind == "shape" or not base.is_tensor:
            return _joined([base, *inputs])
        if name == "size":
            shape = replace(base, kind="shape") if not base.is_split else _Value()
            return _subscript(shape, None, inputs[0]) if inputs else shape
        if base.shard is None or base.is_split or name not in _DIVIDING:
            return _Value() if name in ("dim", "numel", "item") else _joined([base, *inputs, *options.values()])
        if name == "rearrange":
            return self._rearrange(base, inputs, options)
        if name in ("chunk", "tensor_split"):
            return self._chunk(base, inputs, options)
        is_exact = name == "unflatten"
        sizes = inputs[1:] if is_exact else inputs
        sizes = [*sizes, *(value for option, value in options.items() if option in ("shape", "sizes"))]
        return self._divide(base, base.shard, _flat(sizes), is_exact=is_exact)

    def _divide(self, base: _Value, shard: Shard, sizes: Sequence[_Value], *, is_exact: bool = False) -> _Value:
        """Read a reshape of local features to sizes, of which the last ones are theirs."""
        split = replace(base, is_split=True)
        if not sizes or (sizes[-1].kind in ("size", "shape") and not sizes[-1].counts):
            return base  # keeps the features
        if sizes[-1].kind == "size":
            self._found(shard, sizes[-1].counts[:1])
            return split
        known = _known_suffix(sizes, shard.full)
        product = 1
        for size in known:
            product *= size.number or 1
        if known and product == shard.full and not any(size.is_local for size in known):
            counted = [size for size in known if size.counts and size.number != 1] or known[:1]
            self._found(shard, counted[0].counts[:1], counted[0].number or 0)
        elif known:
            before = sizes[len(sizes) - len(known) - 1].number if len(sizes) > len(known) else None
            self.is_understood |= any(size.is_local for size in known) or product == shard.local
            self.is_understood |= before == -1 and shard.local % product == 0
        else:
            return self._divide_by_count(base, shard, sizes, is_exact=is_exact)
        return split

    def _divide_by_count(self, base: _Value, shard: Shard, sizes: Sequence[_Value], *, is_exact: bool) -> _Value:
        """Read a reshape whose last size follows from the others."""
        count = sizes[-2] if len(sizes) > 1 else _Value()
        if count.is_local:
            self.is_understood = True
        elif count.number is None or count.number < 2 or shard.full % count.number:
            is_kept = count.number is None and sizes[-1].number == -1 and len(sizes) < 4
            return base if is_kept else replace(base, is_split=True)
        elif shard.is_fused and not count.counts:
            self.is_understood = True
        elif is_exact or len(sizes) > 3 or any(size.is_many for size in sizes):
            self._found(shard, count.counts[:1], count.number)
        return replace(base, is_split=True)

    def _chunk(self, base: _Value, inputs: list[_Value], options: dict[str, _Value]) -> _Value:
        dim = (inputs[1:2] or [options.get("dim", _Value())])[0].number
        count = (inputs or [options.get("chunks", _Value())])[0]
        shard = base.shard
        if shard is None or dim not in (-1, 2) or count.number is None or count.number < 2:
            return base
        if count.is_local or (shard.is_fused and not count.counts):
            part = shard._replace(full=shard.full // count.number, local=shard.local // count.number, is_fused=False)
            return replace(base, shard=part)
        self._found(shard, count.counts[:1], count.number)
        return replace(base, is_split=True)

    def _rearrange(self, base: _Value, inputs: list[_Value], options: dict[str, _Value]) -> _Value:
        """Read a call of einops: a group such as ``(h d)`` names the sizes that features are divided into."""
        pattern = inputs[0].object if inputs else _UNKNOWN
        left = pattern.partition("->")[0] if isinstance(pattern, str) else ""
        if not left.rstrip().endswith(")"):
            return base
        axes = left[left.rindex("(") + 1 : left.rindex(")")].split()
        sizes = [options.get(axis, _Value(-1)) for axis in axes]
        if base.shard is None or len(sizes) < 2:
            return base
        return self._divide(base, base.shard, sizes, is_exact=True)

    def _found(self, shard: Shard, counts: Sequence[Count], number: int = 0) -> None:
        count = counts[0] if counts else None
        self.problems.append(Problem(shard, count, count.value if count else number))


def _known_suffix(sizes: Sequence[_Value], full: int) -> list[_Value]:
    """The last sizes that are known, as many as have the product of all features."""
    known: list[_Value] = []
    product = 1
    for size in reversed(sizes):
        if size.number is None or size.number < 1 or product >= full:
            break
        known.insert(0, size)
        product *= size.number
    return known


@cache
def _source(function: FunctionType) -> ast.FunctionDef | None:
    """The code of a function; None where its source is not available."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    return tree.body[0] if isinstance(tree.body[0], ast.FunctionDef) else None


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _UNKNOWN


def _owner(function: object) -> _Value:
    """The object that a method is of."""
    return _Value(getattr(function, "__self__", _UNKNOWN))


def _bound(
    arguments: ast.arguments, inputs: Sequence[_Value], options: Mapping[str, _Value]
) -> Iterator[tuple[str, _Value]]:
    """The names of arguments with the values that they get."""
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    given = [one for one in inputs if not one.is_many]
    yield from ((name, _Value()) for name in (*names, *(one.arg for one in arguments.kwonlyargs)))
    yield from zip(names, given, strict=False)
    if arguments.vararg is not None:
        yield arguments.vararg.arg, _Value(items=tuple(given[len(names) :]))
    if arguments.kwarg is not None:
        yield arguments.kwarg.arg, _Value()
    yield from options.items()


def _as_load(target: ast.expr) -> ast.expr:
    """An expression that reads what a target writes."""
    match target:
        case ast.Name(id=name):
            return ast.Name(name, ast.Load())
    return ast.Constant(None)


def _flat(values: Iterable[_Value]) -> list[_Value]:
    """The sizes in arguments, which are numbers, or one tuple of them."""
    return [one for value in values for one in (value.items if value.items is not None else [value])]


def _item(value: _Value) -> _Value:
    """Any item of a sequence; of tensors, the tensors in it have the same features."""
    return _joined(value.items) if value.items is not None else value if value.is_tensor else _Value()


def _unpacked(value: _Value, number: int) -> list[_Value]:
    if value.items is not None and len(value.items) == number:
        return list(value.items)
    if value.kind == "shape":
        return [*[_Value()] * (number - 1), replace(value, kind="size")]
    return [_item(value)] * number


def _subscript(base: _Value, index: ast.expr | None, value: _Value) -> _Value:
    """An item, or a slice, of a value."""
    if base.kind == "shape":
        return replace(base, kind="size") if value.number in (-1, 2) else _Value(is_many=isinstance(index, ast.Slice))
    if base.is_tensor:
        return base
    try:
        if base.items is not None:
            return base.items[value.number] if value.number is not None else _joined(base.items)
        known = isinstance(base.object, nn.ModuleList | nn.ModuleDict | nn.Sequential | Mapping | list | tuple)
        return _Value(base.object[value.object]) if known and value.object is not _UNKNOWN else _Value()
    except (LookupError, TypeError):
        return _Value()


def _calculated(operator: ast.operator, left: _Value, right: _Value) -> _Value:
    """The result of an operator."""
    if isinstance(operator, ast.Add) and (left.items is not None or right.items is not None):
        sides = (one.items if one.items is not None else (replace(one, is_many=True),) for one in (left, right))
        return _Value(items=tuple(item for side in sides for item in side))
    if left.is_tensor or right.is_tensor:
        return _joined([left, right])
    counts, is_local = left.counts + right.counts, left.is_local or right.is_local
    size = next((one for one in (left, right) if one.kind == "size"), None)
    if size is not None and not is_local:
        return replace(size, counts=counts)
    calculate = _OPERATORS.get(type(operator))
    number = calculate(left.number, right.number) if calculate and left.number is not None and right.number else _UNKNOWN
    return _Value(number, counts=counts, is_local=is_local)


def _joined(values: Iterable[_Value]) -> _Value:
    """The result of an operation on values: a tensor, if one of them is a tensor."""
    tensors = [one for value in values for one in (value.items or (value,)) if one.is_tensor]
    if not tensors:
        return _Value()
    return replace(tensors[0], is_split=any(one.is_split for one in tensors))


def _either(values: Sequence[_Value]) -> _Value:
    """The value of one of several branches."""
    if not values:
        return _Value()
    first = values[0]
    if all(one is first for one in values[1:]):
        return first
    lengths = {None if one.items is None else len(one.items) for one in values}
    if len(lengths) == 1 and None not in lengths:
        return _Value(items=tuple(map(_either, zip(*[one.items or () for one in values], strict=True))))
    if any(one.is_tensor for one in values):
        return _joined(values)
    return next((one for one in values if one.counts or one.is_local or one.object is not _UNKNOWN), first)
