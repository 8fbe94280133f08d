"""List the tensors that pickles of torch describe, with their positions. Imports neither torch nor shardconv.

A script that runs in a process of its own, so that a damaged pickle cannot crash the caller. It reads lines of JSON
with requests from stdin. Each is the name of a function in :data:`LISTS`, the number of a file, and a range of its
bytes. It writes lines of JSON to stdout: for each request the result, or a ``problem`` with its ``remedy``, and before
the result of a checkpoint's metadata a line for each tensor. It opens no files: after a line with ranges of files, it
reads their bytes from stdin. Nothing in a pickle is executed: the few names that it may contain stand for functions of
this module, which keep their arguments, and any other name is refused.
"""

import errno
import io
import json
import pickle
import re
import resource
import signal
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple, Self

#: The dtypes that safetensors files have, too: name in torch to name there, and the bytes of an element.
DTYPES = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "int16": ("I16", 2), "uint16": ("U16", 2),
    "int32": ("I32", 4), "uint32": ("U32", 4), "int64": ("I64", 8), "uint64": ("U64", 8), "float16": ("F16", 2),
    "bfloat16": ("BF16", 2), "float32": ("F32", 4), "float64": ("F64", 8), "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1), "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}  # fmt: skip
#: The dtype of each class of storages, and the bytes of an element of further dtypes.
STORAGES = {
    "Untyped": "uint8", "Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32",
    "Long": "int64", "Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128", "QInt8": "qint8", "QUInt8": "quint8",
    "QInt32": "qint32",
}  # fmt: skip
_OTHER_BYTES = {"complex128": 16, "qint8": 1, "quint8": 1, "qint32": 4}
#: Names of the entry of a training checkpoint that has the weights.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
#: Names of the other entries of a training checkpoint that hold tensors.
TRAINER_STATE = re.compile(r"optim|sched|scaler|rng_state|callbacks|loops")
#: Maximum bytes of a pickle, which is read into memory, and of the memory of the process: a short pickle may use more.
MAX_PICKLE_BYTES, _MAX_MEMORY_BYTES = 2**28, 2**33
#: Maximum seconds of CPU time for a request, and more per MiB of its file: a short pickle may take years.
_MAX_SECONDS, _SECONDS_PER_MIB = 5, 2
#: Maximum dims of a tensor, and characters of a name.
_MAX_DIMS, _MAX_CHARACTERS = 64, 2**12
#: Maximum size of the list of tensors, per byte of its file: a short pickle may repeat long objects. Valid metadata has
#: three, if each chunk has a file name of 255 characters.
_MAX_LISTED = 4
#: The size of an item in the list of tensors, without its characters, and with each number.
_ITEM_SIZE, _NUMBER_SIZE = 64, 8
#: Bytes at each end of a file or chunk.
_END_BYTES = 2**11
#: The number of files or chunks whose ends are fetched together.
NUM_TOGETHER = 64
#: Bytes that are fetched at once elsewhere.
_BUFFER_BYTES = 2**16
#: The first objects in a file of torch before 1.6.
_MAGIC_NUMBER, _PROTOCOL_VERSION = 0x1950A86A20F9469CFC6C, 1001

_SAVE_AGAIN = "save its tensors again with torch.save"
_SAVE_ALONE = "save the state dict alone"
_DAMAGED = "download or save it again"
_SAVE_CHECKPOINT = "save the checkpoint again"


class RefusedError(Exception):
    """A file that is refused: the problem and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


# --- files ----------------------------------------------------------------------------------------------------------


def fetch(ranges: list[tuple[int, int, int]]) -> list[bytes]:
    """The bytes of ranges, each the number of a file, its start and stop, which the parent process reads."""
    if ranges:
        write({"ranges": ranges})
    return [sys.stdin.buffer.read(stop - start) for _, start, stop in ranges]


def ends(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The first and the last bytes of each range of a file, as two ranges."""
    return [
        (number, at, min(at + _END_BYTES, stop))
        for number, start, stop in ranges
        for at in (start, max(start, stop - _END_BYTES))
    ]


