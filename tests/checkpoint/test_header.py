"""Headers of safetensors files, compared with the reference library.

Headers that the library refuses are refused here with a SourceError; headers that it writes are read. :data:`STRICTER`
lists the headers that only this reader refuses.
"""

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save_file

from shardconv.files.containers.safetensors import DTYPE_BITS, MAX_HEADER_BYTES, build_header, num_bytes, read_header
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import SourceError
from tests.support.checkpoints import safetensors_bytes
from tests.support.matrix import cases

#: Name to dtype and shape, as a reader returns them.
Tensors = dict[str, tuple[str, tuple[int, ...]]]

fuzz = settings(max_examples=200)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A path that the examples of a test overwrite."""
    path = tmp_path_factory.mktemp("header") / "model.safetensors"
    path.touch()
    return path


def put(path: Path, data: bytes) -> None:
    """Replace the contents of a file in place: truncating it first would wait for the disk on some systems."""
    with path.open("r+b") as opened:
        opened.write(data)
        opened.truncate()


def ours(path: Path) -> Tensors | None:
    """The tensors by this reader; None if it refuses the file. Any other exception fails the test."""
    try:
        header = read_header(path)
    except SourceError as error:
        check_message(str(error), path)
        return None
    return {name: (info.dtype, info.shape) for name, info in header.tensors().items()}


def check_message(message: str, path: Path) -> None:
    """Check that a message names the file, and does not contain long texts of a malicious file."""
    assert message.startswith(f"{path}: ")
    assert len(message) < len(str(path)) + 500


def reference(path: Path) -> Tensors | None:
    """The tensors by the reference library; None if one of its readers refuses the file."""
    try:
        deserialize(path.read_bytes())
        with safe_open(path, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {name: (found.get_dtype(), tuple(found.get_shape())) for name, found in slices.items()}
    except SafetensorError:
        return None


def check_not_more_permissive(path: Path) -> None:
    """Check that the reference library reads the same tensors from a file that is read here."""
    if (found := ours(path)) is not None:
        assert found == reference(path)


def entry(**raw: str) -> str:
    """The JSON of a header's entry for two bytes, with some values replaced."""
    fields = {"dtype": '"U8"', "shape": "[2]", "data_offsets": "[0,2]", **raw}
    return "{" + ",".join(f'"{key}":{value}' for key, value in fields.items()) + "}"


def one(**raw: str) -> bytes:
    """The header of a file with one tensor."""
    return f'{{"a":{entry(**raw)}}}'.encode()


def two(second: str) -> bytes:
    """The header of a file with two tensors, the first at bytes 0 and 1."""
    return f'{{"a":{entry()},"b":{second}}}'.encode()


# --- what is valid --------------------------------------------------------------------------------------------------

NUMPY_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16, "F16": np.float16,
    "I32": np.int32, "U32": np.uint32, "F32": np.float32, "C64": np.complex64, "F64": np.float64, "I64": np.int64,
    "U64": np.uint64,
}  # fmt: skip

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
metadata = st.none() | st.dictionaries(texts, texts, max_size=3)


@fuzz
@given(tensors=st.dictionaries(names, st.tuples(st.sampled_from(sorted(NUMPY_DTYPES)), shapes)), metadata=metadata)
def test_files_of_the_reference_library_are_read(file, tensors, metadata):
    assume(tensors or metadata is None)  # the reference library cannot read its own files with metadata and no tensors
    arrays = {name: np.zeros(shape, NUMPY_DTYPES[dtype]) for name, (dtype, shape) in tensors.items()}
    save_file(arrays, file, metadata)
    header = read_header(file)
    assert {name: (info.dtype, info.shape) for name, info in header.tensors().items()} == tensors
    assert header.metadata == metadata
    assert header.prefix.raw() == file.read_bytes()[: header.data_offset]
    assert header.file_bytes == file.stat().st_size


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
@pytest.mark.parametrize("shape", [(), (0,), (8,), (2, 0, 3), (3, 8)])
def test_every_dtype(file, dtype, shape):
    """Includes dtypes that numpy does not have; both refuse a single element smaller than a byte."""
    count = int(np.prod(shape))
    size = count * DTYPE_BITS[dtype] // 8
    raw = one(dtype=f'"{dtype}"', shape=str(list(shape)), data_offsets=f"[0,{size}]")
    put(file, safetensors_bytes(raw, bytes(size)))
    expected = None if count * DTYPE_BITS[dtype] % 8 else {"a": (dtype, shape)}
    assert ours(file) == reference(file) == expected


