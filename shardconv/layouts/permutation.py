"""Source tensors with all experts, whose elements files have in another order: transposed, or not interleaved."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from shardconv.layouts.full_shapes import positive
from shardconv.layouts.relation import LayoutRule, PermutedTable, find_source
from shardconv.plan.plan import TensorSpec


class Strided(NamedTuple):
    """The elements of one side: the sizes of all dims, and the strides of these dims in the elements of the other."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Permutation(NamedTuple):
    """The order of the elements of a source tensor in a file.

    Attributes:
        source_shape: its shape in the source.
        shape: in the file: experts, rows, and the shape of a row.
        segments: number of segments of the rows.
        to_file: strided view of the source, in the order of the file.
        to_source: strided view of the file, in the order of the source.
    """

    source_shape: tuple[int, ...]
    shape: tuple[int, ...]
    segments: int
    to_file: Strided
    to_source: Strided

    def rows(self, dtype: str) -> TensorSpec:
        """The rows of all experts, one expert after the other."""
        return TensorSpec(dtype, (self.shape[0] * self.shape[1], *self.shape[2:]))


def permutation(table: PermutedTable, config: Mapping[str, object]) -> Permutation:
    """The order by a config.

    Raises:
        PlanError: if a size in the config is not a positive integer.
    """
    sizes = [one if isinstance(one, int) else positive(config, one) for one in table.shape]
    is_factor = [isinstance(one, int) for one in table.shape]
    order = table.order
    ordered, inverse = [sizes[dim] for dim in order], [order.index(dim) for dim in range(len(order))]
    in_source, in_file = _strides(sizes), _strides(ordered)
    return Permutation(
        source_shape=_merged(zip(sizes, is_factor, strict=True)),
        shape=_merged((sizes[dim], is_factor[dim]) for dim in reversed(order))[::-1],
        segments=ordered[1] if is_factor[order[1]] else 1,
        to_file=Strided(tuple(ordered), tuple(in_source[dim] for dim in order)),
        to_source=Strided(tuple(sizes), tuple(in_file[at] for at in inverse)),
    )


def _merged(dims: Iterable[tuple[int, bool]]) -> tuple[int, ...]:
    """The sizes of dims, and factors of the dim before them."""
    sizes: list[int] = []
    for size, is_factor in dims:
        if is_factor:
            sizes[-1] *= size
        else:
            sizes.append(size)
    return tuple(sizes)


def _strides(shape: Sequence[int]) -> list[int]:
    """The distance of the indices of each dim in the elements of a contiguous tensor."""
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def permutations(
    rules: Sequence[LayoutRule], names: Iterable[str], config: Mapping[str, object]
) -> dict[str, Permutation]:
    """Name to order of the source tensors whose elements files have in another order.

    Raises:
        PlanError: if a size in the config is not a positive integer.
    """
    permuted = [rule for rule in rules if rule.options.permuted is not None]
    related = ((name, find_source(permuted, name)) for name in names if permuted)
    tables = ((name, found.rule.options.permuted) for name, found in related if found is not None)
    return {name: permutation(table, config) for name, table in tables if table is not None}