def write(line: Mapping[str, object]) -> None:
    """Write a line to the parent process."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()  # if a later file crashes the process, the others are known


class _Ranges(io.RawIOBase):
    """The bytes of a :class:`File`."""

    def __init__(self, number: int, size: int, parts: Mapping[int, bytes]) -> None:
        super().__init__()
        self._number, self._size, self._parts, self._at = number, size, parts, 0

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def seekable(self) -> bool:
        """Whether it has positions."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "the position is before the start of the file")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        """Read some bytes from the position on."""
        stop = max(self._at, min(self._at + len(buffer), self._size))
        data = self._held(self._at, stop) or self.read_ranges([(self._at, stop)])[0]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def read_ranges(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """The bytes of ranges, each a start and a stop."""
        if any(not 0 <= start <= stop <= self._size for start, stop in ranges):
            raise EOFError
        found = {one: data for one in ranges if len(data := self._held(*one)) == one[1] - one[0]}
        missing = [one for one in ranges if one not in found]
        found |= zip(missing, fetch([(self._number, *one) for one in missing]), strict=True)
        return [found[one] for one in ranges]

    def _held(self, start: int, stop: int) -> bytes:
        """Bytes from ``start`` on, at most to ``stop``, that were fetched already."""
        held = (data[start - first : stop - first] for first, data in self._parts.items() if first <= start)
        return next(filter(None, held), b"")


class File(io.BufferedReader):
    """A file that the parent process reads, or its bytes up to the end of a chunk, where zipfile finds an archive.

    Args:
        number: of the file.
        size: the number of its bytes, or of those up to the end of the chunk.
        parts: start to bytes of ranges that were fetched already.
    """

    def __init__(self, number: int, size: int, parts: Mapping[int, bytes]) -> None:
        self.size, self._ranges = size, _Ranges(number, size, parts)
        super().__init__(self._ranges, _BUFFER_BYTES)

    def read_ranges(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """The bytes of ranges, each a start and a stop, which are read together."""
        return self._ranges.read_ranges(ranges)


# --- objects in pickles ---------------------------------------------------------------------------------------------


class Record:
    """An object of any class that does not matter here: its state, without the arguments of its class.

    Attributes:
        names: of the attributes, if the state is a dict; records with equal names share them.
        state: the values of the attributes, or a state that is not a dict.
    """

    names: tuple[object, ...]
    state: object

    __slots__ = ("names", "state")

    def __new__(cls, *_: object, **__: object) -> Self:
        """Make a record; called by the unpickler."""
        record = super().__new__(cls)
        record.names, record.state = (), None
        return record

    def __setstate__(self, state: object) -> None:
        """Store a state; called by the unpickler."""
        self.state = state
        if isinstance(state, dict):
            self.names, self.state = shared(state), tuple(state.values())

    def get(self, key: str) -> object:
        """The value of an attribute; None if there is none."""
        return dict(self.items()).get(key)

    def items(self) -> Iterator[tuple[object, object]]:
        """The names and values of the attributes."""
        return zip(self.names, self.state if isinstance(self.state, tuple) else (), strict=False)


class AnyRecord(Record):
    """An object of any class, or the result of any function, without the items that it has as a dict or list."""

    __slots__ = ()

    def __call__(self, *_: object, **__: object) -> Self:
        """Stands for a call of the object; called by the unpickler."""
        return self

    def __setitem__(self, key: object, value: object) -> None:
        """Leave out an item of a dict; called by the unpickler."""

    def append(self, item: object) -> None:
        """Leave out an item of a list; called by the unpickler."""


_SHARED: dict[tuple[object, ...], tuple[object, ...]] = {}


def shared(values: Iterable[object]) -> tuple[object, ...]:
    """A tuple. Equal ones are one object, as metadata has many; stands for ``torch.Size``."""
    found = tuple(values)
    return _SHARED.setdefault(found, found)


class Storage(NamedTuple):
    """A storage, by its key in the file, with the dtype that a tensor has in it."""

    key: object
    dtype: str


class Tensor(NamedTuple):
    """A tensor, as a pickle describes it.

    Attributes:
        storage: the storage.
        offset: of its first element in the storage, in elements.
        shape: its shape.
        strides: for each dim the distance of its indices, in elements.
        dtype: its dtype, if it differs from the storage's.
        kind: the reason why it cannot be read as a dense tensor; empty if it can.
    """

    storage: Storage
    offset: object
    shape: object
    strides: object
    dtype: str = ""
    kind: str = ""


def _numbers(value: object) -> list[int]:
    if isinstance(value, tuple) and len(value) > _MAX_DIMS:
        raise RefusedError(f"has {len(value)} sizes or offsets of a tensor (expected at most {_MAX_DIMS})", _DAMAGED)
    if not isinstance(value, tuple) or not all(type(number) is int and 0 <= number < 2**63 for number in value):
        raise RefusedError(f"has sizes or offsets that are not numbers (got {_shown(value)})", _DAMAGED)
    return list(value)


def _shown(value: object) -> str:
    """A value for a message. Of nested objects only the type: a short pickle may have one whose text is very long."""
    return f"{value!r:.100}" if isinstance(value, str | int) else f"a {type(value).__name__}"


def _text(value: object) -> str:
    if not isinstance(value, str | int):
        raise RefusedError(f"has a name that is not text (got {_shown(value)})", _DAMAGED)
    text = str(value)
    if len(text) > _MAX_CHARACTERS:
        raise RefusedError(f"has a name of {len(text)} characters (expected at most {_MAX_CHARACTERS})", _DAMAGED)
    return text


def tensor(storage: Storage, offset: object, shape: object, strides: object, *rest: object) -> Tensor:
    """Stands for ``_rebuild_tensor`` and ``_rebuild_tensor_v2`` of torch."""
    flags = rest[2] if len(rest) > 2 else None
    return Tensor(storage, offset, shape, strides, kind="view" if flags else "")


def tensor_of_dtype(storage: Storage, offset: object, shape: object, strides: object, *rest: Any) -> Tensor:
    """Stands for ``_rebuild_tensor_v3``, of tensors whose dtype no class of storages has."""
    dtype, flags = rest[2], rest[3] if len(rest) > 3 else None
    return Tensor(storage, offset, shape, strides, dtype.removeprefix("torch."), "view" if flags else "")


def parameter(data: object, *_: object) -> object:
    """Stands for ``_rebuild_parameter`` and ``_rebuild_parameter_with_state``."""
    return data


def tensor_of_type(function: Any, _type: object, arguments: Any, _state: object) -> object:
    """Stands for ``_rebuild_from_type_v2``, of tensors with attributes."""
    return function(*arguments)


def other_tensor(kind: object, *_: object) -> Tensor:
    """Stands for functions that make tensors which are not dense; of a sparse one, the first argument is its layout."""
    is_layout = isinstance(kind, str) and kind.startswith("torch.sparse")
    return Tensor(Storage(None, "uint8"), 0, (), (), kind=str(kind) if is_layout else "another kind of tensor")


def layout(name: object) -> object:
    """Stands for ``_get_layout``, whose argument is the name of a layout."""
    return name


def encode(text: str, _encoding: object) -> bytes:
    """Stands for ``codecs.encode``, by which early protocols store bytes."""
    return text.encode("latin-1")


def memory_format(_value: object) -> str:
    """A text instead of a memory format. All tensors of a checkpoint are contiguous."""
    return "memory format"


#: The names of the members of :func:`memory_format`.
MEMORY_FORMATS = frozenset({"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"})


def enum_member(enum: object, name: object) -> str:
    """The name in ``getattr(enum, name)``: Python before 3.11.4 pickles members of enums as this call.

    Raises:
        RefusedError: for any other call of ``getattr``.
    """
    if enum is not memory_format or type(name) is not str or name not in MEMORY_FORMATS:
        raise RefusedError(
            f"asks for builtins.getattr of {_shown(name)}, and nothing in it is executed", _SAVE_CHECKPOINT
        )
    return name


#: The allowed names in files of torch.save: module and name to the replacement.
FILE_NAMES: dict[tuple[str, str], object] = {
    **{("torch._utils", f"_rebuild_tensor{version}"): tensor for version in ("", "_v2")},
    ("torch._utils", "_rebuild_tensor_v3"): tensor_of_dtype,
    **{("torch._utils", f"_rebuild_parameter{rest}"): parameter for rest in ("", "_with_state")},
    **{
        ("torch._utils", f"_rebuild_{kind}"): other_tensor
        for kind in (
            "sparse_tensor", "qtensor", "nested_tensor", "meta_tensor_no_storage", "wrapper_subclass",
            "device_tensor_from_cpu_tensor", "device_tensor_from_numpy",
        )
    },
    ("torch._tensor", "_rebuild_from_type_v2"): tensor_of_type,
    ("torch.nn.parameter", "Parameter"): "Parameter",
    ("torch", "Size"): tuple,
    ("torch", "device"): Record,
    ("torch.serialization", "_get_layout"): layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): dict,
    **{(module, one.__name__): one for module in ("builtins", "__builtin__") for one in (set, complex, bytearray)},
    ("_codecs", "encode"): encode,
}  # fmt: skip
#: The classes in the metadata of torch.distributed.checkpoint whose objects are records, by module.
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta",
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties",),  # before torch 2.3
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath",),
}  # fmt: skip
#: The allowed names in this metadata.
METADATA_NAMES: dict[tuple[str, str], object] = {
    **{(module, name): Record for module, names in _RECORDS.items() for name in names},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): memory_format,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): memory_format,
    ("torch", "Size"): shared,
    ("builtins", "getattr"): enum_member,
}
#: The modules of classes whose objects in files of torch.save are settings and states of training: they are records.
_INERT = re.compile(r"(argparse|numpy|megatron|transformer_engine|signal|pathlib)(\..+)?")
#: Names of torch that stand for themselves, as texts: dtypes and classes of storages.
_TEXTS = re.compile(r"(q?u?int|b?float|complex|bool|per_)\w*|strided|\w*(Storage|Tensor|_format)")


class Unpickler(pickle.Unpickler):
    """Reads a pickle in which only some names may be.

    Args:
        file: is read from its position to the end of the pickle.
        names: the allowed names: module and name to the replacement.
        refused: the problem and the remedy of another name, which is put into ``{}``.
        others: stands for all names that are not allowed; None to refuse them, but those of :data:`_INERT`.

    Attributes:
        item_bytes: for each key of a storage the bytes of an element.
    """

    def __init__(
        self,
        file: BinaryIO,
        names: Mapping[tuple[str, str], object],
        refused: tuple[str, str],
        others: type[Record] | None = None,
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self._names, self._refused, self._others = names, refused, others
        self.item_bytes: dict[object, int] = {}

    def find_class(self, module: str, name: str) -> object:
        """The object instead of a name.

        Raises:
            RefusedError: if it must not be in the pickle.
        """
        if (found := self._names.get((module, name))) is not None:
            return found
        if module in {"torch", "torch.cuda", "torch.storage"} and _TEXTS.fullmatch(name):
            return f"torch.{name}"  # a text cannot be called
        if self._others is not None:
            return self._others
        if self._names is FILE_NAMES and _INERT.fullmatch(module):
            return Record
        problem, remedy = self._refused
        raise RefusedError(problem.format(f"{module}.{name}"), remedy)

    def persistent_load(self, saved_id: Any) -> Storage:  # Any: whatever a pickle holds
        """The storage with an id."""
        if self._names is not FILE_NAMES:
            raise RefusedError("refers to objects outside of it", _SAVE_CHECKPOINT)
        _, kind, key, _, _, *view = saved_id
        if any(view):
            raise RefusedError("its storages are views of other storages", _SAVE_AGAIN)
        dtype = STORAGES[kind.removeprefix("torch.").removesuffix("Storage")]
        storage = Storage(_text(key), dtype)
        self.item_bytes.setdefault(storage.key, _OTHER_BYTES.get(dtype) or DTYPES[dtype][1])
        return storage


_ASKS = (
    "its pickle asks for {} (expected only tensors and plain containers), and nothing in a pickle is executed",
    f"if you trust the file, load it with torch and {_SAVE_AGAIN}",
)
_METADATA_ASKS = ("asks for {}, and nothing in it is executed", _SAVE_CHECKPOINT)


# --- files of torch.save --------------------------------------------------------------------------------------------


class Position(NamedTuple):
    """A range of bytes of a file."""

    offset: int
    size: int


#: The lines that a function of :data:`LISTS` yields, as JSON objects.
Listed = Iterator[Mapping[str, object]]
#: The contents of a file: the unpickled object, and the position of each storage by its key.
Contents = tuple[object, dict[object, Position]]


def read_zip(file: File, others: type[Record] | None = None) -> Contents:
    """Read a file of torch 1.6 or later: a zip archive with a pickle and one entry per storage.

    Args:
        file: the file.
        others: see :class:`Unpickler`.
    """
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) != len(archive.infolist()):
            raise RefusedError("has two entries of the same name", _SAVE_AGAIN)
        roots = [name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") for name in entries):
            raise RefusedError("is a TorchScript archive, which contains code", "save the state_dict() of its module")
        if len(roots) != 1:
            raise RefusedError(
                f"is not a zip archive of torch.save (got {len(roots)} data.pkl, expected one)", _SAVE_AGAIN
            )
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries.values()):
            raise RefusedError("is compressed or encrypted", _SAVE_AGAIN)
        order = entries.get(f"{roots[0]}byteorder")
        _check_byte_order(is_little=order is None or _read(archive, order) == b"little")
        data = _read(archive, entries[f"{roots[0]}data.pkl"])
        unpickler = Unpickler(io.BytesIO(data), FILE_NAMES, _ASKS, others)
        loaded = unpickler.load()
    return loaded, _data_positions(file, {key: entries[f"{roots[0]}data/{key}"] for key in unpickler.item_bytes})


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Read an entry that is small in files of torch.save."""
    if entry.file_size > MAX_PICKLE_BYTES:
        raise RefusedError(
            f"{entry.filename} is too large (got {entry.file_size} bytes, expected at most {MAX_PICKLE_BYTES})",
            _SAVE_AGAIN,
        )
    return archive.read(entry)


