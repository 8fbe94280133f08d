"""Checkpoints of torch.distributed.checkpoint (DCP): ``.metadata`` and ``*.distcp`` files with chunks of tensors.

Each chunk is a file of torch.save inside of a file. A child process lists the metadata and the chunks
(``files.containers.unpickle``); names and positions are untrusted.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, product
from typing import Any, NamedTuple

from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import geometry, unsharded
from shardconv.checkpoint.sources.folder_files import SourceFolder
from shardconv.checkpoint.sources.source import StoredTensors, file_tensor_name
from shardconv.checkpoint.sources.transforms import Concatenation, Rows, Transform
from shardconv.files.containers.safetensors import TensorFile, num_bytes
from shardconv.files.containers.torch_files import TorchChunk, UnpicklerProcess, list_metadata, read_torch_chunks
from shardconv.files.folder import AnyPath, is_portable_name
from shardconv.files.input_files import file_states
from shardconv.files.weight_formats import DCP_METADATA
from shardconv.plan.placement import Interval, Placement
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import SourceError

#: Keys of the entry that is the state dict of the model, if there are several entries.
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
#: Keys of all other entries that may hold tensors.
TRAINING_STATE = re.compile(r"optim|sched|scaler|rng|dataloader|loader|train|step|epoch|ema_state|iter")
_AGAIN = "copy the folder again"


class ListedChunk(NamedTuple):
    """A box of a tensor, and its position: the file, the offset in it and the number of bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    size: int


class ListedTensor(NamedTuple):
    """A tensor of the metadata; ``path`` has the keys of nested dicts that lead to it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    chunks: tuple[ListedChunk, ...]


class Metadata(NamedTuple):
    """Name to tensor of a checkpoint, and the names of other entries."""

    tensors: dict[str, ListedTensor]
    others: tuple[str, ...]


class StoredChunk(NamedTuple):
    """A box of a tensor, and its position: index of the file and offset in it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    offset: int


#: Name to dtype and shape, and the chunks in files, of each tensor.
ChunkedTensors = Mapping[str, tuple[TensorSpec, list[StoredChunk]]]


class ChunkedFiles(NamedTuple):
    """Tensors that consist of chunks in files, and the keys of entries that are not the model's."""

    files: tuple[TensorFile, ...]
    tensors: ChunkedTensors
    left_out: tuple[str, ...]


def read_dcp(folder: SourceFolder) -> tuple[dict[str, TensorSpec], StoredTensors, tuple[str, ...]]:
    """Read the positions of all tensors of the model.

    Returns:
        Name to dtype and shape of each tensor, where they are stored, and the keys of entries that are not the model's.

    Raises:
        SourceError: as :func:`list_dcp` and :func:`stored_tensors`.
    """
    with UnpicklerProcess() as process:
        listed = list_dcp(process, folder, _model_tensors)
    specs = {name: spec for name, (spec, _) in listed.tensors.items()}
    return specs, stored_tensors(folder.path, listed), listed.left_out


def list_dcp(process: UnpicklerProcess, folder: SourceFolder, select: "Selector") -> ChunkedFiles:
    """List the chunks of all tensors of the model.

    Args:
        process: lists the metadata and the chunks.
        folder: the folder.
        select: selects the tensors.

    Raises:
        SourceError: if the metadata is damaged or asks for anything but its own classes, or a file is missing, damaged
            or outside of the folder.
    """
    path = folder.weights_path / DCP_METADATA
    folder.check_link(f"{folder.inner}{DCP_METADATA}")
    named, left_out = select(folder.path, _read_metadata(process, path))
    if (name := next((name for name, tensor in named.items() if not tensor.chunks), None)) is not None:
        raise SourceError(f"{path}: {name} does not have chunks: {_AGAIN}")
    names = sorted({chunk.file for tensor in named.values() for chunk in tensor.chunks})
    paths = {name: _path(folder, name) for name in names}
    files = tuple(
        TensorFile(path, state.size, {}, state=state)
        for path, state in zip(paths.values(), file_states(paths.values()), strict=True)
    )
    return ChunkedFiles(files, _chunks(process, files, named), left_out)


def _read_metadata(process: UnpicklerProcess, path: AnyPath) -> Metadata:
    """Read the metadata; sizes, offsets and names of files that several chunks have are one object."""
    known: dict[Any, Any] = {}
    tensors: dict[str, ListedTensor] = {}
    others: list[str] = []
    for line in list_metadata(process, path):
        others += (".".join(keys) for keys in line.get("others", ()))
        for name, keys, shape, chunks in line.get("tensor", ()):
            listed = (
                ListedChunk(*(known.setdefault(one, one) for one in (tuple(offsets), tuple(sizes), file)), *position)
                for offsets, sizes, file, *position in chunks
            )
            tensors[name] = ListedTensor(tuple(keys), tuple(shape), tuple(listed))
    return Metadata(tensors, tuple(others))


