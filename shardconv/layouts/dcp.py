"""Offsets of shards in rank files, as ``torch.distributed.checkpoint.HuggingFaceStorageReader`` reads them.

The metadata is defined in torch/distributed/checkpoint/_hf_utils.py. A shard is one box of the full tensor, and the
boxes together determine its shape, so neither padding nor several intervals per rank can be expressed. For a replicated
tensor the reader finds the same box in several files, and reads the last.
"""

import json
from collections.abc import Mapping

from shardconv.plan.placement import Placement, intervals
from shardconv.plan.plan import Plan, TensorSpec

#: torch's key in the metadata of a file, and the key of each tensor under it.
KEY, OFFSETS_KEY = "DCP_SHARDING_INFO", "saved_offsets"


def first_unreadable(plan: Plan, names: Mapping[str, TensorSpec]) -> str | None:
    """The first tensor whose placement cannot be expressed; None if there is none."""
    return next((name for name in names if not _is_readable(plan.placement(name))), None)


def why_unreadable(name: str, placement: Placement) -> str:
    """The message for a tensor whose placement cannot be expressed."""
    return (
        f"{name}: is sharded as {placement.describe()}, but torch.distributed.checkpoint reads one interval per rank, "
        f"without padding. Replicate it (--replicate {name}), or use the native layout (--layout native); for a "
        f"checkpoint in torch's format, load the model and save shardconv.tensor.as_dtensor(model)"
    )


def offsets_metadata(tensors: Mapping[str, TensorSpec], placements: Mapping[str, Placement], rank: int) -> str:
    """The offsets of a rank's shards in the full tensors, as torch stores them in the rank's file."""
    offsets = {name: {OFFSETS_KEY: _offsets(placements[name], spec.shape, rank)} for name, spec in tensors.items()}
    return json.dumps(offsets, separators=(",", ":"), ensure_ascii=False)


def _is_readable(placement: Placement) -> bool:
    return not placement.is_padded and all(len(ranges) <= 1 for ranges in placement.ranks)


def _offsets(placement: Placement, shape: tuple[int, ...], rank: int) -> list[int]:
    offsets = [0] * len(shape)
    if placement.dim is not None:
        rank_intervals = intervals(placement.ranks[rank])
        # The reader identifies a box by its offsets: those of an empty shard must differ from all other boxes.
        offsets[placement.dim] = rank_intervals[0].start if rank_intervals else placement.size
    return offsets
