"""The reader of a module's forward: finds divisions of the local features of column parallel layers.

Owns the rules for divisions that are correct on each rank. Follows outputs of column parallel layers through methods,
functions, and objects that get the module.
"""

import ast
import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MethodType, ModuleType
from typing import NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardconv.convert.code_reader import CodeReader, Names
from shardconv.convert.code_values import LAST_DIMS, UNKNOWN, Count, LocalFeatures, Value, calculated, flat, joined
from shardconv.convert.feature_checks import is_elementwise
from shardconv.layers import ParallelLinear
from shardconv.layers.parallel_module import ParallelModule

#: Classes whose output does not have the features of their input.
_MIXING = (nn.Linear, nn.Embedding, ParallelLinear, nn.modules.conv._ConvNd)  # noqa: SLF001 - of all convolutions
#: Operations that divide features.
_RESHAPING, _SPLITTING = ("view", "reshape", "unflatten", "rearrange"), ("chunk", "tensor_split", "split")
_DIVIDING = (*_RESHAPING, *_SPLITTING)
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
#: Literal numbers up to this one count segments, such as q, k, v.
_MAX_SEGMENTS = 4


class Problem(NamedTuple):
    """A division of local features by a number of the unsharded model, or another use that is incorrect on a rank.

    Attributes:
        shard: the features.
        divisor: the attribute with the number; None for a number in the code.
        number: the number, or a description of another use.
    """

    shard: LocalFeatures
    divisor: Count | None
    number: int | str