def _data_positions(file: File, entries: Mapping[object, zipfile.ZipInfo]) -> dict[object, Position]:
    """The positions of the data of zip entries, behind their local headers."""
    starts = [entry.header_offset for entry in entries.values()]
    headers = file.read_ranges([(start + 26, start + 30) for start in starts])  # sizes of the name and extra fields
    return {
        key: Position(start + 30 + sum(struct.unpack("<HH", header)), entry.file_size)
        for (key, entry), start, header in zip(entries.items(), starts, headers, strict=True)
    }


def read_legacy(file: File) -> Contents:
    """Read a file of torch before 1.6: five pickles, then the number of elements and the data of each storage."""
    unpicklers = [Unpickler(file, FILE_NAMES, _ASKS) for _ in range(5)]
    if unpicklers[0].load() != _MAGIC_NUMBER or unpicklers[1].load() != _PROTOCOL_VERSION:
        raise RefusedError("is not a file of torch.save", _DAMAGED)
    system = unpicklers[2].load()
    _check_byte_order(is_little=isinstance(system, dict) and system.get("little_endian") is True)
    loaded, keys = unpicklers[3].load(), unpicklers[4].load()
    positions: dict[object, Position] = {}
    for key in map(_text, keys if isinstance(keys, list) else []):
        (count,) = struct.unpack("<q", file.read(8))
        positions[key] = Position(file.tell(), count * unpicklers[3].item_bytes[key])
        file.seek(positions[key].size, io.SEEK_CUR)
    return loaded, positions


