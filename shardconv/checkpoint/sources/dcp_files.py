"""Checkpoints of torch.distributed.checkpoint (DCP): ``.metadata`` and ``*.distcp`` files with chunks of tensors.

Each chunk is a file of torch.save inside of a file. A child process lists the metadata, another one the chunks
(``files.containers.unpickle``); names and positions are untrusted.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import geometry, unsharded
from shardconv.checkpoint.sources.layout_files import FullTensors, is_contiguous
from shardconv.checkpoint.sources.row_order import JoinedRows, Rows
from shardconv.checkpoint.sources.source_files import is_portable_name
from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.containers.torch_files import REMOTE, TorchChunk, list_metadata, read_torch_chunks
from shardconv.files.folder import AnyPath, RemotePath
from shardconv.files.input_files import FileState, file_states
from shardconv.files.paths import check_link
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


class Chunk(NamedTuple):
    """A box of a tensor, and its position: index of the file and offset in it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    offset: int


class DcpFiles(NamedTuple):
    """The model in a checkpoint of DCP.

    Attributes:
        paths: of the files.
        states: for each file its state when its tensors were listed.
        tensors: the full tensors.
        left_out: keys of entries that are not the model's.
    """

    paths: tuple[AnyPath, ...]
    states: tuple[FileState, ...]
    tensors: FullTensors
    left_out: tuple[str, ...]


def read_dcp(folder: AnyPath, *, follow_links: bool) -> DcpFiles:
    """Read the positions of all tensors of the model.

    Raises:
        SourceError: if the folder is remote, the metadata is damaged or asks for anything but its own classes, a file
            is missing, damaged or outside of the folder, or chunks do not form their tensors.
    """
    if isinstance(folder, RemotePath):
        raise SourceError(f"{folder / METADATA_NAME}: {REMOTE.problem}: {REMOTE.remedy}")
    check_link(folder / METADATA_NAME, folder, follow_links=follow_links)
    listed: Mapping[str, list[_Tensor]] = list_metadata(folder / METADATA_NAME)
    named, left_out = _model_tensors(folder, listed)
    if (name := next((name for name, tensor in named.items() if not tensor["chunks"]), None)) is not None:
        raise SourceError(f"{folder / METADATA_NAME}: {name} does not have chunks: {_AGAIN}")
    names = sorted({chunk[2] for tensor in named.values() for chunk in tensor["chunks"]})
    paths = tuple(_path(folder, name, follow_links=follow_links) for name in names)
    file_of = {name: number for number, name in enumerate(names)}
    wanted = [(name, chunk) for name, tensor in named.items() for chunk in tensor["chunks"]]
    states = file_states(paths)
    found = read_torch_chunks([TorchChunk(paths[file_of[chunk[2]]], *chunk[3:]) for _, chunk in wanted])
    chunks: dict[str, list[Chunk]] = {name: [] for name in named}
    dtypes: dict[str, str] = {}
    for (name, chunk), tensor in zip(wanted, found, strict=True):
        offsets, sizes, file = tuple(chunk[0]), tuple(chunk[1]), chunk[2]
        if tensor.shape != sizes or dtypes.setdefault(name, tensor.dtype) != tensor.dtype or not is_contiguous(tensor):
            raise SourceError(
                f"{folder / file}: a chunk of {name} is {tensor.dtype} {list(tensor.shape)} with strides "
                f"{list(tensor.strides)} (expected {dtypes[name]} {list(sizes)}, contiguous): save the checkpoint again"
            )
        chunks[name].append(Chunk(offsets, sizes, file_of[file], tensor.offset))
    tensors = FullTensors({}, {}, {}, {})
    for name in named:
        _add(tensors, folder, name, TensorSpec(dtypes[name], tuple(named[name]["shape"])), chunks[name])
    return DcpFiles(paths, states, tensors, left_out)


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


def _path(folder: AnyPath, name: str, *, follow_links: bool) -> AnyPath:
    if not is_portable_name(name):
        raise SourceError(f"{folder / METADATA_NAME}: names the file {name!r:.100} (expected one in the same folder)")
    path = folder / name
    if not path.is_file():
        raise SourceError(f"{path}: is missing (expected by {METADATA_NAME}): {_AGAIN}")
    check_link(path, folder, follow_links=follow_links)
    return path


def _add(tensors: FullTensors, folder: AnyPath, name: str, spec: TensorSpec, chunks: Sequence[Chunk]) -> None:
    """Add a tensor: its chunks along one dim, or bands of rows that have chunks along another dim."""
    try:
        tensors.specs[name] = spec
        dims = _sharded_dims(spec.shape, chunks)
        if len(dims) < 2:
            tensors.stored[name], tensors.shards[name] = spec, _shards(spec, chunks, dims)
            return
        if len(dims) > 2 or 0 not in dims:
            raise ValueError(f"its chunks divide dims {dims} (expected one dim, or dim 0 and another)")
        tensors.transforms[name] = _joined(tensors, name, spec, chunks)
    except ValueError as error:
        raise SourceError(f"{folder}: the chunks of {name} cannot be merged: {error}: save it again") from error


def _joined(tensors: FullTensors, name: str, spec: TensorSpec, chunks: Sequence[Chunk]) -> JoinedRows:
    """Add each band of rows as a stored tensor, and join them."""
    bands: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        bands.setdefault((chunk.offsets[0], chunk.sizes[0]), []).append(chunk._replace(offsets=(0, *chunk.offsets[1:])))
    row_bytes, at, parts = num_bytes(spec.dtype, spec.shape[1:]), 0, []
    for (start, size), band in sorted(bands.items()):
        if start != at:
            raise ValueError(f"rows from {min(at, start)} on are missing or in several chunks")
        stored, at = f"{name}[{start}]", start + size
        tensors.stored[stored] = TensorSpec(spec.dtype, (size, *spec.shape[1:]))
        dims = _sharded_dims(tensors.stored[stored].shape, band)
        if len(dims) > 1:
            raise ValueError("its chunks do not form a grid")
        tensors.shards[stored] = _shards(tensors.stored[stored], band, dims)
        parts.append(Rows(stored, start * row_bytes, at * row_bytes))
    if at != spec.shape[0]:
        raise ValueError(f"rows from {at} on are missing")
    return JoinedRows(tuple(parts), row_bytes)


def _sharded_dims(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> list[int]:
    """The dims that chunks do not cover."""
    for chunk in chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"a chunk is outside of the tensor (got {list(chunk.offsets)} to {ends} of {list(shape)})")
    return [dim for dim, size in enumerate(shape) if any(chunk.sizes[dim] != size for chunk in chunks)]


def _shards(spec: TensorSpec, chunks: Sequence[Chunk], dims: Sequence[int]) -> Shards:
    """The shards of chunks along at most one dim."""
    size = num_bytes(spec.dtype, spec.shape)
    held = sorted(chunk for chunk in chunks if 0 not in chunk.sizes)
    if not size:
        return Shards(unsharded(0), (chunks[0].file,), (chunks[0].offset,))
    if not held:
        raise ValueError("it does not have chunks")
    placement = Placement.replicated(len(held))
    if dims:
        (dim,) = dims
        intervals = (Interval(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for chunk in held)
        placement = Placement(dim, spec.shape[dim], tuple((interval,) for interval in intervals))
    files, offsets = tuple(chunk.file for chunk in held), tuple(chunk.offset for chunk in held)
    return Shards(geometry(placement, spec.dtype, spec.shape), files, offsets)