class ForwardReader(CodeReader):
    """Reads the forward of a module that has column parallel layers.

    Args:
        outputs: the layers that are or become parallel, to the local features of the output; None if not sharded.
        modules: all modules that are or contain layers with shards.
        changed: attributes with per-rank values, by id of the object and name: the value in the unsharded model, and
            the value on this rank.

    Attributes:
        problems: divisions of local features by numbers of the unsharded model, in the module that was read last.
        is_understood: whether it divides local features in a way that is correct on each rank.
    """

    def __init__(
        self,
        outputs: Mapping[nn.Module, LocalFeatures | None],
        modules: Collection[nn.Module],
        changed: Mapping[tuple[int, str], tuple[object, object]],
    ) -> None:
        super().__init__()
        self._outputs, self._modules, self._changed = outputs, {id(one) for one in modules}, changed
        self._root: nn.Module = nn.Module()

    def read(self, module: nn.Module) -> None:
        """Read the forward of a module, and the code that it calls."""
        self._root, self._calls, self.is_understood = module, 0, False
        self.problems: list[Problem] = []
        self._call_function(module.forward, [Value(kind="tensor")] * _number_of_inputs(module), {})
        self.is_understood &= not self.is_exhausted

    def _attribute(self, base: Value, name: str) -> Value:
        if base.kind:
            return _attribute_of_tensor(base, name)
        if isinstance(base.object, nn.Module) and base.object in self._outputs and base.object is not self._root:
            return self._attribute_of_layer(base.object, name)
        if (id(base.object), name) in self._changed:
            full, local = self._changed[id(base.object), name]
            return Value(local, full=full if type(full) is int else None, is_local=True)
        try:
            found = UNKNOWN if name == "training" else getattr(base.object, name)
        except Exception:  # noqa: BLE001 - a property may raise whatever it wants
            return Value()
        getter = getattr(type(base.object), name, None)
        if isinstance(getter, property) and id(base.object) in self._modules:
            computed = self._call_function(getter.fget, [base], {})
            is_known = computed.number is not None or computed.is_local or computed.kind
            return computed if is_known else Value(found)
        is_count = type(found) is int and not isinstance(base.object, ModuleType)
        return Value(found, counts=(Count(base.object, name, found),) if is_count else ())

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
        is_full = left.kind == "width" or bool(left.counts and not left.is_local and left.full in (None, left.number))
        if isinstance(node.op, ast.Div | ast.FloorDiv) and is_full and right.is_local:
            shards = [shard for one in self._root.modules() if (shard := self._outputs.get(one)) is not None]
            for shard in shards[:1]:
                text = f"divides a number of the unsharded model by {ast.unparse(node.right)} of one rank"
                self._found(shard, (), text)
        return calculated(node.op, left, right)

    def _on_subscript(self, node: ast.Subscript, names: Names) -> Value:
        base = self._value(node.value, names)
        if not base.is_last or base.shard is None:
            return base.subscript(self._value(node.slice, names), is_slice=isinstance(node.slice, ast.Slice))
        match node.slice:
            case ast.Tuple(elts=[first, *others, last]) if len(others) == 1 or ast.unparse(first) == "...":
                return self._index(base, base.shard, last, names)
        return base

    def _index(self, base: Value, shard: LocalFeatures, index: ast.expr, names: Names) -> Value:
        """Read the index of the last dim of local features."""
        if isinstance(index, ast.Constant) and index.value is None:
            return replace(base, is_moved=True)
        if not isinstance(index, ast.Slice) or index.step is not None:
            return base
        lower, upper = (self._value(one, names) if one else Value() for one in (index.lower, index.upper))
        known = [one for one in (lower, upper) if one.number not in (None, 0, shard.local)]
        start, stop = lower.pair or (0, 0), upper.pair or (shard.full, shard.local)
        return self._segment(base, shard, (stop[0] - start[0], stop[1] - start[1]), known) if known else base

    def _on_call(self, node: ast.Call, names: Names) -> Value:
        inputs = list(self._spread(node.args, names))
        options = {one.arg: self._value(one.value, names) for one in node.keywords if one.arg is not None}
        if isinstance(node.func, ast.Attribute):
            base = self._value(node.func.value, names)
            is_method = bool(base.kind) or base.items is not None
            name, function = node.func.attr, Value() if is_method else self._attribute(base, node.func.attr)
        else:
            is_method, base, function = False, Value(), self._value(node.func, names)
            name = getattr(function.object, "__name__", "")
        if function.object is super and not inputs:
            inputs = [names["__class__"], next(iter(names.values.maps[0].values()), Value())]
        weights = [one for one in flat((*inputs, *options.values())) if one.kind == "weight"]
        if weights and name not in _OF_TYPE and function.function is None and not _is_read(function.object):
            self._found_weight(weights[0])
        return self._operation(name, base, inputs, options) if is_method else self._call(function, inputs, options)

    def _call(self, function: Value, inputs: list[Value], options: dict[str, Value]) -> Value:
        found, given = function.object, (*inputs, *options.values())
        if function.function is not None:
            code, enclosing = function.function
            return self._call_code(code, inputs, options, enclosing)
        if isinstance(found, nn.Module):
            return self._call_module(found, inputs, options)
        if any(found is one for one in (map, getattr, super, tuple, list, checkpoint)):
            return self._call_builtin(found, inputs)
        name = getattr(found, "__name__", "")
        if inputs and inputs[0].is_sharded and (name in _DIVIDING or (name in _OPERATIONS and _is_torch(found))):
            return self._operation(name, inputs[0], inputs[1:], options)
        owner = Value(getattr(found, "__self__", UNKNOWN))
        is_read = any(one.is_raw or one.kind == "weight" or id(one.object) in self._modules for one in (*given, owner))
        return self._call_object(found, inputs, options) if is_read else joined(given)

    def _call_builtin(self, function: object, inputs: list[Value]) -> Value:
        objects = [one.object for one in inputs]
        if function is checkpoint and inputs:
            return self._call(inputs[0], inputs[1:], {})
        if function is map and len(inputs) > 1:
            rows = zip(*(one.known_items for one in inputs[1:]), strict=False)
            found = [self._call(inputs[0], list(row), {}) for row in rows]
            return found[0] if len(found) == 1 else Value(items=tuple(found))
        if function is getattr and len(inputs) > 1 and isinstance(objects[1], str):
            return self._attribute(inputs[0], objects[1])
        if function is super and len(inputs) == 2:
            is_method = isinstance(objects[0], type) and isinstance(objects[1], objects[0])
            return Value(super(*objects)) if is_method else Value()
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
            name = type(module).__name__
            dim = {"dim": Value(getattr(module, "dim", -1))}
            is_known = name.lower() in ("glu", *_OVER_DIM)
            return self._operation(name.lower(), inputs[0], [], dim) if is_known else self._found_over(inputs[0], name)
        is_converted = id(module) in self._modules and not any(module.children())
        is_known = is_torch or is_converted or isinstance(module, ParallelModule)
        if is_known or not any(one.is_raw or id(one.object) in self._modules for one in given):
            return joined(given)
        return self._call_function(module.forward, inputs, options)

    def _operation(self, name: str, base: Value, inputs: list[Value], options: dict[str, Value]) -> Value:
        """Read a method of a tensor, or a function of the same name."""
        if name == "size" and base.kind in ("weight", "tensor"):
            shape = self._attribute(base, "shape")
            return shape.subscript(inputs[0]) if inputs else shape
        if not base.is_sharded or base.shard is None:
            return base if base.kind == "weight" and name not in _OF_TYPE else joined([base, *inputs])
        if name in _TRANSPOSING:
            return replace(base, is_moved=base.is_moved ^ _moves_last(name, [one.number for one in flat(inputs)]))
        return self._division(name, base, base.shard, inputs, options)

    def _division(
        self, name: str, base: Value, shard: LocalFeatures, inputs: list[Value], options: dict[str, Value]
    ) -> Value:
        """Read an operation on local features."""
        if base.is_last and name in _OVER_DIM and _is_over_last(name, inputs, options):
            return self._found_over(base, name)
        if not base.is_split and name in _RESHAPING:
            return self._divide(base, shard, _sizes(name, inputs, options), is_exact=name not in ("view", "reshape"))
        if not base.is_split and (name in _SPLITTING or (name == "glu" and base.is_last)):
            return self._split(name, base, shard, inputs, options)
        return Value() if name in ("dim", "numel", "item") else joined([base, *inputs, *options.values()])

    def _divide(self, base: Value, shard: LocalFeatures, sizes: Sequence[Value], *, is_exact: bool) -> Value:
        """Read a reshape of local features to sizes, of which only the outermost may differ between ranks.

        A reshape to (..., 4, 16) of 64 features, of which this rank has 32, is correct if the 4 is an attribute with
        the local value 2: the pairs are (4, 2) and (16, 16), whose local product is 32. Only the outermost differs. A
        reshape to (..., 4, -1) gives the pairs (4, 4) and (16, 8): the inner size differs, so the 4 is reported.
        """
        last = sizes[-1] if sizes else None
        if last is None or (last.kind == "shape" and last.shard) or last.pair == (shard.full, shard.local):
            return base  # keeps the features
        split = replace(base, is_split=True)
        known, before_last = _known_suffix(sizes, shard.full), sizes[-2:-1]
        found = _sizes_of_features(sizes, known, shard)
        if not found:
            is_local = any(one.is_local for one in known or before_last)
            _, local_product = _product(known)
            self.is_understood |= is_local or bool(known and local_product == shard.local)
            is_kept = not is_local and all(one.number is None for one in before_last)
            return base if is_kept and last.number == -1 and len(sizes) < 4 else split
        pairs = _with_inferred(found, shard)
        differing = [place for place, (full, local) in enumerate(pairs) if full != local]
        innermost = differing[-1] if differing else None
        is_whole = math.prod(local for _, local in pairs) == shard.local
        is_segment = shard.is_fused and differing == [1] and (not found[0].counts or found[1].is_local)
        is_correct = is_whole and (differing in ([], [0]) or is_segment)
        is_set = any(one.is_local for one in found)
        if is_whole and innermost is not None:
            is_set = found[innermost - 1].is_local
        if is_correct or is_set:  # by the user, whatever the number is
            self.is_understood = True
        elif known or is_exact or len(sizes) > 3 or any(one.is_many for one in sizes) or _is_literal(found[0]):
            self._found_sizes(shard, found, innermost if is_whole else None)
        return split

    def _found_sizes(self, shard: LocalFeatures, sizes: Sequence[Value], differing: int | None) -> None:
        """Report an inner size that differs between ranks, or sizes for all features if there is none."""
        if differing is not None:
            size, before = sizes[differing], sizes[differing - 1]
            counts = () if size.is_local else (size.pair and size.counts[:1]) or _attribute_in(before)
            self._found(shard, counts, before.number or 0)
        else:
            counted = [size for size in sizes[:-1] if _attribute_in(size) and size.number != 1] or sizes[:1]
            self._found(shard, _attribute_in(counted[0]) if len(sizes) > 1 else (), counted[0].number or 0)

    def _split(
        self, name: str, base: Value, shard: LocalFeatures, inputs: list[Value], options: dict[str, Value]
    ) -> Value:
        """Read a division into segments, or into parts of one size, such as heads."""
        named = [options[one] for one in ("chunks", "split_size_or_sections", "split_size", "dim") if one in options]
        given = [Value(2), *(inputs or named or [Value(-1)])] if name == "glu" else [*inputs, *named]
        if len(given) < 2 or given[1].number not in LAST_DIMS:
            return base
        size, parts = given[0], given[0].items
        if parts is not None:
            found = [
                self._segment(base, shard, one.pair or (0, 0), [one]) for one in parts if one.number != shard.local
            ]
            return Value(items=tuple(found)) if len(found) == len(parts) else joined([base, *found])
        full, local = size.pair or (0, 0)
        is_split = name == "split"
        if not (0 < local < shard.full and local != shard.local if is_split else local > 1):
            return base
        if is_split and (full != local or shard.local % local):
            return self._segment(base, shard, (full, local), [size])
        if not is_split and full == local and shard.is_fused and not size.counts:
            return self._segment(base, shard, (shard.full // full, shard.local // local))
        if is_split or full != local:
            self.is_understood = True
        else:
            self._found(shard, _attribute_in(size), local)
        return replace(base, is_split=True)

    def _segment(self, base: Value, shard: LocalFeatures, size: tuple[int, int], bounds: Sequence[Value] = ()) -> Value:
        """Read a slice of the features, with its size in the unsharded model and on one rank."""
        full, local = size
        if shard.is_fused and all(one.is_local or one.full for one in bounds) and 0 < local <= shard.local:
            self.is_understood = True
            return replace(base, shard=shard._replace(full=full, local=local, is_fused=local > shard.local // 2))
        self._found(shard, bounds[0].counts[:1] if shard.is_fused else (), f"takes a part of {local} features")
        return replace(base, is_split=True)

    def _found(self, shard: LocalFeatures, counts: Sequence[Count], number: int | str) -> None:
        count = counts[0] if counts else None
        self.problems.append(Problem(shard, count, count.value if count else number))

    def _found_over(self, base: Value, name: str) -> Value:
        assert base.shard is not None
        self._found(base.shard, (), f"computes {name} over the features")
        return replace(base, is_split=True)

    def _found_weight(self, weight: Value) -> None:
        name = next((name for name, one in self._root.named_modules() if one is weight.object), "")
        shard = weight.shard or LocalFeatures(name or str(weight.object), 0, 0, is_fused=False)
        self._found(shard, (), "reads the weight of a sharded layer without calling it: call it, or do not convert it")


def _attribute_of_tensor(base: Value, name: str) -> Value:
    if name == "shape" and base.kind == "weight":
        is_known = base.shard is not None and isinstance(base.object, nn.Linear)
        rows = base.width if is_known else Value()
        return Value(items=(replace(rows, is_local=True), Value(is_local=True)))
    if name == "shape" and base.kind == "tensor" and not base.is_split:
        return replace(base, kind="shape")
    if not base.is_sharded and base.kind != "weight":
        return Value()
    if name in ("T", "mT"):
        return replace(base, is_moved=not base.is_moved)
    return base if name == "data" else Value()


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
    return name.endswith("_norm") or any(one.number in LAST_DIMS or one.object is None for one in flat([dim]))


def _attribute_in(size: Value) -> Sequence[Count]:
    """The attribute that is the size."""
    return [one for one in size.counts[:1] if len(size.counts) == 1 and size.number in (None, one.value)]


def _is_literal(size: Value) -> bool:
    """Whether a size is a literal number of segments."""
    is_written = not (size.counts or size.is_local or size.kind) and size.full is None
    return is_written and 1 < (size.number or 0) <= _MAX_SEGMENTS


def _sizes(name: str, inputs: list[Value], options: dict[str, Value]) -> list[Value]:
    """The sizes of a reshape; of einops, the sizes of the group that features are divided into, such as ``(h d)``."""
    if name != "rearrange":
        named = [value for option, value in options.items() if option in ("shape", "sizes")]
        return flat([*inputs[name == "unflatten" :], *named])
    pattern = inputs[0].object if inputs else UNKNOWN
    left = pattern.partition("->")[0].rstrip() if isinstance(pattern, str) else ""
    axes = left[left.rindex("(") + 1 : -1].split() if left.endswith(")") else []
    return [options.get(axis, Value(-1)) for axis in axes] if len(axes) > 1 else []


def _product(sizes: Iterable[Value]) -> tuple[int, int]:
    """The product of sizes in the unsharded model, and on this rank."""
    pairs = [one.pair or (1, 1) for one in sizes]
    return math.prod(full for full, _ in pairs), math.prod(local for _, local in pairs)


def _known_suffix(sizes: Sequence[Value], full: int) -> list[Value]:
    """The last sizes that are known, as many as have the product of all features."""
    known: list[Value] = []
    for size in reversed(sizes):
        if (size.number or 0) < 1 or _product(known)[0] >= full:
            break
        known.insert(0, size)
    return known


def _sizes_of_features(sizes: Sequence[Value], known: list[Value], shard: LocalFeatures) -> Sequence[Value]:
    """The last sizes, which divide the features; one of them may follow from the others. Empty if not known.

    For 64 features: of (batch, length, 4, 16) they are (4, 16), both known. Of (batch, length, -1, 16), where only 16
    is known, they are (-1, 16): -1 follows as 64 // 16. Of (batch, length, 4, width), where the last size is not known,
    they are (4, width): the width follows as 64 // 4. A literal number of segments before them belongs to them: of
    (batch, length, 3, -1, 16) they are (3, -1, 16) for 192 features.
    """
    known_full, known_local = _product(known)
    if known_full == shard.full:
        return known
    if known:
        outermost = len(sizes) - len(known) - 1  # the size that follows from the known ones
        divisor = known_full
        follows = outermost >= 0 and sizes[outermost].number == -1 and shard.local % known_local == 0
    else:
        outermost = len(sizes) - 2  # the size before the last, which follows from it
        divisor = max(sizes[outermost].pair or (0, 0)) if outermost >= 0 else 0
        follows = divisor > 1
    if not follows or shard.full % divisor:
        return []
    has_segments = outermost > 0 and _is_literal(sizes[outermost - 1])
    return sizes[outermost - 1 if has_segments else outermost :]


def _with_inferred(sizes: Sequence[Value], shard: LocalFeatures) -> list[tuple[int, int]]:
    """The sizes in the unsharded model and on this rank, where -1 is inferred from the others.

    For 64 features, of which this rank has 32, the sizes (-1, 16) are (4, 16) in the unsharded model and (2, 16) on
    this rank: the pairs are (4, 2) and (16, 16).
    """
    known_full, known_local = _product(one for one in sizes if (one.number or 0) > 0)
    inferred = shard.full // known_full, shard.local // known_local
    return [one.pair if one.pair and one.pair[1] > 0 else inferred for one in sizes]
