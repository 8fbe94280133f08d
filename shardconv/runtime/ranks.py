"""Checks before a checkpoint is loaded: number of ranks, devices, package versions and the config."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError

import torch
import torch.distributed as dist

from shardconv.checkpoint.split.loadable import Loadable, refuse_split_adapter, stored_planner
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.convert.model import version
from shardconv.distributed import Axis, GroupLike, as_axis, init_parallel
from shardconv.distributed.agreement import attempt, check_same, run_on_all
from shardconv.distributed.devices import Device
from shardconv.distributed.groups import ParallelGroups, has_groups, launched_size, other_groups
from shardconv.files.folder import AnyPath, read_json
from shardconv.files.weight_formats import CONFIG_NAME
from shardconv.hf.classes import ModelClass, model_class
from shardconv.runtime.device import rank_device
from shardconv.support.errors import PlanError, RunError, SplitCheckpointError, UsageError, WorldSizeError, option

#: The packages that must have the same version on all ranks.
_PACKAGES = ("shardconv", "torch", "transformers", "diffusers")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a checkpoint, seen from this process.

    Attributes:
        all: the ranks of all pipeline stages.
        tensor: the ranks of this data group, which hold the shards of the same tensors.
        pipeline: the ranks with the same number in each stage; None for one stage.
        groups: the groups, if several data groups share experts; None for one data group.
    """

    all: Axis
    tensor: Axis
    pipeline: Axis | None = None
    groups: ParallelGroups | None = None


def connect_ranks(
    find: Callable[[], Loadable], device: Device, group: GroupLike
) -> tuple[Loadable, torch.device, Ranks]:
    """Open a checkpoint, and check that all ranks have the same one, kind of device and package versions.

    Args:
        find: function that opens the checkpoint.
        device: device of this rank; None for the default.
        group: the ranks; None for the current tensor axis, else all processes, which are connected if they are not. Of
            a checkpoint with pipeline stages or data groups, None: its ranks are all processes.

    Raises:
        WorldSizeError: if there are not as many processes as ranks, where a rank detects it.
        ShardconvError: on all ranks, if one cannot open the checkpoint, does not have its file or the device, or
            differs.
    """

    def open_here() -> tuple[Loadable, dict[str, object], torch.device]:
        checkpoint = find()
        _check_size(checkpoint, group)
        return checkpoint, checkpoint.facts(), rank_device(device)

    opened, problem = attempt(open_here)
    if isinstance(problem, WorldSizeError) and not _has_others(group):
        raise problem
    uses_all = bool(opened) and _uses_all(opened[0][0].manifest)
    axis = _axis(group, uses_all, opened[0][2].type if opened else "cpu")
    run_on_all(axis, partial(_raise, problem))
    checkpoint, facts, found = opened[0]
    own = {f"versions of {package}": _version(package) for package in _PACKAGES}
    named = {"kinds of checkpoints": checkpoint.kind, "kinds of devices": found.type, **own}
    check_same(checkpoint.path, axis, facts, named)
    run_on_all(axis, partial(checkpoint.check_ranks, [axis.rank]))
    ranks = _ranks_of_groups(axis, checkpoint.manifest, found.type) if uses_all else Ranks(axis, axis)
    if found.type == "cpu":
        ranks = replace(ranks, tensor=ranks.tensor.with_shared_memory())
    return checkpoint, found, ranks


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def _uses_all(manifest: Manifest) -> bool:
    """Whether a checkpoint has several pipeline stages or data groups, which together use all processes."""
    return manifest.num_ranks > manifest.tp


def _axis(group: GroupLike, uses_all: bool, device_type: str) -> Axis:
    """Return the axis of all ranks of a checkpoint; initialize torch.distributed if it is not."""
    if _num_connected(group, uses_all) is None:
        init_parallel(tensor=launched_size(), device_type=device_type)
    return as_axis(dist.group.WORLD) if uses_all else as_axis(group)


