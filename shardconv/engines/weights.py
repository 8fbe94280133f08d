"""The tensors that one rank of an engine loads, from a split checkpoint or from a source that is split on reading."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardconv.checkpoint.sources.planning import PlanOptions
from shardconv.checkpoint.split.loadable import Loadable, open_loadable, stored_planner
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import is_split
from shardconv.checkpoint.split.rank_reader import RankReader
from shardconv.engines.rank_tensor import HeldShard, RankTensor, positions_of
from shardconv.plan.stages import StageChoice
from shardconv.runtime.rank_tensors import DTYPES, as_tensor
from shardconv.runtime.ranks import check_config
from shardconv.support.errors import NotHeldError, PlanError, UsageError, WorldSizeError

#: Remedies if an engine uses elements that are not on the rank: for a checkpoint that was split for another engine, for
#: one that was split for this engine, for a source, and for data groups. Commands are texts, as an engine shows options
#: as arguments.
_OTHER_ENGINE = (
    "split the source again with shardconv split SRC{sizes} --for {engine}, or run shardconv reshard {folder}{sizes} "
    "--for {engine}"
)
_SAME_ENGINE = "this version of the engine shards it differently: load the source with --load-format auto"
_SOURCE = "the engine shards it differently: load it with --load-format auto"
_IN_DATA_GROUPS = (
    "vLLM replicates shared experts if data groups have several ranks: split the source again with shardconv split "
    "SRC{sizes} --for {engine} --replicate NAME"
)


class RankSource(NamedTuple):
    """The shards of a checkpoint that a rank reads.

    Attributes:
        reader: reader of the shards.
        remedy: the remedy if an element is used that the rank does not hold, for the message.
    """

    reader: RankReader
    remedy: str


class EngineStages(NamedTuple):
    """The pipeline stages of an engine.

    Attributes:
        num_layers: number of layers of each stage.
        stage: the stage of this process, from 0.
    """

    num_layers: tuple[int, ...]
    stage: int


def open_for_engine(
    folder: Path, *, tp: int, rank: int, engine: str, verify: bool, stages: EngineStages | None = None, ep: int = 1
) -> RankSource:
    """Open a checkpoint for one rank.

    Args:
        folder: a split checkpoint, or a source.
        tp: tensor parallel size of the engine.
        rank: the rank in its stage, from 0.
        ep: expert parallel size of the engine; 1 if it shards each expert.
        engine: name of the engine whose boundaries the plan of a source follows.
        verify: check the rank file of a split checkpoint against its checksums while it is read.
        stages: the pipeline stages of the engine; None for one. Only tensors of the rank's stage are read, if the
            stages of the family are known.

    Raises:
        WorldSizeError: if the checkpoint is split for another tensor or expert parallel size, or for other stages.
        ShardconvError: if the checkpoint is not supported.
    """
    is_source = not is_split(folder)
    options: PlanOptions = {"engine": engine, "ep": ep} if is_source else {}
    checkpoint = _open(folder, tp if is_source else None, stages, options)
    manifest, names = checkpoint.manifest, None
    sizes = f" --tp {tp}" + (f" --ep {ep}" if (ep, manifest.plan.ep) != (1, 1) else "")
    if manifest.tp != tp:
        raise WorldSizeError(
            f"{folder} is split for another tensor parallel size (got {manifest.tp}, expected {tp} of the engine): "
            f"start the engine with {manifest.tp}, or run shardconv reshard {folder}{sizes}"
        )
    if manifest.plan.ep != ep:
        raise WorldSizeError(
            f"{folder} is split for another expert parallel size (got {manifest.plan.ep}, expected {ep} of the "
            f"engine): run shardconv reshard {folder}{sizes} --for {engine}"
        )
    num_layers = manifest.plan.num_layers
    of_split = _SAME_ENGINE if manifest.request.engine == engine else _OTHER_ENGINE
    of_split = _IN_DATA_GROUPS if ep > tp > 1 else _SOURCE if is_source else of_split
    layers = f" --stages {','.join(map(str, num_layers))}" if num_layers else ""
    remedy = of_split.format(engine=engine, folder=folder, sizes=f"{sizes}{layers}")
    if manifest.plan.stages is not None:
        _check_stages(folder, manifest, stages)
    if stages is not None:
        rank += manifest.plan.ranks_per_stage * (0 if manifest.plan.stages is None else stages.stage)
        names = _names_of(stages, manifest, engine)
        if missing := next((name for name in names or () if not manifest.plan.holds(rank, name)), None):
            raise NotHeldError(
                f"{folder}: stage {stages.stage} of {engine} needs {missing}, which is on others: {remedy}"
            )
    check_config(checkpoint)
    reader = checkpoint.reader(rank, verify=verify, names=names)
    return RankSource(reader, remedy)


def _open(folder: Path, tp: int | None, stages: EngineStages | None, options: PlanOptions) -> Loadable:
    """Open a checkpoint, with the stages of a source if its family has them."""
    if tp is not None and stages is not None:
        with suppress(PlanError, UsageError):  # the engine may have stages of more families
            return open_loadable(folder, tp=tp, stages=stages.num_layers, options=options)
    return open_loadable(folder, tp=tp, options=options)


def _check_stages(folder: Path, manifest: Manifest, stages: EngineStages | None) -> None:
    """Check that a checkpoint with stages has the engine's numbers of layers."""
    num_layers = () if stages is None else stages.num_layers
    if num_layers != manifest.plan.num_layers:
        expected, got = (",".join(map(str, one)) or "all" for one in (num_layers, manifest.plan.num_layers))
        again = f"shardconv reshard {folder} --tp {manifest.tp} --stages {expected}"
        again = f"shardconv reshard {folder} --tp {manifest.tp} --pp 1" if stages is None else again
        raise WorldSizeError(
            f"{folder} is split for other pipeline stages (got {got} layers, expected {expected} of the engine): start "
            f"the engine with {manifest.plan.pp} stages and VLLM_PP_LAYER_PARTITION={got}, or run {again}"
        )