def test_every_dtype_of_the_reference_library_is_known(file):
    """The library lists its dtypes in the error for an unknown one."""
    with pytest.raises(SafetensorError) as caught:
        deserialize(safetensors_bytes(one(dtype='"U9"'), b"ab"))
    assert set(re.findall(r"`(\w+)`", str(caught.value))) - {"U9"} == set(DTYPE_BITS)


@fuzz
@given(tensors=st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPE_BITS)), shapes)), metadata=metadata)
def test_built_headers_are_read_by_the_reference_library(file, tensors, metadata):
    expected = {name: (dtype, (*shape, 4)) for name, (dtype, shape) in tensors.items()}  # full bytes for every dtype
    header = build_header(((name, TensorSpec(*one)) for name, one in expected.items()), metadata)
    put(file, header.prefix.raw() + bytes(header.data_bytes))
    assert header.data_offset % 8 == 0
    assert reference(file) == expected
    assert read_header(file) == header
    with safe_open(file, framework="numpy") as opened:
        assert (opened.metadata() or {}) == (metadata or {})


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (3,)), ("F6_E2M3", (2, 3)), ("F6_E3M2", ())])
def test_building_refuses_tensors_that_end_inside_a_byte(dtype, shape):
    with pytest.raises(ValueError, match="ends inside a byte"):
        num_bytes(dtype, shape)


VALID = {
    "no tensors": (b"{}", b""),
    "padding of spaces": (b"{}      ", b""),
    "white space inside and behind": (b'{ "a" :\n' + entry().encode() + b"\t}\r\n", b"ab"),
    "null as metadata": (f'{{"__metadata__":null,"a":{entry()}}}'.encode(), b"ab"),
    "metadata behind": (f'{{"a":{entry()},"__metadata__":{{"x":"y"}}}}'.encode(), b"ab"),
    "empty name": (f'{{"":{entry()}}}'.encode(), b"ab"),
    "escapes, a surrogate pair": (rf'{{"\u0000\n\ud83d\ude00":{entry()}}}'.encode(), b"ab"),
    "not in the order of the data": (f'{{"a":{entry(data_offsets="[2,4]")},"b":{entry()}}}'.encode(), b"abcd"),
    "zero before a product that would overflow": (one(shape="[0,4294967296,4294967296]", data_offsets="[0,0]"), b""),
    "empty tensors between": (two(entry(shape="[0]", data_offsets="[2,2]")), b"ab"),
}


@pytest.mark.parametrize("case", VALID)
def test_unusual_valid_headers_are_read(file, case):
    put(file, safetensors_bytes(*VALID[case]))
    assert ours(file) == reference(file) is not None


# --- what is not ----------------------------------------------------------------------------------------------------

DEEP = 100_000

