"""The contents of PyTorch files: compared with torch.load, and refused where torch would execute code."""

import io
import json
import os
import pickle
import random
import re
import signal
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest
import torch

from shardconv.files.containers import torch_files, unpickle
from shardconv.files.containers.safetensors import DTYPE_BITS, TensorFile, TensorInfo
from shardconv.files.containers.torch_files import (
    Request,
    TorchChunk,
    TorchProblem,
    UnpicklerProcess,
    list_torch_files,
    read_torch_chunks,
    read_torch_files,
)
from shardconv.files.input_files import InputFiles
from shardconv.support.errors import SourceError
from tests.support.command import finish, start

Write = Callable[[Path], Any]
DTYPES = {getattr(torch, name): dtype for name, (dtype, _) in unpickle.DTYPES.items()}


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


def saves(value: Any, **options: Any) -> Write:
    return lambda path: torch.save(value, path, **options)


def several(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"first": made(3), **tensors}


# --- files that are read --------------------------------------------------------------------------------------------

MATRIX = made(6, 8)
WITH_ATTRIBUTE = torch.nn.Parameter(MATRIX)
WITH_ATTRIBUTE.is_shared = True
TENSORS = {
    "parameter with an attribute": several(x=WITH_ATTRIBUTE),
    "transposed": several(x=MATRIX.T),
    "columns": several(x=MATRIX[:, 2:5]),
    "every other row": several(x=MATRIX[::2]),
    "permuted": several(x=made(2, 3, 4).permute(2, 0, 1)),
    "expanded": several(x=made(4).expand(3, 4)),
    "view behind its base": several(x=MATRIX, y=MATRIX[2:4], z=MATRIX[2:4].flatten()[3:]),
    "tied": several(x=MATRIX, y=MATRIX),
    "scalar": several(x=torch.tensor(2.5)),
    "empty": several(x=torch.zeros(0, 3), y=made(0)),
    "dim of one with any stride": several(x=MATRIX[:, :1].T),
    "parameters": {"x": torch.nn.Parameter(MATRIX), "y": torch.nn.Parameter(made(3), requires_grad=False)},
    "dtypes": {name: made(2, 3).to(dtype) for dtype, name in DTYPES.items()},
    "viewed as another dtype": several(x=MATRIX.view(torch.int32)),
}
FILES: dict[str, tuple[dict[str, torch.Tensor], Write]] = {
    **{name: (tensors, saves(tensors)) for name, tensors in TENSORS.items()},
    **{
        f"{name}, before torch 1.6": (tensors, saves(tensors, _use_new_zipfile_serialization=False))
        for name, tensors in TENSORS.items()
        if "dtype" not in name  # the old format has only one dtype per storage, and not all
    },
    "module": (dict(module := torch.nn.Linear(4, 3).state_dict()), saves(module)),
    "protocol 4": (TENSORS["tied"], saves(TENSORS["tied"], pickle_protocol=4)),
    "ordered dict": (TENSORS["tied"], saves(OrderedDict(TENSORS["tied"]))),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("files")


def listed(path: Path, write: Write) -> TensorFile | TorchProblem:
    write(path)
    (found,) = list_torch_files([path])
    return found


@pytest.mark.parametrize("name", FILES)
def test_bytes_at_the_positions_are_those_that_torch_loads(name, tmp_path):
    tensors, write = FILES[name]
    path = tmp_path / "model.bin"
    found = listed(path, write)
    data = path.read_bytes()
    assert found.left_out == ()
    assert [(key, one.dtype, one.shape) for key, one in found.tensors.items()] == [
        (name, DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    loaded = torch.load(path, weights_only=name != "protocol 4")
    for key, one in found.tensors.items():
        expected = loaded[key].detach().contiguous().view(-1).view(torch.uint8).numpy()
        item_bytes = DTYPE_BITS[one.dtype] // 8
        strides = None if one.strides is None else [stride * item_bytes for stride in one.strides]
        held = np.ndarray(one.shape, np.dtype((np.void, item_bytes)), data, one.start if one.num_bytes else 0, strides)
        assert held.tobytes() == expected.tobytes(), key
        assert (one.strides is None) == loaded[key].is_contiguous()


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "module", "model_state_dict"])
def test_entries_of_a_training_checkpoint_are_reported(wrapper, tmp_path):
    training = {
        wrapper: {"x": made(3), "version": 2}, "epoch": 3, "args": {"lr": 0.1}, "best": None,
        "optimizer_states": [{"exp_avg": made(3)}], "lr_schedulers": [], "rng_state": torch.zeros(2, dtype=torch.uint8),
    }  # fmt: skip
    del training["rng_state"]
    found = listed(tmp_path / "model.pt", saves(training))
    assert [*found.tensors] == ["x"]
    assert found.left_out == ("epoch", "args", "best", "optimizer_states", "lr_schedulers", f"{wrapper}.version")


def test_scalars_beside_tensors_are_reported(tmp_path):
    held = {"x": made(3), "x._extra_state": None, "iteration": 4, "names": ["a", "b"]}
    found = listed(tmp_path / "model.pt", saves(held))
    assert found.left_out == ("x._extra_state", "iteration", "names")


# --- files that are refused -----------------------------------------------------------------------------------------


class Bomb:
    """A pickle that makes a folder if it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def rezipped(end: str, change: Callable[[bytes], bytes | None], **options: Any) -> Write:
    """A file of torch.save, stored again with other contents of the entries with this end; None removes one."""

    def write(path: Path) -> None:
        torch.save({"x": made(64)}, path)
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", **options) as archive:
            for name, data in entries.items():
                if (stored := change(data) if name.endswith(end) else data) is not None:
                    archive.writestr(name, stored)

    return write


def truncated(size: int, *, is_zip: bool = False) -> Write:
    def write(path: Path) -> None:
        torch.save({"x": made(6400)}, path, _use_new_zipfile_serialization=is_zip)
        os.truncate(path, size)

    return write


def torchscript(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py"):
            archive.writestr(f"model/{name}", b"")


REFUSED: dict[str, tuple[Write, str]] = {
    "compressed": (rezipped("", bytes, compression=zipfile.ZIP_DEFLATED), "is compressed or encrypted"),
    "big-endian": (rezipped("byteorder", lambda _: b"big"), "was written on a big-endian machine"),
    "storage too small": (rezipped("data/0", lambda data: data[:-4]), "tensor x is larger than its storage of 252 "),
    "storage missing": (rezipped("data/0", lambda _: None), "is damaged, or not a file of torch.save (KeyError"),
    "truncated": (truncated(9000, is_zip=True), "is truncated or damaged"),
    "truncated in a pickle, before torch 1.6": (truncated(40), "is truncated or damaged"),
    "truncated, before torch 1.6": (truncated(9000), "is truncated or damaged (got 9000 bytes, expected tensor x at"),
    "TorchScript": (torchscript, "is a TorchScript archive"),
    "zip of something else": (
        lambda path: zipfile.ZipFile(path, "w").writestr("a.txt", "text"), "is not a zip archive of torch.save",
    ),
    "GGUF": (lambda path: path.write_bytes(b"GGUF" + bytes(100)), "is not a file of torch.save"),
    "pointer of git LFS": (
        lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"),
        "is a pointer of git LFS, not the file itself",
    ),
    "web page": (lambda path: path.write_bytes(b"<html></html>"), "is an HTML or XML page, not the file itself"),
    "tar": (lambda path: path.write_bytes(b"storages" + bytes(600)), "is not a file of torch.save"),
    "tensor": (saves(made(3)), "holds a Tensor (expected a dict of tensors)"),
    "no tensors": (saves({"epoch": 3}), "does not hold one state dict (got entries epoch, expected"),
    "two state dicts": (saves({"model": {"x": made(3)}, "module": {"x": made(3)}}), "does not hold one state dict"),
    "state dict and average": (
        saves({"model": {"x": made(3)}, "ema": {"x": made(3)}}), "entry 'ema' holds tensors, but is not one (got dict)",
    ),
    "conjugated": (saves({"x": made(3, dtype=torch.complex64).conj()}), "(got a conjugated or negated view)"),
    "on the meta device": (saves({"x": torch.ones(2, device="meta")}), "not a plain dense tensor (got another kind"),
    "sparse": (saves({"x": torch.eye(3).to_sparse()}), "tensor x is not a plain dense tensor (got torch.sparse_coo)"),
    "name that is not a string": (saves({3: made(3)}), "tensor 3 does not have a valid name"),
    "name of the metadata": (saves({"__metadata__": made(3)}), "tensor '__metadata__' does not have a valid name"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_the_problem(name, tmp_path):
    write, expected = REFUSED[name]
    found = listed(tmp_path / "model.bin", write)
    assert isinstance(found, TorchProblem)
    assert expected in found.problem
    assert found.remedy


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("place", ["entry", "beside tensors", "key"])
def test_nothing_in_a_pickle_is_executed(place, is_zip, tmp_path):
    bomb = Bomb(tmp_path / "executed")
    held = {"entry": {"x": bomb}, "beside tensors": {"x": made(3), "y": bomb}, "key": {"x": made(3), bomb: 1}}[place]
    write = saves(held, _use_new_zipfile_serialization=is_zip)
    found = listed(tmp_path / "model.bin", write)
    assert "its pickle asks for posix.mkdir" in found.problem
    assert "load it with torch" in found.remedy
    assert not (tmp_path / "executed").exists()


def test_pickle_without_the_marks_of_torch_is_not_unpickled(tmp_path):
    bomb = Bomb(tmp_path / "executed")
    found = listed(tmp_path / "model.bin", lambda path: path.write_bytes(pickle.dumps(bomb)))
    assert "is not a file of torch.save" in found.problem
    assert not (tmp_path / "executed").exists()


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Data with up to 3 changed bytes, or truncated, or with a part that was removed or repeated."""
    changed = bytearray(data)
    kind, at = rng.randrange(5), rng.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        size = rng.choice([1, 8, 64, 300])
        return data[:at] + data[at + size :]
    if kind == 2:
        return data[:at] + data[max(at - 64, 0) :]
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_damaged_files_are_refused_or_inside_the_file(is_zip, tmp_path):
    """A change of values is not detected, as in safetensors files; everything else is refused, or harmless."""
    original = tmp_path / "model.bin"
    torch.save(TENSORS["columns"] | TENSORS["tied"], original, _use_new_zipfile_serialization=is_zip)
    rng, paths = random.Random(0), []
    for number in range(200):
        paths.append(tmp_path / f"{number}.bin")
        paths[-1].write_bytes(damaged(original.read_bytes(), rng))
    found = list_torch_files(paths)
    sizes = [path.stat().st_size for path in paths]
    for file, size in zip(found, sizes, strict=True):
        if isinstance(file, TensorFile):
            assert all(0 <= one.start <= one.stop <= size for one in file.tensors.values())
    assert sum(isinstance(file, TorchProblem) for file in found) > 50


# --- chunks of torch.distributed.checkpoint -------------------------------------------------------------------------

#: Tensors whose archives have the same size as the first one's, or the same directory.
LIKE_OTHERS = [
    MATRIX, MATRIX + 1, MATRIX.T, MATRIX.int(), MATRIX.flatten(), MATRIX.reshape(8, 6), MATRIX[:3], made(12, 8)[::2],
    torch.nn.Parameter(MATRIX), WITH_ATTRIBUTE, torch.zeros(0, 8), made(600, 8), made(600, 8) * 2, MATRIX - 1,
]  # fmt: skip


def archives(values: list[bytes], path: Path) -> tuple[list[TensorFile], list[TorchChunk]]:
    path.write_bytes(b"".join(values))
    starts = accumulate(map(len, values), initial=0)
    chunks = [TorchChunk(0, start, len(value)) for start, value in zip(starts, values, strict=False)]
    return [TensorFile(path, path.stat().st_size, {})], chunks


def saved(value: torch.Tensor) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


@pytest.fixture
def unpickling() -> Iterator[UnpicklerProcess]:
    with UnpicklerProcess() as process:
        yield process


def alone(unpickling: UnpicklerProcess, files: list[TensorFile], chunk: TorchChunk) -> TensorInfo | str:
    """The tensor in one chunk; the first one is always unpickled."""
    try:
        (tensor,) = read_torch_chunks(unpickling, files, [chunk])
    except SourceError as error:
        return str(error)
    return tensor


def test_chunks_whose_archives_differ_in_values_only(unpickling, tmp_path, monkeypatch):
    """Only one of them is unpickled, and each is listed as if it were alone."""
    files, chunks = archives([saved(one) for one in LIKE_OTHERS * 20], tmp_path / "__0_0.distcp")
    expected = [alone(unpickling, files, one) for one in chunks[: len(LIKE_OTHERS)]]
    asked, run = [], torch_files.UnpicklerProcess.run
    monkeypatch.setattr(
        torch_files.UnpicklerProcess, "run", lambda child, some, opened: asked.extend(some) or run(child, some, opened)
    )
    found = list(read_torch_chunks(unpickling, files, chunks))
    assert len(asked) == len(LIKE_OTHERS) - 3  # three have the form of another one
    for number, one in enumerate(found):
        start = chunks[number].offset - chunks[number % len(LIKE_OTHERS)].offset
        first = expected[number % len(LIKE_OTHERS)]
        assert one == first._replace(start=first.start + start, stop=first.stop + start)


def test_damaged_chunks_are_found_beside_others(unpickling, tmp_path):
    """A damaged copy of a chunk is refused with the same error as alone."""
    rng, original, expected = random.Random(1), saved(MATRIX), 0
    for number in range(60):
        files, chunks = archives([original, damaged(original, rng)], tmp_path / f"{number}.distcp")
        if not chunks[1].size:
            continue
        lone = alone(unpickling, files, chunks[1])
        if isinstance(lone, str):
            expected += 1
            with pytest.raises(SourceError, match=re.escape(lone)):
                list(read_torch_chunks(unpickling, files, chunks))
        else:
            assert list(read_torch_chunks(unpickling, files, chunks))[1] == lone
    assert expected > 15


def crafted(entries: list[tuple[bytes, bytes, int, int]], end: bytes = b"") -> bytes:
    """An archive without checksums, of entries: name, data, and sizes of zeros in the header and behind the data."""
    made, directory = b"", b""
    for name, data, extra, behind in entries:
        sizes = len(data), len(data), len(name)
        directory += struct.pack("<4s8H2I5H2I", b"PK\1\2", *[0] * 8, *sizes, *[0] * 5, len(made)) + name
        made += struct.pack("<4s5H3I2H", b"PK\3\4", *[0] * 6, *sizes, extra) + name
        made += bytes(extra) + data + bytes(behind)
    count = len(entries)
    return made + directory + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), len(made), 0) + end