def _check_byte_order(*, is_little: bool) -> None:
    if not is_little:
        raise RefusedError("was written on a big-endian machine", "load it with torch.load and save it again")


def find_weights(loaded: object) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of the state dict in a file, and the names of all other entries, which hold no weights.

    The state dict is the saved object, or an entry of it.
    """
    if not isinstance(loaded, dict):
        raise RefusedError(f"holds a {type(loaded).__name__} (expected a dict of tensors)", _SAVE_ALONE)
    tensors, others = _split(loaded)
    if tensors or not loaded:
        _check_others(others, None)
        return tensors, [_key(name) for name in others]
    wrapper = _wrapper(others)
    tensors, inner = _split(others.pop(wrapper))
    _check_others(inner, None)
    _check_others(others, TRAINER_STATE)
    return tensors, [*map(_key, others), *(f"{wrapper}.{_key(name)}" for name in inner)]


def _key(key: object) -> str:
    """The name of an entry."""
    return key if isinstance(key, str) else _shown(key)


def _split(entries: dict[Any, Any]) -> tuple[dict[Any, Tensor], dict[Any, Any]]:  # Any: whatever a pickle holds
    """The entries that are tensors, and the others."""
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in entries.items() if name not in tensors}


def _wrapper(entries: dict[Any, Any]) -> str:  # Any: whatever a pickle holds
    """The name of the entry that is the state dict."""
    found = [name for name in WRAPPERS if isinstance(entries.get(name), dict) and any(_split(entries[name])[0])]
    if len(found) != 1:
        raise RefusedError(
            f"does not hold one state dict (got entries {', '.join(map(_key, entries))[:200] or 'none'}, expected "
            f"tensors, or one of {', '.join(WRAPPERS)})",
            _SAVE_ALONE,
        )
    return found[0]


def _check_others(others: dict[Any, Any], known: re.Pattern[str] | None) -> None:  # Any: whatever a pickle holds
    """Refuse entries that may hold weights."""
    for name, value in others.items():
        if not (known and known.search(_key(name))) and _holds_tensors(value):
            raise RefusedError(
                f"entry {_shown(name)} holds tensors, but is not one (got {type(value).__name__})", _SAVE_ALONE
            )


def _holds_tensors(value: object) -> bool:
    """Whether there is a tensor in nested containers, which may contain themselves."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            return True
        if isinstance(item, Record):
            pending.append(item.state)
        elif isinstance(item, dict | list | tuple | set) and id(item) not in seen:
            seen.add(id(item))
            pending.extend(item.values() if isinstance(item, dict) else item)
    return False


