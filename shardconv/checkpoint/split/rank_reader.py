"""Readers of one rank's shards, one tensor at a time, from its rank file or from byte ranges of a source.

They do not depend on torch: callers create tensors from the bytes. Files are mapped into memory, so that only pages
with bytes of the shard are used, and read with what the system reads around them. Full rows are read in blocks only
where the tensors of a source are computed, or its files cannot be mapped.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Self

from shardconv.checkpoint import engine
from shardconv.checkpoint.engine.copy import (
    REMOTE_KEPT_BYTES,
    Scratch,
    Shards,
    Span,
    Stripe,
    StripeState,
    default_threads,
    fill,
    held_stripes,
)
from shardconv.checkpoint.engine.geometry import ShardRows, geometry, unsharded
from shardconv.checkpoint.engine.shards import ShardReader
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.stored_tensors import open_tensors
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.split_folders import open_rank_files
from shardconv.files.containers.safetensors import DTYPE_BITS, num_bytes
from shardconv.files.fileio import Bytes
from shardconv.files.folder import AnyPath, RemotePath
from shardconv.files.input_files import InputFiles
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.support.errors import SourceError
from shardconv.support.launched import local_ranks

#: Maximum bytes of full rows in memory.
_BLOCK_BYTES = 4 * 2**20


class RankReader(ABC):
    """A reader of the shards of one rank, for one thread.

    A context manager, which closes its files; they are also closed when it is garbage collected. Files are mapped into
    memory: a shard that is one range of a file, and a full tensor of :meth:`map_full`, are views, which are not copied
    and stay valid after that. Files must not be modified while these views are in use.

    Args:
        files: the open files.
        tensors: name to dtype and full shape, in the preferred order of reading.
        plan: their placements.
        rank: the rank, of all pipeline stages.

    Attributes:
        tensors: the tensors that the rank's stage holds.
        rank: the rank in its stage.
        num_bytes_read: bytes of the shards that were read or mapped so far, without reads for checks.
    """

    def __init__(self, files: InputFiles, tensors: Mapping[str, TensorSpec], plan: Plan, rank: int) -> None:
        self.tensors = {name: spec for name, spec in tensors.items() if plan.holds(rank, name)}
        self.plan, self.rank = plan, rank % plan.ranks_per_stage
        self.num_bytes_read = 0
        self._files = files
        self._closing = ExitStack()
        self._closing.callback(files.close)
        self.close = weakref.finalize(self, self._closing.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def read(self, name: str) -> Bytes:
        """The bytes of the rank's shard of a tensor.

        Raises:
            SourceError: if a file is too short, was modified since it was opened, or cannot be read.
        """

    def map_full(self, name: str) -> Bytes | None:  # noqa: ARG002 - readers of sources use it
        """Map the full tensor, without a copy; the rank's shard is counted in ``num_bytes_read``.

        Returns:
            A view; None for a rank file, or if the tensor is empty, computed, misaligned, in several files, compared
            with a grid, or in a file that cannot be mapped.

        Raises:
            SourceError: as :meth:`read`.
        """
        return None

    def read_local(self, name: str) -> Bytes:
        """The bytes of the rank's shard as the rank computes with them: its groups are counted from 0.

        Raises:
            SourceError: as :meth:`read`.
        """
        data, edits = self.read(name), self.plan.tensors[name].edits
        return data if edits is None else _sum(data, self.tensors[name].dtype, edits[self.rank], sign=-1)

    def shard_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the rank's shard of a tensor."""
        return self.plan.placement(name).shard_shape(self.tensors[name].shape, self.rank)

    def finish(self) -> None:
        """Check that no file was modified since it was opened.

        Raises:
            SourceError: if one was.
        """
        self._files.check_unchanged()


