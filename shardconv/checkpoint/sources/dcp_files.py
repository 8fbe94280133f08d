"""Checkpoints of torch.distributed.checkpoint (DCP): ``.metadata`` and ``*.distcp`` files with chunks of tensors.

Each chunk is a file of torch.save inside of a file. A child process lists the metadata, another one the chunks
(``files.containers.unpickle``); names and positions are untrusted.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import geometry, unsharded
from shardconv.checkpoint.sources.folder_files import SourceFolder
from shardconv.checkpoint.sources.row_order import JoinedRows, Rows
from shardconv.checkpoint.sources.source_files import is_portable_name
from shardconv.checkpoint.sources.stored_tensors import StoredTensors, Transform
from shardconv.files.containers.safetensors import TensorFile, num_bytes
from shardconv.files.containers.torch_files import REMOTE, TorchChunk, list_metadata, read_torch_chunks
from shardconv.files.folder import AnyPath, RemotePath
from shardconv.files.input_files import file_states
from shardconv.plan.placement import Interval, Placement
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import SourceError

METADATA_NAME = ".metadata"
#: Keys of the entry that is the state dict of the model, if there are several entries.
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
#: Keys of all other entries that may hold tensors.
_TRAINING_STATE = re.compile(r"optim|sched|scaler|rng|dataloader|loader|train|step|epoch|ema_state|iter")
_AGAIN = "copy the folder again"


class _Tensor(TypedDict):
    """A tensor as the child process lists it; a chunk is its offsets, sizes, file, offset and bytes in the file."""

    name: str
    path: list[str]
    dtype: str
    shape: list[int]
    chunks: list[tuple[list[int], list[int], str, int, int]]


class StoredChunk(NamedTuple):
    """A box of a tensor, and its position: index of the file and offset in it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    offset: int


def read_dcp(folder: SourceFolder) -> tuple[dict[str, TensorSpec], StoredTensors, tuple[str, ...]]:
    """Read the positions of all tensors of the model.

    Returns:
        Name to dtype and shape of each tensor, where they are stored, and the keys of entries that are not the model's.

    Raises:
        SourceError: if the folder is remote, the metadata is damaged or asks for anything but its own classes, a file
            is missing, damaged or outside of the folder, or chunks do not form their tensors.
    """
    metadata = folder.path / METADATA_NAME
    if isinstance(metadata, RemotePath):
        raise SourceError(f"{metadata}: {REMOTE.problem}: {REMOTE.remedy}")
    folder.check_link(METADATA_NAME)
    listed: Mapping[str, list[_Tensor]] = list_metadata(metadata)
    named, left_out = _model_tensors(folder.path, listed)
    if (name := next((name for name, tensor in named.items() if not tensor["chunks"]), None)) is not None:
        raise SourceError(f"{metadata}: {name} does not have chunks: {_AGAIN}")
    names = sorted({chunk[2] for tensor in named.values() for chunk in tensor["chunks"]})
    paths = {name: _path(folder, name) for name in names}
    files = tuple(
        TensorFile(path, state.size, {}, state=state)
        for path, state in zip(paths.values(), file_states(paths.values()), strict=True)
    )
    tensors = _chunks(paths, named)
    shards: dict[str, Shards] = {}
    transforms: dict[str, Transform] = {}
    for name, (spec, chunks) in tensors.items():
        try:
            bands = _bands(name, spec, chunks)
            shards |= {rows.stored: _shards(*band) for rows, band in bands.items()}
        except ValueError as error:
            raise SourceError(
                f"{folder.path}: the chunks of {name} cannot be merged: {error}: save it again"
            ) from error
        if name not in shards:
            transforms[name] = JoinedRows(tuple(bands), num_bytes(spec.dtype, spec.shape[1:]))
    specs = {name: spec for name, (spec, _) in tensors.items()}
    return specs, StoredTensors(files, shards).with_layer(transforms), left_out