def describe(name: object, found: Tensor, positions: Mapping[object, Position]) -> list[object]:
    """Name, dtype, shape, strides and position of a tensor."""
    if not isinstance(name, str) or not name.isprintable() or name == "__metadata__":  # not a tensor in safetensors
        raise RefusedError(f"tensor {_shown(name)} does not have a valid name", _SAVE_AGAIN)
    if found.kind not in {"", "view"}:
        raise RefusedError(
            f"tensor {name} is not a plain dense tensor (got {found.kind})", f"{_SAVE_AGAIN}, as dense tensors"
        )
    torch_dtype, (offset,) = found.dtype or found.storage.dtype, _numbers((found.offset,))
    shape, strides = _numbers(found.shape), _numbers(found.strides)
    if len(shape) != len(strides):
        raise RefusedError("is damaged (a tensor has as many dims as it has strides)", _DAMAGED)
    if torch_dtype not in DTYPES or found.kind:
        shown = f"torch.{torch_dtype}" if torch_dtype not in DTYPES else "a conjugated or negated view"
        raise RefusedError(f"tensor {name} cannot be stored in safetensors (got {shown})", "save it in another dtype")
    position, (dtype, item_bytes) = positions[found.storage.key], DTYPES[torch_dtype]
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    start = offset * item_bytes
    if 0 not in shape and start + (last + 1) * item_bytes > position.size:
        raise RefusedError(f"tensor {name} is larger than its storage of {position.size} bytes", _DAMAGED)
    return [name, dtype, shape, strides, position.offset + start]


