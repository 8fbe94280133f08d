"""PyTorch files (``torch.save``): list their tensors with their positions, and lay out new ones.

A child process unpickles the files (``unpickle``), so that their contents do not affect this process, which reads the
ranges that the child process asks for: the files may be remote. The positions are untrusted: they are checked against
the sizes of the files.
"""

import io
import json
import pickle
import signal
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import cached_property
from itertools import accumulate, islice
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

from msgspec import Struct

from shardconv.files.containers.safetensors import DTYPE_BITS, TensorFile, TensorInfo, num_bytes
from shardconv.files.containers.unpickle import DTYPES, NUM_TOGETHER, STORAGES, ends, max_seconds
from shardconv.files.folder import NUM_REQUESTS, START_BYTES, AnyPath, text_problem
from shardconv.files.input_files import FileState, InputFiles, file_states, open_file
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError, SourceError, option

if TYPE_CHECKING:
    from subprocess import Popen

#: The script of the child process, and lines that run it in the compiled form that Python keeps of modules.
SCRIPT = Path(__file__).with_name("unpickle.py")
_RUN_SCRIPT = """
import sys
from importlib.machinery import SourceFileLoader
exec(SourceFileLoader("__main__", sys.argv[1]).get_code("__main__"))
"""
_DAMAGED = "download or save it again"
_TRUNCATED = f"is truncated or damaged: {_DAMAGED}"
#: The first bytes of a zip archive, which torch.save writes since version 1.6, and bytes near the start of older files.
_ZIP, _LEGACY = b"PK\x03\x04", 0x1950A86A20F9469CFC6C.to_bytes(10, "little")


class TorchProblem(NamedTuple):
    """The reason for which a file cannot be read, and the remedy."""

    problem: str
    remedy: str


class TorchChunk(NamedTuple):
    """A range of bytes that :func:`torch.save` wrote a tensor to, with the number of its file."""

    file: int
    offset: int
    size: int


def read_torch_files(paths: Sequence[AnyPath]) -> list[TensorFile]:
    """List the tensors of files.

    Raises:
        SourceError: if a file cannot be read, or its pickle asks for anything but tensors.
    """
    return [_file_of(path, listed) for path, listed in zip(paths, list_torch_files(paths), strict=True)]


def read_torch_chunks(
    process: "UnpicklerProcess", files: Sequence[TensorFile], chunks: Sequence[TorchChunk]
) -> Iterator[TensorInfo]:
    """Yield the tensor in each range of bytes of these files.

    Unpickles only the first of several archives that differ only in the values of their tensor.

    Raises:
        SourceError: if a range does not hold a tensor.
    """
    firsts = _first_equal(files, chunks)
    asked = {number: chunks[number] for number in sorted(set(firsts))}
    requests = (Request("chunk", file, start, start + size) for file, start, size in asked.values())
    answers = zip(asked.items(), process.ask(requests, [file.path for file in files]), strict=True)
    found = {number: _in_chunk(files[chunk.file], chunk, answer) for (number, chunk), answer in answers}
    for (_, start, _), first in zip(chunks, firsts, strict=True):
        tensor = found[first]
        yield tensor._replace(start=start + tensor.start, stop=start + tensor.stop)


def _in_chunk(file: TensorFile, chunk: TorchChunk, answer: Mapping[str, Any]) -> TensorInfo:
    """The tensor in a chunk, with its position in the chunk."""
    (tensor,) = _file_of(file.path, _checked(file.path, file.size, answer)).tensors.values()
    start, stop = tensor.start - chunk.offset, tensor.stop - chunk.offset
    if not 0 <= start <= stop <= chunk.size:
        raise SourceError(f"{file.path}: the tensor at byte {chunk.offset} is damaged: copy the checkpoint again")
    return tensor._replace(start=start, stop=stop)


def list_metadata(
    process: "UnpicklerProcess", path: AnyPath
) -> Iterator[Mapping[str, Any]]:  # Any: see unpickle.list_metadata
    """Yield the entries of the metadata of a checkpoint of torch.distributed.checkpoint, in several parts.

    Raises:
        SourceError: if the metadata is damaged, or asks for anything but its own classes.
    """
    for answer in process.ask([Request("metadata")], [path]):
        yield _checked_answer(path, answer)


def list_arguments(process: "UnpicklerProcess", path: AnyPath) -> Mapping[str, float | str]:
    """The numbers and words among the arguments of the program that saved a file; none if it does not have arguments.

    Raises:
        SourceError: if the file is damaged.
    """
    (answer,) = process.ask([Request("arguments")], [path])
    arguments: Mapping[str, float | str] = _checked_answer(path, answer)["arguments"]
    return arguments


