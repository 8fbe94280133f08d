"""Checkpoints of Megatron-Core in its legacy format ``torch``: a file of torch.save for each rank.

The shards of all ranks are listed as chunks of the tensors that they form: names have the layers of all pipeline
stages, experts are one tensor, and rows of the gate projection come before rows of the up projection. The files are
read by a process that executes nothing in them.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardconv.checkpoint.sources.dcp_files import ChunkedFiles, StoredChunk
from shardconv.checkpoint.sources.folder_files import SourceFolder
from shardconv.checkpoint.sources.layout_files import rank_files
from shardconv.files.containers.safetensors import TensorFile, TensorInfo, num_bytes
from shardconv.files.containers.torch_files import read_torch_files
from shardconv.files.weight_formats import DCP_METADATA
from shardconv.layouts import MEGATRON
from shardconv.layouts.layout_file import ChosenRules, layout_head
from shardconv.layouts.megatron_names import LAYER, name_in_rules
from shardconv.layouts.relation import LayoutRule, find_target
from shardconv.layouts.row_tensors import shares_of
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError, SourceError

#: The names of a tensor of one expert, in experts that are computed one by one, and by a grouped GEMM.
_EXPERT = re.compile(
    r"(.+\.experts)\.(?:local_experts\.(?P<one>\d{1,6})\.)?(linear_fc[12]\.(?:weight|bias))(?P<grouped>\d{0,6})"
)
#: The head, and the tensor that it is a copy of where embeddings are tied.
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_FINAL_NORM = "decoder.final_layernorm.weight"


class _Rank(NamedTuple):
    """The numbers of a rank in its groups, and its file."""

    tp: int
    pp: int
    file: int


class _Shard(NamedTuple):
    """A rank's shard of a tensor, or of one expert in it."""

    tp: int
    file: int
    info: TensorInfo
    expert: int | None


def list_ranks(folder: SourceFolder, rules: ChosenRules, num_layers: int) -> ChunkedFiles:
    """List the chunks of the model.

    Args:
        folder: the folder.
        rules: for the config.
        num_layers: number of layers without MTP layers.

    Raises:
        SourceError: if a file is missing, or cannot be read.
        PlanError: if a tensor is unknown.
    """
    names = [name for name in rank_files(layout_head(MEGATRON), folder.inner_names) if "/" in name]
    if not names:
        raise SourceError(f"{folder.weights_path / DCP_METADATA}: is missing (expected beside .distcp files): copy it")
    ranks = _ranks(folder, names)
    for name in names:
        folder.check_link(f"{folder.inner}{name}")
    files = tuple(read_torch_files([folder.weights_path / name for name in names]))
    shards: dict[str, list[_Shard]] = {}
    if ranks[-1].pp and _FINAL_NORM in files[ranks[0].file].tensors:  # which the last stage has
        raise _of_experts(folder, names[0])
    first_layer = 0
    for pp in sorted({rank.pp for rank in ranks}):
        stage = [rank for rank in ranks if rank.pp == pp]
        for rank in stage:
            for name, info in _weights(files[rank.file]):
                global_name, expert = _global_name(name, first_layer, num_layers)
                shards.setdefault(global_name, []).append(_Shard(rank.tp, rank.file, info, expert))
        held = {int(match[1]) for name in files[stage[0].file].tensors if (match := LAYER.fullmatch(name))}
        first_layer += len(held)
    tensors, has_stages = {}, max(rank.pp for rank in ranks) > 0
    for name, found in shards.items():
        related = find_target(rules.rules, name)
        if related is None and name == HEAD and has_stages:  # the last stage has a copy of the embedding table
            related = find_target(rules.others, name)
        if related is None:
            raise PlanError(f"tensor {name} is not one of a {rules.config.get('model_type')!r:.40} model")
        segments = len(shares_of(related.rule, rules.config))
        tensors[name] = _chunked(name, related.rule, segments, found, max(rank.tp for rank in ranks) + 1)
    left_out = {entry.partition(".")[0] for file in files for entry in file.left_out if not entry.startswith("model.")}
    return ChunkedFiles(files, tensors, tuple(sorted({*left_out, "extra states"})))