class _Size:
    """The size of the list of tensors, which is limited.

    Args:
        file: the file that lists them.
        remedy: for a file whose list is too large.
    """

    def __init__(self, file: File, remedy: str) -> None:
        self._size, self._most, self._remedy = 0, _MAX_LISTED * file.size, remedy

    def add(self, num_numbers: int, *texts: str) -> None:
        """Add an item.

        Raises:
            RefusedError: if the list is too large.
        """
        self._size += _ITEM_SIZE + _NUMBER_SIZE * num_numbers + sum(map(len, texts))
        if self._size > self._most:
            raise RefusedError(
                f"repeats names and sizes too often (expected a list of at most {self._most} bytes, {_MAX_LISTED} "
                "times its own)",
                self._remedy,
            )


def list_file(file: File) -> Listed:
    """List the tensors and other entries of a file.

    Raises:
        RefusedError: if it cannot be read.
        Exception: any other, if the pickle is damaged.
    """
    is_zip = file.peek(2).startswith(b"PK")
    loaded, positions = read_zip(file) if is_zip else read_legacy(file)
    tensors, left_out = find_weights(loaded)
    listed, size = [], _Size(file, _SAVE_AGAIN)
    for name, tensor in tensors.items():
        listed.append(describe(name, tensor, positions))
        size.add(len(_numbers(tensor.shape)) + len(_numbers(tensor.strides)), name)
    yield {"tensors": listed, "left_out": left_out}


