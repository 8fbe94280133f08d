"""New checkpoints of torch.distributed.checkpoint: the bytes around chunks in ``*.distcp`` files, and ``.metadata``.

A chunk is a file of torch.save inside of a file. ``.metadata`` is a pickle of classes of torch, which is written here
as data, without torch.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple, Self

from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.containers.torch_files import (
    TorchArchive,
    name_opcodes,
    number_opcodes,
    numbers_opcodes,
    text_opcodes,
)
from shardconv.files.containers.unpickle import DTYPES
from shardconv.files.folder import Compressed
from shardconv.plan.plan import TensorSpec

#: Chunks begin at multiples of this, so that chunks of one dtype and shape have the same bytes around their data.
_ALIGNMENT = 64
#: Bytes of opcodes that are compressed together.
_BLOCK_BYTES = 2**16


class ChunkPosition(NamedTuple):
    """A range of bytes of a file that holds a file of torch.save."""

    file: str
    offset: int
    size: int


class Frame(NamedTuple):
    """The bytes around the data of a chunk.

    Attributes:
        head: before it.
        tail: after it, with zeros up to the next chunk.
        size: bytes of the chunk, without these zeros.
    """

    head: bytes
    tail: bytes
    size: int


@cache
def frame(spec: TensorSpec) -> Frame:
    """The frame of a chunk of this dtype and shape."""
    archive = TorchArchive.of_tensor(spec)
    start, size = archive.offsets[""], archive.file_bytes
    parts = sorted(archive.pieces.items())
    head, tail = (b"".join(data for at, data in parts if (at < start) is is_head) for is_head in (True, False))
    assert (len(head), len(head) + num_bytes(*spec[:2]) + len(tail)) == (start, size)
    return Frame(head, tail + bytes(-size % _ALIGNMENT), size)


# --- the pickle of the metadata -------------------------------------------------------------------------------------

_METADATA = "torch.distributed.checkpoint.metadata"
#: The classes and functions in the pickle, by name, and their modules.
_MODULES = {
    **dict.fromkeys(
        (
            "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        ),
        _METADATA,
    ),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem", "_get_layout": "torch.serialization", "Size": "torch",
}  # fmt: skip
_NONE, _FALSE, _EMPTY_DICT, _EMPTY_LIST = b"N", b"\x89", b"}", b"]"


class _Entry(NamedTuple):
    """A tensor: the number of its name in the memo, its dtype and shape, and the opcodes of its chunks."""

    number: int
    spec: TensorSpec
    chunks: bytearray


class _Opcodes:
    """Opcodes in blocks, which are compressed, as those of many chunks take much memory."""

    def __init__(self) -> None:
        self._blocks: list[Compressed] = []
        self._open = bytearray()

    def __iadd__(self, opcodes: bytes) -> Self:
        self._open += opcodes
        if len(self._open) >= _BLOCK_BYTES:
            self._blocks.append(Compressed(self._open))
            self._open.clear()
        return self

    def parts(self) -> Iterator[bytes | Compressed]:
        """Yield the opcodes."""
        yield from self._blocks
        yield bytes(self._open)


class MetadataPickle:
    """The pickle in ``.metadata``, to which tensors and objects are added.

    Frequent objects are pushed once, at the beginning. Later they are taken from the unpickler's memo by number.
    """

    def __init__(self) -> None:
        self._count = 0
        self._known: dict[object, bytes] = {}
        self._tensors: dict[str, _Entry] = {}
        self._start, self._objects, self._stored = bytearray(b"\x80\x02"), _Opcodes(), _Opcodes()

    def add_chunk(
        self, name: str, spec: TensorSpec, offsets: tuple[int, ...], sizes: tuple[int, ...], position: ChunkPosition
    ) -> None:
        """Add a chunk of a tensor.

        Args:
            name: of the tensor.
            spec: its dtype and shape.
            offsets: of the chunk in the tensor.
            sizes: its shape.
            position: of its bytes.
        """
        if name not in self._tensors:
            self._tensors[name] = _Entry(self._number(), spec, bytearray())
        entry, offset = self._tensors[name], self._size(offsets)
        entry.chunks.extend(self._object("ChunkStorageMetadata", offsets=offset, sizes=self._size(sizes)))
        self._stored += self._index(entry.number, offset) + self._storage(position)

    def add_object(self, name: str, position: ChunkPosition) -> None:
        """Add an object, at a position that other objects may have, too."""
        number, kind = self._number(), "BytesStorageMetadata object"
        pushed = self._known.get(kind) or self._shared(kind, self._object("BytesStorageMetadata"))
        stored = self._known.get(position) or self._shared(position, self._storage(position))
        self._objects += _remembered(text_opcodes(name), number) + pushed
        self._stored += self._index(number, _NONE) + stored

    def parts(self) -> Iterator[bytes | Compressed]:
        """Yield the bytes of the pickle."""
        described = _Opcodes()
        for name, entry in self._tensors.items():
            before, after = self._tensor(entry)
            described += _remembered(text_opcodes(name), entry.number) + before + entry.chunks + after
        meta = self._object("StorageMeta", checkpoint_id=_NONE, save_id=_NONE, load_id=_NONE, modules=_EMPTY_LIST)
        start = self._name("Metadata") + b")\x81}(" + self._text("state_dict_metadata") + b"}("
        between = b"u" + self._text("storage_data") + b"}("
        end = b"u" + self._items(planner_data=_EMPTY_DICT, storage_meta=meta) + b"ub."
        before = bytes(self._start) + start
        yield from (before, *described.parts(), *self._objects.parts(), between, *self._stored.parts(), end)

    def _number(self) -> int:
        self._count += 1
        return self._count - 1

    def _shared(self, key: object, opcodes: bytes) -> bytes:
        """The opcodes that push the object of these opcodes from the memo; ``key`` identifies the object."""
        number = self._number()
        self._start += _remembered(opcodes, number) + b"0"
        self._known[key] = _memo_opcodes(b"hj", number)
        return self._known[key]

    def _name(self, name: str) -> bytes:
        return self._known.get((name,)) or self._shared((name,), name_opcodes(_MODULES[name], name))

    def _text(self, text: str) -> bytes:
        return self._known.get(text) or self._shared(text, text_opcodes(text))

    def _size(self, sizes: tuple[int, ...]) -> bytes:
        return self._known.get(sizes) or self._shared(sizes, self._call("Size", numbers_opcodes(sizes)))

    def _call(self, name: str, argument: bytes) -> bytes:
        """The opcodes that push the result of a call."""
        return self._name(name) + b"(" + argument + b"tR"

    def _object(self, name: str, **attributes: bytes) -> bytes:
        """The opcodes that push an object of a class, without a call of it."""
        return self._name(name) + b")\x81}(" + self._items(**attributes) + b"ub"

    def _items(self, **values: bytes) -> bytes:
        return b"".join(self._text(name) + value for name, value in values.items())

    def _index(self, number: int, offset: bytes) -> bytes:
        """The index of a chunk, or of an object; ``number`` is the number of its name in the memo."""
        return self._object("MetadataIndex", fqn=_memo_opcodes(b"hj", number), offset=offset, index=_NONE)

    def _storage(self, position: ChunkPosition) -> bytes:
        file, start, size = self._text(position.file), number_opcodes(position.offset), number_opcodes(position.size)
        return self._object("_StorageInfo", relative_path=file, offset=start, length=size)

    def _tensor(self, entry: _Entry) -> tuple[bytes, bytes]:
        """The opcodes before and after the chunks of a tensor."""
        properties, size = self._properties(entry.spec.dtype), self._size(entry.spec.shape)
        before, chunks = self._items(properties=properties, size=size), self._text("chunks")
        return self._name("TensorStorageMetadata") + b")\x81}(" + before + chunks + b"](", b"eub"

    def _properties(self, dtype: str) -> bytes:
        """The properties of tensors: dtype, layout, whether it has a gradient, memory format, whether it is pinned."""
        torch_dtype = next(name for name, (other, _) in DTYPES.items() if other == dtype)
        layout = self._call("_get_layout", text_opcodes("torch.strided"))
        memory = self._call("_MEM_FORMAT_ENCODING", number_opcodes(0))
        state = b"(" + name_opcodes("torch", torch_dtype) + layout + _FALSE + memory + _FALSE + b"t"
        return self._name("TensorProperties") + b")\x81" + state + b"b"


def _memo_opcodes(codes: bytes, number: int) -> bytes:
    """The opcodes for an object in the memo: the first code takes a number of one byte, the second a larger one."""
    is_small = number < 256
    return codes[:1] + bytes([number]) if is_small else codes[1:] + number.to_bytes(4, "little")


def _remembered(opcodes: bytes, number: int) -> bytes:
    """The opcodes that push an object, and remember it by a number."""
    return opcodes + _memo_opcodes(b"qr", number)
