"""Headers of rank files, and the position of each shard in them.

They follow from the source's headers, a plan and a layout (``layouts/``), so a split checkpoint is checked against
headers that are computed again from its manifest.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, islice
from math import prod
from typing import NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from shardconv.checkpoint.engine.copy import Edits, FileRows, Shards
from shardconv.checkpoint.engine.geometry import Geometry, geometry, unsharded
from shardconv.files.containers.safetensors import DTYPE_BITS, Header, build_header, num_bytes
from shardconv.formats.torchao import VALUES, all_names, rank_metadata
from shardconv.layouts.layout import NATIVE, Constant, FileLayout, FileTensor
from shardconv.plan.families.family import HEAD
from shardconv.plan.placement import Placement, intervals
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.support.errors import PlanError, option

T = TypeVar("T")

#: Names of the manifests of split and of padded checkpoints, and of split pipelines.
MANIFEST_NAME, PADDING_NAME, PIPELINE_NAME = "shardconv.json", "shardconv-padding.json", "shardconv-pipeline.json"
#: Folder of the adapters in a split base model, each of which is a split checkpoint of its own.
ADAPTERS = "adapters"
#: Key of the identity of a split checkpoint in the metadata of its rank files.
IDENTITY_KEY = "shardconv"
#: Keys of the offsets of shards in the metadata of a file: see torch/distributed/checkpoint/_hf_utils.py.
_OFFSETS_KEYS = "DCP_SHARDING_INFO", "saved_offsets"
#: Maximum number of rank files, all of which are open while they are written.
_MAX_FILES = 10_000


class Layout(Struct, frozen=True):
    """Files with shards of tensors.

    Attributes:
        headers: of each file.
        shards: for each source tensor, in order, the positions of its shards, on the ranks that hold it and have files
            here.
        files_per_rank: for each rank the number of its files, which follow each other.
        constants: for each rank the bytes at the beginning of the data section of its first file, before all shards;
            empty for none.
    """

    headers: tuple[Header, ...]
    shards: tuple[Shards, ...]
    files_per_rank: tuple[int, ...]
    constants: tuple[bytes, ...] = ()

    @property
    def prefixes(self) -> list[bytes]:
        """The bytes of each file before its shards; equal ones are one object."""
        first = dict(zip(accumulate(self.files_per_rank, initial=0), self.constants, strict=False))
        parts = [(header.prefix.raw(), first.get(number, b"")) for number, header in enumerate(self.headers)]
        joined = {(prefix, constants): prefix + constants for prefix, constants in parts}
        return [joined[part] for part in parts]

    @property
    def file_bytes(self) -> list[int]:
        """Bytes of each file."""
        return [header.file_bytes for header in self.headers]

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes of the files of each rank."""
        sizes = iter(self.file_bytes)
        return tuple(sum(islice(sizes, count)) for count in self.files_per_rank)

    @property
    def rank_of(self) -> list[int]:
        """The rank of each file."""
        return [rank for rank, count in enumerate(self.files_per_rank) for _ in range(count)]

    def file_range(self, rank: int) -> slice:
        """The files of a rank."""
        start = sum(self.files_per_rank[:rank])
        return slice(start, start + self.files_per_rank[rank])

    def tensors_of(self, rank: int) -> dict[str, TensorSpec]:
        """Name to dtype and shape of each tensor in the files of a rank."""
        return {name: spec for header in self.headers[self.file_range(rank)] for name, spec in header.specs.items()}


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
    ranks: tuple[int, ...] | None = None,
) -> Layout:
    """Lay out the rank files.

    Args:
        tensors: name to dtype and shape of the full tensors, in order.
        plan: placements of the tensors.
        metadata: of the source files.
        layout: the tensors of the rank files.
        identity: of the split checkpoint, for the metadata of each file; None for none.
        ranks: the ranks whose files there are, in order; None for all.

    Raises:
        PlanError: if shards do not form the tensors of the layout, or there are too many files.
    """
    is_torchao = any(one.grid is not None and one.grid.suffix == VALUES for one in plan.tensors.values())
    metadata = all_names(metadata) if is_torchao else metadata
    metadata = {"format": "pt", **metadata, **({} if identity is None else {IDENTITY_KEY: identity})}
    inputs = _Inputs(tensors, plan, metadata, layout)
    first_equal = _first_equal(plan, map(plan.placement, tensors), has_offsets=layout.has_offsets)
    files: dict[int, list[_RankFile]] = {}
    for stage in range(plan.pp):
        files |= _lay_out_stage(inputs, stage, first_equal)
    _check_number(sum(len(files[first]) for first in first_equal), layout)
    chosen = tuple(range(plan.num_ranks)) if ranks is None else ranks
    rank_files = [files[first_equal[rank]] for rank in chosen]
    stage_files = [files[stage * plan.ranks_per_stage] for stage in range(plan.pp)]
    finder = _ShardFinder(inputs, chosen, rank_files, stage_files)
    return Layout(
        headers=tuple(file.header for one in rank_files for file in one),
        shards=tuple(finder.shards_of(name, spec) for name, spec in tensors.items()),
        files_per_rank=tuple(map(len, rank_files)),
        constants=tuple(b"".join(constant.data for constant in one[0].constants) for one in rank_files),
    )