def list_chunk(file: File) -> Listed:
    """List the tensor that was saved in a range of bytes of a file of torch.distributed.checkpoint; errors as above."""
    loaded, positions = read_zip(file)
    if not isinstance(loaded, Tensor):
        raise RefusedError(f"holds a {type(loaded).__name__} in a chunk (expected a tensor)", _SAVE_AGAIN)
    yield {"tensors": [describe("", loaded, positions)], "left_out": []}


#: Most characters of a word among arguments.
_MAX_WORD = 100


def list_arguments(file: File) -> Listed:
    """List the numbers and words among the arguments of the program that saved a file, its entry ``args``.

    Its other objects do not matter, whatever their classes are. Errors as above.
    """
    loaded = read_zip(file, AnyRecord)[0]
    found = loaded.get("args") if isinstance(loaded, dict) else None
    items = found.items() if isinstance(found, Record) else ()
    yield {"arguments": {name: value for name, value in items if isinstance(name, str) and _is_plain(value)}}


def _is_plain(value: object) -> bool:
    """Whether an argument is a number or a word."""
    if isinstance(value, str):
        return len(value) <= _MAX_WORD and value.isidentifier()
    return isinstance(value, int | float) and abs(value) < 2**63


# --- metadata of torch.distributed.checkpoint -----------------------------------------------------------------------

#: For each name and offsets in the tensor the file, offset in the file and number of bytes of a chunk.
Positions = dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]


def list_metadata(file: File) -> Listed:
    """List the tensors of a checkpoint and their chunks, and the paths of other entries; errors as above."""
    if file.size > MAX_PICKLE_BYTES:
        raise RefusedError(f"is too large (expected at most {MAX_PICKLE_BYTES} bytes)", _SAVE_CHECKPOINT)
    metadata = Unpickler(file, METADATA_NAMES, _METADATA_ASKS).load()
    entries = _dict(metadata.get("state_dict_metadata") if isinstance(metadata, Record) else None)
    paths = metadata.get("planner_data")
    positions = _positions(_dict(metadata.get("storage_data")))
    others, size = [], _Size(file, _SAVE_CHECKPOINT)
    for name, entry in entries.items():
        keys = _keys(name, paths)
        size.add(0, *keys)
        if isinstance(entry, Record) and entry.get("chunks") is not None:
            yield {"tensor": [[name, keys, *_chunked(name, entry, positions, size)]]}
        else:
            others.append(keys)
    yield {"others": others}


def _keys(name: object, paths: object) -> list[str]:
    """The keys of nested dicts that lead to an entry."""
    path = paths.get(name) if isinstance(paths, dict) else None
    if not isinstance(path, tuple) or not path:
        return [_text(name)]
    if len(path) > _MAX_DIMS:
        raise RefusedError(f"has an entry in {len(path)} nested dicts (expected at most {_MAX_DIMS})", _DAMAGED)
    return [_text(key) for key in path]


def _positions(storage: dict[object, object]) -> Positions:
    """The positions of chunks, without those of other entries, which do not have offsets in a tensor.

    Empties the dict, so that its records do not take memory beside the result.
    """
    found: Positions = {}
    while storage:
        index, info = storage.popitem()
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise RefusedError("does not have the positions of chunks in files", "it was written by another storage")
        if info.get("transform_descriptors"):
            raise RefusedError("its chunks are compressed or encrypted", "save the checkpoint without extensions")
        if (offset := index.get("offset")) is not None:
            start, size = _numbers((info.get("offset"), info.get("length")))
            found[_text(index.get("fqn")), tuple(_numbers(offset))] = _text(info.get("relative_path")), start, size
    return found


