"""Grid: which elements of a logical matrix each element of a stored tensor covers.

A quantized weight is stored as several tensors: packed values, scales, zero points, indices of groups. Each covers the
logical matrix, the weight without quantization, by a grid of blocks: 8 values in a word of 32 bits, 128 in a group with
one scale. The planner places the logical matrix, and the placement of each stored tensor follows from its grid. The
tensors of an adapter cover the weight that they adapt.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardconv.plan.placement import IndivisibleError, Interval, IntervalOrPadding, Padding, Placement, located
from shardconv.support.structs import Data


class GridDim(NamedTuple):
    """One dim of a stored tensor, and the dim of the logical matrix that it covers.

    Attributes:
        dim: the dim of the logical matrix, from 0; None if the stored dim covers none, as the bytes of a block.
        elements: elements of the logical matrix in a block.
        entries: entries of the stored tensor for a block.
        kind: name of the block: ``group``, ``scale block``, or one of :data:`PACKED`.
    """

    dim: int | None
    elements: int = 1
    entries: int = 1
    kind: str = ""

    def count(self, size: int) -> int:
        """The entries of the stored dim for this many elements of the logical matrix."""
        return -(-size // self.elements) * self.entries


#: Kinds of blocks whose elements are packed into an entry, or into several.
PACKED = PACKED_WORD, PACKED_BYTE = "packed word", "packed byte"

#: A dim that covers no dim of the logical matrix.
NO_DIM = GridDim(None)

#: The content of a stored tensor: numbers that do not depend on the rank; indices of groups along the only dim;
#: or the shape of the logical matrix.
PLAIN, GROUP_INDEX, SHAPE = "plain", "group_index", "shape"
CONTENTS = (PLAIN, GROUP_INDEX, SHAPE)

#: A number that is always 0.
ZERO = "zero"
#: Encodings of entries; ``formats/formats.toml`` describes them.
NUMBERS = frozenset(
    {PLAIN, ZERO, "uint", "uint_minus_1", "offset_binary", "awq", "e2m1", "e8m0", "int8_absmax", "int4"}
)

#: Roles of stored tensors in the formula of the weight, (values - zero point) * (scale * factor / divisor). With a
#: ``GROUP_INDEX``, entry g of a dim of scales and zero points that covers no dim is for the input features of group g.
VALUES, ZERO_POINT, SCALE, FACTOR, DIVISOR = "values", "zero_point", "scale", "factor", "divisor"
ROLES = (VALUES, ZERO_POINT, SCALE, FACTOR, DIVISOR, GROUP_INDEX)


class Grid(Data, frozen=True, cache_hash=True):
    """The grid of one stored tensor over its logical matrix.

    Attributes:
        suffix: end of the name of the stored tensor.
        replacement: the end of the logical matrix's name, instead of the suffix.
        shape: shape of the logical matrix.
        dims: one for each dim of the stored tensor.
        axes: the axis of each dim of the logical matrix, for messages: ``output``, ``input``.
        content: one of :data:`CONTENTS`.
        group: for content or role :data:`GROUP_INDEX` the elements in a group; 0 for one group over all elements.
        role: one of :data:`ROLES`; "" if the tensor does not change the weight.
        numbers: the encoding of entries, one of :data:`NUMBERS`.
        padding: for each dim of the logical matrix, padding is a multiple of this many elements: blocks of all stored
            tensors that only have padding, and whose stored zeros are the value 0; 0 if there are none.
        prefix: beginning of the name of the stored tensor, which the name of the logical matrix does not have.
    """

    suffix: str
    replacement: str
    shape: tuple[int, ...]
    dims: tuple[GridDim, ...]
    axes: tuple[str, ...]
    content: str = PLAIN
    group: int = 0
    role: str = ""
    numbers: str = PLAIN
    padding: tuple[int, ...] = ()
    prefix: str = ""

    @property
    def is_implied(self) -> bool:
        """Whether the settings determine the values of the full tensor."""
        return self.content != PLAIN or self.numbers == ZERO

    @property
    def is_checked(self) -> bool:
        """Whether the values of the full tensor, or only their range, are compared with those by the settings."""
        return self.is_implied or self.group > 0

    def logical_name(self, name: str) -> str:
        """The name of the logical matrix of the stored tensor ``name``."""
        return name.removeprefix(self.prefix).removesuffix(self.suffix) + self.replacement

    def place(self, placement: Placement, stored: Sequence[int]) -> Placement:
        """The placement of the stored tensor.

        Args:
            placement: placement of the logical matrix.
            stored: shape of the stored tensor.

        Raises:
            IndivisibleError: if a boundary would be inside a block, or padding would not be the value 0.
        """
        covering = [at for at, dim in enumerate(self.dims) if dim.dim is not None and dim.dim == placement.dim]
        if placement.is_padded:
            self._check_padding(placement)
        if placement.dim is None or not covering:
            return Placement.replicated(placement.num_ranks)
        grid_dim = self.dims[covering[0]]
        size = stored[covering[0]]
        ranks = tuple(
            tuple(self._stored(entry, grid_dim, placement, size) for entry in entries) for entries in placement.ranks
        )
        return Placement(covering[0], size, ranks)

    def edits(self, placement: Placement) -> tuple[tuple[int, ...], ...] | None:
        """The numbers to subtract from the stored values on each rank: one for all values, or one for each.

        Args:
            placement: placement of the logical matrix.

        Returns:
            One tuple per rank; None if the values do not depend on the rank.
        """
        if self.content == PLAIN or placement.dim is None:
            return None
        if self.content == SHAPE:
            lost = [self.shape[placement.dim] - placement.local_size(rank) for rank in range(placement.num_ranks)]
            return tuple(tuple(one * (at == placement.dim) for at in range(len(self.shape))) for one in lost)
        if not self.group or self.dims[-1].dim != placement.dim:
            return None
        return tuple(map(self._index_edits, placement.ranks))

    def _index_edits(self, entries: Sequence[IntervalOrPadding]) -> tuple[int, ...]:
        """The numbers to subtract from the indices of groups on a rank, so that its groups are counted from 0.

        Elements of padding have index 0 in the full tensor, and the index of their group on the rank.
        """
        if not entries:
            return (0,)
        if len(entries) == 1 and isinstance(entries[0], Interval):
            return (entries[0].start // self.group,)
        return tuple(
            (entry.start + at if isinstance(entry, Interval) else 0) // self.group - (position + at) // self.group
            for entry, position in located(entries)
            for at in range(entry.size)
        )

    def __post_init__(self) -> None:
        is_valid = all(
            dim.elements >= (dim.dim is not None)
            and dim.entries >= 1
            and (dim.dim or 0) in range(max(len(self.shape), 1))
            for dim in self.dims
        )
        if not is_valid or self.group < 0:
            raise ValueError(f"not a grid: {self!r:.100}")
        for key, value, known in (
            ("content", self.content, CONTENTS),
            ("role", self.role, ("", *ROLES)),
            ("numbers", self.numbers, NUMBERS),
        ):
            if value not in known:
                raise ValueError(f"{key} of a grid is {value!r:.40}, which is written by a newer version of shardconv")

    def _check_padding(self, placement: Placement) -> None:
        """Refuse padding whose stored zeros are not the value 0."""
        dim = placement.dim or 0
        block, axis = self.padding[dim] if self.padding else 0, self.axes[dim]
        if not block:
            raise IndivisibleError(
                f"{placement.size} {axis} features would be padded, and zeros of this format are not the value 0: "
                f"either code 0 is another value, and padding would share its scale with other {axis} features, or the "
                f"zero would be a scale to divide by"
            )
        for entry, position in (each for entries in placement.ranks for each in located(entries)):
            if isinstance(entry, Padding) and (position % block or entry.size % block):
                raise IndivisibleError(
                    f"{entry.size} {axis} features of padding after {position} are not full blocks of {block}"
                )

    def _stored(
        self, entry: IntervalOrPadding, grid_dim: GridDim, placement: Placement, size: int
    ) -> IntervalOrPadding:
        """The interval or padding of the stored dim for one of the logical dim."""
        elements, entries = grid_dim.elements, grid_dim.entries
        if isinstance(entry, Padding):
            return Padding(entry.size // elements * entries)
        if entry.start % elements or (entry.stop % elements and entry.stop != placement.size):
            axis, tp = self.axes[placement.dim or 0], placement.num_ranks
            if tp * entry.size == placement.size and all(len(entries) == 1 for entries in placement.ranks):
                raise IndivisibleError(
                    f"{placement.size} / {tp} = {entry.size} {axis} features per rank is not a multiple of the "
                    f"{elements}-wide {grid_dim.kind}"
                )
            boundary = entry.start if entry.start % elements else entry.stop
            raise IndivisibleError(
                f"a boundary at feature {boundary} is inside a {grid_dim.kind} of {elements} {axis} features"
            )
        return Interval(entry.start // elements * entries, min(grid_dim.count(entry.stop), size))
