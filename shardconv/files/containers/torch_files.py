"""Read the names, dtypes, shapes and positions of the tensors in PyTorch files (``torch.save``), without their data.

A child process unpickles the files (``unpickle``), so that their contents do not affect this process. The positions are
untrusted: they are checked against the sizes of the files.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardconv.files.containers.safetensors import DTYPE_BITS
from shardconv.files.folder import AnyPath, RemotePath
from shardconv.files.text_files import START_BYTES, text_problem
from shardconv.support.errors import SourceError

#: The script of the child process.
SCRIPT = Path(__file__).with_name("unpickle.py")
_DAMAGED = "download or save it again"
#: The first bytes of a zip archive, which torch.save writes since version 1.6, and bytes near the start of older files.
_ZIP, _LEGACY = b"PK\x03\x04", 0x1950A86A20F9469CFC6C.to_bytes(10, "little")


class TorchTensor(NamedTuple):
    """A tensor in a PyTorch file.

    Attributes:
        name: its key in the state dict.
        dtype: its dtype, by the name in safetensors files.
        shape: its shape.
        strides: for each dim the distance of its indices in the file, in elements.
        offset: of its first element in the file, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return DTYPE_BITS[self.dtype] // 8

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last one in the file."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.item_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether its bytes are those of the tensor."""
        expected = 1
        for size, stride in reversed([*zip(self.shape, self.strides, strict=True)]):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


class TorchFile(NamedTuple):
    """The contents of a PyTorch file.

    Attributes:
        tensors: in the order of the state dict.
        left_out: names of entries that hold no weights, such as the epoch of a training checkpoint.
    """

    tensors: tuple[TorchTensor, ...]
    left_out: tuple[str, ...]


class TorchProblem(NamedTuple):
    """Why a file cannot be read, and the remedy."""

    problem: str
    remedy: str


#: Why a remote file cannot be read.
REMOTE = TorchProblem("is remote, and only safetensors files are read by ranges", "download it first")


def read_torch_files(paths: Sequence[AnyPath]) -> list[tuple[TorchTensor, ...]]:
    """Read the tensors of files that hold nothing else, in one child process.

    Raises:
        SourceError: if a file cannot be read, its pickle asks for anything but tensors, or it has other entries.
    """
    files = read_training_files(paths)
    for path, file in zip(paths, files, strict=True):
        if file.left_out:
            raise SourceError(f"{path}: entry {file.left_out[0]!r:.100} is not a tensor: save the tensors alone")
    return [file.tensors for file in files]


def read_training_files(paths: Sequence[AnyPath]) -> list[TorchFile]:
    """Read the tensors of files that may have other entries, in one child process.

    Raises:
        SourceError: if a file cannot be read, or its pickle asks for anything but tensors.
    """
    files = []
    for path, listed in zip(paths, list_torch_files(paths), strict=True):
        if isinstance(listed, TorchProblem):
            raise SourceError(f"{path}: {listed.problem}: {listed.remedy}")
        files.append(listed)
    return files


class TorchChunk(NamedTuple):
    """A range of bytes of a file that :func:`torch.save` wrote a tensor to."""

    path: AnyPath
    offset: int
    size: int


def read_torch_chunks(chunks: Sequence[TorchChunk]) -> list[TorchTensor]:
    """Read the tensor in each range, without its name.

    Raises:
        SourceError: if a range does not hold a tensor.
    """
    tensors = []
    for chunk, listed in zip(chunks, list_torch_files(chunks), strict=True):
        if isinstance(listed, TorchProblem):
            raise SourceError(f"{chunk.path}: {listed.problem}: {listed.remedy}")
        (tensor,) = listed.tensors
        if not chunk.offset <= tensor.offset or tensor.offset + tensor.extent > chunk.offset + chunk.size:
            raise SourceError(f"{chunk.path}: the tensor at byte {chunk.offset} is damaged: copy the checkpoint again")
        tensors.append(tensor)
    return tensors


