"""Values in the code of a module, as far as they are known without running it.

Owns what operators, indices and branches make of numbers, shapes, and tensors with local features.
"""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

#: A value that is not known.
UNKNOWN: Any = object()
#: The last dim of a tensor with a batch and tokens.
LAST_DIMS = (-1, 2)
#: The kind of the last size in a shape, by the kind of the shape.
_LAST_SIZES = {"shape": "size", "input shape": "width"}
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


class LocalFeatures(NamedTuple):
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


@dataclass(frozen=True, eq=False)
class Value:
    """A value in the code.

    Attributes:
        object: the object, if it is known.
        counts: the attributes that a number is computed from.
        is_local: whether it is computed from an attribute that has its local value.
        shard: the features of a tensor, of its shape, or of the size of its last dim.
        kind: which of these: "tensor", "shape" or "size"; "weight" for a parameter of a parallel layer; "input",
            "input shape" and "width" for an input of the forward, its shape, and the size of its last dim.
        is_split: whether the tensor was divided already.
        is_moved: whether the features are in another dim than the last.
        items: the items of a tuple or list.
        is_many: whether it is a sequence of unknown length among items.
        function: the code of a function inside the function, with the names that it sees.
    """

    object: Any = UNKNOWN
    counts: tuple[Count, ...] = ()
    is_local: bool = False
    shard: LocalFeatures | None = None
    kind: str = ""
    is_split: bool = False
    is_moved: bool = False
    items: "tuple[Value, ...] | None" = None
    is_many: bool = False
    function: Any = None

    @property
    def number(self) -> int | None:
        """The number, if it is known."""
        return self.object if type(self.object) is int else None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor that is computed from local features."""
        return self.kind == "tensor"

    @property
    def is_last(self) -> bool:
        """Whether its last dim are all local features of a layer."""
        return self.is_tensor and not (self.is_split or self.is_moved)

    @property
    def is_raw(self) -> bool:
        """Whether one dim are all local features of a layer."""
        return (self.is_tensor and not self.is_split) or any(one.is_raw for one in self.items or ())


def flat(values: Iterable[Value]) -> list[Value]:
    """The sizes in arguments, which are numbers, or one tuple of them."""
    return [one for value in values for one in (value.items if value.items is not None else [value])]


def item_of(value: Value) -> Value:
    """Any item of a sequence; of tensors, the tensors in it have the same features."""
    return joined(value.items) if value.items is not None else value if value.is_tensor else Value()


def items_of(value: Value) -> Sequence[Value]:
    """The items of a sequence, if they are known; else one that stands for all of them."""
    return [item_of(value)] if value.items is None else value.items


def unpacked(value: Value, number: int) -> list[Value]:
    """The items of a value that is assigned to so many targets."""
    if value.items is not None and len(value.items) == number:
        return list(value.items)
    if value.kind in _LAST_SIZES:
        return [*[Value()] * (number - 1), _last_size(value)]
    return [item_of(value)] * number


def _last_size(shape: Value) -> Value:
    known = UNKNOWN if shape.shard is None else shape.shard.local
    return replace(shape, kind=_LAST_SIZES[shape.kind], object=known)


def subscript(base: Value, index: ast.expr | None, value: Value) -> Value:
    """An item, or a slice, of a value."""
    if base.kind in _LAST_SIZES:
        is_last = value.number in LAST_DIMS
        return _last_size(base) if is_last else Value(is_many=isinstance(index, ast.Slice))
    if base.is_tensor:
        return base
    try:
        if base.items is not None:
            return base.items[value.number] if value.number is not None else joined(base.items)
        known = isinstance(base.object, nn.ModuleList | nn.ModuleDict | nn.Sequential | Mapping | list | tuple)
        return Value(base.object[value.object]) if known and value.object is not UNKNOWN else Value()
    except (LookupError, TypeError):
        return Value()


def calculated(operator: ast.operator, left: Value, right: Value) -> Value:
    """The result of an operator."""
    if isinstance(operator, ast.Add) and (left.items is not None or right.items is not None):
        sides = (one.items if one.items is not None else (replace(one, is_many=True),) for one in (left, right))
        return Value(items=tuple(item for side in sides for item in side))
    if left.is_tensor or right.is_tensor:
        return joined([left, right])
    counts, is_local = left.counts + right.counts, left.is_local or right.is_local
    size = next((one for one in (left, right) if one.kind == "size"), None)
    calculate = _OPERATORS.get(type(operator))
    number = calculate(left.number, right.number) if calculate and left.number is not None and right.number else UNKNOWN
    if size is not None and not is_local:
        return replace(size, counts=counts, object=number)
    return Value(number, counts=counts, is_local=is_local)


def joined(values: Iterable[Value]) -> Value:
    """The result of an operation on values: a tensor, if one of them is a tensor."""
    tensors = [one for value in values for one in (value.items or (value,)) if one.is_tensor]
    if not tensors:
        return Value()
    return replace(tensors[0], is_split=any(one.is_split for one in tensors))


def either(values: Sequence[Value]) -> Value:
    """The value of one of several branches."""
    if not values:
        return Value()
    first = values[0]
    if all(one is first for one in values[1:]):
        return first
    lengths = {None if one.items is None else len(one.items) for one in values}
    if len(lengths) == 1 and None not in lengths:
        return Value(items=tuple(map(either, zip(*[one.items or () for one in values], strict=True))))
    if any(one.is_tensor for one in values):
        return joined(values)
    return next((one for one in values if one.counts or one.is_local or one.object is not UNKNOWN), first)