PICKLE = zipfile.ZipFile(io.BytesIO(saved(made(8)))).read("archive/data.pkl")
OTHER_PICKLE = zipfile.ZipFile(io.BytesIO(saved(made(8).int()))).read("archive/data.pkl").ljust(len(PICKLE), b"#")
#: Pairs of archives of the same size whose tensors differ by bytes that a short comparison does not reach.
CRAFTED = {
    "padding moved from before the values to behind them": [
        [(b"a/data.pkl", PICKLE, 0, 0), (b"a/data/0", bytes(32), 8 - behind, behind)] for behind in (0, 8)
    ],
    "another entry with the values, which is named as one that is not read": [
        [
            (b"a/data.pkl", PICKLE.replace(b"X\x01\x00\x00\x000", b"X\x09\x00\x00\x000/version"), 0, 0),
            (b"a/data/0", bytes(4), 0, 0),
            (b"a/data/0/version", bytes(32), 8 - behind, behind),
        ]
        for behind in (0, 8)
    ],
    "pickle behind the values": [
        [(b"a/data/0", bytes(32), 0, 0), (b"a/data.pkl", pickled, 0, 0)] for pickled in (PICKLE, OTHER_PICKLE)
    ],
    "pickle with a NUL in its name": [
        [(b"a/data/0", bytes(32), 0, 0), (b"a/data.pkl\0/version", pickled, 0, 0)] for pickled in (PICKLE, OTHER_PICKLE)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_chunks_are_listed_as_alone(unpickling, name, tmp_path, monkeypatch):
    """Also those that only an attacker writes, without checksums, which are not verified here."""
    monkeypatch.setattr(torch_files, "SCRIPT", tmp_path / "script.py")
    text = Path(unpickle.__file__).read_text()
    (tmp_path / "script.py").write_text(
        text.replace("import zipfile\n", "import zipfile\nzipfile.crc32 = lambda *_: 0\n")
    )
    files, chunks = archives([crafted(entries) for entries in CRAFTED[name]], tmp_path / "__0_0.distcp")
    expected = [alone(unpickling, files, one) for one in chunks]
    first, second = (one._replace(start=one.start - chunk.offset) for one, chunk in zip(expected, chunks, strict=True))
    assert chunks[0].size == chunks[1].size
    assert (first.dtype, first.start) != (second.dtype, second.start)
    assert list(read_torch_chunks(unpickling, files, chunks)) == expected


# --- the process ----------------------------------------------------------------------------------------------------


def test_process_lists_all_files_in_order(tmp_path, monkeypatch):
    """A path may have any characters, and the current folder any modules."""
    (tmp_path / "pickle.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    names = ["a b.bin", "ü\n.bin", "bad.bin", "c.bin"]
    for number, name in enumerate(names):
        torch.save([1] if name == "bad.bin" else {f"x{number}": made(number + 1)}, tmp_path / name)
    found = list_torch_files([tmp_path / name for name in names])
    assert [next(iter(file.tensors)) for file in found if isinstance(file, TensorFile)] == ["x0", "x1", "x3"]
    assert found[2].problem == "holds a list (expected a dict of tensors)"
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def script(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Replaces the script by lines of Python, in a new file, as Python may keep its compiled form."""
    numbers = count()

    def replace(lines: str) -> None:
        path = tmp_path / f"script{next(numbers)}.py"
        path.write_text(f"import json, os, sys, time\nrequests = json.loads(sys.stdin.readline())\n{lines}")
        monkeypatch.setattr(torch_files, "SCRIPT", path)

    return replace


ANSWER = """
for _, number, *_ in requests:
    if number == 1:
        os.kill(os.getpid(), 9)
    print(json.dumps({"tensors": [], "left_out": []}), flush=True)
"""


def test_crash_is_the_error_of_the_file_that_was_read(tmp_path, script):
    paths = [tmp_path / name for name in ("a.bin", "bad.bin", "c.bin")]
    for path in paths:
        torch.save({}, path)
    script(ANSWER)
    found = list_torch_files(paths)
    assert [type(file) for file in found] == [TensorFile, TorchProblem, TensorFile]
    assert found[1].problem == "its tensors cannot be listed (exit code -9)"


def finish_requests(process: UnpicklerProcess, paths: list[Path]) -> None:
    assert len([*process.ask([Request("file", 0), Request("file", 1)], paths)]) == 2


def stop_between(process: UnpicklerProcess, paths: list[Path]) -> None:
    next(process.ask([Request("file", 0), Request("file", 1)], paths))


def keep_an_answer_unread(process: UnpicklerProcess, paths: list[Path]) -> None:
    OPEN.append(answers := process.ask([Request("file", 1), Request("file", 0)], paths))
    next(answers)


def end_process(process: UnpicklerProcess, paths: list[Path]) -> None:
    finish_requests(process, paths)
    child, _ = process._running
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def fail_to_read(process: UnpicklerProcess, paths: list[Path]) -> None:
    with pytest.raises(SourceError, match="is truncated or damaged"):
        list(process.ask([Request("chunk", 0, 0, 10**6)], paths))


OPEN: list[Any] = []  # generators that are not read to their end


@pytest.mark.parametrize("before", [finish_requests, stop_between, keep_an_answer_unread, end_process, fail_to_read])
def test_later_requests_have_their_own_answers(tmp_path, unpickling, before):
    """Whatever happened to earlier ones; and the process ends with the block."""
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for number, path in enumerate(paths):
        torch.save({f"x{number}": made(number + 1)}, path)
    before(unpickling, paths)
    first = unpickling._running
    for number in (1, 0):
        (answer,) = unpickling.ask([Request("file", number)], paths)
        assert answer["tensors"][0][0] == f"x{number}"
    OPEN.clear()
    (answer,) = unpickling.ask([Request("file", 0)], paths)
    assert answer["tensors"][0][0] == "x0"
    child, _ = unpickling._running
    assert (first is not None and first.child is child) == (before is finish_requests)
    unpickling.close()
    assert child.returncode == -9


def test_reason_of_a_crash_is_not_a_message_of_an_earlier_request(tmp_path, script):
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for path in paths:
        torch.save({}, path)
    script(
        'print("a warning", file=sys.stderr, flush=True)\n'
        'print(json.dumps({"tensors": [], "left_out": []}), flush=True)\n'
        "sys.stdin.readline()\nos.kill(os.getpid(), 9)"
    )
    with UnpicklerProcess() as process:
        assert next(process.ask([Request("file", 0)], paths)) == {"tensors": [], "left_out": []}
    with UnpicklerProcess() as process:
        (_,), (answer,) = (list(process.ask([Request("file", number)], paths)) for number in (0, 1))
    assert answer["problem"] == "its tensors cannot be listed (exit code -9)"


def test_error_of_reading_is_raised(tmp_path, monkeypatch):
    """Also if the process has exited before the bytes that were read are sent to it, and later reads succeed."""
    paths = [tmp_path / name for name in ("a.bin", "b.bin", "c.bin")]
    for path in paths:
        torch.save({"x": made(3)}, path)
    kill, read, failures = Popen.kill, InputFiles.read, iter([SourceError("the connection was lost")])

    def kill_and_wait(child):
        kill(child)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    def read_or_fail(files, number, buffer, offset):
        if number == 2 and (failure := next(failures, None)):
            raise failure
        read(files, number, buffer, offset)

    monkeypatch.setattr(Popen, "kill", kill_and_wait)
    monkeypatch.setattr(InputFiles, "read", read_or_fail)
    with pytest.raises(SourceError, match="the connection was lost"):
        list_torch_files(paths)


def rezipped(path: Path) -> bytearray:
    """A file with a zip archive that has 32-bit offsets."""
    torch.save({"x": made(3)}, path)
    packed = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return bytearray(packed.getvalue())


def test_entry_before_the_start_of_the_file_is_refused(tmp_path):
    """The offset of the directory is too large by some bytes, which zipfile subtracts from offsets of entries."""
    path, moved = tmp_path / "a.bin", 1000
    data = rezipped(path)
    end = data.rfind(b"PK\5\6")
    (at,) = struct.unpack_from("<I", data, end + 16)
    struct.pack_into("<I", data, end + 16, at + moved)
    while data[at : at + 4] == b"PK\1\2":
        name_size, *others = struct.unpack_from("<HHH", data, at + 28)
        name, (offset,) = bytes(data[at + 46 : at + 46 + name_size]), struct.unpack_from("<I", data, at + 42)
        struct.pack_into("<I", data, at + 42, 0 if name.endswith(b"data/0") else offset + moved)
        at += 46 + name_size + sum(others)
    path.write_bytes(data)
    (found,) = list_torch_files([path])
    assert isinstance(found, TorchProblem)
    assert found.problem == "is truncated or damaged"


@pytest.mark.parametrize(
    "data", [b"cbuiltins\nbytearray\n(\x8a\x08" + (2**40).to_bytes(8, "little") + b"tR.", b"Nr\xff\xff\xff\x7f."],
    ids=["bytearray", "memo"],
)  # fmt: skip
def test_pickle_that_asks_for_much_memory_is_refused(tmp_path, data):
    path, packed = tmp_path / "a.bin", io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + data)
    path.write_bytes(packed.getvalue())
    (found,) = list_torch_files([path])
    assert isinstance(found, TorchProblem)
    assert "more memory" in found.problem


@pytest.mark.timeout(60)
def test_pickle_that_takes_much_time_is_refused(tmp_path):
    """The key of a dict is a tuple nested 60 deep, whose hash takes 2^60 steps."""
    paths = [tmp_path / "slow.bin", tmp_path / "fast.bin"]
    with zipfile.ZipFile(paths[0], "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02})" + b"2\x86" * 60 + b"Ns.")
    torch.save({"x": made(3)}, paths[1])
    slow, fast = list_torch_files(paths)
    assert isinstance(slow, TorchProblem)
    assert slow.problem == "its tensors cannot be listed (that takes more than 5 seconds of CPU time)"
    assert isinstance(fast, TensorFile)


def test_list_that_repeats_a_long_shape_is_refused(tmp_path):
    """Many names of one tensor with 64 dims: a list that is 250 times as long as its pickle."""
    tensor = torch.zeros(0, *[1] * 63)
    torch.save({f"w{number}": tensor for number in range(5000)}, tmp_path / "a.bin")
    (found,) = list_torch_files([tmp_path / "a.bin"])
    assert isinstance(found, TorchProblem)
    assert re.fullmatch(r"repeats names and sizes too often \(expected a list of .* times its own\)", found.problem)


@pytest.mark.timeout(60)
def test_interrupt_ends_the_process(tmp_path, script):
    torch.save({"x": made(3)}, tmp_path / "a.bin")
    script(f"open({str(tmp_path / 'started')!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)")
    patch = (
        "from pathlib import Path\nimport shardconv.files.containers.torch_files as t\n"
        f"t.SCRIPT = Path({str(torch_files.SCRIPT)!r})"
    )
    process = start("plan", tmp_path / "a.bin", patch=patch, start_new_session=True)
    while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130
    while Path("/proc", (tmp_path / "started").read_text()).exists():  # until the system has ended it
        time.sleep(0.02)


def test_positions_outside_of_the_file_are_refused(tmp_path, script):
    torch.save({"x": made(3)}, tmp_path / "a.bin")
    for offset, strides in ((-1, [1]), (10**6, [1]), (0, [-1]), (0, [10**9])):
        listing = {"tensors": [["x", "F32", [3], strides, offset]], "left_out": []}
        script(f"print({json.dumps(json.dumps(listing))})")
        with pytest.raises(SourceError, match=r"is truncated or damaged .*expected tensor x at bytes"):
            read_torch_files([tmp_path / "a.bin"])