def _names_of(stages: EngineStages, manifest: Manifest, engine: str) -> frozenset[str] | None:
    """The tensors of a stage of an engine; None for all, if the stages of the family are unknown."""
    planner = stored_planner(manifest, engine)
    try:
        plan = planner.plan(manifest.tp, planner.stages(StageChoice(len(stages.num_layers), stages.num_layers)))
    except (PlanError, UsageError):  # unknown, or of a draft model with fewer layers than stages
        return None
    return frozenset(name for name in plan.tensors if plan.holds(stages.stage * plan.ranks_per_stage, name))


def rank_weights(source: RankSource, *, dry_run: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of a checkpoint: the full tensor where it is replicated or mapped, else a rank tensor.

    Only the current tensor, and tensors that the caller keeps, are in memory. Rank tensors can also be read later.
    A mapped tensor of a source is a view of its file, of which only the pages that are used are read: copy it before
    the iterator ends, as a change of the file is noticed until then.

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
        if not dry_run and (full := reader.map_full(name)) is not None:
            yield name, as_tensor(name, spec.dtype, spec.shape, full)
            continue
        placement = reader.plan.placement(name)
        read = partial(_zeros if dry_run else _read, reader, name)
        if placement.dim is None:
            yield name, read()
        else:
            shard = HeldShard(name, spec.shape, placement.dim, positions_of(placement, reader.rank), read, remedy)
            yield name, RankTensor.of(shard, DTYPES[spec.dtype])
    if not dry_run:
        reader.finish()


def _read(reader: RankReader, name: str) -> Tensor:
    """Return the rank's shard of a tensor."""
    return as_tensor(name, reader.tensors[name].dtype, reader.shard_shape(name), reader.read(name))


def _zeros(reader: RankReader, name: str) -> Tensor:
    """Return zeros of a shape that share the memory of one element."""
    return torch.zeros((), dtype=DTYPES[reader.tensors[name].dtype]).expand(reader.shard_shape(name))
