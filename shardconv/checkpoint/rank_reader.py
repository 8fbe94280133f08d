"""Readers of one rank's shards, one tensor at a time, from its rank file or from byte ranges of a source.

They read only the bytes of the shard, and do not depend on torch: callers create tensors from the bytes.
"""

import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardconv.checkpoint.copy import Edits, Shards
from shardconv.checkpoint.fileio import Bytes, InputFiles
from shardconv.checkpoint.geometry import Box, geometry
from shardconv.checkpoint.layout import lay_out_source
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.paths import leads_out
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.verify_rank import verify_open_rank
from shardconv.errors import SourceError, SplitCheckpointError
from shardconv.plan.plan import Plan, TensorSpec

#: The shortest run of bytes in a row of a source that is read alone; for shorter runs, full rows are read.
_MIN_RUN_BYTES = 2**12
#: Maximum bytes of full rows in memory.
_BLOCK_BYTES = 4 * 2**20


class RankReader(ABC):
    """A reader of the shards of one rank; it closes its files when it is garbage collected.

    Args:
        files: the open files.
        tensors: name to dtype and full shape, in the preferred order of reading.
        plan: their placements.

    Attributes:
        num_bytes_read: bytes read from the files so far.
    """

    def __init__(self, files: InputFiles, tensors: Mapping[str, TensorSpec], plan: Plan) -> None:
        self.tensors, self.plan = tensors, plan
        self.num_bytes_read = 0
        self._files = files
        self.close = weakref.finalize(self, files.close)

    @abstractmethod
    def read(self, name: str) -> Bytes:
        """The bytes of the rank's shard of a tensor.

        Raises:
            SourceError: if a file is too short, was modified since it was opened, or cannot be read.
        """

    def check_unchanged(self) -> None:
        """Check that no file was modified since it was opened.

        Raises:
            SourceError: if one was.
        """
        self._files.check_unchanged()

    def _read(self, file: int, buffer: Bytes, offset: int) -> None:
        self._files.read(file, buffer, offset)
        self.num_bytes_read += len(buffer)


