"""Reading of the forward of a module: how it divides the local features of column parallel layers.

Owns which numbers are right on each rank. Follows outputs of column parallel layers through methods, functions, and
objects that get the module.
"""

import ast
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType, ModuleType
from typing import NamedTuple

from torch import nn

from shardconv.convert.code_reader import CodeReader, Names
from shardconv.convert.code_values import UNKNOWN, Count, LocalFeatures, Value, flat, items_of, joined, subscript
from shardconv.layers import ParallelLinear
from shardconv.layers.parallel_module import ParallelModule

#: Classes whose output does not have the features of their input.
_MIXING = (nn.Linear, nn.Embedding, ParallelLinear, nn.modules.conv._ConvNd)  # noqa: SLF001 - of all convolutions
#: Operations that divide features.
_DIVIDING = ("view", "reshape", "unflatten", "chunk", "tensor_split", "split", "rearrange")
#: Functions that pass on what they get.
_BUILTINS: tuple[object, ...] = (map, getattr, super, tuple, list)
_VIEWS = ("T", "mT", "data")


class Problem(NamedTuple):
    """A division of local features by a number of the unsharded model.

    Attributes:
        shard: the features.
        divisor: the attribute with the number; None for a number in the code.
        number: the number.
    """

    shard: LocalFeatures
    divisor: Count | None
    number: int


class ForwardReader(CodeReader):
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
        outputs: Mapping[nn.Module, LocalFeatures | None],
        modules: Collection[nn.Module],
        changed: Mapping[tuple[int, str], object],
    ) -> None:
        super().__init__()
        self._outputs, self._modules, self._changed = outputs, {id(one) for one in modules}, changed
        self.problems: list[Problem] = []
        self.is_understood = False
        self.reads: list[Count] = []

    def read(self, module: nn.Module) -> None:
        """Read the forward of a module, and the code that it calls."""
        self._call_function(module.forward, [], {})

    def _attribute(self, base: Value, name: str) -> Value:
        if base.kind:
            is_shape = name == "shape" and base.is_tensor and not base.is_split
            return replace(base, kind="shape") if is_shape else base if name in _VIEWS else Value()
        if (id(base.object), name) in self._changed:
            return Value(self._changed[id(base.object), name], is_local=True)
        try:
            found = UNKNOWN if name == "training" else getattr(base.object, name)
        except Exception:  # noqa: BLE001 - a property may raise whatever it wants
            return Value()
        if type(found) is not int or isinstance(base.object, ModuleType):
            return Value(found)
        self.reads.append(Count(base.object, name, found))
        return Value(found, counts=(self.reads[-1],))

    def _call(self, node: ast.Call, names: Names) -> Value:
        inputs = list(self._spread(node.args, names))
        options = {one.arg: self._value(one.value, names) for one in node.keywords if one.arg is not None}
        if isinstance(node.func, ast.Attribute):
            base = self._value(node.func.value, names)
            if base.kind or base.items is not None:
                return self._operation(node.func.attr, base, inputs, options)
            return self._call_value(self._attribute(base, node.func.attr), inputs, options)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not inputs and names.kind is not None:
            return _super(names.kind, next(iter(names.values.values()), Value()).object)
        return self._call_value(self._value(node.func, names), inputs, options)

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
        if inputs and inputs[0].is_tensor and name in _DIVIDING:
            return self._operation(name, inputs[0], inputs[1:], options)
        is_followed = any(one.is_raw or id(one.object) in self._modules for one in (*given, _owner(found)))
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
            is_torch = (getattr(found, "__module__", None) or "torch").split(".")[0] in ("torch", "_operator")
            return joined(given) if is_torch else self._call_function(found, inputs, options)
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
        is_known = type(module).__module__.startswith("torch.") or isinstance(module, ParallelModule)
        if is_known or not any(one.is_raw or id(one.object) in self._modules for one in given):
            return joined(given)
        return self._call_function(module.forward, inputs, options)

    def _operation(self, name: str, base: Value, inputs: list[Value], options: dict[str, Value]) -> Value:
        """Read a method of a tensor, or a function of the same name."""
        if not base.is_tensor or base.shard is None:
            return joined([base, *inputs])
        if name == "size":
            shape = self._attribute(base, "shape")
            return subscript(shape, None, inputs[0]) if inputs else shape
        if base.is_split or name not in _DIVIDING:
            return Value() if name in ("dim", "numel", "item") else joined([base, *inputs, *options.values()])
        divide = {"rearrange": self._rearrange, "split": self._split, "chunk": self._chunk, "tensor_split": self._chunk}
        return divide.get(name, partial(self._reshape, name))(base, base.shard, inputs, options)

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
        elif is_exact or len(sizes) > 3 or any(size.is_many for size in sizes):
            self._found(shard, count.counts[:1], count.number)
        return replace(base, is_split=True)

    def _chunk(self, base: Value, shard: LocalFeatures, inputs: list[Value], options: dict[str, Value]) -> Value:
        dim = (inputs[1:2] or [options.get("dim", Value())])[0].number
        count = (inputs or [options.get("chunks", Value())])[0]
        if dim not in (-1, 2) or count.number is None or count.number < 2:
            return base
        if count.is_local or (shard.is_fused and not count.counts):
            part = shard._replace(full=shard.full // count.number, local=shard.local // count.number, is_fused=False)
            return replace(base, shard=part)
        self._found(shard, count.counts[:1], count.number)
        return replace(base, is_split=True)

    def _split(self, base: Value, shard: LocalFeatures, inputs: list[Value], _: dict[str, Value]) -> Value:
        """Evaluate a split into parts of a size, such as that of a head, which is the same on each rank."""
        size = inputs[0].number if inputs else None
        if size is None or not 0 < size < shard.local or shard.local % size:
            return base
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

    def _found(self, shard: LocalFeatures, counts: Sequence[Count], number: int = 0) -> None:
        count = counts[0] if counts else None
        self.problems.append(Problem(shard, count, count.value if count else number))


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
