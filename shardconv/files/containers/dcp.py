"""New checkpoints of torch.distributed.checkpoint: the chunks in ``*.distcp`` files, and ``.metadata``.

A chunk is a file of torch.save inside of a file. ``.metadata`` is a pickle of classes of torch, which is written here
as data, without torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.containers.torch_files import (
    TorchArchive,
    name_opcodes,
    number_opcodes,
    numbers_opcodes,
    text_opcodes,
)
from shardconv.files.containers.unpickle import DTYPES
from shardconv.plan.plan import TensorSpec

METADATA_NAME = ".metadata"
#: Chunks begin at multiples of this, so that chunks of one dtype and shape have the same bytes around their data.
_ALIGNMENT = 64


class ChunkPosition(NamedTuple):
    """A range of bytes of a file that holds a file of torch.save."""

    file: str
    offset: int
    size: int


class Chunk(NamedTuple):
    """A box of a tensor, and its position."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    position: ChunkPosition


class DcpTensor(NamedTuple):
    """A tensor with its chunks."""

    spec: TensorSpec
    chunks: list[Chunk]


class _Frame(NamedTuple):
    """The bytes before and after the data of a chunk."""

    head: bytes
    tail: bytes


@cache
def _frame(spec: TensorSpec) -> _Frame:
    archive = TorchArchive.of_tensor(spec)
    start = archive.offsets[""]
    parts = sorted(archive.pieces.items())
    head, tail = (b"".join(data for at, data in parts if (at < start) is is_head) for is_head in (True, False))
    assert (len(head), len(head) + num_bytes(*spec[:2]) + len(tail)) == (start, archive.file_bytes)
    return _Frame(head, tail)


@cache
def _joined(first: bytes, second: bytes) -> bytes:
    return first + second


@dataclass
class DcpFile:
    """A file of chunks that is laid out, chunk after chunk.

    Attributes:
        name: its name.
        size: bytes so far.
        literals: offset to bytes of everything but the data of chunks; equal ones are one object.
    """

    name: str
    size: int = 0
    literals: dict[int, bytes] = field(default_factory=dict)
    _literal: int = 0

    def add_tensor(self, spec: TensorSpec) -> tuple[int, ChunkPosition]:
        """Add a chunk of this dtype and shape; returns the offset of its data, and its position."""
        frame, start = _frame(spec), self.size
        self._add(frame.head)
        data = self.size
        self.size += num_bytes(spec.dtype, spec.shape)
        self._literal = self.size
        position = ChunkPosition(self.name, start, self.size + len(frame.tail) - start)
        self._add(_joined(frame.tail, bytes(-position.size % _ALIGNMENT)))
        return data, position

    def add_object(self, value: object) -> ChunkPosition:
        """Add an object of Python's own classes."""
        start, data = self.size, TorchArchive.of_object(value).data
        self._add(data)
        return ChunkPosition(self.name, start, len(data))

    def _add(self, data: bytes) -> None:
        """Add literal bytes, to literal bytes that end here."""
        self.literals[self._literal] = _joined(self.literals.get(self._literal, b""), data)
        self.size += len(data)


# --- the pickle of the metadata -------------------------------------------------------------------------------------

_METADATA = "torch.distributed.checkpoint.metadata"
#: The names in the pickle: name to module, in the order of the numbers under which the unpickler remembers them.
_MODULES = {
    "Metadata": _METADATA, "TensorStorageMetadata": _METADATA, "ChunkStorageMetadata": _METADATA,
    "BytesStorageMetadata": _METADATA, "TensorProperties": _METADATA, "MetadataIndex": _METADATA,
    "StorageMeta": _METADATA, "_MEM_FORMAT_ENCODING": _METADATA,
    "_StorageInfo": "torch.distributed.checkpoint.filesystem", "_get_layout": "torch.serialization", "Size": "torch",
}  # fmt: skip
_GET = {name: b"h" + bytes([number]) for number, name in enumerate(_MODULES)}
_NONE, _FALSE, _EMPTY_DICT, _EMPTY_LIST = b"N", b"\x89", b"}", b"]"


def metadata_pickle(tensors: Mapping[str, DcpTensor], objects: Mapping[str, ChunkPosition]) -> Iterator[bytes]:
    """Yield the bytes of ``.metadata``.

    Args:
        tensors: name to tensor.
        objects: name to the position of each object.
    """
    yield b"\x80\x02"
    for name, module in _MODULES.items():  # remembered, and removed from the stack
        yield name_opcodes(module, name) + b"q" + _GET[name][1:] + b"0"
    yield _GET["Metadata"] + b")\x81}(" + text_opcodes("state_dict_metadata") + b"}("
    for name, tensor in tensors.items():
        yield text_opcodes(name) + _tensor_metadata(tensor)
    for name in objects:
        yield text_opcodes(name) + _object("BytesStorageMetadata")
    yield b"u" + text_opcodes("storage_data") + b"}("
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            yield _stored(name, _size(chunk.offsets), chunk.position)
    for name, position in objects.items():
        yield _stored(name, _NONE, position)
    meta = _object("StorageMeta", checkpoint_id=_NONE, save_id=_NONE, load_id=_NONE, modules=_EMPTY_LIST)
    yield b"u" + _items(planner_data=_EMPTY_DICT, storage_meta=meta) + b"ub."


def _tensor_metadata(tensor: DcpTensor) -> bytes:
    chunks = (
        _object("ChunkStorageMetadata", offsets=_size(chunk.offsets), sizes=_size(chunk.sizes))
        for chunk in tensor.chunks
    )
    properties, listed = _properties(tensor.spec.dtype), _EMPTY_LIST + b"(" + b"".join(chunks) + b"e"
    return _object("TensorStorageMetadata", properties=properties, size=_size(tensor.spec.shape), chunks=listed)


def _stored(name: str, offset: bytes, position: ChunkPosition) -> bytes:
    """The item of a chunk or an object, with its position."""
    index = _object("MetadataIndex", fqn=text_opcodes(name), offset=offset, index=_NONE)
    file, start, size = position
    return index + _object(
        "_StorageInfo", relative_path=text_opcodes(file), offset=number_opcodes(start), length=number_opcodes(size)
    )


@cache
def _properties(dtype: str) -> bytes:
    """The properties of a tensor: its dtype, layout, whether it has a gradient, memory format, whether it is pinned."""
    torch_dtype = next(name for name, (other, _) in DTYPES.items() if other == dtype)
    layout, memory = (
        _call("_get_layout", text_opcodes("torch.strided")),
        _call("_MEM_FORMAT_ENCODING", number_opcodes(0)),
    )
    state = b"(" + name_opcodes("torch", torch_dtype) + layout + _FALSE + memory + _FALSE + b"t"
    return _GET["TensorProperties"] + b")\x81" + state + b"b"


@cache
def _size(sizes: tuple[int, ...]) -> bytes:
    return _call("Size", numbers_opcodes(sizes))


def _call(name: str, argument: bytes) -> bytes:
    """The opcodes that push the result of a call."""
    return _GET[name] + b"(" + argument + b"tR"


def _object(name: str, **attributes: bytes) -> bytes:
    """The opcodes that push an object of a class, without a call of it."""
    return _GET[name] + b")\x81}(" + _items(**attributes) + b"ub"


def _items(**values: bytes) -> bytes:
    return b"".join(text_opcodes(name) + value for name, value in values.items())
