"""List the tensors of PyTorch files, with their positions and without reading their data. Imports nothing of shardconv.

A script that runs in a process of its own, so that others do not import torch. It reads a JSON list of paths from
stdin, and writes a line of JSON for each file to stdout: its ``tensors`` and ``left_out`` entries, or a ``problem``
with its ``remedy``. torch's weights_only unpickler, which executes nothing in a pickle, makes the storages on the meta
device.
"""

import io
import json
import re
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch._weights_only_unpickler import Unpickler
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

#: The dtypes that safetensors files have, too, with their names there.
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
#: Names of the entry of a training checkpoint that has the weights.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
#: Names of the other entries of a training checkpoint that hold tensors.
TRAINER_STATE = re.compile(r"optim|sched|scaler|rng_state|callbacks|loops")
#: Maximum bytes of a pickle, which is read into memory.
MAX_PICKLE_BYTES = 2**28

_SAVE_AGAIN = "save its tensors again with torch.save"
_SAVE_ALONE = "save the state dict alone"
_DAMAGED = "download or save it again"


class RefusedError(Exception):
    """A file that is refused: the problem and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


class Position(NamedTuple):
    """A range of bytes of a file."""

    offset: int
    size: int


class Storages:
    """The storages of a file, without their data.

    Attributes:
        item_sizes: for each key the bytes of an element.
        keys: the keys of the storages.
    """

    def __init__(self) -> None:
        self.item_sizes: dict[object, int] = {}
        self.keys: dict[torch.UntypedStorage, object] = {}
        self._by_key: dict[object, torch.UntypedStorage] = {}

    def make(self, saved_id: Any) -> torch.TypedStorage:  # Any: whatever a pickle holds
        """Make the storage with an id of a pickle."""
        _, kind, key, _, size, *view = saved_id
        if any(view):
            raise RefusedError("its storages are views of other storages", _SAVE_AGAIN)
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if key not in self._by_key:
            storage = torch.UntypedStorage(size * dtype.itemsize, device="meta")
            self._by_key[key], self.keys[storage], self.item_sizes[key] = storage, key, dtype.itemsize
        return torch.storage.TypedStorage(wrap_storage=self._by_key[key], dtype=dtype, _internal=True)

    def unpickle(self, file: BinaryIO) -> object:
        """Read the next pickle in a file."""
        return _Unpickler(file, self).load()


class _Unpickler(Unpickler):
    """torch's weights_only unpickler, with storages without data."""

    def __init__(self, file: BinaryIO, storages: Storages) -> None:
        super().__init__(file, encoding="utf-8")
        self._storages = storages

    def persistent_load(self, pid: Any) -> torch.TypedStorage:  # Any: whatever a pickle holds
        """Return the storage with an id."""
        return self._storages.make(pid)


#: What a file holds: the unpickled object, its storages, and the position of each by its key.
Contents = tuple[object, Storages, dict[object, Position]]