class _Inputs(NamedTuple):
    """The inputs of all rank files; see :func:`lay_out_ranks`."""

    tensors: Mapping[str, TensorSpec]
    plan: Plan
    metadata: dict[str, str]
    layout: FileLayout


class _Position(NamedTuple):
    """The offset of a shard in a file, and its rows there; None if it is contiguous."""

    offset: int
    rows: FileRows | None


class _RankFile(NamedTuple):
    """A rank file: its header, the position of each source tensor's shard, and its constants."""

    header: Header
    positions: dict[str, _Position]
    constants: Sequence[Constant]


class _ShardFinder:
    """Finds the shards of source tensors in the files of some ranks.

    Args:
        inputs: the inputs of the files.
        ranks: the ranks.
        files: the files of each of these ranks.
        stage_files: the files of a rank of each stage; all ranks of a stage have a tensor in the same file.
    """

    def __init__(
        self,
        inputs: _Inputs,
        ranks: Sequence[int],
        files: Sequence[list[_RankFile]],
        stage_files: Sequence[list[_RankFile]],
    ) -> None:
        plan, layout = inputs.plan, inputs.layout
        self._plan, self._implied, self._files = plan, layout.implied, files
        # files with offsets are read as parts of the full tensors, and engines read the values of full tensors
        self._has_full_values = layout.has_offsets or layout.engine is not None
        self._stages = [rank // plan.ranks_per_stage for rank in ranks]
        self._held = {one.stages: _held(one.stages, ranks, plan.ranks_per_stage) for one in plan.distinct}
        self._starts = [*accumulate(map(len, files), initial=0)]
        self._file_of = [{name: at for at, file in enumerate(one) for name in file.positions} for one in stage_files]
        self._of_key: dict[object, tuple[list[int], list[_RankFile]]] = {}  # one object where they are equal

    def shards_of(self, name: str, spec: TensorSpec) -> Shards:
        """The positions of the shards of a tensor."""
        plan = self._plan
        if name in self._implied:
            size = num_bytes(spec.dtype, spec.shape)
            return Shards(Geometry(size, size, ()), (), (), edits_of(name, spec, plan))
        planned = plan.tensors[name]
        stage_ranks = self._held[planned.stages][1]
        of_ranks = None if self._has_full_values else planned.edits
        edits = edits_of(name, spec, plan, None if of_ranks is None else [of_ranks[rank] for rank in stage_ranks])
        numbers, files = self._files_of(name, planned.stages)
        found = [file.positions[name] for file in files]
        rows = [position.rows for position in found if position.rows is not None] or None
        offsets = tuple([position.offset for position in found])
        return Shards(geometry(planned.placement, spec.dtype, spec.shape, stage_ranks), numbers, offsets, edits, rows)

    def _files_of(self, name: str, stages: tuple[int, ...]) -> tuple[list[int], list[_RankFile]]:
        """The numbers of the files with a tensor, one for each rank that has it, and these files."""
        key = tuple([(stage, self._file_of[stage][name]) for stage in stages])
        if key not in self._of_key:
            file_of, held = dict(key), self._held[stages][0]
            of_rank = [(at, file_of[self._stages[at]]) for at in held]
            numbers = [self._starts[at] + file for at, file in of_rank]
            self._of_key[key] = numbers, [self._files[at][file] for at, file in of_rank]
        return self._of_key[key]


def _check_number(count: int, layout: FileLayout) -> None:
    """Refuse too many files of all ranks: a small maximum file size makes many."""
    if layout.max_file_bytes is not None and count > _MAX_FILES:
        raise PlanError(
            f"the maximum file size is too small (got {layout.max_file_bytes} bytes, for {count} rank files, expected "
            f"at most {_MAX_FILES} files): pass a larger {option('max_file_size')}"
        )


def _held(stages: tuple[int, ...], ranks: Sequence[int], per_stage: int) -> tuple[list[int], tuple[int, ...]]:
    """The indexes of the ``ranks`` whose stage is one of ``stages``, and their ranks in the stage."""
    held = [at for at, rank in enumerate(ranks) if rank // per_stage in stages]
    return held, tuple(ranks[at] % per_stage for at in held)


def _first_equal(plan: Plan, placements: Iterable[Placement], *, has_offsets: bool) -> list[int]:
    """For each rank the first rank of its stage whose files have the same headers.

    Ranks with equal shapes share headers, unless these store the offsets of the shards.
    """
    distinct, per_stage = tuple(dict.fromkeys(placements)), plan.ranks_per_stage
    sizes = [tuple(placement.local_size(rank) for placement in distinct) for rank in range(per_stage)]
    first = list(range(per_stage)) if has_offsets else [sizes.index(size) for size in sizes]
    return [stage * per_stage + rank for stage in range(plan.pp) for rank in first]


def _named_in_stage(tensor: FileTensor, stage: int, plan: Plan) -> FileTensor:
    """A file tensor of a stage. A tied head has the name of the embedding on stages without the head."""
    is_embedding = tensor.is_head and plan.stages is not None and stage not in plan.stages.of_kind(HEAD)
    return replace(tensor, name=tensor.members[0]) if is_embedding else tensor


def edits_of(name: str, spec: TensorSpec, plan: Plan, values: Sequence[Sequence[int]] | None = None) -> Edits | None:
    """The edits of a tensor whose values are compared with its grid; None for any other tensor."""
    grid = plan.tensors[name].grid
    return None if grid is None or not grid.is_checked else Edits(name, spec.dtype, grid, values)


def _lay_out_stage(inputs: _Inputs, stage: int, first_equal: Sequence[int]) -> dict[int, list[_RankFile]]:
    """Lay out the files of each rank of a stage that is the first one with its headers, by ``first_equal``.

    The tensors are divided over files in the same way on all of these ranks, as they have all shapes of the stage.

    Raises:
        PlanError: if shards do not form the tensors of the layout.
    """
    tensors, plan, _, layout = inputs
    lay_out = partial(_lay_out_rank, inputs)
    ranks = list(dict.fromkeys(first_equal[stage * plan.ranks_per_stage : (stage + 1) * plan.ranks_per_stage]))
    held = layout.file_tensors([name for name in tensors if plan.holds(ranks[0], name)])
    names = {tensor.name for tensor in held}
    first = [constant for constant in layout.constants if constant.beside in names]
    one = [_named_in_stage(tensor, stage, plan) for tensor in held]
    files = {rank: [lay_out(rank, one, first)] for rank in ranks}
    if layout.max_file_bytes is None:
        return files
    groups = _divide(one, [file for (file,) in files.values()], layout.max_file_bytes)
    constants = [first, *([()] * (len(groups) - 1))]
    return {rank: list(map(partial(lay_out, rank), groups, constants)) for rank in ranks} if len(groups) > 1 else files


def _lay_out_rank(
    inputs: _Inputs, rank: int, file_tensors: Sequence[FileTensor], constants: Sequence[Constant]
) -> _RankFile:
    """Lay out one file of a rank, with some of its tensors."""
    tensors, plan, metadata, layout = inputs
    first = ((constant.name, TensorSpec(constant.dtype, constant.shape)) for constant in constants)
    members = [name for tensor in file_tensors for name in tensor.members]
    placements = {name: plan.placement(name) for name in members}
    in_stage = rank % plan.ranks_per_stage
    shapes = {name: placements[name].shard_shape(tensors[name].shape, in_stage) for name in members}
    fused = (
        (one.name, TensorSpec(tensors[one.members[0]].dtype, one.shape([shapes[name] for name in one.members])))
        for one in file_tensors
    )
    of_rank = (
        {_OFFSETS_KEYS[0]: _offsets_metadata({name: tensors[name].shape for name in members}, placements, in_stage)}
        if layout.has_offsets
        else rank_metadata(metadata, plan, in_stage)
    )
    header = build_header(chain(first, fused), {**metadata, **of_rank})
    starts = header.starts()
    positions = {
        name: position
        for tensor in file_tensors
        for name, position in _positions(tensor, starts[tensor.name], tensors, shapes)
    }
    return _RankFile(header, positions, constants)


def _offsets_metadata(shapes: Mapping[str, tuple[int, ...]], placements: Mapping[str, Placement], rank: int) -> str:
    """The offsets of a rank's shards in full tensors of these shapes, as HuggingFaceStorageReader of torch reads them.

    For a replicated tensor it finds the same box in several files, and reads the last.
    """
    found = {}
    for name, shape in shapes.items():
        placement, offsets = placements[name], [0] * len(shape)
        if placement.dim is not None:
            rank_intervals = intervals(placement.ranks[rank])
            # The reader identifies a box by its offsets: an empty shard must have other offsets than all other boxes.
            offsets[placement.dim] = rank_intervals[0].start if rank_intervals else placement.size
        found[name] = {_OFFSETS_KEYS[1]: offsets}
    return json.dumps(found, separators=(",", ":"), ensure_ascii=False)


def _positions(
    tensor: FileTensor, offset: int, tensors: Mapping[str, TensorSpec], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, _Position]]:
    """Yield the members of a file tensor at ``offset``, each with its position.

    Members that are concatenated along a dim have a part of each row of this dim; along dim 0, there is one row.
    """
    if len(tensor.members) == 1:
        yield tensor.members[0], _Position(offset, None)
        return
    step = len(tensor.members) // (tensor.stack or 1)
    for at in range(0, len(tensor.members), step):
        members = tensor.members[at : at + step]
        widths = [num_bytes(tensors[name].dtype, shapes[name][tensor.dim :]) for name in members]
        stride, start = sum(widths), offset
        for name, width in zip(members, widths, strict=True):
            yield name, _Position(start, FileRows(width, stride) if tensor.dim else None)
            start += width
        offset += stride * prod(shapes[members[0]][: tensor.dim])


def _divide(
    file_tensors: Sequence[FileTensor], files: Sequence[_RankFile], max_file_bytes: int
) -> list[list[FileTensor]]:
    """Divide the tensors of a rank over files that fit the limit or have one tensor, equally on all ranks.

    Args:
        file_tensors: the tensors, in order.
        files: with all tensors, of ranks with different shapes; no other file has a longer header.
        max_file_bytes: the limit.
    """
    others = max(file.header.data_offset for file in files) + sum(len(one.data) for one in files[0].constants)
    sizes = (max(num_bytes(*file.header.specs[tensor.name][:2]) for file in files) for tensor in file_tensors)
    return divide(zip(file_tensors, sizes, strict=True), max_file_bytes - others)


def divide(items: Iterable[tuple[T, int]], max_bytes: int) -> list[list[T]]:
    """Divide items, each with its bytes, into consecutive groups that fit the limit or have one item."""
    groups: list[list[T]] = [[]]
    used = 0
    for item, size in items:
        if groups[-1] and used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += size
    return groups


def lay_out_source(headers: Sequence[Header], tensors: Mapping[str, TensorSpec]) -> Layout:
    """Lay out the files of an unsharded checkpoint.

    Args:
        headers: of each source file.
        tensors: name to dtype and shape of the tensors, in order.
    """
    full = {name: unsharded(num_bytes(*spec[:2])) for name, spec in tensors.items()}
    return _lay_out_files(headers, full, files_per_rank=(1,) * len(headers))


def lay_out_padded(headers: Sequence[Header], tensors: Mapping[str, TensorSpec], plan: Plan) -> Layout:
    """Lay out the files of a padded checkpoint: one rank has all files. The plan pads their tensors.

    Args:
        headers: header of each file without padding.
        tensors: name to dtype and shape of the full tensors, in order.
        plan: placements of the tensors, for one rank.
    """

    def padded(header: Header) -> Header:
        return build_header(plan.shards(header.specs, 0).items(), header.metadata)

    return _lay_out_files(
        [padded(header) for header in headers],
        {name: geometry(plan.placement(name), spec.dtype, spec.shape) for name, spec in tensors.items()},
        files_per_rank=(len(headers),),
    )


def _lay_out_files(
    headers: Sequence[Header], tensors: Mapping[str, Geometry], *, files_per_rank: tuple[int, ...]
) -> Layout:
    """The layout of files with one shard of each tensor."""
    positions = {
        name: (file, (start,))
        for file, header in zip(zip(range(len(headers))), headers, strict=True)
        for name, start in header.starts().items()
    }
    shards = (Shards(one, *positions[name]) for name, one in tensors.items())
    return Layout(tuple(headers), tuple(shards), files_per_rank)
