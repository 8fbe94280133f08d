"""The layout of a split checkpoint: which tensor lies where in which rank's file.

Owns the order of tensors in rank files and their headers. Follows from the source's headers and a plan alone, so what
reads a split checkpoint computes it anew and compares.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardconv.checkpoint.copy import Shards
from shardconv.checkpoint.dcp import KEY, offsets_metadata
from shardconv.checkpoint.geometry import geometry, whole
from shardconv.checkpoint.header import DTYPE_BITS, Header, build_header
from shardconv.plan.plan import Plan, TensorSpec

MANIFEST_NAME = "shardconv.json"
#: The key of the identity of a split in the metadata of its rank files.
IDENTITY_KEY = "shardconv"


@dataclass(frozen=True, slots=True)
class Layout:
    """Files with the shards of tensors.

    Attributes:
        headers: of each file.
        shards: for each tensor, in order, where its shards lie.
    """

    headers: tuple[Header, ...]
    shards: tuple[Shards, ...]

    @property
    def heads(self) -> list[bytes]:
        """What each file begins with, up to its data."""
        return [header.head for header in self.headers]

    @property
    def file_bytes(self) -> list[int]:
        """Bytes of each file."""
        return [header.file_bytes for header in self.headers]


def rank_file_name(rank: int, tp: int) -> str:
    """The name of a rank's file, all of equal length."""
    return f"rank-{rank:0{len(str(tp - 1))}}-of-{tp}.safetensors"


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
    dcp: bool = False,
    identity: str | None = None,
) -> Layout:
    """The files of the ranks.

    Args:
        tensors: name to dtype and shape of the full tensors, in order.
        plan: their placements.
        metadata: what the source's files say of themselves.
        dcp: whether each file says where its shards lie, as torch reads it.
        identity: of the split, for the metadata of each file; None for none.
    """
    own = {} if identity is None else {IDENTITY_KEY: identity}
    placements = {name: plan.placement(name) for name in tensors}
    distinct = tuple(dict.fromkeys(placements.values()))
    sizes = [tuple(placement.local_size(rank) for placement in distinct) for rank in range(plan.tp)]
    # most often 0: ranks with equal shapes share a header, unless it says where the shards lie
    first_alike = list(range(plan.tp)) if dcp else [sizes.index(size) for size in sizes]
    headers = {
        rank: build_header(
            ((name, spec.dtype, placements[name].shard_shape(spec.shape, rank)) for name, spec in tensors.items()),
            {"format": "pt", **metadata, **own, **({KEY: offsets_metadata(tensors, placements, rank)} if dcp else {})},
        )
        for rank in dict.fromkeys(first_alike)
    }

    def offsets(name: str) -> tuple[int, ...]:
        found = {rank: header.data_offset + header.tensors[name].start for rank, header in headers.items()}
        return tuple(map(found.__getitem__, first_alike))

    shards = tuple(
        Shards(geometry(placements[name], spec.dtype, spec.shape), range(plan.tp), offsets(name))
        for name, spec in tensors.items()
    )
    return Layout(tuple(map(headers.__getitem__, first_alike)), shards)


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