def _chunks(
    paths: Mapping[str, AnyPath], named: Mapping[str, _Tensor]
) -> dict[str, tuple[TensorSpec, list[StoredChunk]]]:
    """Name to dtype and shape, and the chunks in the files, of each tensor."""
    wanted = [(name, chunk) for name, tensor in named.items() for chunk in tensor["chunks"]]
    found = read_torch_chunks([TorchChunk(paths[chunk[2]], *chunk[3:]) for _, chunk in wanted])
    file_of = {name: number for number, name in enumerate(paths)}
    tensors: dict[str, tuple[TensorSpec, list[StoredChunk]]] = {}
    for (name, (offsets, sizes, file, *_)), info in zip(wanted, found, strict=True):
        spec, chunks = tensors.setdefault(name, (TensorSpec(info.dtype, tuple(named[name]["shape"])), []))
        if [*info.shape] != sizes or info.dtype != spec.dtype or info.strides is not None:
            strides = "" if info.strides is None else f" with strides {list(info.strides)}"
            raise SourceError(
                f"{paths[file]}: a chunk of {name} is {info.dtype} {list(info.shape)}{strides} (expected {spec.dtype} "
                f"{sizes}{', contiguous' if strides else ''}): save the checkpoint again"
            )
        chunks.append(StoredChunk(tuple(offsets), tuple(sizes), file_of[file], info.start))
    return tensors


def _model_tensors(folder: AnyPath, listed: Mapping[str, list[_Tensor]]) -> tuple[dict[str, _Tensor], tuple[str, ...]]:
    """Name to tensor of the model, and the keys of all other entries."""
    nested = {tensor["path"][0] for tensor in listed["tensors"] if len(tensor["path"]) > 1}
    wrapper = next((key for key in _MODEL_KEYS if key in nested), None)
    flat = sorted(tensor["path"][0] for tensor in listed["tensors"] if len(tensor["path"]) == 1)
    if wrapper is None and not nested:
        return {tensor["name"]: tensor for tensor in listed["tensors"]}, ()
    others = sorted({*nested, *flat} - {wrapper})
    if wrapper is None or (unknown := [key for key in others if not _TRAINING_STATE.search(key)]):
        raise SourceError(
            f"{folder}: holds entries {', '.join(sorted({*nested, *flat}))[:200]} (expected the state dict of a model, "
            f"or one under {', '.join(_MODEL_KEYS)}): save the model alone"
        )
    assert not unknown
    tensors = [tensor for tensor in listed["tensors"] if tensor["path"][0] == wrapper]
    return {".".join(tensor["path"][1:]): tensor for tensor in tensors}, tuple(others)


def _path(folder: SourceFolder, name: str) -> AnyPath:
    if not is_portable_name(name):
        raise SourceError(
            f"{folder.path / METADATA_NAME}: names the file {name!r:.100} (expected one in the same folder)"
        )
    path = folder.path / name
    if not path.is_file():
        raise SourceError(f"{path}: is missing (expected by {METADATA_NAME}): {_AGAIN}")
    folder.check_link(name)
    return path


def _bands(
    name: str, spec: TensorSpec, chunks: Sequence[StoredChunk]
) -> dict[Rows, tuple[TensorSpec, list[StoredChunk]]]:
    """The stored tensors that a tensor consists of: itself, or bands of rows that have chunks along another dim.

    Raises:
        ValueError: if the chunks are not along one dim, or along dim 0 and another one.
    """
    size, dims = num_bytes(spec.dtype, spec.shape), _sharded_dims(spec.shape, chunks)
    if len(dims) < 2:
        return {Rows(name, 0, size): (spec, [*chunks])}
    if len(dims) > 2 or 0 not in dims:
        raise ValueError(f"its chunks divide dims {dims} (expected one dim, or dim 0 and another)")
    by_rows: dict[tuple[int, int], list[StoredChunk]] = {}
    for chunk in chunks:
        moved = chunk._replace(offsets=(0, *chunk.offsets[1:]))
        by_rows.setdefault((chunk.offsets[0], chunk.sizes[0]), []).append(moved)
    row_bytes, at, bands = size // spec.shape[0], 0, {}
    for (start, count), held in sorted(by_rows.items()):
        if start != at:
            raise ValueError(f"rows from {min(at, start)} on are missing or in several chunks")
        at = start + count
        rows = Rows(f"{name}[{start}]", start * row_bytes, at * row_bytes)
        bands[rows] = TensorSpec(spec.dtype, (count, *spec.shape[1:])), held
    if at != spec.shape[0]:
        raise ValueError(f"rows from {at} on are missing")
    return bands


def _sharded_dims(shape: tuple[int, ...], chunks: Sequence[StoredChunk]) -> list[int]:
    """The dims that chunks do not cover."""
    for chunk in chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"a chunk is outside of the tensor (got {list(chunk.offsets)} to {ends} of {list(shape)})")
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
