"""One rank's shards, one tensor at a time: from its rank file, or from the byte ranges of a source that is not split.

Owns which bytes are read for a shard, and no more of them. Knows no torch: what reads here makes tensors of the bytes.
"""

import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardconv.checkpoint.copy import Shards
from shardconv.checkpoint.fileio import Bytes, InputFiles
from shardconv.checkpoint.geometry import Box, geometry
from shardconv.checkpoint.layout import lay_out_parts
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.paths import leads_out
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.verify import verify_open_rank
from shardconv.errors import SplitCheckpointError
from shardconv.plan.plan import Plan, TensorSpec

#: The smallest run of bytes in a row of a source that is read by itself; of narrower ones whole rows are read.
_MIN_RUN_BYTES = 2**12
#: Bytes of whole rows that are in memory at once.
_BLOCK_BYTES = 4 * 2**20


class RankReader(ABC):
    """Where the shards of one rank come from; the files are closed with the last reference to it.

    Args:
        files: the files, open.
        tensors: name to dtype and full shape, in the order in which they are best read.
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
            SourceError: if a file ends too early, was written to since it was opened, or cannot be read.
        """

    def check_unchanged(self) -> None:
        """Check that no file was written to since it was opened.

        Raises:
            SourceError: if one was.
        """
        self._files.check_unchanged()

    def _read(self, file: int, buffer: Bytes, offset: int) -> None:
        self._files.read(file, buffer, offset)
        self.num_bytes_read += len(buffer)


class RankFileReader(RankReader):
    """The shards in the file of a rank, which is mapped into memory: what is read is not copied.

    The file must not be changed as long as what was read is used.

    Args:
        manifest: of the split checkpoint.
        folder: where it is.
        rank: whose file.
        verify: check the file against its checksums first.

    Raises:
        IntegrityError: if bytes are not those that were written.
        SplitCheckpointError: if the file is a link out of its folder.
        SourceError: if it is not as it was written.
    """

    def __init__(self, manifest: Manifest, folder: Path, rank: int, *, verify: bool = False) -> None:
        layout, path = manifest.rank_layout, manifest.rank_paths(folder)[rank]
        if leads_out(path, folder):
            raise SplitCheckpointError(f"{path}: is a link out of its folder")
        if not path.is_file():
            raise SplitCheckpointError(f"{path}: is missing: copy it to this host, or split the source again")
        files = InputFiles([path], [layout.heads[rank]], [layout.file_bytes[rank]])
        super().__init__(files, manifest.tensors, manifest.plan)
        self._rank = rank
        self._shards = dict(zip(manifest.tensors, layout.shards, strict=True))
        if verify:
            verify_open_rank(manifest, files, rank)
        # Private, so that a reader may write into what it is given; unmapped with the last tensor that uses it.
        self._mapped = mmap.mmap(files.descriptors[0], layout.file_bytes[rank], access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_WILLNEED"):
            self._mapped.madvise(mmap.MADV_WILLNEED)

    def read(self, name: str) -> Bytes:
        """See :class:`RankReader`."""
        self._files.check_unchanged()
        shards = self._shards[name]
        start, size = shards.offsets[self._rank], _shard_bytes(shards, self._rank)
        self.num_bytes_read += size
        return memoryview(self._mapped)[start : start + size]


class SourceReader(RankReader):
    """The shards that a plan gives a rank, read from the files of a source.

    Args:
        source: the source.
        plan: of its tensors.
        rank: whose shards.

    Raises:
        SourceError: if a file is not as its header says.
    """

    def __init__(self, source: Source, plan: Plan, rank: int) -> None:
        parts = lay_out_parts([part.header for part in source.parts], source.specs)
        files = InputFiles([part.path for part in source.parts], parts.heads, parts.file_bytes)
        super().__init__(files, source.specs, plan)
        self._rank = rank
        self._full = dict(zip(source.specs, parts.shards, strict=True))

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
        return data

    def _read_rows(self, full: Shards, box: Box, data: Bytes) -> None:
        """Read whole rows, block by block, and keep the columns of a box."""
        from shardconv.checkpoint import strided  # noqa: PLC0415 - see there

        step = max(_BLOCK_BYTES // box.full_width, 1)
        block = memoryview(bytearray(min(step, box.rows) * box.full_width))
        for row in range(0, box.rows, step):
            rows = min(step, box.rows - row)
            part = box._replace(full=0, local=0, rows=rows)
            whole = block[: rows * box.full_width]
            self._read(full.files[0], whole, full.offsets[0] + box.full + row * box.full_width)
            start = box.local + row * box.local_width
            strided.scatter(whole, [part], data[start : start + rows * box.local_width], is_padded=False)


def _is_in_runs(box: Box) -> bool:
    return box.rows == 1 or box.size == box.full_width == box.local_width or box.size >= _MIN_RUN_BYTES


def _runs(box: Box) -> Iterator[tuple[int, int, int]]:
    """The contiguous runs of a box: where they go, how long they are, and where they lie in the full tensor."""
    if box.size == box.full_width == box.local_width:
        yield box.local + box.local_offset, box.rows * box.size, box.full + box.offset
        return
    for row in range(box.rows):
        at = box.local + box.local_offset + row * box.local_width
        yield at, box.size, box.full + box.offset + row * box.full_width


def _shard_bytes(shards: Shards, rank: int) -> int:
    full = shards.geometry.num_bytes
    return shards.geometry.shards[rank].local(full) if full else 0