def read_zip(file: BinaryIO) -> Contents:
    """Read a file of torch 1.6 or later: a zip archive with a pickle and one entry per storage."""
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
        storages = Storages()
        loaded = storages.unpickle(io.BytesIO(_read(archive, entries[f"{roots[0]}data.pkl"])))
    return loaded, storages, {key: _position(file, entries[f"{roots[0]}data/{key}"]) for key in storages.item_sizes}


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Read an entry that is small in files of torch.save."""
    if entry.file_size > MAX_PICKLE_BYTES:
        raise RefusedError(
            f"{entry.filename} is too large (got {entry.file_size} bytes, expected at most {MAX_PICKLE_BYTES})",
            _SAVE_AGAIN,
        )
    return archive.read(entry)


def _position(file: BinaryIO, entry: zipfile.ZipInfo) -> Position:
    """The position of the data of a zip entry, behind its local header."""
    file.seek(entry.header_offset + 26)
    name_size, extra_size = struct.unpack("<HH", file.read(4))
    return Position(entry.header_offset + 30 + name_size + extra_size, entry.file_size)


def read_legacy(file: BinaryIO) -> Contents:
    """Read a file of torch before 1.6: five pickles, then the number of elements and the data of each storage."""
    storages = Storages()
    if storages.unpickle(file) != MAGIC_NUMBER or storages.unpickle(file) != PROTOCOL_VERSION:
        raise RefusedError("is not a file of torch.save", _DAMAGED)
    system = storages.unpickle(file)
    _check_byte_order(is_little=isinstance(system, dict) and system.get("little_endian") is True)
    loaded, keys = storages.unpickle(file), storages.unpickle(file)
    positions = {}
    for key in keys if isinstance(keys, list) else []:
        (count,) = struct.unpack("<q", file.read(8))
        positions[key] = Position(file.tell(), count * storages.item_sizes[key])
        file.seek(positions[key].size, io.SEEK_CUR)
    return loaded, storages, positions


def _check_byte_order(*, is_little: bool) -> None:
    if not is_little:
        raise RefusedError("was written on a big-endian machine", "load it with torch.load and save it again")


def find_weights(loaded: object) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of the state dict in a file, and the names of all other entries, which hold no weights.

    The state dict is what was saved, or an entry of it.
    """
    if not isinstance(loaded, dict):
        raise RefusedError(f"holds a {type(loaded).__name__} (expected a dict of tensors)", _SAVE_ALONE)
    tensors, others = _split(loaded)
    if tensors or not loaded:
        _check_others(others, None)
        return tensors, [str(name) for name in others]
    wrapper = _wrapper(others)
    tensors, inner = _split(others.pop(wrapper))
    _check_others(inner, None)
    _check_others(others, TRAINER_STATE)
    return tensors, [*map(str, others), *(f"{wrapper}.{name}" for name in inner)]


def _split(entries: dict[Any, Any]) -> tuple[dict[Any, torch.Tensor], dict[Any, Any]]:  # Any: whatever a pickle holds
    """The entries that are tensors, and the others."""
    tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in entries.items() if name not in tensors}


def _wrapper(entries: dict[Any, Any]) -> str:  # Any: whatever a pickle holds
    """The name of the entry that is the state dict."""
    found = [name for name in WRAPPERS if isinstance(entries.get(name), dict) and any(_split(entries[name])[0])]
    if len(found) != 1:
        raise RefusedError(
            f"does not hold one state dict (got entries {', '.join(map(str, entries))[:200] or 'none'}, expected "
            f"tensors, or one of {', '.join(WRAPPERS)})",
            _SAVE_ALONE,
        )
    return found[0]


def _check_others(others: dict[Any, Any], known: re.Pattern[str] | None) -> None:  # Any: whatever a pickle holds
    """Refuse entries that may hold weights."""
    for name, value in others.items():
        if not (known and known.search(str(name))) and _holds_tensors(value):
            raise RefusedError(
                f"entry {name!r:.100} holds tensors, but is not one (got {type(value).__name__})", _SAVE_ALONE
            )