#: Headers that are more than an edit of one byte away from a valid one, see test_every_edit_of_one_byte.
HOSTILE = {
    "empty file": b"",
    "less than a length": b"\2\0\0\0",
    "no header": safetensors_bytes(b""),
    "length beyond the file": safetensors_bytes(b"{}", length=3),
    "length over the limit": safetensors_bytes(b"{}", length=MAX_HEADER_BYTES + 1),
    "length of 2**64 - 1": safetensors_bytes(b"{}", length=2**64 - 1),
    "a list": safetensors_bytes(b"[]"),
    "null": safetensors_bytes(b"null"),
    "second object behind": safetensors_bytes(b"{}{}"),
    "byte order mark": safetensors_bytes(b"\xef\xbb\xbf{}"),
    "UTF-16": safetensors_bytes("{}".encode("utf-16")),
    "UTF-16 without a mark": safetensors_bytes("{}".encode("utf-16-le")),
    "UTF-32": safetensors_bytes("{}".encode("utf-32")),
    "a surrogate in UTF-8": safetensors_bytes(b'{"\xed\xa0\x80":' + entry().encode() + b"}", b"ab"),
    "overlong UTF-8": safetensors_bytes(b'{"\xc0\x80":' + entry().encode() + b"}", b"ab"),
    "half of a pair in metadata": safetensors_bytes(rb'{"__metadata__":{"a":"\udc00"}}'),
    "a surrogate pair turned round": safetensors_bytes(rf'{{"\udc00\ud800":{entry()}}}'.encode(), b"ab"),
    "comment": safetensors_bytes(b"{/**/}"),
    "single quotes": safetensors_bytes(b"{'a':1}"),
    "form feed": safetensors_bytes(b"{\f}"),
    "deep lists": safetensors_bytes(b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "deep lists without an end": safetensors_bytes(b'{"a":' + b"[" * DEEP),
    "deep objects": safetensors_bytes(b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "deep lists under another key": safetensors_bytes(one(x="[" * DEEP + "]" * DEEP), b"ab"),
    "metadata is a list": safetensors_bytes(b'{"__metadata__":[]}'),
    "metadata is a string": safetensors_bytes(b'{"__metadata__":"x"}'),
    "metadata is false": safetensors_bytes(b'{"__metadata__":false}'),
    "metadata holds a number": safetensors_bytes(b'{"__metadata__":{"x":1}}'),
    "metadata holds null": safetensors_bytes(b'{"__metadata__":{"x":null}}'),
    "metadata holds an object": safetensors_bytes(b'{"__metadata__":{"x":{}}}'),
    "metadata twice": safetensors_bytes(b'{"__metadata__":{},"__metadata__":{}}'),
    "tensor is null": safetensors_bytes(b'{"a":null}'),
    "tensor is a number": safetensors_bytes(b'{"a":1}'),
    "tensor is empty": safetensors_bytes(b'{"a":{}}'),
    "tensor without offsets": safetensors_bytes(b'{"a":{"dtype":"U8","shape":[2]}}', b"ab"),
    "shape twice": safetensors_bytes(one(shape='[2],"shape":[2]'), b"ab"),
    "dtype is null": safetensors_bytes(one(dtype="null"), b"ab"),
    "dtype is a number": safetensors_bytes(one(dtype="4"), b"ab"),
    "shape is a number": safetensors_bytes(one(shape="2"), b"ab"),
    "shape is null": safetensors_bytes(one(shape="null"), b"ab"),
    "shape of strings": safetensors_bytes(one(shape='["2"]'), b"ab"),
    "shape of NaN": safetensors_bytes(one(shape="[NaN]"), b"ab"),
    "shape of Infinity": safetensors_bytes(one(shape="[Infinity]"), b"ab"),
    "shape of floats": safetensors_bytes(one(shape="[2.0]"), b"ab"),
    "shape with an exponent": safetensors_bytes(one(shape="[2e0]"), b"ab"),
    "shape of two negatives": safetensors_bytes(one(shape="[-1,-2]"), b"ab"),
    "shape of -0": safetensors_bytes(one(shape="[-0]", data_offsets="[0,0]")),
    "shape of booleans": safetensors_bytes(one(shape="[true]", data_offsets="[0,1]"), b"a"),
    "shape beyond 64 bits": safetensors_bytes(one(shape=f"[{2**64}]"), b"ab"),
    "shape of 2**64 - 1": safetensors_bytes(one(shape=f"[{2**64 - 1}]"), b"ab"),
    "shape of 5000 digits": safetensors_bytes(one(shape="[" + "9" * 5000 + "]"), b"ab"),
    "shape that overflows to 0": safetensors_bytes(one(shape=f"[{2**32},{2**32}]", data_offsets="[0,0]")),
    "shape that overflows, then 0": safetensors_bytes(one(shape=f"[{2**32},{2**32},0]", data_offsets="[0,0]")),
    "bits that overflow": safetensors_bytes(one(shape=f"[{2**61}]", data_offsets="[0,0]")),
    "offsets of booleans": safetensors_bytes(one(shape="[1]", data_offsets="[false,true]"), b"a"),
    "one offset": safetensors_bytes(one(data_offsets="[0]"), b"ab"),
    "three offsets": safetensors_bytes(one(data_offsets="[0,2,2]"), b"ab"),
    "offsets in an object": safetensors_bytes(one(data_offsets='{"0":0}'), b"ab"),
    "offsets turned round": safetensors_bytes(one(data_offsets="[2,0]"), b"ab"),
    "offsets beyond the file": safetensors_bytes(one(shape=f"[{2**60}]", data_offsets=f"[0,{2**60}]"), b"ab"),
    "half a byte": safetensors_bytes(one(dtype='"F4"', shape="[3]"), b"ab"),
    "empty tensor inside another": safetensors_bytes(two(entry(shape="[0]", data_offsets="[1,1]")), b"ab"),
    "data too short": safetensors_bytes(one(), b"a"),
    "data too long": safetensors_bytes(one(), b"abc"),
    "data without tensors": safetensors_bytes(b"{}", b"x"),
    "name that is too long for a message": safetensors_bytes(one(shape="[1]").replace(b"a", b"a" * 10_000, 1), b"ab"),
    "shape that is too long for a message": safetensors_bytes(one(shape=str([1] * 10_000)), b"ab"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_headers_that_both_refuse(file, case):
    put(file, HOSTILE[case])
    assert ours(file) is reference(file) is None


#: Headers that the reference library reads and this reader refuses on purpose.
STRICTER = {
    # The reference library uses the last of the two, other readers the first.
    "tensor twice": f'{{"a":{entry()},"a":{entry()}}}'.encode(),
    "key of the metadata twice": f'{{"__metadata__":{{"x":"1","x":"2"}},"a":{entry()}}}'.encode(),
    # Unknown keys could change what the known ones mean.
    "unknown key": one(strides="[1]"),
    # The format says that a header begins with {.
    "space before": b" " + one(),
    "newline before": b"\n" + one(),
    # serde also reads structs and enums in this form, which no library writes.
    "tensor as a list": b'{"a":["U8",[2],[0,2]]}',
    "dtype as an object": one(dtype='{"U8":null}'),
}


@pytest.mark.parametrize("case", STRICTER)
def test_headers_that_only_this_reader_refuses(file, case):
    put(file, safetensors_bytes(STRICTER[case], b"ab"))
    assert reference(file) == {"a": ("U8", (2,))}
    assert ours(file) is None


#: Other files under the name of a safetensors file, with the message.
OTHER_FILES = {
    "error of an object store": (b"<?xml version='1.0'?><Error/>", "is an HTML or XML page, not the file itself: down"),
    "short text": (b"not found", "expected at most 100000000): download or copy it again"),
    "empty": (b"", "is not a safetensors file (got 0 bytes, expected at least 8): download or copy it again"),
    "truncated header": (safetensors_bytes(one(), b"ab")[:30], "is truncated (got 30 bytes, expected at least"),
    "header that is not JSON": (safetensors_bytes(b"{x}", b""), ": download or copy it again"),
    "header with an unknown dtype": (safetensors_bytes(one(dtype='"U9"'), b"ab"), ": download or copy it again"),
    "wrong start, which leaves a gap": (
        safetensors_bytes(
            f'{{"a":{entry(data_offsets="[100,2]")},"b":{entry(data_offsets="[2,4]")}}}'.encode(), bytes(4)
        ),
        "tensor 'a': data_offsets do not match its size (got bytes 100 to 2, expected 2 bytes of U8 of shape [2])",
    ),
    "unknown dtype behind a gap": (
        safetensors_bytes(two(entry(dtype='"U9"', data_offsets="[4,6]")), bytes(6)),
        "tensor 'b' has unknown dtype 'U9'",
    ),
    "truncated data": (
        safetensors_bytes(one(), b"ab")[:-1],
        "is truncated (got 1 bytes of data, expected 2): download or copy it again",
    ),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_other_files_are_named_with_a_remedy(file, name):
    data, message = OTHER_FILES[name]
    put(file, data)
    with pytest.raises(SourceError, match=re.escape(message)):
        read_header(file)


# --- fuzz -----------------------------------------------------------------------------------------------------------

BASES = [
    *VALID.values(),
    (one(), b"ab"),
    (two(entry(dtype='"F16"', shape="[1,1]", data_offsets="[2,4]")), b"abcd"),
    (f'{{"__metadata__":{{"format":"pt"}},"a":{entry()}}}'.encode(), b"ab"),
]
#: White space, metadata, escapes, and two tensors that are not in the order of the data.
BASES_BY_DEFAULT = {2, 4, 6, 7}
TELLING_BYTES = b'{}[]",:0123456789-+.eE\\u/ntf \t\n\0\x7f\x80\xc0\xed\xff'
PUT = [b"", *(bytes([byte]) for byte in TELLING_BYTES)]


@st.composite
def mutated_files(draw) -> bytes:
    """A valid file with some bytes replaced, inserted, removed or repeated, in the header or anywhere."""
    header, data = draw(st.sampled_from(BASES))
    in_header = draw(st.booleans())
    target = bytearray(header if in_header else safetensors_bytes(header, data))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(target) - 1, 0)))
        length = draw(st.integers(0, 3))
        piece = draw(
            st.lists(st.sampled_from(TELLING_BYTES), max_size=3).map(bytes)
            | st.binary(max_size=2)
            | st.just(bytes(target[at : at + 20]))
        )
        target[at : at + length] = piece
    return safetensors_bytes(bytes(target), data) if in_header else bytes(target)


@pytest.mark.parametrize("base", cases(range(len(BASES)), lambda base: base in BASES_BY_DEFAULT))
def test_every_edit_of_one_byte(file, base):
    """Each byte of a header is removed, replaced, or preceded by another."""
    header, data = BASES[base]
    edits = [(at, at + removed, byte) for at in range(len(header)) for removed in (0, 1) for byte in PUT]
    for start, stop, byte in edits:
        put(file, safetensors_bytes(header[:start] + byte + header[stop:], data))
        check_not_more_permissive(file)


@settings(fuzz, max_examples=500)
@given(data=mutated_files())
def test_mutated_files(file, data):
    put(file, data)
    check_not_more_permissive(file)


numbers = st.sampled_from([0, 1, 2, 3, 2**31, 2**32, 2**53, 2**61, 2**63, 2**64 - 1, 2**64, 10**30, -1]) | st.integers()
scalars = numbers | st.none() | st.booleans() | st.floats() | st.sampled_from(["U8", "F4", "x", "\ud800"]) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


@st.composite
def structured_headers(draw) -> tuple[dict[str, Any], int]:
    """Entries of a header that are valid except for a few values, and the number of bytes of data."""
    end = 0
    header: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(["a", "b", "c", "__metadata__", "\x00"]), unique=True, max_size=4)):
        dtype, shape = draw(st.sampled_from(sorted(DTYPE_BITS))), draw(shapes)
        start, end = end, end + int(np.prod(shape)) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    for _ in range(draw(st.integers(0, 2)) if header else 0):
        found = header[draw(st.sampled_from(sorted(header)))]
        key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "x"]))
        if isinstance(found.get(key), list) and found[key] and draw(st.booleans()):
            found[key][draw(st.integers(0, len(found[key]) - 1))] = draw(values)
        else:
            found[key] = draw(values)
    if "__metadata__" in header and draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(), st.text() | values))
    return header, end