def _checked_answer(path: AnyPath, answer: dict[str, Any]) -> dict[str, Any]:
    """An answer of the child process.

    Raises:
        SourceError: if it is the reason why a file cannot be read.
    """
    if "problem" in answer:
        raise SourceError(f"{path}: {answer['problem']}: {answer['remedy']}")
    return answer


def list_torch_files(paths: Sequence[AnyPath]) -> list[TensorFile | TorchProblem]:
    """The tensors of each file, or why it cannot be read."""
    states = file_states(paths)  # before the listing: a file may be replaced while the child process runs
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        problems = list(pool.map(_problem_at_start, paths))
    readable = [path for path, problem in zip(paths, problems, strict=True) if not problem]
    requests = [Request("file", number) for number in range(len(readable))]
    with UnpicklerProcess() as process:
        answers = iter([*process.ask(requests, readable)])
    return [
        problem or _checked(path, state.size, next(answers), state)
        for path, state, problem in zip(paths, states, problems, strict=True)
    ]


def _file_of(path: AnyPath, listed: TensorFile | TorchProblem) -> TensorFile:
    if isinstance(listed, TorchProblem):
        raise SourceError(f"{path}: {listed.problem}: {listed.remedy}")
    return listed


def _problem_at_start(path: AnyPath) -> TorchProblem | None:
    """The reason, by its first bytes, for which a file is not one of torch.save."""
    if not path.is_file():
        return TorchProblem("is not a regular file", "remove it")
    try:
        with closing(open_file(path)) as file:
            start = bytearray(min(START_BYTES, file.size))
            file.read(memoryview(start), 0)
    except OSError as error:
        return TorchProblem(f"cannot be read: {error.strerror or error}", "change its permissions")
    if start.startswith(_ZIP) or _LEGACY in start:
        return None
    problem = "is not a file of torch.save, or it is damaged" if start else "is empty (got 0 bytes)"
    return TorchProblem(*(text_problem(bytes(start)) or (problem, _DAMAGED)))


def _checked(
    path: AnyPath, size: int, listed: Mapping[str, Any], state: FileState | None = None
) -> TensorFile | TorchProblem:
    """The file that the child process listed, if all of its tensors are inside the file, which has ``size`` bytes."""
    if "problem" in listed:
        return TorchProblem(listed["problem"], listed["remedy"])
    tensors = {name: _tensor(*fields) for name, *fields in listed["tensors"]}
    for name, one in tensors.items():
        if one.start < 0 or min(one.strides or (), default=0) < 0 or one.stop > size:
            return TorchProblem(
                f"is truncated or damaged (got {size} bytes, expected tensor {name} at bytes {one.start} to "
                f"{one.stop})",
                _DAMAGED,
            )
    return TensorFile(path, size, tensors, state=state, left_out=tuple(listed["left_out"]))


def _tensor(dtype: str, shape: Sequence[int], strides: Sequence[int], start: int) -> TensorInfo:
    """A tensor. The strides of dims of size 1 are ignored."""
    steps = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    count, is_contiguous = 1, True
    for size, stride in reversed(steps):
        is_contiguous = is_contiguous and stride == count
        count *= size
    is_contiguous = is_contiguous or not count
    elements = count if is_contiguous else 1 + sum((size - 1) * stride for size, stride in steps)
    stop = start + elements * DTYPE_BITS[dtype] // 8
    return TensorInfo(dtype, tuple(shape), start, stop, None if is_contiguous else tuple(strides))


# --- chunks whose archives are equal but for values -------------------------------------------------------------------

#: The end of an archive without a comment: mark, number of entries, size and position of their directory.
_END = struct.Struct("<4s6xHII2x")
#: The record between directory and end of an archive, if there is one: the size and position again, with marks.
_LARGE_END = struct.Struct("<4s36xQQ4s16x")
#: An entry of the directory up to its name: mark, checksum, sizes of name, extra field and comment, and the position of
#: its header.
_ENTRY = struct.Struct("<4s12x4s8x3H8xI")
#: A header up to its name: mark, checksum, sizes of name and extra field.
_HEADER = struct.Struct("<4s10x4s8x2H")
#: The positions of the checksums of an entry and of a header.
_ENTRY_CHECKSUM, _HEADER_CHECKSUM = 16, 14
#: The entries before the data of the only tensor of an archive, and those behind it, which are not read.
_BEFORE, _DATA = {b"data.pkl", b".format_version", b".storage_alignment", b"byteorder"}, b"data/0"
_BEHIND = {b"version", b".data/serialization_id"}


