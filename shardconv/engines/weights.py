"""The tensors that one rank of an engine loads, from a split checkpoint or from a source that is split on reading."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardconv.checkpoint.sources.planning import PlanOptions
from shardconv.checkpoint.split.loadable import open_loadable
from shardconv.checkpoint.split.manifest_file import is_split
from shardconv.checkpoint.split.rank_reader import RankReader
from shardconv.engines.held_shard import HeldShard, runs_of
from shardconv.engines.rank_tensor import RankTensor
from shardconv.runtime.rank_tensors import DTYPES, as_tensor
from shardconv.runtime.ranks import check_config
from shardconv.support.errors import PlanError, WorldSizeError

#: What to do if an engine uses elements that are not on the rank: for a checkpoint that was not split for this engine,
#: for one that was, and for a source. Commands are complete, as an engine shows arguments in place of other options.
_OTHER_ENGINE = (
    "split the source again with shardconv split SRC --tp {tp} --for {engine}, or run shardconv reshard {folder} "
    "--tp {tp} --for {engine}"
)
_SAME_ENGINE = "this version of the engine shards it differently: load the source with --load-format auto"
_SOURCE = "the engine shards it differently: load it with --load-format auto"


class RankSource(NamedTuple):
    """The shards of a checkpoint that a rank reads.

    Attributes:
        reader: reader of the shards.
        remedy: what to do if an element is used that the rank does not hold, for the message.
    """

    reader: RankReader
    remedy: str


def open_for_engine(folder: Path, *, tp: int, rank: int, engine: str, verify: bool) -> RankSource:
    """Open a checkpoint for one rank.

    Args:
        folder: a split checkpoint for ``tp`` ranks, or a source.
        tp: tensor parallel size of the engine.
        rank: the rank, from 0.
        engine: name of the engine whose boundaries the plan of a source follows.
        verify: check the rank file of a split checkpoint against its checksums while it is read.

    Raises:
        WorldSizeError: if the checkpoint is split for another tensor parallel size.
        ShardconvError: if the checkpoint is not supported.
    """
    is_source = not is_split(folder)
    options: PlanOptions = {"engine": engine} if is_source else {}
    checkpoint = open_loadable(folder, tp=tp if is_source else None, options=options)
    manifest = checkpoint.manifest
    if manifest.tp != tp:
        raise WorldSizeError(
            f"{folder} is split for another tensor parallel size (got {manifest.tp}, expected {tp} of the engine): "
            f"start the engine with {manifest.tp}, or run shardconv reshard {folder} --tp {tp}"
        )
    check_config(checkpoint)
    of_split = _SAME_ENGINE if manifest.request.engine == engine else _OTHER_ENGINE
    remedy = _SOURCE if is_source else of_split
    return RankSource(checkpoint.reader(rank, verify=verify), remedy.format(engine=engine, folder=folder, tp=tp))


def rank_weights(source: RankSource, *, dry_run: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of a checkpoint: a rank tensor of the full shape where it is sharded, else the full tensor.

    Only the current tensor is in memory, and those that the caller keeps. Rank tensors can also be read later.

    Args:
        source: result of :func:`open_for_engine`.
        dry_run: yield zeros instead of values, and read nothing.

    Raises:
        PlanError: if torch does not have the dtype of a tensor.
        NotHeldError: from operations on the tensors that use elements that the rank does not hold.
        IntegrityError: if bytes of the rank file differ from its checksums; from operations on the tensors that use
            them, or at the end.
    """
    reader, remedy = source
    for name, spec in reader.tensors.items():
        if spec.dtype not in DTYPES:
            raise PlanError(
                f"{name} has a dtype that torch does not have (got {spec.dtype}): use the engine's own loader"
            )
        placement = reader.plan.placement(name)
        read = partial(_zeros if dry_run else _read, reader, name)
        if placement.dim is None:
            yield name, read()
        else:
            shard = HeldShard(name, spec.shape, placement.dim, runs_of(placement, reader.rank), read, remedy)
            yield name, RankTensor.of(shard, DTYPES[spec.dtype])
    if not dry_run:
        reader.finish()


def _read(reader: RankReader, name: str) -> Tensor:
    return as_tensor(name, reader.tensors[name].dtype, reader.shard_shape(name), reader.read(name))


def _zeros(reader: RankReader, name: str) -> Tensor:
    """Return zeros of a shape that share the memory of one element."""
    return torch.zeros((), dtype=DTYPES[reader.tensors[name].dtype]).expand(reader.shard_shape(name))
