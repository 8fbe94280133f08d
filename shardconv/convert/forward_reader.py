"""Reading of the forward of a module: how it divides the local features of column parallel layers.

Owns which numbers are right on each rank. Follows outputs of column parallel layers through methods, functions, and
objects that get the module.
"""

import ast
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType, ModuleType
from typing import NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardconv.convert.code_reader import CodeReader, Names
from shardconv.convert.code_values import (
    LAST_DIMS,
    UNKNOWN,
    Count,
    LocalFeatures,
    Value,
    calculated,
    flat,
    items_of,
    joined,
    subscript,
)
from shardconv.convert.feature_checks import is_elementwise
from shardconv.layers import ParallelLinear
from shardconv.layers.parallel_module import ParallelModule

#: Classes whose output does not have the features of their input.
_MIXING = (nn.Linear, nn.Embedding, ParallelLinear, nn.modules.conv._ConvNd)  # noqa: SLF001 - of all convolutions
#: Operations that divide features.
_DIVIDING = ("view", "reshape", "unflatten", "chunk", "tensor_split", "split", "rearrange")
#: Operations over a dim, with the place of the dim in their arguments behind the tensor; without one, over all dims or
#: the last.
_OVER_DIM = {
    **dict.fromkeys((
        "softmax", "log_softmax", "softmin", "logsumexp", "mean", "sum", "prod", "var", "std", "amax", "amin", "max",
        "min", "median", "argmax", "argmin", "cumsum", "cumprod", "sort", "argsort",
    ), 0),
    **dict.fromkeys(("norm", "normalize", "topk", "roll", "layer_norm", "rms_norm", "group_norm"), 1),
}  # fmt: skip
#: The dim of an operation that has another default than the last.
_DEFAULT_DIMS = {"normalize": 1}
_TRANSPOSING = ("transpose", "swapaxes", "swapdims", "movedim", "permute")
_OPERATIONS = (*_DIVIDING, *_OVER_DIM, *_TRANSPOSING, "glu")
#: Functions that read the type of a parameter, not its numbers.
_OF_TYPE = ("isinstance", "hasattr", "type", "len", "to", "type_as", "is_tensor", "size", "dim", "numel")
#: Literal numbers up to this one are those of segments, such as q, k, v.
_MAX_SEGMENTS = 4
#: Functions that pass on what they get.
_BUILTINS: tuple[object, ...] = (map, getattr, super, tuple, list)
_VIEWS = ("T", "mT", "data")


class Problem(NamedTuple):
    """A division of local features by a number of the unsharded model, or another use that is not right on each rank.

    Attributes:
        shard: the features.
        divisor: the attribute with the number; None for a number in the code.
        number: the number, or what the forward does instead of a division.
    """

    shard: LocalFeatures
    divisor: Count | None
    number: int | str


