"""The quantized layers of a checkpoint: refuse to load them as they are, or dequantize them while loading.

The model that is loaded is the unquantized one: neither activations nor KV caches are quantized.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from shardconv.checkpoint.copy import Progress
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.stored_plan import quantized_tensors
from shardconv.errors import RunError, SplitCheckpointError
from shardconv.formatting import size
from shardconv.plan.grid import VALUES
from shardconv.plan.plan import Plan, TensorSpec, logical_tensors
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.runtime.dequantize import dequantize_all
from shardconv.runtime.device import num_bytes

#: Dtypes of weights, as safetensors names them.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class Dequantizer:
    """Dequantizes the tensors of a checkpoint, or of one rank.

    Attributes:
        specs: the tensors of the source.
        weights: dtype and shape of each tensor after it is dequantized.
        dtype: of dequantized weights.
    """

    specs: Mapping[str, TensorSpec]
    weights: Mapping[str, TensorSpec]
    dtype: torch.dtype

    @classmethod
    def of_source(cls, specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> Self:
        """Create the dequantizer of full tensors.

        Args:
            specs: the tensors of the source, with grids.
            dtype: of dequantized weights.
        """
        [loaded] = (name for name, each in _DTYPES.items() if each == dtype)
        unquantized = {name for name, spec in specs.items() if spec.grid is None}
        weights = {
            name: spec if name in unquantized else spec._replace(dtype=loaded)
            for name, spec in logical_tensors(specs).items()
        }
        return cls(specs, weights, dtype)

    @classmethod
    def of_rank(cls, manifest: Manifest, folder: Path, plan: Plan, rank: int, dtype: torch.dtype | None) -> Self:
        """Create the dequantizer of a rank's file.

        Args:
            manifest: of the split checkpoint.
            folder: of the split checkpoint, for messages.
            plan: of the weights.
            rank: the rank.
            dtype: of dequantized weights; None for that of the config.

        Raises:
            RunError: if the checkpoint does not have quantized layers.
            SplitCheckpointError: if the manifest does not have what is needed to dequantize them.
        """
        specs = quantized_tensors(manifest)
        grids = [spec.grid for spec in specs.values() if spec.grid is not None]
        if not grids:
            raise RunError(f"{folder}: is not quantized: remove --dequantize (dequantize=True)")
        if not any(grid.role == VALUES for grid in grids):
            raise SplitCheckpointError(
                f"{folder}: its manifest, of an earlier version, does not describe how values are stored: merge it and "
                f"split it again (shardconv merge {folder} -o MERGED; shardconv split MERGED --tp {manifest.tp})"
            )
        full = cls.of_source(specs, dtype or _weight_dtype(manifest.config, specs))
        weights = {
            name: spec._replace(shape=plan.placement(name).shard_shape(spec.shape, rank))
            for name, spec in full.weights.items()
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
        grids = {name: spec.grid for name, spec in self.specs.items()}
        total = sum(tensor.nbytes for name, tensor in tensors.items() if grids[name] is not None)
        shapes = {name: spec.shape for name, spec in self.weights.items()}
        report = None if progress is None else partial(_report, progress, total)
        return dict(dequantize_all(tensors, grids, shapes, self.dtype, report))


def _report(progress: Progress, total: int, done: int) -> None:
    progress(done, total)


def refuse_quantized(manifest: Manifest, folder: Path) -> None:
    """Refuse to load quantized layers as they are.

    Raises:
        RunError: if a split checkpoint has any.
    """
    specs = quantized_tensors(manifest)
    if not ((manifest.config or {}).get(SETTINGS_KEY) or any(spec.grid for spec in specs.values())):
        return
    dtype = _weight_dtype(manifest.config, specs)
    name = str(dtype).removeprefix("torch.")
    needed = sum(map(num_bytes, Dequantizer.of_source(specs, dtype).weights.values())) / manifest.tp
    raise RunError(
        f"{folder}: is quantized: pass --dequantize (dequantize=True) to load it as {name}, with "
        f"about {size(needed)} per rank in place of {size(manifest.rank_layout.file_bytes[0])}"
    )


def _weight_dtype(config: Mapping[str, object] | None, specs: Mapping[str, TensorSpec]) -> torch.dtype:
    """The dtype of dequantized weights: that of the config, else that of most unquantized tensors."""
    tables = [config or {}]
    if isinstance(nested := tables[0].get("text_config"), Mapping):
        tables.append(nested)
    names = {str(table.get("dtype", table.get("torch_dtype"))) for table in tables}
    found = [dtype for dtype in _DTYPES.values() if str(dtype).removeprefix("torch.") in names]
    found = found or [_DTYPES[spec.dtype] for spec in specs.values() if spec.grid is None and spec.dtype in _DTYPES]
    return max(set(found), key=found.count, default=torch.bfloat16)
