"""Offsets of shards in rank files, as ``torch.distributed.checkpoint.HuggingFaceStorageReader`` reads them.

Owns that metadata (torch/distributed/checkpoint/_hf_utils.py), and which placements it can express. A shard is one box
of the full tensor, whose shape is what all boxes reach to: so neither padding nor several intervals of a rank can be
expressed. Of a replicated tensor the reader finds the same box in several files and reads it from the last.
"""

import json
from collections.abc import Mapping

from shardconv.plan.placement import Placement, intervals
from shardconv.plan.plan import Plan, TensorSpec

#: torch's key in a file's metadata, and the one of each tensor under it.
KEY, OFFSETS_KEY = "DCP_SHARDING_INFO", "saved_offsets"


def first_unreadable(plan: Plan, names: Mapping[str, TensorSpec]) -> str | None:
    """The first tensor whose placement cannot be expressed; None if there is none."""
    return next((name for name in names if not _is_readable(plan.placement(name))), None)


def why_unreadable(name: str, placement: Placement) -> str:
    """The message for a tensor whose placement cannot be expressed."""
    return (
        f"{name}: is sharded as {placement.describe()}, and torch.distributed.checkpoint reads one interval per rank, "
        f"without padding. Replicate it (--replicate {name}), or use the native layout (--layout native); for a "
        f"checkpoint of torch's own, load the model and save shardconv.tensor.as_dtensor(model)"
    )


def offsets_metadata(tensors: Mapping[str, TensorSpec], placements: Mapping[str, Placement], rank: int) -> str:
    """Where a rank's shards begin in the full tensors, as torch stores it in the rank's file."""
    offsets = {name: {OFFSETS_KEY: _offsets(placements[name], spec.shape, rank)} for name, spec in tensors.items()}
    return json.dumps(offsets, separators=(",", ":"), ensure_ascii=False)


def _is_readable(placement: Placement) -> bool:
    return not placement.is_padded and all(len(pieces) <= 1 for pieces in placement.ranks)


def _offsets(placement: Placement, shape: tuple[int, ...], rank: int) -> list[int]:
    offsets = [0] * len(shape)
    if placement.dim is not None:
        held = intervals(placement.ranks[rank])
        # The reader knows a box by its offsets alone: where a rank has nothing, they must be those of no other's box.
        offsets[placement.dim] = held[0].start if held else placement.size
    return offsets
