"""List the contents of a checkpoint of torch.distributed.checkpoint (DCP) by its ``.metadata``. Imports no torch.

A script that runs in a process of its own, like ``torch_listing``. It reads a JSON path from stdin, and writes one JSON
object to stdout: ``tensors``, ``others`` (the paths of entries that are not tensors), or the ``error`` with its remedy.
``.metadata`` is a pickle of a protocol that torch's weights_only unpickler does not read. Here, all classes that it may
name become records that hold its values, and any other name is refused, so nothing in it is executed.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import BinaryIO, NoReturn, Self

#: The names that a ``.metadata`` file may contain: module, and name in it.
ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"), # before torch 2.3
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip
#: The enums of memory formats, which have the same members.
ENUMS = {
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
}
#: The names of their members.
MEMORY_FORMATS = frozenset({"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"})
_NOT_EXECUTED = "and nothing in it is executed: save the checkpoint again"
#: Maximum bytes of the file, which is read into memory.
MAX_BYTES = 2**28


class RefusedError(Exception):
    """A file that is refused. Its text has the problem and the remedy."""


class Record:
    """An object of any allowed class: its arguments and its state."""

    def __new__(cls, *arguments: object) -> Self:
        """Make a record; called by the unpickler."""
        record = object.__new__(cls)
        record.arguments = arguments
        record.state = {}
        return record

    arguments: tuple[object, ...]
    state: object

    def __init__(self, *arguments: object) -> None:
        """Ignore the arguments, which ``__new__`` stores."""

    def __setstate__(self, state: object) -> None:
        """Store a state; called by the unpickler."""
        self.state = state

    def get(self, key: str) -> object:
        """A value of the state; None if it does not have one."""
        return self.state.get(key) if isinstance(self.state, dict) else None


def memory_format(value: object) -> str:
    """A text in place of the memory format with a value. All tensors of a checkpoint are contiguous."""
    return f"memory format {value!r:.20}"


def enum_member(enum: object, name: object) -> str:
    """The name in ``getattr(enum, name)``: Python before 3.11.4 pickles members of enums as this call.

    Raises:
        RefusedError: for any other call of ``getattr``.
    """
    if enum is not memory_format or type(name) is not str or name not in MEMORY_FORMATS:
        raise RefusedError(f"asks for builtins.getattr of {name!r:.60}, {_NOT_EXECUTED}")
    return name


class MetadataUnpickler(pickle.Unpickler):
    """Reads a pickle in which classes become records."""

    def find_class(self, module: str, name: str) -> object:
        """The record for an allowed name.

        Raises:
            RefusedError: for any other name.
        """
        if (module, name) in ALLOWED:
            return Record
        if (module, name) in ENUMS:
            return memory_format
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name.isidentifier():
            return f"torch.{name}"  # a dtype; a text cannot be called
        raise RefusedError(f"asks for {module}.{name}, {_NOT_EXECUTED}")

    def persistent_load(self, _: object) -> NoReturn:
        """Refuse references to objects outside of the pickle."""
        raise RefusedError("refers to objects outside of it: save the checkpoint again")


def read_metadata(file: BinaryIO) -> dict[str, object]:
    """The tensors and other entries of a checkpoint."""
    metadata = MetadataUnpickler(file).load()
    entries = _dict(metadata.get("state_dict_metadata") if isinstance(metadata, Record) else None)
    paths = metadata.get("planner_data")
    positions = _positions(_dict(metadata.get("storage_data")))
    tensors, others = [], []
    for name, entry in entries.items():
        path = _path(name, paths)
        if isinstance(entry, Record) and entry.get("chunks") is not None:
            tensors.append({"name": name, "path": path, **_tensor(name, entry, positions)})
        else:
            others.append(path)
    return {"tensors": tensors, "others": others}


def _path(name: object, paths: object) -> list[str]:
    """The keys of nested dicts that lead to an entry."""
    path = paths.get(name) if isinstance(paths, dict) else None
    return [str(key) for key in path] if isinstance(path, tuple) and path else [str(name)]


def _positions(storage: dict[object, object]) -> dict[tuple[object, object], list[object]]:
    """For each name and offsets in the tensor the file, offset in the file and number of bytes of a chunk."""
    found = {}
    for index, info in storage.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise RefusedError("does not have the positions of chunks in files: it was written by another storage")
        if info.get("transform_descriptors"):
            raise RefusedError("its chunks are compressed or encrypted: save the checkpoint without extensions")
        numbers = _numbers((info.get("offset"), info.get("length")))
        found[index.get("fqn"), index.get("offset")] = [str(info.get("relative_path")), *numbers]
    return found


def _tensor(name: object, entry: Record, positions: dict[tuple[object, object], list[object]]) -> dict[str, object]:
    properties, chunks = entry.get("properties"), entry.get("chunks")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(chunks, list) or not isinstance(name, str):
        raise RefusedError(f"entry {name!r:.100} is not a tensor with chunks")
    listed = []
    for chunk in chunks:
        offsets, sizes = (chunk.get(key) if isinstance(chunk, Record) else None for key in ("offsets", "sizes"))
        if (position := positions.get((name, offsets))) is None:
            raise RefusedError(f"does not have the position of a chunk of {name}: save the checkpoint again")
        listed.append([_numbers(offsets), _numbers(sizes), *position])
    return {"dtype": str(dtype).removeprefix("torch."), "shape": _numbers(entry.get("size")), "chunks": listed}


def _dict(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise RefusedError("is not the metadata of torch.distributed.checkpoint: save the checkpoint again")
    return value


def _numbers(value: object) -> list[int]:
    if not isinstance(value, tuple) or not all(type(number) is int and 0 <= number < 2**63 for number in value):
        raise RefusedError(f"has sizes or offsets that are not numbers (got {value!r:.60}): save the checkpoint again")
    return list(value)


def list_metadata(path: Path) -> dict[str, object]:
    """The contents of a ``.metadata`` file, or its error."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RefusedError(f"is too large (expected at most {MAX_BYTES} bytes)")
        with path.open("rb") as file:
            return read_metadata(file)
    except RefusedError as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": f"cannot be read: {error.strerror or error}"}
    except Exception as error:  # noqa: BLE001 - the unpickler raises any error for a damaged pickle
        return {"error": f"is damaged ({type(error).__name__}: {error!s:.100}): copy the checkpoint again"}


if __name__ == "__main__":
    json.dump(list_metadata(Path(json.load(sys.stdin))), sys.stdout)