def _ranks(folder: SourceFolder, names: Sequence[str]) -> list[_Rank]:
    """The ranks of the files, which form complete groups."""
    ranks = []
    for file, name in enumerate(names):
        match = layout_head(MEGATRON).names.fullmatch(name)
        assert match is not None
        if match["ep"] is not None:
            raise _of_experts(folder, name)
        ranks.append(_Rank(int(match["tp"]), int(match["pp"] or 0), file))
    expected = {
        (tp, pp) for tp in range(max(rank.tp for rank in ranks) + 1) for pp in range(max(rank.pp for rank in ranks) + 1)
    }
    if missing := sorted(expected - {rank[:2] for rank in ranks}):
        tp, pp = missing[0]
        raise SourceError(f"{folder.path}: the file of rank tp {tp}, pp {pp} is missing: copy the folder again")
    return ranks


def _of_experts(folder: SourceFolder, name: str) -> SourceError:
    """The error for files of expert-parallel ranks; without pipeline stages, they have the names of stages."""
    return SourceError(
        f"{folder.path}: {name} is of an expert-parallel rank, which is not read in this format: convert the "
        f"checkpoint to torch_dist with Megatron-LM"
    )


def _weights(file: TensorFile) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the weights of a rank."""
    for name, info in file.tensors.items():
        if info.strides is not None:
            raise SourceError(f"{file.path}: {name} is not contiguous: save it again after .contiguous()")
        if "_extra_state" not in name:
            yield name, info


def _global_name(name: str, first_layer: int, num_layers: int) -> tuple[str, int | None]:
    """The name in the rules of a tensor of a stage, and the expert that it is of."""
    if match := LAYER.fullmatch(name):
        name = f"decoder.layers.{first_layer + int(match[1])}.{match[2]}"
    name = name_in_rules(name, num_layers)
    match = _EXPERT.fullmatch(name)
    if match is None or not (number := match["one"] or match["grouped"]):
        return name, None
    return f"{match[1]}.experts.{match[3]}", int(number)


def _chunked(
    name: str, rule: LayoutRule, segments: int, shards: Sequence[_Shard], tp: int
) -> tuple[TensorSpec, list[StoredChunk]]:
    """The dtype, shape and chunks of a tensor. Each rank has a shard of each segment, of equal shape."""
    local = {TensorSpec(shard.info.dtype, shard.info.shape) for shard in shards}
    if len(local) > 1:
        raise PlanError(f"{name}: ranks have different shapes or dtypes (got {sorted(local)})")
    ((dtype, shape, *_),) = local
    if rule.has_experts and any(shard.expert is None for shard in shards):
        raise PlanError(f"{name}: has all experts of a rank in one tensor, which this format is not read with")
    experts = [max(shard.expert or 0 for shard in shards) + 1] if rule.has_experts else []
    dim = rule.options.dims[0] if rule.options.dims else None
    if len(shape) <= (dim or 0):
        raise PlanError(f"{name}: has shape {list(shape)} on a rank (expected at least {(dim or 0) + 1} dims)")
    count = segments if dim == 0 and rule.options.groups is None else 1
    if dim == 0 and shape[0] % count:
        raise PlanError(f"{name}: has {shape[0]} rows on a rank (expected a multiple of {count})")
    full = [*shape]
    if dim is not None:
        full[dim] *= tp
    chunks = []
    for shard in shards:
        size = [*shape]
        if dim == 0:
            size[0] //= count
        for segment in range(count):
            offsets = [0] * len(shape)
            if dim is not None:
                offsets[dim] = (segment * tp + shard.tp) * size[dim]
            start = shard.info.start + segment * num_bytes(dtype, tuple(size))
            expert = [shard.expert or 0] * len(experts)
            chunks.append(StoredChunk((*expert, *offsets), (*[1] * len(experts), *size), shard.file, start))
    return TensorSpec(dtype, (*experts, *full)), chunks
