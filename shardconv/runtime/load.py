"""Load: each rank builds the model on the meta device, converts it, and takes its values from its own file.

Owns the way of a rank's file into a model. The model is transformers' own, and so is the mapping from names on disk to
names in memory; only the conversion comes in between, when the model is built and nothing is in memory yet.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardconv.checkpoint.copy import Progress
from shardconv.checkpoint.fileio import InputFiles
from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.json_files import read_json
from shardconv.checkpoint.manifest import Manifest, read_manifest
from shardconv.checkpoint.paths import leads_out, local_path
from shardconv.checkpoint.planning import StrPath
from shardconv.checkpoint.stored_plan import placements_in_memory, resolver_of, runnable_plan
from shardconv.checkpoint.verify import verify_rank
from shardconv.convert.converted_model import extend_model_class
from shardconv.convert.model import convert_with_request
from shardconv.distributed import Axis, GroupLike, as_axis, init_parallel, reduce_from_tp
from shardconv.distributed.agreement import digest, same_on_all_ranks
from shardconv.distributed.groups import has_groups, launched_size
from shardconv.errors import (
    PeerError,
    PlanError,
    PlanWarning,
    RunError,
    ShardconvError,
    SourceError,
    SplitCheckpointError,
    WorldSizeError,
)
from shardconv.hf.classes import ModelClass, model_class
from shardconv.hf.weights import load_shards
from shardconv.layers import ParallelModule
from shardconv.layers.sharding import take_shard
from shardconv.layouts.layout import FileTensor
from shardconv.plan.experts import local_experts
from shardconv.runtime.device import check_room, move, rank_device
from shardconv.runtime.versions import versions


def load(
    path: StrPath,
    *,
    device: Any = None,
    dtype: torch.dtype | None = None,
    model: Callable[[], nn.Module] | None = None,
    group: GroupLike = None,
    verify: bool = True,
    unused: Sequence[str] = (),
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Any:
    """Load a split checkpoint; each rank calls this, and reads its own file only.

    Without groups it starts them, one rank a process of ``torchrun``. On a CPU the values are views of the file, which
    is mapped into memory and must not be changed meanwhile.

    Args:
        path: the split checkpoint.
        device: where the model goes; by default the rank's own GPU where there is one, else the CPU.
        dtype: of the values; by default as they are stored.
        model: makes the module, on the meta device, whose names are those of the checkpoint; by default the class of
            transformers that its config names.
        group: the ranks; by default the current tensor axis, else all processes.
        verify: check the rank's file against its checksums first, which reads it once more: without it, files that were
            damaged or exchanged with another rank's are loaded as they are.
        unused: patterns of tensors that the model need not use, as ``*.pooler.*``; MTP layers,
            constants of old checkpoints, poolers and heads of pretraining need no pattern.
        trust_remote_code: run code that the checkpoint brings for its model.
        progress: called with bytes done and bytes in all, while they are checked and go to a device.

    Returns:
        The model, converted, in eval mode; with full logits on every rank.

    Raises:
        RunError: if there are not as many processes as ranks, the model cannot be built, a parameter has no tensor, or
            a tensor no parameter; on all ranks.
        SplitCheckpointError: if the checkpoint or the rank's file cannot be used; on all ranks.

    Warns:
        PlanWarning: if the plan rests on assumptions, or on rules of a plan file; on the first rank.

    Example:
        >>> model = shardconv.load("llama-tp2")  # doctest: +SKIP
    """
    folder = local_path(path)
    manifest, device, axis = _meet(folder, device, group)
    plan = _agreed(axis, partial(runnable_plan, manifest, folder))
    convert = partial(convert_with_request, config=manifest.config or {}, request=plan, axis=axis, has_values=False)
    is_moved = device.type != "cpu"
    steps = iter(_steps(progress, verify + is_moved))

    def check_and_map() -> dict[str, Tensor]:
        check_room(device, manifest.rank_layout.headers[axis.rank], dtype, manifest.tp)
        if verify:
            verify_rank(manifest, folder, axis.rank, next(steps))
        tensors = _map_rank_file(manifest, folder, axis.rank)
        for name, placement in placements_in_memory(manifest, plan).items():
            tensors[name] = take_shard(tensors[name], placement, axis.rank)
        placements = {name: planned.placement for name, planned in plan.tensors.items()}
        return local_experts(tensors, placements, axis.rank)

    tensors = _agreed(axis, check_and_map)
    if model is None:
        kind = _agreed(axis, partial(_model_class, folder, manifest.config, is_trusted=trust_remote_code))
        build = partial(_build_by_config, folder, kind, axis, unused)
    else:
        build = partial(_build_by_caller, model)

    def fill() -> nn.Module:
        built = build(convert=convert, tensors=tensors, dtype=dtype)
        if is_moved:
            move(built, device, next(steps))
        return built

    loaded = _agreed(axis, fill)
    if plan.assumed and axis.rank == 0:
        warnings.warn(f"{folder}: {'; '.join(plan.assumed)}", PlanWarning, stacklevel=2)
    for module in loaded.modules():
        if isinstance(module, ParallelModule):
            module.describe_parameters()
    return loaded.eval()


def _steps(progress: Progress | None, count: int) -> list[Progress | None]:
    """The callbacks of several steps, each of which takes its share of the whole."""
    if progress is None:
        return [None] * count
    return [partial(_report_step, progress, step, count) for step in range(count)]


def _report_step(progress: Progress, step: int, count: int, done: int, total: int) -> None:
    progress(step * total + done, count * total)


def _meet(folder: Path, device: Any, group: GroupLike) -> tuple[Manifest, torch.device, Axis]:
    """The checkpoint, the device and the ranks, when all ranks have found the same."""
    problem: ShardconvError | None = None
    device_type = "cpu"
    try:
        manifest = read_manifest(folder)
        _check_size(manifest, folder, group)
        device = rank_device(device)
        device_type = device.type
    except WorldSizeError:
        raise  # by all alike, before they talk
    except ShardconvError as error:
        problem = error
    axis = _axis(group, device_type)
    _agreed(axis, partial(_raise, problem))
    own = {f"versions of {package}": version for package, version in versions().items()}
    _check_facts(folder, axis, {"checkpoints": manifest.to_json(""), "kinds of devices": device_type, **own})
    return manifest, device, axis.with_shared_memory() if device_type == "cpu" else axis


def _check_facts(folder: Path, axis: Axis, facts: Mapping[str, Any]) -> None:
    """Check that all ranks see the same."""
    same = same_on_all_ranks([digest(json.dumps(fact, sort_keys=True).encode()) for fact in facts.values()], axis)
    if different := [name for name, is_same in zip(facts, same, strict=True) if not is_same]:
        own = ", ".join(fact for name, fact in facts.items() if name in different and isinstance(fact, str))
        raise RunError(
            f"{folder}: the ranks see different {' and '.join(different)}"
            f"{f' (rank {axis.rank}: {own})' if own else ''}: make them the same on all ranks"
        )


def _world(group: GroupLike) -> int | None:
    """The processes of the axis that is there; None where none is."""
    return as_axis(group).size if group is not None or has_groups() or dist.is_initialized() else None


def _check_size(manifest: Manifest, folder: Path, group: GroupLike) -> None:
    size = _world(group) or launched_size()
    if size != manifest.tp:
        found = "is 1 process" if size == 1 else f"are {size} processes"
        other = (
            f", or make one for {size} by shardconv reshard {folder} --tp {size}"
            if _is_supported(manifest, size)
            else ""
        )
        raise WorldSizeError(
            f"{folder}: is for {manifest.tp} ranks, and there {found}: start it by torchrun --nproc-per-node "
            f"{manifest.tp}{other}"
        )


def _is_supported(manifest: Manifest, tp: int) -> bool:
    try:
        resolver_of(manifest, manifest.request.engine, pad=0).plan(tp)
    except PlanError:
        return False
    return True


def _axis(group: GroupLike, device_type: str) -> Axis:
    """The ranks; torch.distributed is started if it is not."""
    if _world(group) is None:
        init_parallel(tensor=launched_size(), device_type=device_type)
    return as_axis(group)


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def _agreed(axis: Axis, step: Callable[[], Any]) -> Any:
    """Do a step that can fail on one rank alone; where one fails, all raise, and none waits for it."""
    result, problem = None, None
    try:
        result = step()
    except ShardconvError as error:
        problem = error
    except Exception as error:  # noqa: BLE001 - the other ranks have to hear of it, whatever it was
        problem = RunError(f"{type(error).__name__}: {error}")
        problem.__cause__ = error
    failed = torch.tensor(int(problem is not None), device=axis.message_device)
    if axis.size > 1 and reduce_from_tp(failed, group=axis):
        problems: list[str | None] = [None] * axis.size
        dist.all_gather_object(problems, None if problem is None else str(problem), group=axis.group)
        for rank, text in enumerate(problems):
            if text is not None and problem is None:
                raise PeerError(f"rank {rank}: {text}")
    if problem is not None:
        raise problem
    return result


def _map_rank_file(manifest: Manifest, folder: Path, rank: int) -> dict[str, Tensor]:
    """The tensors of a rank's file, as views of the file in memory."""
    from safetensors.torch import load_file  # noqa: PLC0415 - torch and it are imported where they are needed

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
    """The shards of the source tensors, as views of the tensors of a rank file."""
    tensors = manifest.tensors
    shards = {}
    for tensor in manifest.layout.file_tensors(tensors):
        shapes = [manifest.plan.placement(name).shard_shape(tensors[name].shape, rank) for name in tensor.members]
        if tensor == FileTensor(tensor.name, (tensor.name,)):
            shards[tensor.name] = found[tensor.name]
            continue
        sections = found[tensor.name].flatten().split([prod(shape) for shape in shapes])
        shards.update(
            (name, part.view(shape)) for name, part, shape in zip(tensor.members, sections, shapes, strict=True)
        )
    return shards


