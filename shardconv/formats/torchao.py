"""torchao: the metadata of its safetensors files holds the class and the block sizes of each quantized tensor.

``__metadata__`` has one entry per parameter, JSON with the name of the class and its attributes. ``block_size`` has the
elements of a block with one scale; a block of a full row or tensor has the sizes of the full tensor, so a rank file has
the sizes of its shard. A merge restores the metadata of the source, which the manifest stores.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from shardconv.plan.plan import Plan
from shardconv.support.errors import PlanError

#: Class of a quantized tensor to the format that stores it.
FORMATS = {
    "Int8Tensor": "torchao",
    "IntxUnpackedToInt8Tensor": "torchao",
    "Float8Tensor": "torchao",
    "Int4Tensor": "torchao_int4",
}
#: End of the names of stored values.
VALUES = "_weight_qdata"
_UNQUANTIZED = "Tensor"
#: The key with the names of all parameters.
_NAMES = "tensor_names"


class Entry(NamedTuple):
    """The metadata of a quantized tensor.

    Attributes:
        kind: name of its class.
        block_size: elements of a block with one scale, for each dim.
    """

    kind: str
    block_size: tuple[int, ...]


def read_metadata(metadata: Mapping[str, str]) -> dict[str, Entry]:
    """Read the metadata of the quantized tensors.

    Args:
        metadata: of the source files.

    Returns:
        Name of each parameter to its entry.

    Raises:
        PlanError: if an entry is not valid, or its class is not supported.
    """
    found = {}
    for name, text in metadata.items():
        if "." not in name:  # format, tensor_names
            continue
        table = _parse(name, text)
        kind, data = table.get("_type"), table.get("_data")
        if kind == _UNQUANTIZED:
            continue
        if kind not in FORMATS:
            raise PlanError(
                f"{name}: torchao's {kind!r:.60} is not supported (expected {', '.join(FORMATS)}): its layout is that "
                f"of a kernel and not of the rows of the weight: quantize with a class that is supported, or split the "
                f"unquantized checkpoint"
            )
        block = data.get("block_size") if isinstance(data, Mapping) else None
        if not isinstance(block, list) or not all(type(size) is int and size > 0 for size in block):
            raise PlanError(f"{name}: block_size in the metadata is {block!r:.60} (expected positive integers)")
        found[name] = Entry(str(kind), tuple(block))
    return found


def rank_metadata(metadata: Mapping[str, str], plan: Plan, rank: int) -> dict[str, str]:
    """The metadata of a rank file.

    Args:
        metadata: of the source files.
        plan: the placements.
        rank: the rank.

    Returns:
        The entries that differ from the source.
    """
    changed = {}
    for stored, planned in plan.tensors.items():
        grid = planned.grid
        if grid is None or grid.suffix != VALUES or planned.placement.dim is None:
            continue
        name, covered = grid.logical_name(stored), grid.dims[planned.placement.dim]
        if covered.dim is None or name not in metadata:
            continue
        full, local = grid.shape[covered.dim], planned.placement.local_size(rank) // covered.entries * covered.elements
        table, at = _parse(name, metadata[name]), covered.dim - len(grid.shape)
        data = table.get("_data")
        for sizes in (data.get("block_size"), data.get("shape")) if isinstance(data, dict) else ():
            if isinstance(sizes, list) and len(sizes) >= -at and sizes[at] == full != local:
                sizes[at] = local
                changed[name] = json.dumps(table)
    return changed


def all_names(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata with the names of all parameters, where source files list only their own.

    Args:
        metadata: of all source files, where the first file takes precedence.
    """
    try:
        names = json.loads(metadata[_NAMES])
    except (KeyError, ValueError):
        return dict(metadata)
    if not isinstance(names, list):
        return dict(metadata)
    missing = [name for name in metadata if "." in name and name not in names]
    return {**metadata, _NAMES: json.dumps([*names, *missing])} if missing else dict(metadata)


def _parse(name: str, text: str) -> dict[str, object]:
    try:
        table = json.loads(text)
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise PlanError(f"{name}: its metadata is {text!r:.60} (expected a JSON object): save the checkpoint again")
    return table