def _first_equal(files: Sequence[TensorFile], chunks: Sequence[TorchChunk]) -> list[int]:
    """For each chunk the number of the first one whose archive is equal but for the values of its tensor."""
    numbers: dict[tuple[int, bytes, bytes], int] = {}
    ends = enumerate(zip(chunks, _ends(files, chunks), strict=True))
    return [
        number if (parts := _without_values(chunk.size, *both)) is None else numbers.setdefault(parts, number)
        for number, (chunk, both) in ends
    ]


def _without_values(size: int, start: bytes, end: bytes) -> tuple[int, bytes, bytes] | None:
    """The parts of an archive that say how to read its tensor, without checksums of values.

    Returns:
        Size of the archive, its bytes before the data of the tensor, and those from the directory on; None if
        torch.save writes other archives than this one, or the parts are not among the first and last bytes.
    """
    directory = _directory(end, size)
    entries = _entries(directory)
    if not {b"data.pkl", _DATA} <= entries.keys() <= _BEFORE | {_DATA} | _BEHIND:
        return None
    _, header = entries[_DATA]
    are_before = all(position < header for name, (_, position) in entries.items() if name in _BEFORE)
    if not are_before or header + _HEADER.size > len(start):
        return None
    mark, _, *sizes = _HEADER.unpack_from(start, header)
    values = header + _HEADER.size + sum(sizes)
    if mark != b"PK\x03\x04" or values > len(start):
        return None
    before, behind = bytearray(start[:values]), bytearray(directory)
    before[header + _HEADER_CHECKSUM : header + _HEADER_CHECKSUM + 4] = bytes(4)
    for name in entries.keys() & {_DATA, b".data/serialization_id"}:
        at = entries[name][0] + _ENTRY_CHECKSUM
        behind[at : at + 4] = bytes(4)
    return size, bytes(before), bytes(behind)


def _directory(end: bytes, num_bytes: int) -> bytes:
    """The bytes of an archive from its directory on; empty if they are not among its last bytes."""
    _, _, _, position = _END.unpack(end[-_END.size :].rjust(_END.size))
    return end[position - num_bytes :] if 0 < num_bytes - position <= len(end) else b""


def _entries(directory: bytes) -> dict[bytes, tuple[int, int]]:
    """Name, without the folder, to the positions of an entry in the directory, and of its header in the archive.

    Empty if the directory is not as torch.save writes it: its size or number of entries differs, an entry has an extra
    field or a comment, or is in another folder, or there are two of the same name.
    """
    entries: dict[bytes, tuple[int, int]] = {}
    if len(directory) < _END.size:
        return entries
    mark, count, size, position = _END.unpack_from(directory, len(directory) - _END.size)
    between, folders, at = directory[size : -_END.size], set(), 0
    while at + _ENTRY.size <= size:
        entry, _, name_size, *others, header = _ENTRY.unpack_from(directory, at)
        folder, _, name = directory[at + _ENTRY.size : at + _ENTRY.size + name_size].partition(b"/")
        if entry != b"PK\x01\x02" or any(others) or name in entries:
            return {}
        folders.add(folder)
        entries[name] = at, header
        at += _ENTRY.size + name_size
    is_large = len(between) == _LARGE_END.size and _LARGE_END.unpack(between) == (
        b"PK\x06\x06", size, position, b"PK\x06\x07",
    )  # fmt: skip
    is_whole = mark == b"PK\x05\x06" and (at, len(entries), len(folders)) == (size, count, 1)
    return entries if is_whole and (not between or is_large) else {}