def list_torch_files(paths: Sequence[AnyPath | TorchChunk]) -> list[TorchFile | TorchProblem]:
    """The contents of each file, or range of bytes of a file, or why it cannot be read."""
    found: dict[AnyPath | TorchChunk, TorchFile | TorchProblem] = {}
    for path in paths:
        file = path.path if isinstance(path, TorchChunk) else path
        if isinstance(file, RemotePath):
            found[path] = REMOTE
        elif file is path and (problem := _problem_at_start(file)) is not None:
            found[path] = problem
    while rest := [path for path in paths if path not in found]:  # a process that crashes is started again for the rest
        found |= zip(rest, _list_in_child(rest), strict=False)
    return [found[path] for path in paths]


def _problem_at_start(path: Path) -> TorchProblem | None:
    """Why a file cannot be of torch.save, by its first bytes."""
    if not path.is_file():
        return TorchProblem("is not a regular file", "remove it")
    try:
        with path.open("rb") as file:
            start = file.read(START_BYTES)
    except OSError as error:
        return TorchProblem(f"cannot be read: {error.strerror or error}", "change its permissions")
    if start.startswith(_ZIP) or _LEGACY in start:
        return None
    if text := text_problem(start):
        return TorchProblem(*text)
    if not start:
        return TorchProblem("is empty (got 0 bytes)", _DAMAGED)
    return TorchProblem("is not a file of torch.save, or it is damaged", _DAMAGED)


def _list_in_child(paths: Sequence[AnyPath | TorchChunk]) -> list[TorchFile | TorchProblem]:
    """The contents of at least one file."""
    files = [Path(str(one.path if isinstance(one, TorchChunk) else one)) for one in paths]  # none is remote
    answers = ask([
        ("chunk", str(file.absolute()), *one[1:]) if isinstance(one, TorchChunk) else ("file", str(file.absolute()))
        for file, one in zip(files, paths, strict=True)
    ])  # fmt: skip
    return [
        TorchProblem(one["problem"], one["remedy"]) if "problem" in one else _checked(file, one)
        for file, one in zip(files, answers, strict=False)
    ]


def _checked(path: Path, listed: Mapping[str, Any]) -> TorchFile | TorchProblem:
    """The contents of a file, if all tensors are inside the file."""
    tensors = tuple(
        TorchTensor(name, dtype, tuple(shape), tuple(strides), offset)
        for name, dtype, shape, strides, offset in listed["tensors"]
    )
    size = path.stat().st_size
    for tensor in tensors:
        if tensor.offset < 0 or min(tensor.strides, default=0) < 0 or tensor.offset + tensor.extent > size:
            return TorchProblem(
                f"is truncated or damaged (got {size} bytes, expected tensor {tensor.name} at bytes {tensor.offset} to "
                f"{tensor.offset + tensor.extent})",
                _DAMAGED,
            )
    return TorchFile(tensors, tuple(listed["left_out"]))


def list_metadata(path: Path) -> Mapping[str, Any]:  # Any: see unpickle.list_metadata
    """The tensors and their chunks in the metadata of a checkpoint of torch.distributed.checkpoint.

    Raises:
        SourceError: if the metadata is damaged, or asks for anything but its own classes.
    """
    (answer,) = ask([("metadata", str(path.absolute()))])
    if "problem" in answer:
        raise SourceError(f"{path}: {answer['problem']}: {answer['remedy']}")
    return answer


def ask(requests: Sequence[tuple[object, ...]]) -> list[dict[str, Any]]:  # Any: see the functions of unpickle
    """The answers of a child process to the first requests, and the problem with that at which it crashed, if any."""
    child = run_script(requests)
    answers = [json.loads(line) for line in child.stdout.splitlines()[: len(requests)]]
    if len(answers) == len(requests):
        return answers
    reason = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
    return [*answers, {"problem": f"its tensors cannot be listed ({reason})", "remedy": _DAMAGED}]


def run_script(requests: Sequence[tuple[object, ...]]) -> "subprocess.CompletedProcess[str]":
    """Run the script in a child process."""
    command = [sys.executable, "-P", str(SCRIPT)]
    return subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, check=False)  # noqa: S603