class RankFileReader(RankReader):
    """A reader of a rank file, which is mapped into memory: shards are not copied.

    The file must not be modified while the shards are in use.

    Args:
        manifest: of the split checkpoint.
        folder: of the split checkpoint.
        rank: the rank of the file.
        verify: check the file against its checksums first.

    Raises:
        IntegrityError: if bytes differ from those that were written.
        SplitCheckpointError: if the file is missing, or a link out of its folder.
        SourceError: if it has the wrong size or header.
    """

    def __init__(self, manifest: Manifest, folder: Path, rank: int, *, verify: bool = False) -> None:
        layout, path = manifest.rank_layout, manifest.rank_paths(folder)[rank]
        if leads_out(path, folder):
            raise SplitCheckpointError(f"{path}: is a link out of its folder")
        if not path.is_file():
            raise SplitCheckpointError(f"{path}: is missing: copy it to this host, or split the source again")
        files = InputFiles([path], [layout.prefixes[rank]], [layout.file_bytes[rank]])
        super().__init__(files, manifest.tensors, manifest.plan)
        self._rank = rank
        self._shards = dict(zip(manifest.tensors, layout.shards, strict=True))
        if verify:
            verify_open_rank(manifest, files, rank)
        # A private mapping, so callers may write into the shards. It is unmapped with the last tensor that uses it.
        self._mapped = mmap.mmap(files.descriptors[0], layout.file_bytes[rank], access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_WILLNEED"):
            self._mapped.madvise(mmap.MADV_WILLNEED)

    def read(self, name: str) -> Bytes:
        """See :class:`RankReader`."""
        self._files.check_unchanged()
        shards = self._shards[name]
        if not shards.files:
            return _implied_values(shards)
        start, size = shards.offsets[self._rank], _shard_bytes(shards, self._rank)
        self.num_bytes_read += size
        data = memoryview(self._mapped)[start : start + size]
        return _source_values(data, shards.edits, self._rank) if shards.is_edited else data


class SourceReader(RankReader):
    """A reader of the shards of a plan from the files of a source.

    Args:
        source: the source.
        plan: of its tensors.
        rank: the rank of the shards.

    Raises:
        SourceError: if a file does not match its header.
    """

    def __init__(self, source: Source, plan: Plan, rank: int) -> None:
        layout = lay_out_source([file.header for file in source.files], source.specs, plan)
        files = InputFiles([file.path for file in source.files], layout.prefixes, layout.file_bytes)
        super().__init__(files, source.specs, plan)
        self._rank = rank
        self._full = dict(zip(source.specs, layout.shards, strict=True))

    def read(self, name: str) -> Bytes:
        """See :class:`RankReader`."""
        spec, full = self.tensors[name], self._full[name]
        self._files.check_unchanged(full.files[0])
        shard = geometry(self.plan.placement(name), spec.dtype, spec.shape).shards[self._rank]
        data = memoryview(bytearray(shard.local(full.geometry.num_bytes) if full.geometry.num_bytes else 0))
        for box in shard.boxes(0, full.geometry.num_bytes):
            for at, size, offset in _runs(box) if _is_in_runs(box) else ():
                self._read(full.files[0], data[at : at + size], full.offsets[0] + offset)
            if not _is_in_runs(box):
                self._read_rows(full, box, data)
        if full.edits is not None:
            self._check_values(full, full.edits)
        return data

    def _check_values(self, full: Shards, edits: Edits) -> None:
        """Compare the values of a full tensor, which is small, with those that follow from its grid."""
        from shardconv.checkpoint.edits import difference  # noqa: PLC0415 - see its docstring

        values = memoryview(bytearray(full.geometry.num_bytes))
        self._read(full.files[0], values, full.offsets[0])
        if problem := difference(values, edits, 0):
            raise SourceError(problem)

    def _read_rows(self, full: Shards, box: Box, data: Bytes) -> None:
        """Read full rows, block by block, and copy the columns of a box."""
        from shardconv.checkpoint import strided  # noqa: PLC0415 - see its docstring

        step = max(_BLOCK_BYTES // box.full_width, 1)
        block = memoryview(bytearray(min(step, box.rows) * box.full_width))
        for row in range(0, box.rows, step):
            rows = min(step, box.rows - row)
            block_box = box._replace(full=0, local=0, rows=rows)
            full_rows = block[: rows * box.full_width]
            self._read(full.files[0], full_rows, full.offsets[0] + box.full + row * box.full_width)
            start = box.local + row * box.local_width
            strided.scatter(full_rows, [block_box], data[start : start + rows * box.local_width], is_padded=False)


def _source_values(data: Bytes, edits: Edits | None, rank: int) -> Bytes:
    """The values of the source, which engines expect, of a shard with other ones."""
    from shardconv.checkpoint.edits import add  # noqa: PLC0415 - see its docstring

    assert edits is not None
    assert edits.values is not None
    values = memoryview(bytearray(data))
    add(values, edits.dtype, 0, edits.values[rank])
    return values


def _implied_values(shards: Shards) -> Bytes:
    """The values of a tensor that no file has, as they follow from its grid."""
    from shardconv.checkpoint.edits import fill  # noqa: PLC0415 - see its docstring

    assert shards.edits is not None
    values = memoryview(bytearray(shards.geometry.num_bytes))
    fill(values, shards.edits, 0)
    return values


def _is_in_runs(box: Box) -> bool:
    return box.rows == 1 or box.size == box.full_width == box.local_width or box.size >= _MIN_RUN_BYTES


def _runs(box: Box) -> Iterator[tuple[int, int, int]]:
    """The contiguous runs of a box: offset in the shard, size, and offset in the full tensor, in bytes."""
    if box.size == box.full_width == box.local_width:
        yield box.local + box.local_offset, box.rows * box.size, box.full + box.offset
        return
    for row in range(box.rows):
        at = box.local + box.local_offset + row * box.local_width
        yield at, box.size, box.full + box.offset + row * box.full_width


def _shard_bytes(shards: Shards, rank: int) -> int:
    full = shards.geometry.num_bytes
    return shards.geometry.shards[rank].local(full) if full else 0
