"""Files of torch.save whose tensors are written by the copy engine: a zip archive with known positions.

An archive has a pickle, which names the shapes and storages of the tensors, and an uncompressed entry for each storage,
aligned to 64 bytes as torch aligns it. The zip entries of storages store no CRC-32, which torch does not check, as with
``torch.serialization.set_crc32_options(False)``.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

from shardconv.files.containers.safetensors import num_bytes
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError, option

#: The classes of storages of torch, by dtype of safetensors.
_STORAGES = {
    "BF16": "BFloat16Storage", "F16": "HalfStorage", "F32": "FloatStorage", "F64": "DoubleStorage", "U8": "ByteStorage",
    "I8": "CharStorage", "I16": "ShortStorage", "I32": "IntStorage", "I64": "LongStorage", "BOOL": "BoolStorage",
}  # fmt: skip
_ALIGNMENT = 64
_MAX_32, _MAX_16 = 2**32 - 1, 2**16 - 1
#: The id of the extra field that aligns the data of an entry, and of the field with sizes of 64 bits.
_PADDING, _ZIP64 = 0x4246, 1
#: The version of the zip format with fields of 64 bits.
_VERSION = 45
#: 1980-01-01, the first date of the format.
_DATE = 0x21


class _Entry(NamedTuple):
    """An entry of an archive: its name, its bytes, or None for a storage, its size, and the offset of its header."""

    name: bytes
    data: bytes | None
    size: int
    at: int

    @property
    def crc(self) -> int:
        """The CRC-32 of its bytes; 0 for a storage."""
        return 0 if self.data is None else zlib.crc32(self.data)

    @property
    def header(self) -> bytes:
        """The header before its bytes, padded so that the bytes are aligned."""
        is_large = self.size >= _MAX_32
        sizes = struct.pack("<HHQQ", _ZIP64, 16, self.size, self.size) if is_large else b""
        short = _MAX_32 if is_large else self.size
        unpadded = self.at + 30 + len(self.name) + len(sizes) + 4
        extra = sizes + struct.pack("<HH", _PADDING, -unpadded % _ALIGNMENT) + bytes(-unpadded % _ALIGNMENT)
        fields = (b"PK\3\4", _VERSION, 0, 0, 0, _DATE, self.crc, short, short, len(self.name), len(extra))
        return struct.pack("<4sHHHHHIIIHH", *fields) + self.name + extra

    @property
    def start(self) -> int:
        """The offset of its bytes."""
        return self.at + len(self.header)

    @property
    def listing(self) -> bytes:
        """Its entry in the directory at the end."""
        numbers = (self.size, self.size, self.at)
        large = b"".join(struct.pack("<Q", number) for number in numbers if number >= _MAX_32)
        extra = struct.pack("<HH", _ZIP64, len(large)) + large if large else b""
        size, _, at = (min(number, _MAX_32) for number in numbers)
        fields = (b"PK\1\2", _VERSION, _VERSION, 0, 0, 0, _DATE, self.crc, size, size, len(self.name), len(extra), at)
        return struct.pack("<4sHHHHHHIIIHH10xI", *fields) + self.name + extra


@dataclass(frozen=True)
class TorchArchive:
    """A file of torch.save with a state dict.

    Attributes:
        root: the folder of all entries.
        tensors: name to dtype and shape, in the order of the data.
    """

    root: str
    tensors: Mapping[str, TensorSpec]

    @cached_property
    def _entries(self) -> list[_Entry]:
        small = {"data.pkl": self._pickle(), "byteorder": b"little", "version": b"3\n"}
        sizes = [num_bytes(spec.dtype, spec.shape) for spec in self.tensors.values()]
        contents: list[tuple[str, bytes | None, int]] = [(name, data, len(data)) for name, data in small.items()]
        contents += [(f"data/{number}", None, size) for number, size in enumerate(sizes)]
        entries, at = [], 0
        for name, data, size in contents:
            entries.append(_Entry(f"{self.root}/{name}".encode(), data, size, at))
            at = entries[-1].start + size
        return entries

    @property
    def offsets(self) -> dict[str, int]:
        """Name to offset of the data of each tensor."""
        stored = [entry.start for entry in self._entries if entry.data is None]
        return dict(zip(self.tensors, stored, strict=True))

    @property
    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of everything but the tensors."""
        for entry in self._entries:
            yield entry.at, entry.header + (entry.data or b"")
        yield self._end, self._directory

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self._end + len(self._directory)

    @property
    def _end(self) -> int:
        return self._entries[-1].start + self._entries[-1].size

    @cached_property
    def _directory(self) -> bytes:
        """The directory of all entries, with its position in 64 and 32 bits."""
        listing, count, at = b"".join(entry.listing for entry in self._entries), len(self._entries), self._end
        size = len(listing)
        wide = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, size, at)
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, at + size, 1)
        short = (min(count, _MAX_16), min(count, _MAX_16), min(size, _MAX_32), min(at, _MAX_32))
        return listing + wide + locator + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, *short, 0)

    def _pickle(self) -> bytes:
        """The pickle of the state dict."""
        items = [_text(name) + _tensor(number, name, spec) for number, (name, spec) in enumerate(self.tensors.items())]
        return b"\x80\x02}(" + b"".join(items) + b"u."


def _tensor(number: int, name: str, spec: TensorSpec) -> bytes:
    """The opcodes that build a tensor on a storage of its own, as torch.save writes them."""
    if spec.dtype not in _STORAGES:
        raise PlanError(f"{name}: dtype {spec.dtype} cannot be stored in PyTorch files: use {option(layout='native')}")
    strides = tuple(accumulate(reversed(spec.shape[1:]), lambda step, size: step * size, initial=1))[::-1]
    storage = (
        b"(" + _text("storage") + _name("torch", _STORAGES[spec.dtype]) + _text(str(number)) + _text("cpu")
        + _number(prod(spec.shape)) + b"tQ"
    )  # fmt: skip
    shape = _numbers(spec.shape) + _numbers(strides if spec.shape else ())
    hooks = _name("collections", "OrderedDict") + b")R"
    return _name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + _number(0) + shape + b"\x89" + hooks + b"tR"


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _number(number: int) -> bytes:
    return b"\x8a\x09" + number.to_bytes(9, "little")


def _numbers(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t"