def stored_tensors(folder: AnyPath, listed: ChunkedFiles) -> StoredTensors:
    """The positions of tensors that consist of chunks; ``folder`` is for messages.

    Raises:
        SourceError: if chunks do not form their tensors.
    """
    shards = {**StoredTensors.of_files(listed.files).shards}
    transforms: dict[str, Transform] = {}
    for name, (spec, chunks) in listed.tensors.items():
        try:
            _check_boxes(spec.shape, chunks)
            if (contents := _contents(spec, chunks)) is not None:
                transforms[name] = contents
                continue
            bands = _bands(name, spec, chunks)
            shards |= {stored: _shards(*band) for stored, band in bands.stored.items()}
        except ValueError as error:
            raise SourceError(f"{folder}: the chunks of {name} cannot be merged: {error}: save it again") from error
        if name not in shards:
            transforms[name] = Concatenation.of_rows(bands.rows, num_bytes(spec.dtype, spec.shape[1:]))
    return StoredTensors(listed.files, shards).with_layer(transforms)


def _contents(spec: TensorSpec, chunks: Sequence[StoredChunk]) -> Concatenation | None:
    """A tensor whose chunks follow one another in its bytes, as ranges of files; None for other tensors."""
    contents = Concatenation()
    for start, chunk in sorted((_start(spec, chunk), chunk) for chunk in chunks if 0 not in chunk.sizes):
        if start != contents.size:
            return None
        contents.add(file_tensor_name(chunk.file), num_bytes(spec.dtype, chunk.sizes), chunk.offset)
    return contents if contents.size == num_bytes(spec.dtype, spec.shape) else None


def _start(spec: TensorSpec, chunk: StoredChunk) -> int:
    """The first byte of a tensor that a chunk has, if it has a range of its bytes; else -1."""
    outer = next((dim for dim, size in enumerate(chunk.sizes) if size != 1), len(chunk.sizes))
    if chunk.sizes[outer + 1 :] != spec.shape[outer + 1 :]:
        return -1
    strides = (num_bytes(spec.dtype, spec.shape[dim + 1 :]) for dim in range(len(spec.shape)))
    return sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))


def _chunks(
    process: UnpicklerProcess, files: Sequence[TensorFile], named: Mapping[str, ListedTensor]
) -> ChunkedTensors:
    """Name to dtype and shape, and the chunks in the files, of each tensor.

    They are read in the order of the files, where the end of a chunk and the start of the next one are one request.
    """
    number_of = {file.path.name: number for number, file in enumerate(files)}

    def position(one: tuple[str, ListedTensor, ListedChunk]) -> TorchChunk:
        return TorchChunk(number_of[one[2].file], *one[2][3:])

    wanted = [(name, tensor, chunk) for name, tensor in named.items() for chunk in tensor.chunks]
    wanted.sort(key=position)
    found = read_torch_chunks(process, files, [one for one, _ in groupby(wanted, position)])
    tensors: dict[str, tuple[TensorSpec, list[StoredChunk]]] = {}
    listed = ((*one, info) for (_, same), info in zip(groupby(wanted, position), found, strict=True) for one in same)
    for name, tensor, chunk, info in listed:
        spec, chunks = tensors.setdefault(name, (TensorSpec(info.dtype, tensor.shape), []))
        if info.shape != chunk.sizes or info.dtype != spec.dtype or info.strides is not None:
            strides = "" if info.strides is None else f" with strides {list(info.strides)}"
            raise SourceError(
                f"{files[number_of[chunk.file]].path}: a chunk of {name} is {info.dtype} {list(info.shape)}{strides} "
                f"(expected {spec.dtype} {list(chunk.sizes)}{', contiguous' if strides else ''}): save the checkpoint "
                f"again"
            )
        chunks.append(StoredChunk(chunk.offsets, chunk.sizes, number_of[chunk.file], info.start))
    return {name: tensors[name] for name in named}


#: Selects the tensors of the model from the listed ones, and returns them with the keys of all other entries.
Selector = Callable[[AnyPath, Metadata], tuple[dict[str, ListedTensor], tuple[str, ...]]]


def _model_tensors(folder: AnyPath, listed: Metadata) -> tuple[dict[str, ListedTensor], tuple[str, ...]]:
    """Name to tensor of the model, and the keys of all other entries."""
    tensors = listed.tensors.values()
    nested = {tensor.path[0] for tensor in tensors if len(tensor.path) > 1}
    wrapper = next((key for key in _MODEL_KEYS if key in nested), None)
    flat = {tensor.path[0] for tensor in tensors if len(tensor.path) == 1}
    if wrapper is None and not nested:
        return listed.tensors, ()
    others = sorted((nested | flat) - {wrapper})
    if wrapper is None or not all(map(TRAINING_STATE.search, others)):
        raise SourceError(
            f"{folder}: holds entries {', '.join(sorted(nested | flat))[:200]} (expected the state dict of a model, "
            f"or one under {', '.join(_MODEL_KEYS)}): save the model alone"
        )
    return {".".join(one.path[1:]): one for one in tensors if one.path[0] == wrapper}, tuple(others)


