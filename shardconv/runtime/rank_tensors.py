"""The tensors of a rank, from the bytes that its reader returns."""

import torch
from torch import Tensor

from shardconv.checkpoint.engine.copy import Progress
from shardconv.checkpoint.split.rank_reader import RankReader
from shardconv.convert.model import DTYPE_NAMES
from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.fileio import Bytes
from shardconv.support.errors import PlanError

#: torch dtypes by their names in safetensors.
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def read_tensors(reader: RankReader, progress: Progress | None = None) -> dict[str, Tensor]:
    """Read all tensors of a rank.

    Args:
        reader: of the rank.
        progress: called with the number of read bytes and the total.

    Returns:
        Name of source tensor to shard; shards that are ranges of a file are views of it.

    Raises:
        PlanError: if torch does not have the dtype of a tensor.
        SourceError: if a file was modified since it was opened, or cannot be read.
    """
    total = sum(num_bytes(spec.dtype, reader.shard_shape(name)) for name, spec in reader.tensors.items())
    tensors = {}
    done = 0
    for name in reader.tensors:
        tensors[name] = shard_tensor(reader, name, reader.read_local(name))
        done += tensors[name].nbytes
        if progress is not None:
            progress(done, total)
    reader.finish()
    return tensors


def shard_tensor(reader: RankReader, name: str, data: Bytes) -> Tensor:
    """The tensor with the bytes of a rank's shard.

    Args:
        reader: that read the bytes.
        name: name of the tensor.
        data: the bytes.

    Raises:
        PlanError: if torch does not have its dtype.
    """
    spec = reader.tensors[name]
    if spec.dtype not in DTYPES:
        raise PlanError(f"{name} has a dtype that torch does not have (got {spec.dtype}): load it with another tool")
    dtype, shape = DTYPES[spec.dtype], reader.shard_shape(name)
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)
