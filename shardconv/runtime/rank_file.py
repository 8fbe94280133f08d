"""The tensors of a rank file, mapped into memory."""

from math import prod
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from shardconv.checkpoint.fileio import InputFiles
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.paths import leads_out
from shardconv.errors import SourceError, SplitCheckpointError
from shardconv.layouts.layout import FileTensor


def map_rank_file(manifest: Manifest, folder: Path, rank: int) -> dict[str, Tensor]:
    """Map a rank file into memory.

    Args:
        manifest: of the split checkpoint.
        folder: of the split checkpoint.
        rank: the rank.

    Returns:
        Name of source tensor to shard; shards are views of the file.

    Raises:
        SplitCheckpointError: if the file cannot be read, or differs from the manifest.
    """
    path = manifest.rank_paths(folder)[rank]
    if leads_out(path, folder):
        raise SplitCheckpointError(f"{path}: is a link out of its folder")
    layout = manifest.rank_layout
    try:
        with InputFiles([path], [layout.prefixes[rank]], [layout.file_bytes[rank]]):
            return _source_tensors(load_file(path), manifest, rank)
    except SourceError as error:
        raise SplitCheckpointError(str(error)) from error


def _source_tensors(found: dict[str, Tensor], manifest: Manifest, rank: int) -> dict[str, Tensor]:
    """Return the shards of the source tensors, as views of the tensors of a rank file."""
    tensors = manifest.tensors
    shards = {}
    for tensor in manifest.layout.file_tensors(tensors):
        shapes = [manifest.plan.placement(name).shard_shape(tensors[name].shape, rank) for name in tensor.members]
        if tensor == FileTensor(tensor.name, (tensor.name,)):
            shards[tensor.name] = found[tensor.name]
            continue
        sections = found[tensor.name].flatten().split([prod(shape) for shape in shapes])
        shards.update(
            (name, section.view(shape)) for name, section, shape in zip(tensor.members, sections, shapes, strict=True)
        )
    return shards
