"""The tensors that one rank of an engine loads: of a split checkpoint, or of a source that is split as it is read.

Owns which checkpoint is opened in which way, and what is checked first. Knows no engine but by the name of its
boundaries.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardconv.checkpoint.manifest import is_split, read_manifest
from shardconv.checkpoint.planning import plan_source
from shardconv.checkpoint.rank_reader import RankFileReader, RankReader, SourceReader
from shardconv.convert.model import DTYPE_NAMES
from shardconv.engines.rank_tensor import HeldShard, RankTensor, positions_of
from shardconv.errors import PlanError, WorldSizeError
from shardconv.plan.plan import TensorSpec
from shardconv.runtime.load import check_config

#: The dtypes of torch, by the names of safetensors.
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


#: What to do where an engine uses elements that are not on the rank, by what is loaded.
_OF_OTHERS = "split the source again with --for {engine}, or run shardconv reshard with --for {engine}"
_OF_ENGINE = "this version of the engine places it otherwise: load the source itself with --load-format auto"
_OF_SOURCE = "the engine places it otherwise: load it with --load-format auto"


class RankSource(NamedTuple):
    """What a rank reads of a checkpoint.

    Attributes:
        reader: where the shards come from.
        remedy: what to do where an element is used that the rank does not hold.
    """

    reader: RankReader
    remedy: str


def open_rank(folder: Path, *, tp: int, rank: int, engine: str, verify: bool) -> RankSource:
    """Open what a rank reads of a checkpoint.

    Args:
        folder: a split checkpoint for ``tp`` ranks, or a source.
        tp: tensor parallel size of the engine.
        rank: the rank, from 0.
        engine: whose boundaries the plan of a source follows.
        verify: check the rank file of a split checkpoint against its checksums first.

    Raises:
        WorldSizeError: if the split checkpoint is for another number of ranks.
        ShardconvError: if the checkpoint cannot be used, or its rank file is not what was written.
    """
    if not is_split(folder):
        source, _, (resolver, assumed), _ = plan_source(folder, engine=engine)
        return RankSource(SourceReader(source, resolver.plan(tp, assumed=assumed), rank), _OF_SOURCE)
    manifest = read_manifest(folder)
    if manifest.tp != tp:
        raise WorldSizeError(
            f"{folder}: is split for {manifest.tp} ranks (got a tensor parallel size of {tp}): start the engine with "
            f"{manifest.tp}, or make one for {tp} by shardconv reshard {folder} --tp {tp}"
        )
    check_config(folder, manifest.config)
    remedy = _OF_OTHERS if manifest.request.engine != engine else _OF_ENGINE
    return RankSource(RankFileReader(manifest, folder, rank, verify=verify), remedy.format(engine=engine))


def rank_weights(source: RankSource, rank: int, *, dry_run: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, one after the other: a rank tensor where it is sharded, else the tensor itself.

    At most the tensor at hand is in memory, and what the caller keeps. Rank tensors can be read later, too.

    Args:
        source: what :func:`open_rank` gives.
        rank: whose shards.
        dry_run: give zeros in place of values, and read nothing.

    Raises:
        PlanError: if a tensor is of a dtype that torch does not have.
        NotHeldError: by the tensors, when an operation uses what is not there.
    """
    reader, remedy = source
    for name, spec in reader.tensors.items():
        if spec.dtype not in _DTYPES:
            raise PlanError(f"{name}: dtype {spec.dtype} cannot be loaded through torch: use the engine's own loader")
        placement = reader.plan.placement(name)
        shape = placement.shard_shape(spec.shape, rank)
        read = partial(_zeros, spec, shape) if dry_run else partial(_read, reader, name, spec, shape)
        if placement.dim is None:
            yield name, read()
        else:
            shard = HeldShard(name, spec.shape, placement.dim, positions_of(placement, rank), read, remedy)
            yield name, RankTensor.of(shard, _DTYPES[spec.dtype])


def _read(reader: RankReader, name: str, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    data = reader.read(name)
    dtype = _DTYPES[spec.dtype]
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _zeros(spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Zeros in one element of memory."""
    return torch.zeros((), dtype=_DTYPES[spec.dtype]).expand(shape)
