"""Values in the code of a module, as far as they are known without running it.

Owns the results of operators, indices and branches for numbers, shapes, and tensors with local features. A number is a
pair: its value in the unsharded model, and its value on this rank.
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
        is_fused: whether they consist of several segments, such as q, k and v.
    """

    layer: str
    full: int
    local: int
    is_fused: bool


@dataclass(frozen=True, eq=False)
class Value:
    """A value in the code.

    Attributes:
        object: the object on this rank, if it is known.
        full: the number in the unsharded model, where it differs from the number on this rank.
        counts: the attributes from which a number is computed.
        is_local: whether it is computed from an attribute that has its local value.
        kind: "tensor" for a tensor, "shape" for its shape, "width" for the size of its last dim, "weight" for a
            parameter of a parallel layer, "" for other objects and for known sizes.
        shard: the features of a tensor, or of its shape; None for an input of the forward.
        is_split: whether the tensor was divided already.
        is_moved: whether the features are in another dim than the last.
        items: the items of a tuple or list.
        is_many: whether it stands for an unknown number of items of a tuple or list.
        function: the code of a nested function, with the names in its scope.
    """

    object: Any = UNKNOWN
    full: int | None = None
    counts: tuple[Count, ...] = ()
    is_local: bool = False
    kind: str = ""
    shard: LocalFeatures | None = None
    is_split: bool = False
    is_moved: bool = False
    items: "tuple[Value, ...] | None" = None
    is_many: bool = False
    function: Any = None

    @property
    def number(self) -> int | None:
        """The number on this rank, if it is known."""
        return self.object if type(self.object) is int else None

    @property
    def pair(self) -> tuple[int, int] | None:
        """The number in the unsharded model and on this rank, if they are known."""
        return None if self.number is None else (self.number if self.full is None else self.full, self.number)

    @property
    def is_sharded(self) -> bool:
        """Whether it is a tensor that is computed from local features."""
        return self.kind == "tensor" and self.shard is not None

    @property
    def is_last(self) -> bool:
        """Whether its last dim has all local features of a layer."""
        return self.is_sharded and not (self.is_split or self.is_moved)

    @property
    def is_raw(self) -> bool:
        """Whether one dim has all local features of a layer."""
        return (self.is_sharded and not self.is_split) or any(one.is_raw for one in self.items or ())

    @property
    def width(self) -> "Value":
        """The size of the last dim of a tensor."""
        return Value(kind="width") if self.shard is None else Value(self.shard.local, full=self.shard.full)

    @property
    def item(self) -> "Value":
        """A value for any item of a sequence; in a sequence of tensors, all have the same features."""
        return joined(self.items or (self,))

    @property
    def known_items(self) -> "Sequence[Value]":
        """The items of a sequence, if they are known; else one item that represents all of them."""
        return [self.item] if self.items is None else self.items

    def unpacked(self, number: int) -> "list[Value]":
        """The values of this number of targets that it is assigned to."""
        if self.items is not None and len(self.items) == number:
            return list(self.items)
        if self.kind == "shape":
            return [*[Value()] * (number - 1), self.width]
        return [self.item] * number

    def subscript(self, index: "Value", *, is_slice: bool = False) -> "Value":
        """An item, or a slice."""
        if self.kind == "shape":
            return self.width if index.number in LAST_DIMS else Value(is_many=is_slice)
        if self.is_sharded:
            return self
        try:
            if self.items is not None:
                return self.items[index.number] if index.number is not None else joined(self.items)
            known = isinstance(self.object, nn.ModuleList | nn.ModuleDict | nn.Sequential | Mapping | list | tuple)
            return Value(self.object[index.object]) if known and index.object is not UNKNOWN else Value()
        except (LookupError, TypeError):
            return Value()

    def negated(self) -> "Value":
        """The negative of a number; another value as it is."""
        return replace(self, object=-self.pair[1], full=-self.pair[0]) if self.pair else self


def flat(values: Iterable[Value]) -> list[Value]:
    """The sizes in arguments, which are numbers, or one tuple of them."""
    return [one for value in values for one in (value.items if value.items is not None else [value])]


def calculated(operator: ast.operator, left: Value, right: Value) -> Value:
    """The result of an operator."""
    if isinstance(operator, ast.Add) and (left.items is not None or right.items is not None):
        sides = (one.items if one.items is not None else (replace(one, is_many=True),) for one in (left, right))
        return Value(items=tuple(item for side in sides for item in side))
    if left.is_sharded or right.is_sharded:
        return joined([left, right])
    calculate = _OPERATORS.get(type(operator))
    full, number = UNKNOWN, UNKNOWN
    if calculate and left.pair and right.pair and all(right.pair):
        full, number = map(calculate, left.pair, right.pair)
    counts, is_local = left.counts + right.counts, left.is_local or right.is_local
    return Value(number, full=None if full == number else full, counts=counts, is_local=is_local)


def joined(values: Iterable[Value]) -> Value:
    """The result of an operation on values: a tensor, if one of them is a tensor."""
    tensors = [one for value in values for one in (value.items or (value,)) if one.is_sharded]
    return replace(tensors[0], is_split=any(one.is_split for one in tensors)) if tensors else Value()


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
    if any(one.is_sharded for one in values):
        return joined(values)
    return next((one for one in values if one.counts or one.is_local or one.object is not UNKNOWN), first)
