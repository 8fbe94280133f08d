"""Read, check and build headers of safetensors files (https://github.com/huggingface/safetensors#format).

Files are untrusted input: everything that the reference library refuses is refused here, too.
"""

import json
import re
import stat
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

from msgspec import Struct, convert
from msgspec.json import Decoder, encode

from shardconv.files.folder import START_BYTES, AnyPath, Compressed, RemotePath, text_problem
from shardconv.files.input_files import FileState, InputFile, open_input
from shardconv.plan.plan import TensorSpec, plain_spec
from shardconv.support.errors import SourceError, UsageError
from shardconv.support.structs import located

#: Bits per element of every dtype of the format, by its name in a header.
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

#: The floating-point dtypes that tensors can be converted from, and their names in configs.
FLOAT_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: The dtypes that tensors can be converted to, by their names as options.
TARGET_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

#: Maximum size of a header in bytes.
MAX_HEADER_BYTES = 100_000_000

#: The remedy for a damaged file.
_AGAIN = "download or copy it again"
_U64_MAX = 2**64 - 1
_LENGTH = struct.Struct("<Q")


class TensorInfo(NamedTuple):
    """Dtype and shape of one tensor of a file, and its byte range in the data section of the file.

    Its strides, in elements, are None if its bytes are contiguous, as in all safetensors files.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    strides: tuple[int, ...] | None = None

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape."""
        return plain_spec(self.dtype, self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        return self.stop - self.start


class TensorFile(NamedTuple):
    """A file with tensors, in any container.

    Attributes:
        path: its path.
        size: its size in bytes.
        tensors: name to tensor.
        data_offset: the offset in the file to which the positions of tensors are relative.
        prefix: its expected first bytes, if these have the positions; None if they have not.
        state: its state when its tensors were listed, if the prefix does not have their positions.
        left_out: names of entries that hold no weights, such as the epoch of a training checkpoint.
    """

    path: AnyPath
    size: int
    tensors: Mapping[str, TensorInfo]
    data_offset: int = 0
    prefix: Compressed | None = None
    state: FileState | None = None
    left_out: tuple[str, ...] = ()


class Header:
    """A checked header.

    Attributes:
        specs: name to dtype and shape of each tensor, in the order of the data, where one follows the other.
        metadata: the ``__metadata__`` strings of the file, or None.
        data_offset: offset of the data section in the file.
        data_bytes: bytes of the data section.
        prefix: the bytes of the file before its data section: the length of the JSON text, and this text.
    """

    specs: Mapping[str, TensorSpec]
    metadata: dict[str, str] | None
    data_offset: int
    data_bytes: int
    prefix: Compressed

    __slots__ = ("data_bytes", "data_offset", "metadata", "prefix", "specs")

    def __init__(
        self,
        raw: bytes | bytearray,
        specs: Mapping[str, TensorSpec],
        metadata: dict[str, str] | None,
        data_bytes: int,
    ) -> None:
        self.specs, self.metadata, self.data_bytes = specs, metadata, data_bytes
        self.data_offset = _LENGTH.size + len(raw)
        self.prefix = Compressed(_LENGTH.pack(len(raw)), raw)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Header) and self.prefix == other.prefix

    def __hash__(self) -> int:
        return hash(self.prefix)

    def raw(self) -> bytes:
        """The JSON text exactly as in the file, with its padding."""
        return self.prefix.raw()[_LENGTH.size :]

    def tensors(self) -> dict[str, TensorInfo]:
        """Name to tensor, in the order of the data; computed, as the positions of many tensors take much memory."""
        infos: dict[str, TensorInfo] = {}
        start = 0
        for name, (dtype, shape, _) in self.specs.items():
            stop = start + num_bytes(dtype, shape)
            infos[name] = TensorInfo(dtype, shape, start, stop)
            start = stop
        return infos

    def starts(self) -> dict[str, int]:
        """Name to offset in the file of each tensor; computed, as for :meth:`tensors`."""
        sizes = (num_bytes(dtype, shape) for dtype, shape, _ in self.specs.values())
        return dict(zip(self.specs, accumulate(sizes, initial=self.data_offset), strict=False))

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + self.data_bytes

    def file(self, path: AnyPath) -> TensorFile:
        """The file with this header."""
        return TensorFile(path, self.file_bytes, self.tensors(), self.data_offset, self.prefix)


def target_dtype(name: object) -> str:
    """The dtype in headers for a key of :data:`TARGET_DTYPES`.

    Raises:
        UsageError: if the name is unknown.
    """
    if not isinstance(name, str) or (target := TARGET_DTYPES.get(name)) is None:
        raise UsageError(f"dtype {name!r:.40} is unknown (expected one of {', '.join(TARGET_DTYPES)}): correct it")
    return target