class ForwardReader(CodeReader):
    """Reads the forward of a module that has column parallel layers.

    Args:
        outputs: the layers that become parallel or are: the features of the output; None where it is not sharded.
        modules: all modules that are or contain layers with shards.
        changed: attributes of objects, by id and name, that have their local value, and that value.

    Attributes:
        problems: divisions of local features by numbers of the unsharded model.
        is_understood: whether local features are divided in a way that is right on each rank.
    """

    def __init__(
        self,
        outputs: Mapping[nn.Module, LocalFeatures | None],
        modules: Collection[nn.Module],
        changed: Mapping[tuple[int, str], object],
    ) -> None:
        super().__init__()
        self._outputs, self._modules, self._changed = outputs, {id(one) for one in modules}, changed
        self._root: nn.Module = nn.Module()
        self.problems: list[Problem] = []
        self.is_understood = False

    def read(self, module: nn.Module) -> None:
        """Read the forward of a module, and the code that it calls."""
        self._root = module
        self._call_function(module.forward, [Value(kind="input")] * _number_of_inputs(module), {})
        self.is_understood &= not self.is_exhausted

    def _attribute(self, base: Value, name: str) -> Value:
        if base.kind:
            return _attribute_of_tensor(base, name)
        if isinstance(base.object, nn.Module) and base.object in self._outputs and base.object is not self._root:
            return self._attribute_of_layer(base.object, name)
        if (id(base.object), name) in self._changed:
            return Value(self._changed[id(base.object), name], is_local=True)
        try:
            found = UNKNOWN if name == "training" else getattr(base.object, name)
        except Exception:  # noqa: BLE001 - a property may raise whatever it wants
            return Value()
        getter = getattr(type(base.object), name, None)
        if isinstance(getter, property) and id(base.object) in self._modules:
            computed = self._call_function(getter.fget, [base], {})
            is_known = computed.number is not None or computed.is_local or computed.kind
            return computed if is_known else Value(found)
        return self._counted(base, name, found)

    def _counted(self, base: Value, name: str, found: object) -> Value:
        if type(found) is not int or isinstance(base.object, ModuleType):
            return Value(found)
        return Value(found, counts=(Count(base.object, name, found),))

    def _attribute_of_layer(self, layer: nn.Module, name: str) -> Value:
        is_replicated = isinstance(layer, ParallelModule) and getattr(layer, "dim", 0) is None
        if name in ("weight", "bias") and not is_replicated:
            return Value(layer, kind="weight", shard=self._outputs[layer])
        return Value(getattr(layer, name, UNKNOWN))  # a count is not set in a layer

    def _on_binop(self, node: ast.BinOp, names: Names) -> Value:
        left, right = self._value(node.left, names), self._value(node.right, names)
        for one in (left, right):
            if one.kind == "weight":
                self._found_weight(one)
        is_full = left.kind == "width" or bool(left.counts and not left.is_local and not left.kind)
        if isinstance(node.op, ast.Div | ast.FloorDiv) and is_full and right.is_local:
            self._found_in_root(f"divides a number of the unsharded model by {ast.unparse(node.right)} of one rank")
        return calculated(node.op, left, right)

    def _on_subscript(self, node: ast.Subscript, names: Names) -> Value:
        base = self._value(node.value, names)
        if not base.is_last:
            return subscript(base, node.slice, self._value(node.slice, names))
        match node.slice:
            case ast.Tuple(elts=[first, *others, last]) if len(others) == 1 or _is_ellipsis(first):
                return self._index(base, last, names)
        return base

    def _index(self, base: Value, index: ast.expr, names: Names) -> Value:
        """Read the index of local features."""
        if isinstance(index, ast.Constant) and index.value is None:
            return replace(base, is_moved=True)
        if not isinstance(index, ast.Slice) or index.step is not None or base.shard is None:
            return base
        bounds = [self._value(one, names) if one else None for one in (index.lower, index.upper)]
        known = [one for one in bounds if one is not None and one.number not in (None, 0, base.shard.local)]
        if not known:
            return base
        start, end = (None if one is None else one.number for one in bounds)
        number = (base.shard.local if end is None else end) - (start or 0)
        return self._segment(base, base.shard, known, number)

    def _segment(self, base: Value, shard: LocalFeatures, sizes: Sequence[Value], number: int) -> Value:
        """Read a part of the features, with its size on one rank, which is one of several segments."""
        if shard.is_fused and all(one.is_local or one.kind == "size" for one in sizes) and 0 < number <= shard.local:
            self.is_understood = True
            full = number * shard.full // shard.local
            return replace(base, shard=shard._replace(full=full, local=number, is_fused=number > shard.local // 2))
        self._found(shard, sizes[0].counts[:1] if shard.is_fused else (), f"takes a part of {number} features")
        return replace(base, is_split=True)

    def _call(self, node: ast.Call, names: Names) -> Value:
        inputs = list(self._spread(node.args, names))
        options = {one.arg: self._value(one.value, names) for one in node.keywords if one.arg is not None}
        if isinstance(node.func, ast.Attribute):
            base = self._value(node.func.value, names)
            if base.kind or base.items is not None:
                self._check_weights(node.func.attr, Value(), (*inputs, *options.values()))
                return self._operation(node.func.attr, base, inputs, options)
            function = self._attribute(base, node.func.attr)
            self._check_weights(node.func.attr, function, (*inputs, *options.values()))
            return self._call_value(function, inputs, options)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not inputs and names.kind is not None:
            return _super(names.kind, next(iter(names.values.values()), Value()).object)
        function = self._value(node.func, names)
        self._check_weights(getattr(function.object, "__name__", ""), function, (*inputs, *options.values()))
        return self._call_value(function, inputs, options)

    def _check_weights(self, name: str, function: Value, given: Iterable[Value]) -> None:
        """Refuse parameters of parallel layers that a function gets whose code is not read."""
        weights = [one for one in flat(given) if one.kind == "weight"]
        if weights and name not in _OF_TYPE and function.function is None and not _is_read(function.object):
            self._found_weight(weights[0])

    def _call_value(self, function: Value, inputs: list[Value], options: dict[str, Value]) -> Value:
        found, given = function.object, (*inputs, *options.values())
        if function.function is not None:
            code, outer = function.function
            return self._call_code(code, inputs, options, Names({}, outer.globals, outer, outer.kind))
        if any(found is one for one in _BUILTINS):
            return self._call_builtin(found, inputs)
        if isinstance(found, nn.Module):
            return self._call_module(found, inputs, options)
        name = getattr(found, "__name__", "")
        if found is checkpoint and inputs:
            return self._call_value(inputs[0], inputs[1:], options)
        if inputs and inputs[0].is_tensor and name in _OPERATIONS and (name in _DIVIDING or _is_torch(found)):
            return self._operation(name, inputs[0], inputs[1:], options)
        is_followed = any(one.is_raw or id(one.object) in self._modules for one in (*given, _owner(found)))
        is_followed = is_followed or any(one.kind == "weight" for one in given)
        return self._call_object(found, inputs, options) if is_followed else joined(given)

    def _call_builtin(self, function: object, inputs: list[Value]) -> Value:
        if function is map and len(inputs) > 1:
            rows = zip(*map(items_of, inputs[1:]), strict=False)
            found = [self._call_value(inputs[0], list(row), {}) for row in rows]
            return found[0] if len(found) == 1 else Value(items=tuple(found))
        if function is getattr and len(inputs) > 1 and isinstance(inputs[1].object, str):
            return self._attribute(inputs[0], inputs[1].object)
        if function is super:
            return _super(*(one.object for one in inputs)) if len(inputs) == 2 else Value()
        return inputs[0] if len(inputs) == 1 else Value()

    def _call_object(self, found: object, inputs: list[Value], options: dict[str, Value]) -> Value:
        """Evaluate a call of a function, or of an object with a method ``__call__``."""
        given = (*inputs, *options.values())
        if inspect.isroutine(found):
            return joined(given) if _is_torch(found) else self._call_function(found, inputs, options)
        called = getattr(type(found), "__call__", None)  # noqa: B004 - the method is read
        if found is UNKNOWN or isinstance(found, type) or not inspect.isfunction(called):
            return replace(joined(given), is_split=True)
        return self._call_function(MethodType(called, found), inputs, options)

    def _call_module(self, module: nn.Module, inputs: list[Value], options: dict[str, Value]) -> Value:
        if module in self._outputs or isinstance(module, _MIXING):
            shard = self._outputs.get(module)
            return Value() if shard is None else Value(shard=shard, kind="tensor")
        given = (*inputs, *options.values())
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            value = inputs[0] if inputs else Value()
            for one in module:
                value = self._call_module(one, [value], {})
            return value
        is_torch = type(module).__module__.startswith("torch.")
        has_own = next(module.parameters(), None) is not None  # is converted, or checks its input
        if is_torch and inputs and inputs[0].is_last and not (has_own or is_elementwise(module)):
            return self._call_operation(module, inputs[0])
        is_converted = id(module) in self._modules and not any(module.children())
        is_known = is_torch or is_converted or isinstance(module, ParallelModule)
        if is_known or not any(one.is_raw or id(one.object) in self._modules for one in given):
            return joined(given)
        return self._call_function(module.forward, inputs, options)

    def _call_operation(self, module: nn.Module, base: Value) -> Value:
        """Read a module of torch without parameters that does not compute each feature by itself."""
        name = type(module).__name__.lower()
        if name in ("glu", *_OVER_DIM):
            return self._operation(name, base, [], {"dim": Value(getattr(module, "dim", -1))})
        return self._found_over(base, type(module).__name__)

    def _operation(self, name: str, base: Value, inputs: list[Value], options: dict[str, Value]) -> Value:
        """Read a method of a tensor, or a function of the same name."""
        if name == "size" and base.kind in ("weight", "input", "tensor"):
            shape = self._attribute(base, "shape")
            return subscript(shape, None, inputs[0]) if inputs else shape
        if base.kind == "weight":
            return Value() if name in _OF_TYPE else base
        if not base.is_tensor or base.shard is None:
            return joined([base, *inputs])
        if name in _TRANSPOSING:
            return replace(base, is_moved=base.is_moved ^ _moves_last(name, [one.number for one in flat(inputs)]))
        return self._over_features(name, base, base.shard, inputs, options)

    def _over_features(
        self, name: str, base: Value, shard: LocalFeatures, inputs: list[Value], options: dict[str, Value]
    ) -> Value:
        if base.is_last and name in _OVER_DIM and _is_over_last(name, inputs, options):
            return self._found_over(base, name)
        if base.is_last and name == "glu":
            return self._chunk(base, shard, [Value(2), *(inputs or [options.get("dim", Value(-1))])], {})
        if base.is_split or name not in _DIVIDING:
            return Value() if name in ("dim", "numel", "item") else joined([base, *inputs, *options.values()])
        divide = {"rearrange": self._rearrange, "split": self._split, "chunk": self._chunk, "tensor_split": self._chunk}
        return divide.get(name, partial(self._reshape, name))(base, shard, inputs, options)

    def _reshape(
        self, name: str, base: Value, shard: LocalFeatures, inputs: list[Value], options: dict[str, Value]
    ) -> Value:
        is_exact = name == "unflatten"
        sizes = inputs[1:] if is_exact else inputs
        sizes = [*sizes, *(value for option, value in options.items() if option in ("shape", "sizes"))]
        return self._divide(base, shard, flat(sizes), is_exact=is_exact)

    def _divide(self, base: Value, shard: LocalFeatures, sizes: Sequence[Value], *, is_exact: bool = False) -> Value:
        """Read a reshape of local features to sizes, of which the last ones are theirs."""
        split = replace(base, is_split=True)
        if not sizes or (sizes[-1].kind in ("size", "shape") and not sizes[-1].counts):
            return base  # keeps the features
        if (segments := _segments(sizes, shard)) > 1:
            self._found(shard, (), segments)
            return split
        if sizes[-1].kind == "size" and sizes[-1].counts:
            self._found(shard, sizes[-1].counts[:1])
            return split
        known = _known_suffix(sizes, shard.full)
        product = 1
        for size in known:
            product *= size.number or 1
        if known and product == shard.full and not any(size.is_local for size in known):
            counted = [size for size in known[:-1] if _attribute_in(size) and size.number != 1] or known[:1]
            self._found(shard, _attribute_in(counted[0]) if len(known) > 1 else (), counted[0].number or 0)
        elif known:
            before = sizes[-len(known) - 1] if len(sizes) > len(known) else Value()
            self.is_understood |= any(size.is_local for size in known) or product == shard.local
            is_rest = before.number == -1 or before.kind == "size"
            self.is_understood |= is_rest and shard.local % product == 0
        else:
            return self._divide_by_count(base, shard, sizes, is_exact=is_exact)
        return split

    def _divide_by_count(self, base: Value, shard: LocalFeatures, sizes: Sequence[Value], *, is_exact: bool) -> Value:
        """Read a reshape whose last size follows from the others."""
        count = sizes[-2] if len(sizes) > 1 else Value()
        if count.is_local:
            self.is_understood = True
        elif count.number is None or count.number < 2 or shard.full % count.number:
            is_kept = count.number is None and sizes[-1].number == -1 and len(sizes) < 4
            return base if is_kept else replace(base, is_split=True)
        elif shard.is_fused and not count.counts:
            self.is_understood = True
        elif is_exact or len(sizes) > 3 or any(size.is_many for size in sizes) or _is_literal(count):
            self._found(shard, _attribute_in(count), count.number)
        return replace(base, is_split=True)

    def _chunk(self, base: Value, shard: LocalFeatures, inputs: list[Value], options: dict[str, Value]) -> Value:
        dim = (inputs[1:2] or [options.get("dim", Value())])[0].number
        count = (inputs or [options.get("chunks", Value())])[0]
        if dim not in LAST_DIMS or count.number is None or count.number < 2:
            return base
        if count.is_local or (shard.is_fused and not count.counts):
            self.is_understood = True
            part = shard._replace(full=shard.full // count.number, local=shard.local // count.number, is_fused=False)
            return replace(base, shard=part)
        self._found(shard, _attribute_in(count), count.number)
        return replace(base, is_split=True)

    def _split(self, base: Value, shard: LocalFeatures, inputs: list[Value], options: dict[str, Value]) -> Value:
        """Evaluate a split into segments, or into parts of a size such as that of a head."""
        given = [
            *inputs,
            *(options[name] for name in ("split_size_or_sections", "split_size", "dim") if name in options),
        ]
        if len(given) < 2 or given[1].number not in LAST_DIMS:
            return base
        size, parts = given[0], given[0].items
        if parts is not None:
            found = [self._segment(base, shard, [one], one.number or 0) for one in parts if one.number != shard.local]
            return Value(items=tuple(found)) if len(found) == len(parts) else joined([base, *found])
        if size.number is None or not 0 < size.number < shard.full or size.number == shard.local:
            return base
        if size.is_local or size.kind == "size" or shard.local % size.number:
            return self._segment(base, shard, [size], size.number)
        self.is_understood = True
        return replace(base, is_split=True)

    def _rearrange(self, base: Value, shard: LocalFeatures, inputs: list[Value], options: dict[str, Value]) -> Value:
        """Read a call of einops: a group such as ``(h d)`` names the sizes that features are divided into."""
        pattern = inputs[0].object if inputs else UNKNOWN
        left = pattern.partition("->")[0] if isinstance(pattern, str) else ""
        if not left.rstrip().endswith(")"):
            return base
        axes = left[left.rindex("(") + 1 : left.rindex(")")].split()
        sizes = [options.get(axis, Value(-1)) for axis in axes]
        return base if len(sizes) < 2 else self._divide(base, shard, sizes, is_exact=True)

    def _found(self, shard: LocalFeatures, counts: Sequence[Count], number: int | str = 0) -> None:
        count = counts[0] if counts else None
        self.problems.append(Problem(shard, count, count.value if count else number))

    def _found_over(self, base: Value, name: str) -> Value:
        assert base.shard is not None
        self._found(base.shard, (), f"computes {name} over the features")
        return replace(base, is_split=True)

    def _found_in_root(self, text: str) -> None:
        shards = (self._outputs.get(one) for one in self._root.modules())
        shard = next((one for one in shards if one is not None), None)
        if shard is not None:
            self._found(shard, (), text)

    def _found_weight(self, weight: Value) -> None:
        name = next((name for name, one in self._root.named_modules() if one is weight.object), "")
        shard = weight.shard or LocalFeatures(name or str(weight.object), 0, 0, is_fused=False)
        self._found(shard, (), "reads the weight of a sharded layer without calling it: call it, or do not convert it")


def _attribute_of_tensor(base: Value, name: str) -> Value:
    if name == "shape" and base.kind == "weight":
        known = UNKNOWN if base.shard is None or not isinstance(base.object, nn.Linear) else base.shard.local
        return Value(items=(Value(known, is_local=True), Value(is_local=True)))
    if name == "shape" and base.kind == "input":
        return Value(kind="input shape")
    if name == "shape" and base.is_tensor and not base.is_split:
        return replace(base, kind="shape")
    if name in ("T", "mT"):
        return replace(base, is_moved=not base.is_moved)
    return base if name in _VIEWS else Value()


def _number_of_inputs(module: nn.Module) -> int:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return 0
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


def _is_torch(function: object) -> bool:
    return (getattr(function, "__module__", None) or "torch").split(".")[0] in ("torch", "_operator")


def _is_read(function: object) -> bool:
    """Whether the code of a function or module is read when it gets a parameter."""
    is_python = inspect.isfunction(function) or inspect.ismethod(function) or isinstance(function, nn.Module)
    return is_python and not _is_torch(type(function) if isinstance(function, nn.Module) else function)


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _moves_last(name: str, dims: Sequence[int | None]) -> bool:
    """Whether a transposition puts the last dim elsewhere, or back."""
    if name == "permute":
        return bool(dims) and dims[-1] not in (None, -1, len(dims) - 1)
    return any(dim in LAST_DIMS for dim in dims)


def _is_over_last(name: str, inputs: Sequence[Value], options: Mapping[str, Value]) -> bool:
    """Whether an operation is over the last dim, or over all dims."""
    place = _OVER_DIM[name]
    default = Value(_DEFAULT_DIMS.get(name, -1))
    dim = options.get("dim", next(iter(inputs[place : place + 1]), default))
    if name.endswith("_norm"):
        return True
    return any(one.number in LAST_DIMS or one.object is None for one in flat([dim]))


def _attribute_in(size: Value) -> Sequence[Count]:
    """The attribute that is the size."""
    return [one for one in size.counts[:1] if len(size.counts) == 1 and size.number in (None, one.value)]


def _is_literal(size: Value) -> bool:
    return not (size.counts or size.is_local or size.kind) and 1 < (size.number or 0) <= _MAX_SEGMENTS


def _segments(sizes: Sequence[Value], shard: LocalFeatures) -> int:
    """The number of segments that a reshape divides a shard without segments into; 0 if it does not."""
    places = [
        place for place, size in enumerate(sizes) if size.is_local or (size.number == -1 and size is not sizes[-1])
    ]
    if shard.is_fused or not places or not places[-1]:
        return 0
    left, right = sizes[places[-1] - 1], sizes[places[-1] :]
    product = left.number or 0
    for size in right:
        product *= size.number or 0
    return (left.number or 0) if _is_literal(left) or (product == shard.local and not left.is_local) else 0


def _known_suffix(sizes: Sequence[Value], full: int) -> list[Value]:
    """The last sizes that are known, as many as have the product of all features."""
    known: list[Value] = []
    product = 1
    for size in reversed(sizes):
        if size.number is None or size.number < 1 or product >= full:
            break
        known.insert(0, size)
        product *= size.number
    return known


def _super(kind: object, owner: object) -> Value:
    return Value(super(kind, owner)) if isinstance(kind, type) and isinstance(owner, kind) else Value()


def _owner(function: object) -> Value:
    """The object that a method is of."""
    return Value(getattr(function, "__self__", UNKNOWN))
