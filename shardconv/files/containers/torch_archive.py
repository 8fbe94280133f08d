"""Files of torch.save whose tensors are written by the copy engine: a zip archive with known positions.

An archive has a pickle, which names the shapes and storages of the tensors, and an uncompressed entry for each storage,
aligned to 64 bytes as torch aligns it. The zip entries of storages store no CRC-32, which torch does not check, as with
``torch.serialization.set_crc32_options(False)``.
"""

import io
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.containers.unpickle import DTYPES, STORAGES
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError, option

#: The classes of storages of torch, by dtype of safetensors.
_STORAGES = {DTYPES[dtype][0]: f"{name}Storage" for name, dtype in STORAGES.items() if dtype in DTYPES}
_ALIGNMENT = 64
#: The id of the extra field that aligns the data of an entry.
_PADDING = 0x4246


class _Pieces(io.RawIOBase):
    """A file in memory that has only what is written, by its offset."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[int, bytes] = {}
        self._at = 0

    def write(self, data: Any) -> int:  # noqa: ANN401 - a type of bytes is in Python 3.12
        """Write at the position."""
        self.written[self._at] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        self._at = offset + (self._at if whence else 0)
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at


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
    def _laid_out(self) -> tuple[_Pieces, dict[str, int]]:
        """The file without the tensors, and the offset of each."""
        pieces, offsets = _Pieces(), {}
        with zipfile.ZipFile(pieces, "w") as archive:
            for name, data in {"data.pkl": self._pickle(), "byteorder": b"little", "version": b"3\n"}.items():
                archive.writestr(zipfile.ZipInfo(f"{self.root}/{name}"), data)
            for number, (name, spec) in enumerate(self.tensors.items()):
                entry = zipfile.ZipInfo(f"{self.root}/data/{number}")
                entry.file_size = entry.compress_size = num_bytes(spec.dtype, spec.shape)
                entry.CRC, entry.header_offset = 0, pieces.tell()
                padding = -(entry.header_offset + len(entry.FileHeader()) + 4) % _ALIGNMENT
                entry.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
                pieces.write(entry.FileHeader())
                entry.extra = b""
                offsets[name] = pieces.tell()
                archive.filelist.append(entry)
                archive.start_dir = pieces.seek(entry.file_size, io.SEEK_CUR)
        return pieces, offsets

    @property
    def offsets(self) -> dict[str, int]:
        """Name to offset of the data of each tensor."""
        return self._laid_out[1]

    @property
    def pieces(self) -> Mapping[int, bytes]:
        """Offset to bytes of everything but the tensors."""
        return self._laid_out[0].written

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self._laid_out[0].tell()

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