def read_header(path: AnyPath) -> Header:
    """Read and check the header of the file at ``path``.

    Raises:
        SourceError: if it is not a regular file, or not a valid safetensors file.
    """
    try:
        if not isinstance(path, RemotePath) and not stat.S_ISREG(path.stat().st_mode):
            raise SourceError(f"{path}: is not a regular file")
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    with closing(open_input(path)) as file:
        raw = _read_raw(file, path)
        return parse_header(raw, file.size - _LENGTH.size - len(raw), path)


def header_bytes(file: InputFile) -> int:
    """Bytes of a file before its data section; 8 if the length of the header is not valid, 0 for a shorter file.

    Raises:
        SourceError: if the file cannot be read.
    """
    if file.size < _LENGTH.size:
        return 0
    length = _read_length(file)
    return _LENGTH.size + (length if length <= min(MAX_HEADER_BYTES, file.size - _LENGTH.size) else 0)


def _read_length(file: InputFile) -> int:
    prefix = memoryview(bytearray(_LENGTH.size))
    file.read(prefix, 0)
    length: int = _LENGTH.unpack(prefix)[0]
    return length


def _read_raw(file: InputFile, path: AnyPath) -> bytes:
    if file.size < _LENGTH.size:
        raise SourceError(f"{path}: is not a safetensors file (got {file.size} bytes, expected at least 8): {_AGAIN}")
    length = _read_length(file)
    if length > MAX_HEADER_BYTES:
        raise SourceError(f"{path}: {': '.join(_other_file(file, length))}")
    if _LENGTH.size + length > file.size:
        raise SourceError(
            f"{path}: is truncated (got {file.size} bytes, expected at least {_LENGTH.size + length}): {_AGAIN}"
        )
    raw = bytearray(length)
    file.read(memoryview(raw), _LENGTH.size)
    return bytes(raw)


def _other_file(file: InputFile, length: int) -> tuple[str, str]:
    """The problem and the remedy of a file whose first bytes are not the length of a header."""
    start = memoryview(bytearray(min(START_BYTES, file.size)))
    file.read(start, 0)
    not_safetensors = f"is not a safetensors file (got a header of {length} bytes, expected at most {MAX_HEADER_BYTES})"
    return text_problem(bytes(start)) or (not_safetensors, _AGAIN)


def parse_header(raw: bytes, data_bytes: int | None, path: AnyPath) -> Header:
    """Parse the JSON text of a header and check it against the size of the data section.

    Args:
        raw: the header without its length.
        data_bytes: bytes of the file after the header; None if they are not known.
        path: the file, for messages only.

    Raises:
        SourceError: if the header is not valid, or does not describe exactly ``data_bytes`` bytes.
    """
    try:
        entries, metadata = _parse_usual(raw) or _parse_strictly(raw)
        specs, size = _check(entries)
    except ValueError as error:
        raise SourceError(f"{path}: invalid safetensors header: {error!s:.300}: {_AGAIN}") from error
    if data_bytes is not None and size != data_bytes:
        kind = "truncated" if data_bytes < size else "longer than its header allows"
        raise SourceError(f"{path}: is {kind} (got {data_bytes} bytes of data, expected {size}): {_AGAIN}")
    return Header(raw, specs, metadata, size)


