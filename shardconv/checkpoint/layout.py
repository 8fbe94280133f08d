"""The files of a split checkpoint: where each shard lies in which rank's file.

Owns the order of tensors in rank files and their headers. Follows from the source's headers, a plan and a layout
(layouts/), so what reads a split checkpoint computes it anew and compares.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from shardconv.checkpoint.copy import Shards
from shardconv.checkpoint.geometry import geometry, whole
from shardconv.checkpoint.header import DTYPE_BITS, Header, build_header, num_bytes
from shardconv.layouts.dcp import KEY, offsets_metadata
from shardconv.layouts.layout import NATIVE, FileLayout, FileTensor
from shardconv.plan.plan import Plan, TensorSpec

MANIFEST_NAME = "shardconv.json"
#: The key of the identity of a split in the metadata of its rank files.
IDENTITY_KEY = "shardconv"


@dataclass(frozen=True, slots=True)
class Layout:
    """Files with the shards of tensors.

    Attributes:
        headers: of each file.
        shards: for each source tensor, in order, where its shards lie.
        constants: the bytes with which the data section of each file begins, before all shards.
    """

    headers: tuple[Header, ...]
    shards: tuple[Shards, ...]
    constants: bytes = b""

    @property
    def heads(self) -> list[bytes]:
        """The first bytes of each file, up to its shards."""
        return [header.head + self.constants for header in self.headers]

    @property
    def file_bytes(self) -> list[int]:
        """Bytes of each file."""
        return [header.file_bytes for header in self.headers]


class FoundFiles(NamedTuple):
    """Rank files that an engine wrote itself.

    Attributes:
        names: of the files.
        layout: what they hold.
        notes: sentences on how their checkpoint may differ from the one that the engine loaded.
    """

    names: tuple[str, ...]
    layout: Layout
    notes: tuple[str, ...]


def in_order(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors of a source in the order of the rank files: widest dtype first, else as they lie.

    So every shard is aligned to its dtype, as in files of the reference writer; those keep their order.
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
    """The files of the ranks.

    Args:
        tensors: name to dtype and shape of the full tensors, in order.
        plan: their placements.
        metadata: what the source's files say of themselves.
        layout: which tensors the files hold.
        identity: of the split, for the metadata of each file; None for none.

    Raises:
        PlanError: if shards do not form the tensors of the layout.
    """
    own = {"format": "pt", **metadata, **({} if identity is None else {IDENTITY_KEY: identity})}
    placements = {name: plan.placement(name) for name in tensors}
    distinct = tuple(dict.fromkeys(placements.values()))
    sizes = [tuple(placement.local_size(rank) for placement in distinct) for rank in range(plan.tp)]
    # most often 0: ranks with equal shapes share a header, unless it says where the shards lie
    first_alike = list(range(plan.tp)) if layout.has_offsets else [sizes.index(size) for size in sizes]
    file_tensors = layout.file_tensors(tensors)
    files = {
        rank: _lay_out_rank(
            file_tensors,
            tensors,
            {name: placements[name].shard_shape(spec.shape, rank) for name, spec in tensors.items()},
            layout,
            {**own, KEY: offsets_metadata(tensors, placements, rank)} if layout.has_offsets else own,
        )
        for rank in dict.fromkeys(first_alike)
    }

    def offsets(name: str) -> tuple[int, ...]:
        found = {rank: file.offsets[name] for rank, file in files.items()}
        return tuple(map(found.__getitem__, first_alike))

    shards = tuple(
        Shards(geometry(placements[name], spec.dtype, spec.shape), range(plan.tp), offsets(name))
        for name, spec in tensors.items()
    )
    headers = tuple(files[rank].header for rank in first_alike)
    return Layout(headers, shards, b"".join(constant.data for constant in layout.constants))


class _RankFile(NamedTuple):
    """The header of a rank's file, and the first byte of each source tensor's shard in the file."""

    header: Header
    offsets: dict[str, int]


def _lay_out_rank(
    file_tensors: Sequence[FileTensor],
    tensors: Mapping[str, TensorSpec],
    shapes: Mapping[str, tuple[int, ...]],
    layout: FileLayout,
    metadata: dict[str, str],
) -> _RankFile:
    """One rank's file; ``shapes`` are those of the rank's shards of the source tensors."""
    constants = ((constant.name, constant.dtype, constant.shape) for constant in layout.constants)
    joined = (
        (one.name, tensors[one.members[0]].dtype, one.shape([shapes[name] for name in one.members]))
        for one in file_tensors
    )
    header = build_header(chain(constants, joined), metadata)
    offsets = {one.members[0]: header.data_offset + header.tensors[one.name].start for one in file_tensors}
    for one in layout.changed:
        for before, name in pairwise(one.members):
            offsets[name] = offsets[before] + num_bytes(tensors[before].dtype, shapes[before])
    return _RankFile(header, offsets)


def lay_out_parts(headers: Sequence[Header], names: Iterable[str]) -> Layout:
    """The files of a checkpoint that is not split.

    Args:
        headers: of each part.
        names: the tensors, in order.
    """
    places = {
        name: (number, header.data_offset + info.start, info.num_bytes)
        for number, header in enumerate(headers)
        for name, info in header.tensors.items()
    }
    found = (places[name] for name in names)
    return Layout(tuple(headers), tuple(Shards(whole(size), (part,), (at,)) for part, at, size in found))


def lay_out_padded(headers: Sequence[Header], tensors: Mapping[str, TensorSpec], plan: Plan) -> Layout:
    """The files of a checkpoint that is not split, and whose tensors are padded by a plan for one rank.

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

    files = tuple(map(padded, headers))
    places = {
        name: (number, header.data_offset + info.start)
        for number, header in enumerate(files)
        for name, info in header.tensors.items()
    }
    shards = (
        Shards(geometry(plan.placement(name), spec.dtype, spec.shape), (places[name][0],), (places[name][1],))
        for name, spec in tensors.items()
    )
    return Layout(files, tuple(shards))
