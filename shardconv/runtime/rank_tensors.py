"""The tensors of a rank in memory, from the bytes that its reader returns. Quantized layers can be dequantized.

The model that is loaded from quantized layers is the unquantized one: neither activations nor KV caches are quantized.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from shardconv.checkpoint.engine.copy import Progress
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.rank_reader import RankReader
from shardconv.checkpoint.split.stored_plan import quantized_tensors
from shardconv.convert.model import DTYPE_NAMES
from shardconv.files.fileio import Bytes
from shardconv.files.folder import AnyPath
from shardconv.plan.grid import VALUES
from shardconv.plan.plan import Plan, TensorSpec, logical_tensors
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.runtime.dequantize import Stored, dequantize, is_readable
from shardconv.runtime.device import num_bytes
from shardconv.support.errors import PlanError, RunError, option
from shardconv.support.formatting import size

#: torch dtypes by their names in safetensors.
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def read_tensors(reader: RankReader, progress: Progress | None = None) -> dict[str, Tensor]:
    """Read all tensors of a rank, and close its reader.

    Args:
        reader: reader of the rank's file.
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
    with reader:
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
        weights = {
            name: spec._replace(shape=plan.placement(name).shard_shape(spec.shape, rank % plan.ranks_per_stage))
            for name, spec in full.weights.items()
            if plan.holds(rank, name)
        }
        return cls(specs, weights, full.dtype)

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