def _holds_tensors(value: object) -> bool:
    """Whether there is a tensor in nested containers, which may contain themselves."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            return True
        if isinstance(item, dict | list | tuple | set) and id(item) not in seen:
            seen.add(id(item))
            pending.extend(item.values() if isinstance(item, dict) else item)
    return False


def describe(name: object, tensor: torch.Tensor, contents: Contents) -> list[object]:
    """Name, dtype, shape, strides and position of a tensor."""
    _, storages, positions = contents
    if not isinstance(name, str) or not name.isprintable() or name == "__metadata__":  # not a tensor in safetensors
        raise RefusedError(f"tensor {name!r:.100} does not have a valid name", _SAVE_AGAIN)
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter} or tensor.layout != torch.strided:
        kind = type(tensor).__name__ if type(tensor) is not torch.Tensor else str(tensor.layout)
        raise RefusedError(
            f"tensor {name} is not a plain dense tensor (got {kind})", f"{_SAVE_AGAIN}, as dense tensors"
        )
    if tensor.dtype not in DTYPES or tensor.is_conj() or tensor.is_neg():
        dtype = tensor.dtype if tensor.dtype not in DTYPES else "a conjugated or negated view"
        raise RefusedError(f"tensor {name} cannot be stored in safetensors (got {dtype})", "save it in another dtype")
    position = positions[storages.keys[tensor.untyped_storage()]]
    start, item_size = tensor.storage_offset() * tensor.dtype.itemsize, tensor.dtype.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and start + (last + 1) * item_size > position.size:
        raise RefusedError(f"tensor {name} is larger than its storage of {position.size} bytes", _DAMAGED)
    return [name, DTYPES[tensor.dtype], list(tensor.shape), list(tensor.stride()), position.offset + start]


class Window(io.RawIOBase):
    """A range of bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def seekable(self) -> bool:
        """Whether it has positions."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        self._at = max(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence], 0)
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at

    def readinto(self, buffer: Any) -> int:  # Any: a writable buffer, without a type before Python 3.12
        """Read bytes from the position on."""
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(buffer), max(self._size - self._at, 0)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def list_chunk(path: Path, start: int, size: int) -> dict[str, object]:
    """The tensor that was saved in a range of bytes of a file of torch.distributed.checkpoint.

    Raises:
        RefusedError: if it is not a tensor.
        Exception: any other, if the pickle is damaged or not allowed.
    """
    with path.open("rb") as file:
        loaded, storages, positions = read_zip(io.BufferedReader(Window(file, start, size)))
    if not isinstance(loaded, torch.Tensor):
        raise RefusedError(f"holds a {type(loaded).__name__} at byte {start} (expected a tensor)", _SAVE_AGAIN)
    positions = {key: Position(start + position.offset, position.size) for key, position in positions.items()}
    return {"tensors": [describe("", loaded, (loaded, storages, positions))], "left_out": []}


def list_file(path: Path) -> dict[str, object]:
    """The tensors and other entries of a file.

    Raises:
        RefusedError: if it cannot be read.
        Exception: any other, if the pickle is damaged or not allowed.
    """
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
        file.seek(0)
        contents = read_zip(file) if is_zip else read_legacy(file)
    tensors, left_out = find_weights(contents[0])
    return {"tensors": [describe(*item, contents) for item in tensors.items()], "left_out": left_out}


def refusal(error: Exception) -> RefusedError:
    """The problem and the remedy of an error of torch's unpickler."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, RefusedError):
        return error
    if "Unsupported operand" in text:
        return RefusedError(
            f"its pickle is damaged, or of another protocol than torch.save writes by default ({text})",
            f"download it again, or if you trust it, load it with torch and {_SAVE_AGAIN}",
        )
    if isinstance(error, zipfile.BadZipFile | EOFError | struct.error):
        return RefusedError("is truncated or damaged", _DAMAGED)
    if isinstance(error, OSError):
        return RefusedError(f"cannot be read: {error.strerror or text}", "check the file")
    if needs := re.search(r"GLOBAL (\S+)", text):
        return RefusedError(
            f"its pickle asks for {needs[1]} (expected only tensors and plain containers), and nothing in a pickle is "
            f"executed",
            f"if you trust the file, load it with torch and {_SAVE_AGAIN}",
        )
    return RefusedError(f"is damaged, or not a file of torch.save ({type(error).__name__}: {text})", _DAMAGED)


def list_files(paths: Iterable[str | tuple[str, int, int]]) -> Iterator[dict[str, object]]:
    """The tensors and other entries of each file, or range of bytes of a file, or its error."""
    for path in paths:
        try:
            yield list_file(Path(path)) if isinstance(path, str) else list_chunk(Path(path[0]), *path[1:])
        except Exception as error:  # noqa: BLE001 - torch's unpickler raises any error for a damaged pickle
            refused = refusal(error)
            yield {"problem": str(refused), "remedy": refused.remedy}


if __name__ == "__main__":
    for listed in list_files(json.load(sys.stdin)):
        sys.stdout.write(json.dumps(listed) + "\n")
        sys.stdout.flush()  # if a later file crashes the process, the others are known