def _path(folder: SourceFolder, name: str) -> AnyPath:
    if not is_portable_name(name):
        raise SourceError(
            f"{folder.weights_path / DCP_METADATA}: names the file {name!r:.100} (expected one in the same folder)"
        )
    path = folder.weights_path / name
    if not path.is_file():
        raise SourceError(f"{path}: is missing (expected by {DCP_METADATA}): {_AGAIN}")
    folder.check_link(f"{folder.inner}{name}")
    return path


class _Bands(NamedTuple):
    """The stored tensors that form a tensor: itself, or bands. The chunks of a band divide the last divided dim.

    Attributes:
        stored: name to dtype and shape, and the chunks, of each.
        rows: the ranges of the tensor that they have, in order.
    """

    stored: dict[str, tuple[TensorSpec, list[StoredChunk]]]
    rows: tuple[Rows, ...]


def _bands(name: str, spec: TensorSpec, chunks: Sequence[StoredChunk]) -> _Bands:
    """The bands of a tensor.

    Raises:
        ValueError: if ranges are missing, or in several bands.
    """
    size, dims = num_bytes(spec.dtype, spec.shape), _sharded_dims(spec.shape, chunks)
    if len(dims) < 2:
        return _Bands({name: (spec, [*chunks])}, (Rows(name, 0, size),))
    last = dims[-1]
    by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], list[StoredChunk]] = {}
    for chunk in chunks:
        moved = chunk._replace(offsets=(*[0] * last, *chunk.offsets[last:]))
        by_box.setdefault((chunk.offsets[:last], chunk.sizes[:last]), []).append(moved)
    stored, rows = {}, list[Rows]()
    for (offsets, sizes), held in by_box.items():
        band = f"{name}{list(offsets)}"
        stored[band] = TensorSpec(spec.dtype, (*sizes, *spec.shape[last:])), held
        rows += _ranges(band, spec, offsets, sizes)
    rows.sort(key=lambda one: one.start)
    at = 0
    for one in rows:
        if one.start != at:
            raise ValueError(f"bytes from {min(at, one.start)} on are missing or in several chunks")
        at = one.stop
    if at != size:
        raise ValueError(f"bytes from {at} on are missing")
    return _Bands(stored, tuple(rows))


def _ranges(band: str, spec: TensorSpec, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Rows]:
    """Yield the contiguous ranges of a tensor that a band with this box of its first dims has."""
    inner = max((dim for dim in range(len(sizes)) if sizes[dim] != spec.shape[dim]), default=0)
    strides = [num_bytes(spec.dtype, spec.shape[dim + 1 :]) for dim in range(inner + 1)]
    size = sizes[inner] * strides[inner]
    for number, index in enumerate(product(*map(range, sizes[:inner]))):
        place = (*(offset + at for offset, at in zip(offsets, index, strict=False)), offsets[inner])
        start = sum(at * stride for at, stride in zip(place, strides, strict=True))
        yield Rows(band, start, start + size, number * size)


def _check_boxes(shape: tuple[int, ...], chunks: Sequence[StoredChunk]) -> None:
    """Check that chunks are inside their tensor.

    Raises:
        ValueError: if one is not, or has another number of dims.
    """
    for offsets, sizes, *_ in chunks:
        has_dims = len(offsets) == len(sizes) == len(shape)
        if not has_dims or any(at + size > full for at, size, full in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(
                f"a chunk is outside of the tensor (got shape {list(sizes)} at {list(offsets)} of {list(shape)})"
            )


def _sharded_dims(shape: tuple[int, ...], chunks: Sequence[StoredChunk]) -> list[int]:
    """The dims that chunks do not cover."""
    return [dim for dim, size in enumerate(shape) if any(chunk.sizes[dim] != size for chunk in chunks)]


def _shards(spec: TensorSpec, chunks: Sequence[StoredChunk]) -> Shards:
    """The shards of chunks along at most one dim."""
    size, dims = num_bytes(spec.dtype, spec.shape), _sharded_dims(spec.shape, chunks)
    held = sorted(chunk for chunk in chunks if 0 not in chunk.sizes)
    if not size:
        return Shards(unsharded(0), (chunks[0].file,), (chunks[0].offset,))
    if not held or len(dims) > 1:
        raise ValueError("its chunks do not form a grid")
    placement = Placement.replicated(len(held))
    if dims:
        (dim,) = dims
        intervals = (Interval(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for chunk in held)
        placement = Placement(dim, spec.shape[dim], tuple((interval,) for interval in intervals))
    files, offsets = tuple(chunk.file for chunk in held), tuple(chunk.offset for chunk in held)
    return Shards(geometry(placement, spec.dtype, spec.shape), files, offsets)