def _ranks_of_groups(axis: Axis, manifest: Manifest, device_type: str) -> Ranks:
    """Return the axes of the ranks of several stages or data groups; the current ones if the caller made such."""
    tp, pp = manifest.tp, manifest.plan.pp
    groups = other_groups(tensor=tp, data=manifest.plan.ranks_per_stage // tp, pipeline=pp, device_type=device_type)
    pipeline, has_data = groups.pipeline if pp > 1 else None, groups.data.size > 1
    return Ranks(axis, groups.tensor, pipeline, groups if has_data else None)


def _num_connected(group: GroupLike, uses_all: bool) -> int | None:
    """Return the number of connected ranks, of the current tensor axis or of the world; None if there are none."""
    if uses_all and dist.is_initialized():
        return dist.get_world_size()
    return as_axis(group).size if group is not None or has_groups() or dist.is_initialized() else None


def _has_others(group: GroupLike) -> bool:
    """Whether there are other ranks to communicate with, which may have another checkpoint under the same path."""
    return _num_connected(group, uses_all=False) is not None or "MASTER_ADDR" in os.environ


def _check_size(checkpoint: Loadable, group: GroupLike) -> None:
    path, manifest = checkpoint.pipeline or checkpoint.path, checkpoint.manifest
    ep, pp, uses_all = manifest.plan.ep, manifest.plan.pp, _uses_all(manifest)
    if uses_all and group is not None:
        what = "pipeline stages" if pp > 1 else "data groups"
        raise UsageError(f"{path}: has {what}, which use all processes: remove the argument group")
    size = _num_connected(group, uses_all) or launched_size()
    if size != manifest.num_ranks:
        found = "is 1 process" if size == 1 else f"are {size} processes"
        if checkpoint.source is None:
            more = f"{' --ep 1' * (ep > 1)}{' --pp 1' * (pp > 1)}"
            other, remedy = "is", f"make one for {size} by shardconv reshard {path} --tp {size}{more}"
        else:
            given = [option(tp=size), *[option(ep=1)] * (ep > 1), *[option(pp=1)] * (pp > 1)]
            other, remedy = "would be loaded", f"pass {' '.join(given)}"
        raise WorldSizeError(
            f"{path}: {other} for {manifest.num_ranks} ranks, and there {found}: start it by torchrun --nproc-per-node "
            f"{manifest.num_ranks}{f', or {remedy}' if _is_supported(manifest, size) else ''}"
        )


def _is_supported(manifest: Manifest, tp: int) -> bool:
    try:
        stored_planner(manifest, manifest.request.engine, ep=1, pad=0).plan(tp)
    except PlanError:
        return False
    return True


# --- the config and its model class -----------------------------------------------------------------------------------


def check_config(checkpoint: Loadable) -> None:
    """Check that a checkpoint has a config, and a split checkpoint the config.json that it was split with.

    Raises:
        RunError: if it does not have a config, or is an adapter.
        SplitCheckpointError: if the config differs: shards may not fit, and no later check would detect that.
    """
    folder, source = checkpoint.path, checkpoint.source
    if source is not None:
        if source.config is None:
            raise _no_config(folder, f"pass one with {option(config='FILE')}", "SRC, tp=N")
        return
    refuse_split_adapter(folder, checkpoint.manifest.auxiliary_files)
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise _no_config(folder, "split the source again with shardconv split SRC --config FILE", "DIR")
    found, known = read_json(path), checkpoint.manifest.config or {}
    if different := [name for name in sorted({*found, *known}) if _text(found.get(name)) != _text(known.get(name))]:
        raise SplitCheckpointError(
            f"{path}: differs from the config that was split, in {', '.join(different[:5])}: restore it, or split the "
            f"source again"
        )


def _no_config(folder: AnyPath, remedy: str, arguments: str) -> RunError:
    return RunError(
        f"{folder}: does not have a config.json, which names the model's class: {remedy}, or load it into your own "
        f"module with shardconv.load({arguments}, model=...)"
    )


def _text(value: object) -> str:
    """Format a config field as JSON, in which NaN equals NaN."""
    return json.dumps(value, sort_keys=True)


def find_model_class(checkpoint: Loadable, *, is_trusted: bool) -> ModelClass:
    """Look up the model class of a checkpoint.

    Args:
        checkpoint: the checkpoint.
        is_trusted: whether code in its folder may be run; it is not run with a config from elsewhere.

    Raises:
        RunError: as :func:`~shardconv.hf.classes.model_class`.
        SplitCheckpointError: if config.json differs from the config that was split.
    """
    check_config(checkpoint)
    path = checkpoint.folder / CONFIG_NAME
    is_own = checkpoint.source is None or checkpoint.source.auxiliary_files.get(CONFIG_NAME, path) == path
    return model_class(checkpoint.manifest.config or {}, checkpoint.folder if is_own else None, is_trusted=is_trusted)