class _StripeChecks:
    """Checks of a rank's stripes in background threads, in the order of the file, ahead of the reader of its shards.

    The threads read in blocks, for which Linux reads ahead and caches in large units, so that the reader maps cached
    pages: reads and mappings of a local file have the same bytes. Their number is that of the rank's processors, as
    stripes of one file that are read beside each other take longer from storage. The threads do not keep the process
    from exiting.

    Args:
        reader: of the shards, with their checksums.
        stripes: of the full tensors, with the ranges that the rank holds.
    """

    def __init__(self, reader: ShardReader, stripes: Sequence[Stripe]) -> None:
        self._reader, self._stripes = reader, stripes
        self._of_tensor: dict[int, set[int]] = {}
        for number, stripe in enumerate(stripes):
            for span in stripe:
                self._of_tensor.setdefault(span.tensor, set()).add(number)
        self._missing = set(range(len(stripes)))
        self._numbers = iter(range(len(stripes)))
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start the threads, which end when all stripes are checked."""
        for _ in range(default_threads(local_ranks())):
            threading.Thread(target=self._work, name="shardconv", daemon=True).start()

    def _work(self) -> None:
        try:
            while (number := self._next()) is not None:
                self._reader.check(number, self._stripes[number])
                with self._changed:
                    self._missing.discard(number)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self.stop(error)

    def _next(self) -> int | None:
        with self._changed:
            return None if self._error is not None else next(self._numbers, None)

    def wait(self, tensor: int | None = None) -> None:
        """Wait for the checks of a tensor's stripes, by default of all stripes.

        Raises:
            IntegrityError: if bytes of any stripe differ from their checksum.
        """
        wanted = self._missing if tensor is None else self._of_tensor.get(tensor, set())
        with self._changed:
            self._changed.wait_for(lambda: self._error or not wanted & self._missing)
            if self._error is not None:
                raise self._error.with_traceback(None)

    def stop(self, error: BaseException | None = None) -> None:
        """Stop checking after the current stripes; waiting and later calls raise the error."""
        with self._changed:
            self._error = self._error or error or RuntimeError("the reader of the rank is closed")
            self._changed.notify_all()


class RankFileReader(RankReader):
    """A reader of the files of a rank.

    Args:
        manifest: of the split checkpoint.
        folder: of the split checkpoint.
        rank: the rank of the files.
        verify: check the files against their checksums, if there are any: the shard of a tensor before it is returned,
            all others before :meth:`finish` returns.
        names: the tensors that are read and verified; None for all of the rank.

    Raises:
        IntegrityError: if a file is missing, a link out of its folder, or has the wrong size or header; from the
            methods if bytes differ from their checksums.
        SplitCheckpointError: if the folder does not have the rank, or a file cannot be read.
    """

    def __init__(
        self,
        manifest: Manifest,
        folder: AnyPath,
        rank: int,
        *,
        verify: bool = False,
        names: Collection[str] | None = None,
    ) -> None:
        own, reader, files = open_rank_files(manifest, folder, rank)
        held = {name: spec for name, spec in own.tensors.items() if names is None or name in names}
        super().__init__(files, held, own.plan, rank)
        self._shards = dict(zip(own.tensors, own.rank_layout.shards, strict=True))
        self._number = {name: number for number, name in enumerate(own.tensors)}
        self._views = files.views()
        self._checks: _StripeChecks | None = None
        if verify and own.checksums is not None:
            stripes = held_stripes(own.stripes, reader.tensors)
            numbers = {self._number[name] for name in self.tensors}
            checked = [stripe if any(span.tensor in numbers for span in stripe) else () for stripe in stripes]
            self._checks = _StripeChecks(reader, checked)
            self._closing.callback(self._checks.stop)
            self._checks.start()

    def finish(self) -> None:
        """See :class:`RankReader`; also check all stripes.

        Raises:
            IntegrityError: if bytes differ from their checksums.
        """
        if self._checks is not None:
            self._checks.wait()
        super().finish()

    def read(self, name: str) -> Bytes:
        """See :class:`RankReader`."""
        if self._checks is not None:
            self._checks.wait(self._number[name])
        self._files.check_unchanged()
        shards, spec = self._shards[name], self.tensors[name]
        if not shards.files:
            shard = geometry(self.plan.placement(name), spec.dtype, spec.shape).shards[self.rank]
            return _take_shard(_implied_values(shards), shard)
        full = shards.geometry.num_bytes
        ranges = shards.stored(0, full) if full else ()
        pieces = [self._views[file][offset : offset + size] for file, offset, size in ranges]
        self.num_bytes_read += sum(map(len, pieces))
        data = pieces[0] if len(pieces) == 1 else memoryview(bytearray().join(pieces))
        if shards.edits is None or shards.edits.values is None:
            return data
        return _sum(data, shards.edits.dtype, shards.edits.values[0], sign=1)


class RankSourceReader(RankReader):
    """A reader of the shards of a plan from the files of a source.

    Args:
        source: the source.
        plan: of its tensors.
        rank: the rank of the shards.
        names: the tensors that are read; None for all of the rank.

    Raises:
        SourceError: if a file does not match its header.
    """

    def __init__(self, source: Source, plan: Plan, rank: int, names: Collection[str] | None = None) -> None:
        self._reader, files = open_tensors(source, source.specs, plan)
        held = {name: spec for name, spec in source.specs.items() if names is None or name in names}
        super().__init__(files, held, plan, rank)
        self._number = {name: number for number, name in enumerate(source.specs)}
        self._scratch = Scratch(_BLOCK_BYTES, REMOTE_KEPT_BYTES)
        self._mappings: dict[int, Bytes | None] = {}
        if files.is_remote:
            self._reader.prefetch(tuple(span for name in self.tensors for span in self._spans(name)))

    def _spans(self, name: str) -> Iterator[Span]:
        """The ranges of a full tensor that are read for its shard."""
        spec, number = self.tensors[name], self._number[name]
        full = self._reader.tensors[number]
        size = full.geometry.num_bytes
        own = geometry(self.plan.placement(name), spec.dtype, spec.shape, (self.rank,))
        for start, stop in [(0, size)] if full.edits is not None else own.held(0, size):
            yield Span(number, start, stop)

    def map_full(self, name: str) -> Bytes | None:
        """See :class:`RankReader`."""
        spec, full, shard = self._find(name)
        mapped = self._mapped(full)
        if mapped is None or _is_misaligned(full, spec):
            return None
        self._count(full, shard)
        return mapped

    def _find(self, name: str) -> tuple[TensorSpec, Shards, ShardRows]:
        """A tensor, its place in files that are unchanged, and the rank's shard."""
        spec, full = self.tensors[name], self._reader.tensors[self._number[name]]
        for file in set(full.files):
            self._files.check_unchanged(file)
        return spec, full, geometry(self.plan.placement(name), spec.dtype, spec.shape).shards[self.rank]

    def read(self, name: str) -> Bytes:
        """See :class:`RankReader`."""
        spec, full, shard = self._find(name)
        size = full.geometry.num_bytes
        if not size:
            return memoryview(bytearray())
        if (mapped := self._mapped(full)) is not None:
            self._count(full, shard)
            return _take_shard(mapped, shard, is_copied=_is_misaligned(full, spec))
        if full.edits is not None:
            whole = memoryview(bytearray(size))
            self._fill(name, whole, 0)  # compares all values with the grid's
            return _take_shard(whole, shard)
        data, block = memoryview(bytearray(shard.local(size))), memoryview(bytearray(min(_BLOCK_BYTES, size)))
        for span in self._spans(name):
            for start in range(span.start, span.stop, len(block)):
                stop = min(start + len(block), span.stop)
                local, boxes = data[shard.local(start) : shard.local(stop)], shard.boxes(start, stop)
                if len(boxes) == 1 and boxes[0].rows * boxes[0].size == len(local) == stop - start:
                    self._fill(name, local, start)
                else:
                    self._fill(name, block[: stop - start], start)
                    engine.arrays.scatter(block, boxes, local, is_padded=False)
        return data

    def _mapped(self, full: Shards) -> Bytes | None:
        """As :meth:`map_full`, but also of misaligned tensors, and not counted."""
        size = full.geometry.num_bytes
        if not size or len(full.files) != 1 or full.edits is not None or full.geometry != unsharded(size):
            return None
        mapping, start = self._mapping(full.files[0]), full.offsets[0]
        return None if mapping is None else mapping[start : start + size]

    def _mapping(self, file: int) -> Bytes | None:
        """A file as it is mapped into memory; None if it cannot be mapped."""
        if file not in self._mappings:
            self._mappings[file] = self._files.map(file)
        return self._mappings[file]

    def _count(self, full: Shards, shard: ShardRows) -> None:
        """Count the bytes of a mapped shard."""
        self.num_bytes_read += sum(run.size for run in shard.runs) * (full.geometry.num_bytes // shard.full_width)

    def _fill(self, name: str, buffer: Bytes, start: int) -> None:
        """Fill a buffer with the bytes of a full tensor from ``start`` on."""
        state = StripeState(0)
        fill(self._reader, state, Span(self._number[name], start, start + len(buffer)), buffer, self._scratch)
        self.num_bytes_read += len(buffer)
        if state.problem:
            raise SourceError(state.problem)


def copied_bytes(source: Source, plan: Plan, rank: int, names: Collection[str]) -> int:
    """Bytes of shards that :meth:`RankSourceReader.read` copies: of all tensors but single ranges of local files."""
    is_remote = any(isinstance(path, RemotePath) for path in source.paths)
    stored, total = source.stored, 0
    held = {name: spec for name, spec in source.specs.items() if name in names and plan.holds(rank, name)}
    for name, spec in held.items():
        shard = geometry(plan.placement(name), spec.dtype, spec.shape).shards[rank % plan.ranks_per_stage]
        size = num_bytes(spec.dtype, spec.shape)
        full = None if stored.transform_of(name) is not None else stored.shards[name]
        is_made = full is None or len(full.files) > 1 or _is_misaligned(full, spec)
        if size and (is_remote or is_made or _only_range(shard, size) is None):
            total += shard.local(size)
    return total


def _is_misaligned(full: Shards, spec: TensorSpec) -> bool:
    """Whether a full tensor begins in its file at a position that is not a multiple of its elements."""
    return full.offsets[0] % max(DTYPE_BITS[spec.dtype] // 8, 1) > 0


def _take_shard(full: Bytes, shard: ShardRows, *, is_copied: bool = False) -> Bytes:
    """The shard of a full tensor: a view of it if the shard is one range, else, or with ``is_copied``, a copy."""
    if not is_copied and (found := _only_range(shard, len(full))) is not None:
        return full[found]
    data = memoryview(bytearray(shard.local(len(full))))
    engine.arrays.scatter(full, shard.boxes(0, len(full)), data, is_padded=False)
    return data


def _only_range(shard: ShardRows, full_bytes: int) -> slice | None:
    """The range of the full tensor that is the shard; None if the shard is not one range."""
    boxes = shard.boxes(0, full_bytes)
    if len(boxes) != 1 or shard.is_padded:
        return None
    (box,) = boxes
    is_one = box.rows == 1 or box.size == box.full_width == box.local_width
    start = box.full + box.offset
    return slice(start, start + box.rows * box.size) if is_one else None


def _sum(data: Bytes, dtype: str, values: Sequence[int], *, sign: int) -> Bytes:
    """A copy of a shard with integers added to its elements, or subtracted with ``sign`` -1."""
    copied = memoryview(bytearray(data))
    engine.arrays.add_integers(copied, dtype, 0, values, sign=sign)
    return copied


def _implied_values(shards: Shards) -> Bytes:
    """The values of a tensor that no file has, as they follow from its grid."""
    assert shards.edits is not None
    values = memoryview(bytearray(shards.geometry.num_bytes))
    engine.arrays.fill_expected(values, shards.edits, 0)
    return values