def _chunked(name: object, entry: Record, positions: Positions, size: _Size) -> list[object]:
    """The shape of a tensor, and the offsets, sizes and position of each chunk."""
    chunks = entry.get("chunks")
    if not isinstance(chunks, list) or not isinstance(name, str):
        raise RefusedError(f"entry {_shown(name)} is not a tensor with chunks", _SAVE_CHECKPOINT)
    listed = []
    for chunk in chunks:
        boxes = (chunk.get(key) if isinstance(chunk, Record) else None for key in ("offsets", "sizes"))
        offsets, sizes = map(_numbers, boxes)
        if (position := positions.get((name, tuple(offsets)))) is None:
            raise RefusedError(f"does not have the position of a chunk of {name}", _SAVE_CHECKPOINT)
        size.add(len(offsets) + len(sizes), position[0])
        listed.append([offsets, sizes, *position])
    shape = _numbers(entry.get("size"))
    size.add(len(shape))
    return [shape, listed]


def _dict(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise RefusedError("is not the metadata of torch.distributed.checkpoint", _SAVE_CHECKPOINT)
    return value


# --- the process ----------------------------------------------------------------------------------------------------

#: The functions that a request may name.
LISTS: dict[str, Callable[[File], Listed]] = {
    "file": list_file, "chunk": list_chunk, "metadata": list_metadata, "arguments": list_arguments,
}  # fmt: skip


def refusal(error: Exception) -> RefusedError:
    """The problem and the remedy of an error of the unpickler."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, zipfile.BadZipFile | EOFError | struct.error) or "truncated" in text:
        return RefusedError("is truncated or damaged", _DAMAGED)
    if isinstance(error, MemoryError):
        return RefusedError(f"needs more memory to list its tensors than {_MAX_MEMORY_BYTES} bytes", _DAMAGED)
    if isinstance(error, OSError):
        return RefusedError(f"cannot be read: {error.strerror or text}", "check the file")
    return RefusedError(f"is damaged, or not a file of torch.save ({type(error).__name__}: {text})", _DAMAGED)


def max_seconds(size: int) -> int:
    """Maximum seconds of CPU time for a request, by the bytes of the file."""
    return _MAX_SECONDS + _SECONDS_PER_MIB * min(size, MAX_PICKLE_BYTES) // 2**20


def answer(name: str, file: File) -> Listed:
    """The result of a request, or its error. The signal SIGPROF ends the process after :func:`max_seconds`."""
    signal.setitimer(signal.ITIMER_PROF, max_seconds(file.size))
    _SHARED.clear()
    try:
        yield from LISTS[name](file)
    except Exception as error:  # noqa: BLE001 - an unpickler raises any error for a damaged pickle
        refused = refusal(error)
        yield {"problem": str(refused), "remedy": refused.remedy}
    signal.setitimer(signal.ITIMER_PROF, 0)


def answers(requests: list[tuple[str, int, int, int]]) -> Listed:
    """The results of requests. The ends of several files or chunks are fetched together."""
    for first in range(0, len(requests), NUM_TOGETHER):
        some = requests[first : first + NUM_TOGETHER]
        wanted = ends(one[1:] for one in some)
        fetched = iter(zip(wanted, fetch(wanted), strict=True))
        for (name, number, _, stop), *both in zip(some, fetched, fetched, strict=True):
            yield from answer(name, File(number, stop, {at: data for (_, at, _), data in both}))


def limit_memory() -> None:
    """Make an allocation beyond the maximum an error."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = min([_MAX_MEMORY_BYTES, *([] if most == resource.RLIM_INFINITY else [most])])
    with suppress(ValueError):  # some systems do not have this limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


if __name__ == "__main__":
    limit_memory()
    for asked in iter(sys.stdin.buffer.readline, b""):
        for line in answers(json.loads(asked)):
            write(line)
