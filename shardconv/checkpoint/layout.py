"""Headers of rank files, and the position of each shard in them.

They follow from the source's headers, a plan and a layout (``layouts/``), so a split checkpoint is checked against
headers that are computed again from its manifest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from shardconv.checkpoint.copy import Edits, Shards
from shardconv.checkpoint.geometry import Geometry, geometry, unsharded
from shardconv.checkpoint.header import DTYPE_BITS, Header, build_header, num_bytes
from shardconv.formats.torchao import VALUES, all_names, rank_metadata
from shardconv.layouts.dcp import KEY, offsets_metadata
from shardconv.layouts.layout import NATIVE, FileLayout, FileTensor
from shardconv.plan.plan import Plan, TensorSpec

MANIFEST_NAME = "shardconv.json"
#: Key of the identity of a split checkpoint in the metadata of its rank files.
IDENTITY_KEY = "shardconv"


@dataclass(frozen=True, slots=True)
class Layout:
    """Files with shards of tensors.

    Attributes:
        headers: of each file.
        shards: for each source tensor, in order, the positions of its shards.
        constants: the bytes at the beginning of each file's data section, before all shards.
    """

    headers: tuple[Header, ...]
    shards: tuple[Shards, ...]
    constants: bytes = b""

    @property
    def prefixes(self) -> list[bytes]:
        """The bytes of each file before its shards."""
        return [header.prefix + self.constants for header in self.headers]

    @property
    def file_bytes(self) -> list[int]:
        """Bytes of each file."""
        return [header.file_bytes for header in self.headers]


class ExplicitFiles(NamedTuple):
    """Rank files whose names and headers are stored instead of computed: those of vLLM and of padded checkpoints.

    Attributes:
        names: of the files.
        layout: their headers and shards.
        notes: possible differences from the checkpoint that the engine loaded, one sentence each.
    """

    names: tuple[str, ...]
    layout: Layout
    notes: tuple[str, ...]


def in_file_order(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Sort the tensors of a source into the order of the rank files: widest dtype first, stable.

    Every shard is then aligned to its dtype, as in files of the reference library, whose order does not change.
    """
    return dict(sorted(tensors.items(), key=lambda item: -max(DTYPE_BITS[item[1].dtype] // 8, 1)))


def lay_out_ranks(
    tensors: Mapping[str, TensorSpec],
    plan: Plan,
    metadata: dict[str, str],
    *,
    layout: FileLayout = NATIVE,
    identity: str | None = None,
) -> Layout:
    """Lay out the rank files.

    Args:
        tensors: name to dtype and shape of the full tensors, in order.
        plan: their placements.
        metadata: of the source files.
        layout: the tensors of the rank files.
        identity: of the split checkpoint, for the metadata of each file; None for none.

    Raises:
        PlanError: if shards do not form the tensors of the layout.
    """
    is_torchao = any(one.grid is not None and one.grid.suffix == VALUES for one in plan.tensors.values())
    metadata = all_names(metadata) if is_torchao else metadata
    common = {"format": "pt", **metadata, **({} if identity is None else {IDENTITY_KEY: identity})}
    placements = {name: plan.placement(name) for name in tensors}
    distinct = tuple(dict.fromkeys(placements.values()))
    sizes = [tuple(placement.local_size(rank) for placement in distinct) for rank in range(plan.tp)]
    # ranks with equal shapes share a header, unless it stores the offsets of the shards
    first_equal = list(range(plan.tp)) if layout.has_offsets else [sizes.index(size) for size in sizes]
    file_tensors = layout.file_tensors(tensors)
    files = {
        rank: _lay_out_rank(
            file_tensors,
            tensors,
            {name: placements[name].shard_shape(spec.shape, rank) for name, spec in tensors.items()},
            layout,
            {**common, KEY: offsets_metadata(tensors, placements, rank)}
            if layout.has_offsets
            else {**common, **rank_metadata(metadata, plan, rank)},
        )
        for rank in dict.fromkeys(first_equal)
    }

    def offsets(name: str) -> tuple[int, ...]:
        by_rank = {rank: file.offsets[name] for rank, file in files.items()}
        return tuple(map(by_rank.__getitem__, first_equal))

    # files with offsets are read as parts of the full tensors, and engines read the values of full tensors
    has_full_values = layout.has_offsets or layout.engine is not None
    implied = layout.implied

    def shards_of(name: str, spec: TensorSpec) -> Shards:
        if name in implied:
            size = num_bytes(spec.dtype, spec.shape)
            return Shards(Geometry(size, size, ()), (), (), _edits(name, spec, plan, None))
        edits = _edits(name, spec, plan, None if has_full_values else plan.tensors[name].edits)
        return Shards(geometry(placements[name], spec.dtype, spec.shape), range(plan.tp), offsets(name), edits)

    shards = tuple(shards_of(name, spec) for name, spec in tensors.items())
    headers = tuple(files[rank].header for rank in first_equal)
    return Layout(headers, shards, b"".join(constant.data for constant in layout.constants))


def _edits(name: str, spec: TensorSpec, plan: Plan, values: Sequence[Sequence[int]] | None) -> Edits | None:
    """The edits of a tensor whose values are compared with its grid; None for any other tensor."""
    grid = plan.tensors[name].grid
    return None if grid is None or not grid.is_checked else Edits(name, spec.dtype, grid, values)


class _RankFile(NamedTuple):
    """The header of a rank file, and the offset of each source tensor's shard in the file."""

    header: Header
    offsets: dict[str, int]


def _lay_out_rank(
    file_tensors: Sequence[FileTensor],
    tensors: Mapping[str, TensorSpec],
    shapes: Mapping[str, tuple[int, ...]],
    layout: FileLayout,
    metadata: dict[str, str],
) -> _RankFile:
    """Lay out one rank file; ``shapes`` are those of the rank's shards of the source tensors."""
    constants = ((constant.name, constant.dtype, constant.shape) for constant in layout.constants)
    fused = (
        (tensor.name, tensors[tensor.members[0]].dtype, tensor.shape([shapes[name] for name in tensor.members]))
        for tensor in file_tensors
    )
    header = build_header(chain(constants, fused), metadata)
    offsets = {tensor.members[0]: header.data_offset + header.tensors[tensor.name].start for tensor in file_tensors}
    for tensor in layout.changed:
        for previous, name in pairwise(tensor.members):
            offsets[name] = offsets[previous] + num_bytes(tensors[previous].dtype, shapes[previous])
    return _RankFile(header, offsets)


def lay_out_source(headers: Sequence[Header], tensors: Mapping[str, TensorSpec], plan: Plan | None = None) -> Layout:
    """Lay out the files of an unsharded checkpoint.

    Args:
        headers: of each source file.
        tensors: name to dtype and shape of the tensors, in order.
        plan: their placements, if the source is not yet known to have the values that follow from their grids.
    """
    positions = {
        name: (number, header.data_offset + info.start, info.num_bytes)
        for number, header in enumerate(headers)
        for name, info in header.tensors.items()
    }
    shards = (
        Shards(unsharded(size), (file,), (offset,), None if plan is None else _edits(name, tensors[name], plan, None))
        for name, (file, offset, size) in ((name, positions[name]) for name in tensors)
    )
    return Layout(tuple(headers), tuple(shards))


def lay_out_padded(headers: Sequence[Header], tensors: Mapping[str, TensorSpec], plan: Plan) -> Layout:
    """Lay out the files of an unsharded checkpoint whose tensors are padded by a plan for one rank.

    Args:
        headers: of each file without padding.
        tensors: name to dtype and shape of the full tensors, in order.
        plan: their placements.
    """

    def padded(header: Header) -> Header:
        shapes = (
            (name, info.dtype, plan.placement(name).shard_shape(info.shape, 0)) for name, info in header.tensors.items()
        )
        return build_header(shapes, header.metadata)

    padded_headers = tuple(map(padded, headers))
    positions = {
        name: (number, header.data_offset + info.start)
        for number, header in enumerate(padded_headers)
        for name, info in header.tensors.items()
    }
    shards = (
        Shards(geometry(plan.placement(name), spec.dtype, spec.shape), (positions[name][0],), (positions[name][1],))
        for name, spec in tensors.items()
    )
    return Layout(padded_headers, tuple(shards))
