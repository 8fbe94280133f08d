"""The tensors of a rank in memory, from the bytes that its reader returns. Quantized layers can be dequantized.

The model that is loaded from quantized layers is the unquantized one: neither activations nor KV caches are quantized.
The weight of a layer is computed from the tensors that store it by their grids, which hold everything that is needed:
no quantization settings are read here. Values are computed in float32 and rounded once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm, prod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from shardconv.checkpoint.split.loadable import quantized_tensors
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.rank_reader import RankReader
from shardconv.convert.model import DTYPE_NAMES
from shardconv.files.fileio import Bytes
from shardconv.files.folder import AnyPath
from shardconv.layers.sharding import bytes_of
from shardconv.plan.grid import (
    DIVISOR,
    FACTOR,
    GROUP_INDEX,
    PACKED,
    PACKED_BYTE,
    PLAIN,
    SCALE,
    VALUES,
    ZERO_POINT,
    Grid,
    GridDim,
)
from shardconv.plan.plan import Plan, TensorSpec, logical_tensors
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.runtime.device import num_bytes
from shardconv.support import Progress
from shardconv.support.errors import PlanError, RunError, option
from shardconv.support.formatting import size

#: Elements of a weight that are computed at once.
_BAND_ELEMENTS = 1 << 24

#: The values of E2M1, the floating-point format of 4 bits of MXFP4 and NVFP4, by code.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

#: The position in its word of each of 8 values, as AWQ packs them.
_AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


class Stored(NamedTuple):
    """A stored tensor, or a shard of it, and its grid."""

    tensor: Tensor
    grid: Grid


def dequantize(stored: Sequence[Stored], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Dequantize one weight.

    Args:
        stored: the tensors that store it, full or of one rank.
        shape: shape of the result.
        dtype: dtype of the result.

    Returns:
        (values - zero point) * (scale * factor / divisor), computed in float32.
    """
    result = torch.empty(tuple(shape), dtype=dtype)
    for start, stop in _bands(stored, shape):
        band = [one._replace(tensor=_narrow(one, start, stop)) for one in stored]
        result[start:stop] = _weight(band, (stop - start, *shape[1:]))
    return result


