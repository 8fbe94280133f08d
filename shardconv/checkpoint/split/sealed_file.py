"""JSON files of typed data that end with their own checksum: the manifests of checkpoints and of pipelines.

A file is written in one form only: in the order of the fields, without fields that have their default, without spaces,
and with the checksum of all other fields last. The tag of its class is the version of its format.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import xxhash
from msgspec import DecodeError, Struct, ValidationError, json
from msgspec.structs import replace

from shardconv import __version__
from shardconv.files.containers.safetensors import Header, parse_header
from shardconv.files.fileio import create
from shardconv.files.folder import AnyPath, RemotePath, file_bytes
from shardconv.support.errors import ShardconvError, SplitCheckpointError
from shardconv.support.structs import located

T = TypeVar("T", bound=Struct)
_MAX_BYTES = 2**30


class _Version(Struct):
    """The key that every version has."""

    format_version: int


def encode(data: Struct) -> bytes:
    """Encode data without its checksum; equal data have equal bytes."""
    return json.encode(data, enc_hook=_header_text)


def write_sealed(data: Struct, path: Path, *, mode: int) -> None:
    """Write a new file with the permissions ``mode`` before the umask; ``data`` has a field ``created_by``."""
    body = encode(replace(data, created_by=f"shardconv {__version__}"))
    with create(path, mode) as file:
        file.write(body[:-1] + _end(body))


def read_sealed(path: AnyPath, kind: type[T], check: Callable[[T], None], remedy: str) -> T:
    """Read and check a file, whose contents are untrusted.

    Args:
        path: the file.
        kind: the class of its data.
        check: raises ValueError or PlanError if fields do not fit together.
        remedy: the remedy for a file that cannot be used.

    Raises:
        FileNotFoundError, NotADirectoryError: if there is none.
        SplitCheckpointError: if it cannot be read or used.
    """
    try:
        data = _unseal(_read(path), kind)
        check(data)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise SplitCheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ShardconvError, ValueError, RecursionError) as error:
        reason, *own = error.args if isinstance(error, ShardconvError) else (error,)
        raise SplitCheckpointError(f"{path}: cannot be used: {reason}: {(own or [remedy])[0]}") from error
    return data


def _read(path: AnyPath) -> bytes:
    """The contents of a file.

    Raises:
        ValueError: if it cannot be one of these.
    """
    if not path.is_file() and path.exists():
        raise ValueError("it is not a regular file")  # reading a pipe could block forever
    if file_bytes(path) > _MAX_BYTES:
        raise ValueError("it is too large")
    return path.read_bytes() if not isinstance(path, RemotePath) else path.file.read_all(_MAX_BYTES)


def _unseal(text: bytes, kind: type[T]) -> T:
    """Decode the contents of a file.

    Raises:
        ValueError: if it is not of this kind and version, or was changed after it was written.
        SplitCheckpointError: if it is one of a later version.
        SourceError: if the header of a source file is not valid.
        PlanError: if the options of a plan contradict each other.
    """
    _check_version(text, int(kind.__struct_config__.tag or 0))
    end = text[-len(_end(b"")) :]
    body = bytearray(text)
    del text  # it may have many megabytes
    body[-len(end) :] = b"}"
    if end != _end(body):
        raise ValueError("it was changed after it was written (its checksum differs)")
    try:
        data = json.decode(body, type=kind, dec_hook=_header)
    except ValidationError as error:
        raise ValueError(located(error)) from error
    del body
    if end != _end(encode(data)):  # the decoder keeps the last of duplicated keys
        raise ValueError("it is not in the form that shardconv writes, for example because a key is duplicated")
    return data


def _end(body: bytes | bytearray) -> bytes:
    """The end of a file: the key of the checksum, which ``body`` does not have."""
    return b',"manifest_checksum":"%s"}' % xxhash.xxh3_128_hexdigest(body).encode()


def _check_version(text: bytes, expected: int) -> None:
    try:
        version = json.decode(text, type=_Version).format_version
    except ValidationError as error:
        raise ValueError("it is not a manifest of shardconv") from error
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is truncated or damaged ({error})") from error
    if version > expected:
        raise SplitCheckpointError(
            f"its format version is too new (got {version}, expected at most {expected})", "update shardconv"
        )
    if version != expected:
        raise ValueError(f"its format version is not supported (got {version}, expected {expected})")


def _header_text(header: object) -> str:
    """A header as it is stored."""
    assert isinstance(header, Header)
    return header.raw.decode()


def _header(kind: type, text: object) -> Header:
    if kind is not Header or not isinstance(text, str):
        raise ValueError(f"is {text!r:.60} (expected the text of a header)")
    return parse_header(text.encode(), None, Path("header"))