def _ends(files: Sequence[TensorFile], chunks: Sequence[TorchChunk]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the first and the last bytes of each chunk."""
    for file, start, size in chunks:
        if not 0 <= start < start + size <= files[file].size:
            raise SourceError(f"{files[file].path}: {_TRUNCATED}")
    with InputFiles([file.path for file in files], [b""] * len(files), [file.size for file in files]) as opened:
        for first in range(0, len(chunks), NUM_TOGETHER):
            ranges = ends((file, start, start + size) for file, start, size in chunks[first : first + NUM_TOGETHER])
            blocks = map(bytes, _blocks(opened, ranges))
            yield from zip(blocks, blocks, strict=True)


# --- the child process ----------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A request to list the contents of a file, by its number, or of a range of its bytes: see :mod:`unpickle`."""

    kind: str
    file: int = 0
    start: int = 0
    stop: int = 0


#: Maximum requests in a line for the child process.
_NUM_REQUESTS = 4096
#: The number of a file, a start and a stop.
_Range = tuple[int, int, int]
#: Alignment of the chunks that shardconv writes, and of the data of entries.
_ALIGNMENT = 64
#: Bytes that are read at once for the child process.
_BLOCK_BYTES = 2**20


class _Running(NamedTuple):
    """A child process, and the file of its messages."""

    child: "Popen[bytes]"
    messages: IO[str]


class UnpicklerProcess:
    """A child process that unpickles. The first request starts it, and the next one after a crash starts it again.

    A context manager that stops the process on exit.
    """

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._num_asked = 0  # requests without an answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the process."""
        if self._running is not None:
            self._running.child.kill()
            self._wait()

    def ask(self, requests: Iterable[Request], paths: Sequence[AnyPath]) -> Iterator[dict[str, Any]]:  # Any: JSON
        """Yield the answers to requests about these files."""
        sizes, requests = [state.size for state in file_states(paths)], iter(requests)
        with InputFiles(paths, [b""] * len(paths), sizes) as files:
            while some := [one._replace(stop=one.stop or sizes[one.file]) for one in islice(requests, _NUM_REQUESTS)]:
                if wrong := next((one for one in some if not 0 <= one.start < one.stop <= sizes[one.file]), None):
                    raise SourceError(f"{paths[wrong.file]}: {_TRUNCATED}")
                while some:
                    for answer in self.run(some, files):
                        yield answer
                        if "tensor" not in answer:  # it has further lines
                            some = some[1:]

    def run(self, requests: Sequence[Request], files: InputFiles) -> Iterator[dict[str, Any]]:
        """Yield the answers to requests. If the process crashes, the last answer reports it."""
        running = self._ready()
        stdin, stdout = running.child.stdin, running.child.stdout
        assert stdin is not None
        assert stdout is not None
        self._num_asked = len(requests)
        running.messages.truncate(0)  # of earlier requests
        try:
            with suppress(BrokenPipeError):  # it crashed
                _send(stdin, [json.dumps(requests).encode(), b"\n"])
                while self._num_asked and (line := stdout.readline()).endswith(b"\n"):
                    answer = json.loads(line)
                    if (ranges := answer.get("ranges")) is not None:
                        _send(stdin, _blocks(files, ranges))
                    else:
                        self._num_asked -= "tensor" not in answer
                        yield answer
        except BaseException:
            if self._running is running:
                self.close()
            raise
        if self._num_asked:
            reason = self._wait()
            if running.child.returncode == -signal.SIGPROF:
                reason = f"that takes more than {max_seconds(requests[-self._num_asked].stop)} seconds of CPU time"
            self._num_asked = 0
            yield {"problem": f"its tensors cannot be listed ({reason})", "remedy": _DAMAGED}

    def _ready(self) -> _Running:
        """The process, or a new one if it has ended or its answers were not read to the end."""
        if self._running is not None and (self._num_asked or self._running.child.poll() is not None):
            self.close()
        if self._running is None:
            from subprocess import PIPE, Popen  # noqa: PLC0415 - slow; files that are written do not need them
            from tempfile import TemporaryFile  # noqa: PLC0415

            # without site-packages, which the script does not import
            command = [sys.executable, "-P", "-S", "-c", _RUN_SCRIPT, str(SCRIPT)]
            with ExitStack() as opened:
                messages = opened.enter_context(TemporaryFile("a+"))
                child = Popen(command, stdin=PIPE, stdout=PIPE, stderr=messages)  # noqa: S603
                opened.pop_all()
            self._running = _Running(child, messages)
        return self._running

    def _wait(self) -> str:
        """Wait until the process ends, and return the last line of its messages, or else its exit code."""
        assert self._running is not None
        (child, messages), self._running = self._running, None
        with messages:
            child.communicate()
            messages.seek(0)
            return (messages.read().strip().splitlines() or [f"exit code {child.returncode}"])[-1]


def _send(pipe: IO[bytes], blocks: Iterable[bytes | bytearray]) -> None:
    for block in blocks:
        pipe.write(block)
    pipe.flush()


def _blocks(files: InputFiles, ranges: Sequence[_Range]) -> Iterator[bytearray]:
    """Yield the bytes of ranges. Those with a short gap between them are fetched in one request."""
    read = list(_with_gaps(ranges))
    files.prefetch((number, start, stop - start) for (number, start, stop), _ in read)
    for (number, start, stop), is_asked in read:
        for at in range(start, stop, _BLOCK_BYTES):
            block = bytearray(min(_BLOCK_BYTES, stop - at))
            files.read(number, memoryview(block), at)
            if is_asked:
                yield block


def _with_gaps(ranges: Sequence[_Range]) -> Iterator[tuple[_Range, bool]]:
    """Yield ranges, and the short gaps between them, and whether each is one of the ranges."""
    for number, one in enumerate(ranges):
        before = ranges[number - 1] if number else one
        if before[0] == one[0] and 0 < one[1] - before[2] < _ALIGNMENT:
            yield (one[0], before[2], one[1]), False
        yield one, True


# --- files whose tensors are written by the copy engine --------------------------------------------------------------

#: The classes of storages of torch, by dtype of safetensors.
_STORAGES = {DTYPES[dtype][0]: f"{name}Storage" for name, dtype in STORAGES.items() if dtype in DTYPES}
#: The id of the extra field that aligns the data of an entry.
_PADDING = 0x4246


class _Pieces(io.RawIOBase):
    """A file in memory that stores written bytes only, by their offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[int, bytes] = {}
        self._at = 0

    def write(self, data: Any) -> int:
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


class TorchArchive(Struct, frozen=True, dict=True):
    """A file of torch.save with a state dict, or with another object: a zip archive with known positions.

    It has a pickle, which names the shapes and storages of the tensors, and an uncompressed entry for each storage,
    aligned as torch aligns it. The entries of storages store no CRC-32, which torch does not check, as with
    ``torch.serialization.set_crc32_options(False)``.

    Attributes:
        root: the folder of all entries.
        tensors: name to dtype and shape, in the order of the data.
        saved: the pickle of another object than the state dict of the tensors; empty for that.
    """

    root: str
    tensors: Mapping[str, TensorSpec]
    saved: bytes = b""

    @classmethod
    def of_tensor(cls, spec: TensorSpec) -> Self:
        """A file with a single tensor, whose name here is empty."""
        return cls("archive", {"": spec}, b"\x80\x02" + _opcodes(0, "", spec) + b".")

    @classmethod
    def of_object(cls, value: object) -> Self:
        """A file with an object of Python's own classes."""
        return cls("archive", {}, pickle.dumps(value, protocol=2))

    @cached_property
    def _laid_out(self) -> tuple[_Pieces, dict[str, int]]:
        """The file without the tensors, and the offset of each."""
        pieces, offsets = _Pieces(), {}
        with zipfile.ZipFile(pieces, "w") as archive:
            for name, data in {
                "data.pkl": self.saved or self._pickle(),
                "byteorder": b"little",
                "version": b"3\n",
            }.items():
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

    @property
    def data(self) -> bytes:
        """The bytes of a file without tensors."""
        return b"".join(data for _, data in sorted(self.pieces.items()))

    def _pickle(self) -> bytes:
        """The pickle of the state dict."""
        items = [
            text_opcodes(name) + _opcodes(number, name, spec)
            for number, (name, spec) in enumerate(self.tensors.items())
        ]
        return b"\x80\x02}(" + b"".join(items) + b"u."


def _opcodes(number: int, name: str, spec: TensorSpec) -> bytes:
    """The opcodes that build a tensor on a storage of its own, as torch.save writes them."""
    if spec.dtype not in _STORAGES:
        raise PlanError(f"{name}: dtype {spec.dtype} cannot be stored in PyTorch files: use {option(layout='native')}")
    strides = tuple(accumulate(reversed(spec.shape[1:]), lambda step, size: step * size, initial=1))[::-1]
    storage = (
        b"(" + text_opcodes("storage") + name_opcodes("torch", _STORAGES[spec.dtype]) + text_opcodes(str(number))
        + text_opcodes("cpu") + number_opcodes(prod(spec.shape)) + b"tQ"
    )  # fmt: skip
    shape = numbers_opcodes(spec.shape) + numbers_opcodes(strides if spec.shape else ())
    hooks = name_opcodes("collections", "OrderedDict") + b")R"
    return (
        name_opcodes("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + storage
        + number_opcodes(0)
        + shape
        + b"\x89"
        + hooks
        + b"tR"
    )


# --- opcodes of pickles ---------------------------------------------------------------------------------------------


def text_opcodes(text: str) -> bytes:
    """The opcodes that push a text."""
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name_opcodes(module: str, name: str) -> bytes:
    """The opcodes that push the object with a name in a module."""
    return f"c{module}\n{name}\n".encode()


def number_opcodes(number: int) -> bytes:
    """The opcodes that push a number from 0 on."""
    size = number.bit_length() // 8 + 1  # with a sign bit
    return b"\x8a" + bytes([size]) + number.to_bytes(size, "little")


def numbers_opcodes(numbers: Sequence[int]) -> bytes:
    """The opcodes that push a tuple of numbers."""
    return b"(" + b"".join(map(number_opcodes, numbers)) + b"t"