def _bands(stored: Sequence[Stored], shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of dim 0 of the weight, of full blocks and few elements, as temporary tensors are larger."""
    if not prod(shape):
        return
    block = lcm(*(dim.elements for one in stored for dim in one.grid.dims if dim.dim == 0))
    size = max(_BAND_ELEMENTS // prod(shape[1:]) // block, 1) * block
    yield from ((start, min(start + size, shape[0])) for start in range(0, shape[0], size))


def _narrow(stored: Stored, start: int, stop: int) -> Tensor:
    """The part of a stored tensor for a range of dim 0 of the weight; all of a tensor that does not have this dim."""
    for at, dim in enumerate(stored.grid.dims):
        if dim.dim == 0:
            first, last = start // dim.elements * dim.entries, -(-stop // dim.elements) * dim.entries
            return stored.tensor.narrow(at, first, last - first)
    return stored.tensor


def _weight(stored: Sequence[Stored], shape: Sequence[int]) -> Tensor:
    by_role = {one.grid.role: one for one in stored if one.grid.role}
    groups = by_role[GROUP_INDEX].tensor.long() if GROUP_INDEX in by_role else None
    term = {
        role: partial(_expanded, one, shape, groups) for role, one in by_role.items() if role != GROUP_INDEX
    }  # evaluated one after the other, as each may be as large as the weight
    weight = term[VALUES]()
    if ZERO_POINT in term:
        weight -= term[ZERO_POINT]()
    scale = term[SCALE]()
    if FACTOR in term:
        scale = scale * term[FACTOR]()
    if DIVISOR in term:
        scale = scale / term[DIVISOR]()
    return weight.mul_(scale)


def _expanded(stored: Stored, shape: Sequence[int], groups: Tensor | None) -> Tensor:
    """Read the numbers of a stored tensor as float32, and repeat each over its block of the weight.

    Args:
        stored: the tensor.
        shape: shape of the weight.
        groups: the group of each input feature, where groups are not consecutive.

    Returns:
        A tensor that can be broadcast to ``shape``, with its order of dims.
    """
    numbers, dims = _unpacked(stored)
    order = [dim.dim for dim in dims]
    for at, dim in enumerate(dims):
        if dim.dim is not None:
            if dim.elements > 1:
                numbers = numbers.repeat_interleave(dim.elements, at)
            numbers = numbers.narrow(at, 0, shape[dim.dim])  # the last block may not be full
        elif groups is not None:
            numbers = numbers.index_select(at, groups)
            order[at] = next(axis for axis in range(len(shape)) if axis not in order)
    axes = [at for at in order if at is not None]
    kept = numbers.reshape([size for at, size in zip(order, numbers.shape, strict=True) if at is not None])
    ordered = kept.permute([axes.index(at) for at in sorted(axes)])
    return ordered.reshape([shape[at] if at in axes else 1 for at in range(len(shape))])


def _unpacked(stored: Stored) -> tuple[Tensor, tuple[GridDim, ...]]:
    """Return the numbers of a tensor as float32, unpacked, and the dims that they have."""
    tensor, (dims, kind) = stored.tensor, (stored.grid.dims, stored.grid.numbers)
    if kind not in _UNPACKED:
        return _READ[kind](tensor), dims
    if all(dim.kind not in PACKED for dim in dims):  # the entries of a block have a dim of their own, the last
        dims = (*dims[:-2], dims[-2]._replace(entries=tensor.shape[-1], kind=PACKED_BYTE))
        tensor = tensor.flatten(-2)
    at = next(at for at, dim in enumerate(dims) if dim.kind in PACKED)
    codes, bits = _codes(tensor, at, dims[at])
    return _UNPACKED[kind](codes, at, bits), (*dims[:at], GridDim(dims[at].dim), *dims[at + 1 :])


def _codes(tensor: Tensor, at: int, dim: GridDim) -> tuple[Tensor, int]:
    """Unpack the integers of a dim, the first in the lowest bits; return them as int16, and the bits of each."""
    words = tensor.movedim(at, -1)
    grid = (*words.shape[:-1], words.shape[-1] // dim.entries, dim.entries * words.element_size())
    octets = bytes_of(words).view(grid).short()
    bits = 8 * octets.shape[-1] // dim.elements
    starts = torch.arange(dim.elements) * bits
    first, shift = starts // 8, (starts % 8).short()
    pairs = octets[..., first] | octets[..., (first + 1).clamp_(max=octets.shape[-1] - 1)] << 8
    return (pairs >> shift & (1 << bits) - 1).flatten(-2).movedim(-1, at), bits


def _awq(codes: Tensor, at: int, _bits: int) -> Tensor:
    return codes.unflatten(at, (-1, 8)).index_select(at + 1, torch.tensor(_AWQ_POSITIONS)).flatten(at, at + 1).float()


#: :attr:`Grid.numbers` to the function that decodes packed codes along a dim.
_UNPACKED: Mapping[str, Callable[[Tensor, int, int], Tensor]] = {
    "uint": lambda codes, _at, _bits: codes.float(),
    "uint_minus_1": lambda codes, _at, bits: (codes + 1 & (1 << bits) - 1).float(),
    "offset_binary": lambda codes, _at, bits: (codes - (1 << bits - 1)).float(),
    "awq": _awq,
    "e2m1": lambda codes, _at, _bits: torch.tensor(_E2M1)[codes.int()],
}
#: The same for tensors that are not packed.
_READ: Mapping[str, Callable[[Tensor], Tensor]] = {
    PLAIN: Tensor.float,
    "e8m0": lambda tensor: tensor.view(torch.float8_e8m0fnu).float(),
    "int8_absmax": lambda tensor: tensor.float() / 127,
}


def is_readable(grid: Grid) -> bool:
    """Whether the numbers of a stored tensor can be read."""
    return grid.numbers in _UNPACKED or grid.numbers in _READ


#: torch dtypes by their names in safetensors.
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def read_tensors(reader: RankReader, progress: Progress | None = None) -> dict[str, Tensor]:
    """Read all tensors of a rank; values of mapped files are read when they are used.

    Args:
        reader: reader of the rank, which stays open.
        progress: called with the number of read bytes and the total.

    Returns:
        Name of source tensor to shard; shards that are ranges of a file are views of it.

    Raises:
        PlanError: if torch does not have the dtype of a tensor.
        SourceError: if a file was modified since it was opened, or cannot be read.
    """
    shapes = {name: reader.shard_shape(name) for name in reader.tensors}
    total = sum(num_bytes(spec._replace(shape=shapes[name])) for name, spec in reader.tensors.items())
    tensors = {}
    done = 0
    for name, spec in reader.tensors.items():
        tensors[name] = as_tensor(name, spec.dtype, shapes[name], reader.read_local(name))
        done += tensors[name].nbytes
        if progress is not None:
            progress(done, total)
    reader.finish()
    return tensors


def as_tensor(name: str, dtype: str, shape: Sequence[int], data: Bytes) -> Tensor:
    """The tensor with these bytes, and a dtype as safetensors names it.

    Raises:
        PlanError: if torch does not have the dtype.
    """
    if dtype not in DTYPES:
        raise PlanError(f"{name} has a dtype that torch does not have (got {dtype}): load it with another tool")
    if not len(data):
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    return torch.frombuffer(data, dtype=DTYPES[dtype]).view(tuple(shape))


# --- quantized layers -------------------------------------------------------------------------------------------------

#: Dtypes of weights, as safetensors names them.
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class Dequantizer:
    """Dequantizes the tensors of a checkpoint, or of one rank.

    Attributes:
        specs: the tensors of the source.
        weights: dtype and shape of each tensor after it is dequantized.
        dtype: dtype of dequantized weights.
    """

    specs: Mapping[str, TensorSpec]
    weights: Mapping[str, TensorSpec]
    dtype: torch.dtype

    @classmethod
    def of_source(cls, specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> Self:
        """Create the dequantizer of full tensors.

        Args:
            specs: the tensors of the source, with grids.
            dtype: dtype of dequantized weights.

        Raises:
            RunError: if weights do not have this dtype, or a format cannot be dequantized.
        """
        if (loaded := DTYPE_NAMES.get(dtype)) not in _DTYPES:
            raise RunError(f"dtype is {dtype} (expected one of {', '.join(map(str, _DTYPES.values()))})")
        for name, spec in specs.items():
            if spec.grid is not None and spec.grid.role == VALUES and not is_readable(spec.grid):
                raise RunError(
                    f"{name}: its values are packed for the kernels of one GPU, and cannot be dequantized: split and "
                    f"load the unquantized checkpoint"
                )
        unquantized = {name for name, spec in specs.items() if spec.grid is None}
        weights = {
            name: spec if name in unquantized else spec._replace(dtype=loaded)
            for name, spec in logical_tensors(specs).items()
        }
        return cls(specs, weights, dtype)

    @classmethod
    def of_rank(cls, manifest: Manifest, folder: AnyPath, plan: Plan, rank: int, dtype: torch.dtype | None) -> Self:
        """Create the dequantizer of a rank's file.

        Args:
            manifest: manifest of the split checkpoint.
            folder: folder of the split checkpoint, for messages.
            plan: plan of the weights.
            rank: the rank, of all pipeline stages.
            dtype: dtype of dequantized weights; None for the config's dtype.

        Raises:
            RunError: if the checkpoint does not have quantized layers.
        """
        specs = require_quantized(manifest, folder)
        full = cls.of_source(specs, dtype or _weight_dtype(manifest.config, specs))
        return cls(specs, plan.shards(full.weights, rank), full.dtype)

    def dequantize(self, tensors: Mapping[str, Tensor], progress: Progress | None = None) -> dict[str, Tensor]:
        """Dequantize tensors.

        Args:
            tensors: name to stored tensor.
            progress: called with bytes done and total bytes of quantized tensors.

        Returns:
            Name to tensor of the same model without quantization.
        """
        found: dict[str, Tensor] = {}
        layers: dict[str, list[Stored]] = {}
        for name, tensor in tensors.items():
            grid = self.specs[name].grid
            if grid is None:
                found[name] = tensor
            elif grid.axes:
                layers.setdefault(grid.logical_name(name), []).append(Stored(tensor, grid))
        done, total = 0, sum(one.tensor.nbytes for stored in layers.values() for one in stored)
        for name, stored in layers.items():
            found[name] = dequantize(stored, self.weights[name].shape, self.dtype)
            done += sum(one.tensor.nbytes for one in stored)
            if progress is not None:
                progress(done, total)
        return found


def require_quantized(manifest: Manifest, folder: AnyPath) -> Mapping[str, TensorSpec]:
    """The source tensors of a split checkpoint, some of which belong to quantized layers.

    Raises:
        RunError: if the checkpoint does not have quantized layers.
    """
    specs = quantized_tensors(manifest)
    if not any(spec.grid for spec in specs.values()):
        raise RunError(f"{folder}: is not quantized: remove {option(dequantize=True)}")
    return specs


def refuse_quantized(manifest: Manifest, folder: AnyPath) -> None:
    """Refuse to load quantized layers as they are.

    Raises:
        RunError: if a split checkpoint has any.
    """
    if not is_quantized(manifest):
        return
    specs = quantized_tensors(manifest)
    dtype = _weight_dtype(manifest.config, specs)
    name = str(dtype).removeprefix("torch.")
    needed = sum(map(num_bytes, Dequantizer.of_source(specs, dtype).weights.values())) / manifest.num_ranks
    raise RunError(
        f"{folder}: is quantized: pass {option(dequantize=True)} to load it as {name}, with about {size(needed)} per "
        f"rank instead of {size(manifest.rank_layout.rank_bytes[0])}"
    )


def is_quantized(manifest: Manifest) -> bool:
    """Whether a checkpoint has quantized layers, or settings of some."""
    has_settings = bool((manifest.config or {}).get(SETTINGS_KEY))
    return has_settings or any(spec.grid for spec in quantized_tensors(manifest).values())


def _weight_dtype(config: Mapping[str, object] | None, specs: Mapping[str, TensorSpec]) -> torch.dtype:
    """The dtype of dequantized weights: the config's, else the dtype of most bytes of unquantized tensors.

    It is the same on all ranks.
    """
    top = config or {}
    nested = top.get("text_config")
    names = [table.get("dtype", table.get("torch_dtype")) for table in (top, nested) if isinstance(table, Mapping)]
    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}
    sizes = dict.fromkeys(_DTYPES, 0)
    for spec in specs.values():
        if spec.grid is None and spec.dtype in sizes:
            sizes[spec.dtype] += num_bytes(spec)
    most = max(sizes, key=sizes.__getitem__)
    return next((by_name[str(name)] for name in names if name in by_name), _DTYPES[most])