def _build_by_caller(
    make: Callable[[], nn.Module],
    *,
    convert: Callable[[nn.Module], nn.Module],
    tensors: dict[str, Tensor],
    dtype: torch.dtype | None,
) -> nn.Module:
    """Build, convert and fill the module that the caller makes."""
    with torch.device("meta"):
        model = convert(make())
    if dtype is not None:
        tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    model.load_state_dict(tensors, assign=True)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise RunError(f"{', '.join(left[:3])}: is in no file, and has to be computed when the module is made on meta")
    return model


def check_config(folder: Path, split: Mapping[str, Any] | None) -> None:
    """Refuse to build a model without a config.json, or by another one than the checkpoint was split with.

    Args:
        folder: the split checkpoint.
        split: the config in its manifest.

    Raises:
        RunError: if there is none.
        SplitCheckpointError: if it is another: shards may not fit it, and nothing else would show that.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise RunError(
            f"{folder}: does not have a config.json, which names the model's class: split the source again with "
            f"shardconv split SRC --config FILE, or load it into your own module with shardconv.load(DIR, model=...)"
        )
    found, known = read_json(path), split or {}
    if different := [name for name in sorted({*found, *known}) if _text(found.get(name)) != _text(known.get(name))]:
        raise SplitCheckpointError(
            f"{path}: differs from the config that was split, in {', '.join(different[:5])}: restore it, or split the "
            f"source again"
        )


def _text(value: Any) -> str:
    """A config field as JSON, in which NaN equals NaN."""
    return json.dumps(value, sort_keys=True)


def _model_class(folder: Path, split: Mapping[str, Any] | None, *, is_trusted: bool) -> ModelClass:
    """Look up the class of a split checkpoint.

    Args:
        folder: the split checkpoint.
        split: the config in its manifest.
        is_trusted: whether code in the folder may be run.

    Raises:
        RunError: as :func:`~shardconv.hf.classes.model_class`, or if the checkpoint is quantized.
        SplitCheckpointError: if config.json differs from the config of the split.
    """
    check_config(folder, split)
    if (split or {}).get("quantization_config"):
        raise RunError(f"{folder}: is quantized, and cannot be run so far")
    return model_class(split or {}, folder, is_trusted=is_trusted)


def _build_by_config(
    folder: Path,
    found: ModelClass,
    axis: Axis,
    unused: Sequence[str],
    *,
    convert: Callable[[nn.Module], nn.Module],
    tensors: dict[str, Tensor],
    dtype: torch.dtype | None,
) -> nn.Module:
    """Build, convert and fill the model of the class that the config names."""
    model = load_shards(found, tensors, convert, folder, dtype=dtype, unused=unused)
    extend_model_class(model, axis)
    return model