class _Entry(Struct, forbid_unknown_fields=True):
    """The entry of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _check(entries: Mapping[str, _Entry]) -> tuple[dict[str, TensorSpec], int]:
    """Check that each tensor is as long as its dtype and shape say, and follows the one before it.

    Returns:
        Name to dtype and shape, in the order of the data, and bytes of all tensors.
    """
    specs: dict[str, TensorSpec] = {}
    end, misplaced = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype, shape, (start, stop) = entry.dtype, entry.shape, entry.data_offsets
        if dtype not in DTYPE_BITS:
            raise ValueError(f"tensor {name!r} has unknown dtype {dtype!r}")
        if start < 0 or start + num_bytes(dtype, shape) != stop:
            raise ValueError(
                f"tensor {name!r}: data_offsets do not match its size (got bytes {start} to {stop}, expected "
                f"{num_bytes(dtype, shape)} bytes of {dtype} of shape {list(shape)})"
            )
        if start != end and not misplaced:  # reported last: the tensor that is wrong may be another one
            kind = "overlaps the previous tensor" if start < end else "leaves a gap after the previous tensor"
            misplaced = f"tensor {name!r} {kind} (got start {start}, expected {end})"
        specs[name], end = plain_spec(dtype, shape), stop
    if misplaced:
        raise ValueError(misplaced)
    return specs, end


_ENTRIES, _METADATA = Decoder(dict[str, _Entry]), Decoder(dict[str, str])
_METADATA_START = b'{"__metadata__":{'
#: Quotation marks of an entry, which has four keys and one string as a value, and of a string of metadata.
_QUOTES_OF_ENTRY, _QUOTES_OF_STRING = 10, 4


def _parse_usual(raw: bytes) -> tuple[dict[str, _Entry], dict[str, str] | None] | None:
    """Parse a header as libraries write it, with its metadata first or without any; None for all others.

    The decoder keeps the last of duplicated keys, which are found because they have more quotation marks.
    """
    if not raw.startswith(b"{"):
        return None
    metadata, text = None, raw
    try:
        if raw.startswith(_METADATA_START):
            before, end, after = raw.removeprefix(_METADATA_START).partition(b"},")
            text_of_metadata, text = b"{" + before + end[:1], b"{" + after
            metadata = _METADATA.decode(text_of_metadata)  # not JSON if the end was in a string
            if text_of_metadata.count(b'"') != _QUOTES_OF_STRING * len(metadata):
                return None
        entries = _ENTRIES.decode(text)
    except ValueError:
        return None
    has_duplicates = text.count(b'"') != _QUOTES_OF_ENTRY * len(entries)
    has_negative = b"-" in text and _MAYBE_NEGATIVE.search(text)
    if has_duplicates or not entries or "__metadata__" in entries or has_negative:
        return None
    return entries, metadata


def _parse_strictly(raw: bytes) -> tuple[dict[str, _Entry], dict[str, str] | None]:
    """Parse any header, with messages that name the problem."""
    entries = _parse_json(raw)
    metadata = _converted("__metadata__", entries.pop("__metadata__", None), dict[str, str] | None)
    return {name: _converted(f"tensor {name!r}", entry, _Entry) for name, entry in entries.items()}, metadata


def _converted(what: str, data: object, kind: Any) -> Any:  # noqa: ANN401 - a type, and a value of it
    try:
        return convert(data, kind)
    except ValueError as error:
        raise ValueError(f"{what}: {located(error)}") from error


#: A minus sign where a number may begin. Python parses -0 as 0, but the reference library refuses it.
_MAYBE_NEGATIVE = re.compile(rb"[\[,:]\s*-")


def _parse_json(raw: bytes) -> dict[str, object]:
    if not raw.startswith(b"{"):
        raise ValueError("it does not begin with {")
    try:
        parse_int = _parse_unsigned if _MAYBE_NEGATIVE.search(raw) else None  # slow, so only where it may matter
        entries = json.loads(
            raw.decode(), object_pairs_hook=_unique_keys, parse_int=parse_int, parse_constant=_refuse_constant
        )
        if b"\\u" in raw:
            json.dumps(entries, ensure_ascii=False).encode()  # refuses unpaired surrogates
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    assert isinstance(entries, dict)
    return entries


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {name!r} is duplicated")
    return result


def _parse_unsigned(text: str) -> int:
    value = int(text) if text.isdigit() and len(text) <= 20 else -1
    if not 0 <= value <= _U64_MAX:
        raise ValueError(f"{text[:40]} is not an unsigned 64-bit integer")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def build_header(tensors: Iterable[tuple[str, TensorSpec]], metadata: dict[str, str] | None) -> Header:
    """Build the header of a file with contiguous tensors.

    Args:
        tensors: the name of each with its dtype and shape, in the order of the data.
        metadata: the ``__metadata__`` strings of the file, or None.

    Raises:
        SourceError: if the header would be longer than the format allows.
    """
    specs: dict[str, TensorSpec] = {}
    end = 0
    raw = bytearray() if metadata is None else bytearray(encode({"__metadata__": metadata})[:-1])
    for name, (dtype, shape, _) in tensors:  # one by one, as all entries would take much memory
        start, end = end, end + num_bytes(dtype, shape)
        specs[name] = plain_spec(dtype, shape)
        raw += (b"," if raw else b"{") + encode({name: _Entry(dtype, shape, (start, end))})[1:-1]
    raw += b"}" if raw else b"{}"
    if len(raw) > MAX_HEADER_BYTES - 8:
        raise SourceError(
            f"header is too large (got {len(raw)} bytes, expected at most {MAX_HEADER_BYTES - 8}): use smaller metadata"
        )
    raw += b" " * (-len(raw) % 8)
    return Header(raw, specs, metadata, end)


def build_index(files: Iterable[tuple[str, Header]]) -> str:
    """The text of the index of files with these names and headers."""
    files = [*files]
    weight_map = {tensor: name for name, header in files for tensor in header.specs}
    total = sum(header.data_bytes for _, header in files)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


@lru_cache
def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor, checked as in the reference library: no intermediate product may exceed 64 bits.

    Raises:
        ValueError: if a product overflows, or if the tensor ends inside a byte.
    """
    total = 1
    for size in (*shape, DTYPE_BITS[dtype]):
        total *= size
        if not 0 <= size <= _U64_MAX or total > _U64_MAX:
            raise ValueError(f"shape {list(shape)} overflows")
    if total % 8:
        raise ValueError(f"{dtype} of shape {list(shape)} ends inside a byte")
    return total // 8


def total_bytes(specs: Iterable[tuple[str, tuple[int, ...], object]]) -> int:
    """Bytes of tensors, each with its dtype and shape first."""
    return sum(num_bytes(dtype, shape) for dtype, shape, *_ in specs)
