"""List elements that a rank of vLLM reads, but the same rank of a shardconv plan does not hold.

    python -m tools.vllm_compare FOLDER     for all checkpoints that vllm_names wrote to --work FOLDER

Vocabulary-parallel tensors are not compared: vLLM's boundaries are of a padded vocabulary.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from shardconv.checkpoint.sources.planning import make_plan
from shardconv.plan.placement import Interval, Placement, intervals
from shardconv.support.errors import PlanError
from tools.composition import Numbering, pattern

Mask = npt.NDArray[np.bool_]


def held(placement: Placement, shape: tuple[int, ...], rank: int) -> Mask:
    """The elements of a tensor that a rank holds."""
    if placement.dim is None:
        return np.ones(shape, dtype=bool)
    mask = np.zeros(shape, dtype=bool)
    along = np.moveaxis(mask, placement.dim, 0)
    for start, stop in intervals(placement.ranks[rank]):
        along[start:stop] = True
    return mask


def ranges(mask: Mask) -> str:
    """Describe the elements of a mask by ranges of the dims that it does not cover."""
    words = []
    for dim, size in enumerate(mask.shape):
        others = tuple(axis for axis in range(mask.ndim) if axis != dim)
        rows = mask.any(axis=others)
        if rows.all():
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[False], rows, [False]])))
        runs = [Interval(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        some = " ".join(f"{start}:{stop}" for start, stop in runs[:4]) + (" ..." if len(runs) > 4 else "")
        words.append(f"dim {dim} of {size}: {some}")
    return "; ".join(words) or "all"


def is_vocabulary(placement: Placement, shape: tuple[int, ...], size: int | None) -> bool:
    """Whether a tensor is vocabulary-parallel; vLLM pads its rows to a multiple of 64."""
    return placement.dim == 0 and shape[0] == size


def differences(folder: Path, name: str, found: Mapping[str, Any]) -> list[str]:
    """One line per pattern of tensors with elements that a rank of vLLM reads and shardconv's does not hold."""
    if found.get("status") != "loaded":
        return []
    numbering = Numbering(json.loads((folder / "shapes.json").read_text()))
    vocabulary = found["config"].get("vocab_size")
    tensors = dict(numbering.tensors())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    lines: dict[str, str] = {}
    for tp in (tp for tp in (2, 4) if str(tp) not in found["refused"]):
        try:
            plan = make_plan(folder, tp=tp)
        except PlanError as error:
            lines[f"plan {tp}"] = f"{name} | tp {tp} | no plan: {str(error).splitlines()[0]}"
            continue
        for rank in range(tp):
            packed = np.load(folder / f"taken-{tp}-{rank}.npy")
            taken = np.unpackbits(packed)[: numbering.total + 1].astype(bool)
            for tensor, start in zip(numbering.names, numbering.starts, strict=False):
                shape = numbering.shapes[tensor]
                needed = taken[start : start + int(np.prod(shape))].reshape(shape)
                ours = held(plan.placement(tensor), shape, rank)
                if is_vocabulary(plan.placement(tensor), shape, vocabulary):
                    continue
                key = f"{pattern(tensor)} {tp}"
                if (needed & ~ours).any() and key not in lines:
                    lines[key] = (
                        f"{name} | {pattern(tensor)} | tp {tp} rank {rank} | vLLM {ranges(needed)} | "
                        f"shardconv {ranges(ours)} ({plan.placement(tensor).describe()})"
                    )
    (folder / "model.safetensors").unlink()
    return list(lines.values())


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*/record.json")):
        record = json.loads(path.read_text()) | {"config": json.loads((path.parent / "config.json").read_text())}
        sys.stdout.writelines(f"{line}\n" for line in differences(path.parent, path.parent.name, record))
