"""One quantized layer: the grid of each stored tensor, from its format, dtypes, shapes and the settings.

Everything must fit together: the tensors of the format are there, with the dtypes and shapes that the settings give.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import lcm, prod

from msgspec import Struct, structs

from shardconv.formats.format import PACKED_SCALE_DIMS, SCALE_DIMS, WORD_BITS, Block, Scheme, StoredTensor
from shardconv.plan.grid import (
    GROUP_INDEX,
    NO_DIM,
    PACKED_BYTE,
    PACKED_WORD,
    PLAIN,
    SCALE,
    SHAPE,
    VALUES,
    ZERO_POINT,
    Grid,
    GridDim,
)
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError, ShapeError, option

#: Names of axes and of kinds of blocks in messages.
_AXES = {"out": "output", "in": "input"}
_KINDS = {
    "group": "group",
    "word": PACKED_WORD,
    "pair": PACKED_BYTE,
    "rows": "scale block",
    "columns": "scale block",
}

#: The remedy for a layer without one of its tensors.
_COMPLETE = (
    f"copy all files of the checkpoint again, or pass {option(config='FILE')} with its quantization_config if the "
    "layer has another format"
)


class QuantizedLayer(Struct, frozen=True):
    """One quantized layer.

    Attributes:
        name: of the tensor with its values.
        tensors: of the checkpoint.
        scheme: its format.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    scheme: Scheme

    @property
    def stem(self) -> str:
        """The beginning of the names of its tensors."""
        return self.name.removesuffix(self.scheme.format.values.suffix)

    @property
    def _block_size(self) -> tuple[int, ...] | None:
        """The elements of a block with one scale, where every matrix has its own."""
        return (self.scheme.block_sizes or {}).get(self.stem + self.scheme.format.values.weight)

    @property
    def _blocks(self) -> Mapping[str, Block]:
        """Name to elements and entries of each block."""
        if (sizes := self._block_size) is None:
            return self.scheme.blocks
        own = zip(("columns", "rows"), reversed(sizes), strict=False)
        return {**self.scheme.blocks, **{name: (size, 1) for name, size in own}}

    @property
    def _companions(self) -> Mapping[str, StoredTensor]:
        """The tensors of the format beside that with the values, by the end of their names."""
        found = self.scheme.format.companions
        if not self.scheme.has_act_order:
            return found
        indices = {
            suffix: structs.replace(stored, optional=False, content=PLAIN, role=GROUP_INDEX)
            for suffix, stored in found.items()
            if stored.content == GROUP_INDEX
        }
        return {**found, **indices}

    def missing(self) -> Iterator[str]:
        """Yield the names of the tensors that the format needs, and the checkpoint does not have."""
        for suffix, stored in self._companions.items():
            is_wanted = self._exists(stored) and not stored.optional
            if is_wanted and (name := self.stem + suffix) not in self.tensors:
                yield name

    def _exists(self, stored: StoredTensor) -> bool:
        """Whether a tensor exists with the symmetry of the settings."""
        return not (stored.asymmetric and self.scheme.is_symmetric)

    def stored(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """Return the tensors that libraries store for a matrix of this shape, by the end of their names.

        Raises:
            PlanError: if they follow from more than the settings.
        """
        wanted = {self.scheme.format.values.suffix: self.scheme.format.values} | {
            suffix: stored
            for suffix, stored in self._companions.items()
            if self._exists(stored) and (stored.usual or not stored.optional)
        }
        return {suffix: self._spec(self.stem + suffix, stored, shape) for suffix, stored in wanted.items()}

    def _spec(self, name: str, stored: StoredTensor, shape: tuple[int, ...]) -> TensorSpec:
        """The usual dtype and the shape of one stored tensor of a matrix."""
        if not stored.dtypes:
            raise self._error(name, "has a dtype that follows from the stored tensors only")
        dtype = next(iter(stored.dtypes))
        if stored.content == SHAPE:
            return TensorSpec(dtype, (len(shape),))
        dims, axes = self._dims(stored, None), self._axes(shape)
        sizes = [self._grid_dim(dim, axes, name, shape, 1)[1] for dim in dims]
        return TensorSpec(dtype, (*shape[: len(shape) - len(self.scheme.format.axes)], *sizes))

    def _axes(self, shape: Sequence[int]) -> tuple[str, ...]:
        """The names of the matrix's dims; "" for dims before the axes of the format."""
        axes = self.scheme.format.axes
        return (*[""] * (len(shape) - len(axes)), *axes)

    def grids(self) -> dict[str, Grid]:
        """Return the grid of each stored tensor, by the end of its name.

        Raises:
            PlanError: if a tensor is missing, or its dtype or shape does not fit the format.
        """
        form, shape = self.scheme.format, self._logical_shape()
        grids = {form.values.suffix: self._grid(self.name, form.values.suffix, form.values, shape)}
        if name := next(self.missing(), None):
            raise PlanError(f"{self.name}: {name} is missing, which {form.name} needs: {_COMPLETE}")
        for suffix, stored in self._companions.items():
            if (name := self.stem + suffix) in self.tensors:
                grids[suffix] = self._grid(name, suffix, stored, shape)
        padding = tuple(self._padding_block(at, grids) for at in range(len(shape)))
        return {suffix: structs.replace(grid, padding=padding) for suffix, grid in grids.items()}

    def _padding_block(self, at: int, grids: Mapping[str, Grid]) -> int:
        """The elements of a block of padding along a dim of the matrix; 0 if padding would not be the value 0."""
        by_role = {grid.role: grid for grid in grids.values()}
        if by_role[VALUES].numbers not in (PLAIN, "e2m1") or ZERO_POINT in by_role:
            scale = by_role.get(SCALE)  # of padding, which is 0
            if scale is None or scale.numbers != PLAIN or all(dim.dim != at for dim in scale.dims):
                return 0
        return lcm(*(dim.elements for grid in grids.values() for dim in grid.dims if dim.dim == at))

    def _logical_shape(self) -> tuple[int, ...]:
        """The shape of the logical matrix, by the shape of the stored values.

        The size of a dim that is packed into words of several entries, or whose last word is not full, is the largest
        that fits; other tensors of the layer then have to agree.
        """
        spec, values = self.tensors[self.name], self.scheme.format.values
        dims = self._dims(values, spec.shape)
        if len(spec.shape) < len(dims):
            raise self._error(self.name, f"has {len(spec.shape)} dims (expected at least {len(dims)})")
        leading = len(spec.shape) - len(dims)
        sizes = dict[str, int]()
        for dim, size in zip(dims, spec.shape[leading:], strict=True):
            axis, elements, entries = self._block(dim, self.name)
            if size % entries:
                raise self._error(self.name, f"has {size} entries of {axis} (expected a multiple of {entries})")
            if axis in self.scheme.format.axes:
                sizes[axis] = size // entries * elements
        return (*spec.shape[:leading], *(sizes[axis] for axis in self.scheme.format.axes))

    def _grid(self, name: str, suffix: str, stored: StoredTensor, shape: tuple[int, ...]) -> Grid:
        """The grid of one stored tensor, whose dtype and shape are checked."""
        form, spec = self.scheme.format, self.tensors[name]
        if stored.dtypes and spec.dtype not in stored.dtypes:
            raise self._error(name, f"has dtype {spec.dtype} (expected {' or '.join(stored.dtypes)})")
        axes = self._axes(shape)
        return Grid(
            suffix,
            form.values.weight,
            shape,
            self._grid_dims(name, stored, axes, shape),
            tuple(_AXES.get(axis, axis) for axis in axes),
            stored.content,
            self.scheme.blocks.get("group", (0, 1))[0] if GROUP_INDEX in (stored.content, stored.role) else 0,
            stored.role,
            stored.numbers_of(spec.dtype),
        )

    def _grid_dims(
        self, name: str, stored: StoredTensor, axes: Sequence[str], shape: tuple[int, ...]
    ) -> tuple[GridDim, ...]:
        """The dims of the grid of one stored tensor, whose shape is checked."""
        spec, leading = self.tensors[name], len(shape) - len(self.scheme.format.axes)
        if stored.content == SHAPE:
            if spec.shape != (len(shape),):
                raise self._error(name, f"has shape {list(spec.shape)} (expected {[len(shape)]})")
            return (NO_DIM,)
        dims = self._dims(stored, spec.shape)
        if not dims and prod(spec.shape) == 1:
            return (NO_DIM,) * len(spec.shape)
        covered = [(GridDim(at), shape[at]) for at in range(leading)]
        sizes = (*spec.shape[leading:], *(1,) * len(dims))
        covered += [self._grid_dim(dim, axes, name, shape, size) for dim, size in zip(dims, sizes, strict=False)]
        expected = [size for _, size in covered]
        if list(spec.shape) != expected:
            raise self._error(name, f"has shape {list(spec.shape)} (expected {expected} for a weight of {list(shape)})")
        return tuple(dim for dim, _ in covered)

    def _dims(self, stored: StoredTensor, shape: Sequence[int] | None) -> tuple[str, ...]:
        """The dims of a tensor of this shape, None if it is not stored yet; () for one number, of any shape."""
        if not isinstance(stored.dims, str):
            return stored.dims
        if stored.dims == "number":
            return ()
        table = PACKED_SCALE_DIMS if stored.dims == "packed_scale" else SCALE_DIMS
        strategy = self.scheme.strategy or self._strategy_of(shape)
        if strategy not in table:
            raise self._error(self.name, f"has zero points of strategy {strategy}, which is not supported")
        return () if strategy == "tensor" and prod(shape or ()) == 1 else table[strategy]

    def _strategy_of(self, shape: Sequence[int] | None) -> str:
        """The strategy that the shape of a scale shows, where settings have none; the usual one without a shape."""
        if shape is None:
            return "block" if "columns" in self.scheme.blocks else "tensor"
        if prod(shape) == 1 or shape[-2:] == (1, 1):  # a number, or one for each of several experts
            return "tensor"
        return "channel" if shape[-1:] == (1,) and "columns" not in self.scheme.blocks else "block"

    def _block(self, dim: str, name: str) -> tuple[str, int, int]:
        """Axis, elements and entries of a dim as ``formats.toml`` has it."""
        axis, _, block = dim.partition(" / ")
        if not block:
            return axis, 1, 1
        if (found := self._blocks.get(block)) is None:
            setting = self.scheme.format.settings.get("rows", block)
            raise self._error(name, f"needs a block size ({setting}), which the settings do not have")
        return axis, *found

    def _grid_dim(
        self, dim: str, axes: Sequence[str], name: str, shape: Sequence[int], found: int
    ) -> tuple[GridDim, int]:
        """The grid dim of a dim as ``formats.toml`` has it, and its expected size; ``found`` if any size is right."""
        axis, elements, entries = self._block(dim, name)
        if axis not in axes:
            return NO_DIM, int(dim) if dim.isdecimal() else found
        at, block = axes.index(axis), dim.partition(" / ")[2]
        if not elements or (self._block_size and elements == shape[at]):  # one group over the full dim
            return GridDim(None, shape[at]), 1
        grid_dim = GridDim(at, elements, entries, _KINDS.get(block, ""))
        is_free = self.scheme.has_act_order and block == "group"
        return NO_DIM if is_free else grid_dim, grid_dim.count(shape[at])

    def _error(self, name: str, problem: str) -> ShapeError:
        return ShapeError(
            f"{name} {problem}: quantization_config ({', '.join([self.scheme.format.name, *self._settings()])}) "
            f"does not fit the tensors",
            f"pass {option(config='FILE')} with the quantization_config of this checkpoint",
        )

    def _settings(self) -> Iterator[str]:
        """Yield the settings with the sizes of blocks, as the quantization settings name them."""
        blocks = self._blocks
        for block, setting in self.scheme.format.settings.items():
            if block not in blocks:
                continue
            elements, entries = blocks[block]
            size = {"word": WORD_BITS * entries // elements if elements else 0, "group": elements or -1}
            yield f"{setting} {size.get(block) or [elements, blocks['columns'][0]]}"