@settings(fuzz, max_examples=400)
@given(case=structured_headers(), extra=st.sampled_from([0, 0, 0, -1, 1, 8]))
def test_structured_headers(file, case, extra):
    header, size = case
    put(file, safetensors_bytes(json.dumps(header).encode(), bytes(max(size + extra, 0))))
    check_not_more_permissive(file)


# --- not a regular file ---------------------------------------------------------------------------------------------


def make_fifo(path: Path) -> None:
    """Make a pipe, which blocks a reader that opens it."""
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


SPECIAL = {
    "fifo": make_fifo,
    "folder": Path.mkdir,
    "socket": make_socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "empty device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_are_refused(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    path = Path("model.safetensors")
    SPECIAL[kind](path)
    with pytest.raises(SourceError, match="is not a regular file"):
        read_header(path)


@pytest.mark.parametrize(
    ("target", "message"),
    [(None, "No such file"), ("elsewhere", "No such file"), ("model.safetensors", r"[Ss]ymbolic links")],
    ids=["missing", "broken link", "link to itself"],
)
def test_file_that_cannot_be_opened(tmp_path, target, message):
    path = tmp_path / "model.safetensors"
    if target is not None:
        path.symlink_to(target)
    with pytest.raises(SourceError, match=message):
        read_header(path)
