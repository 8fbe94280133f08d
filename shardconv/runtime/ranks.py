"""The ranks that load a checkpoint: their number, devices and package versions."""

import os
from collections.abc import Callable
from functools import partial
from importlib import metadata

import torch
import torch.distributed as dist

from shardconv.checkpoint.split.loadable import Loadable
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.stored_plan import stored_planner
from shardconv.distributed import Axis, GroupLike, as_axis, init_parallel
from shardconv.distributed.agreement import attempt, check_same, run_on_all
from shardconv.distributed.devices import Device
from shardconv.distributed.groups import has_groups, launched_size
from shardconv.runtime.device import rank_device
from shardconv.support.errors import PlanError, WorldSizeError, option


def connect_ranks(
    find: Callable[[], Loadable], device: Device, group: GroupLike
) -> tuple[Loadable, torch.device, Axis]:
    """Open a checkpoint, and check that all ranks have the same one, kind of device and package versions.

    Args:
        find: opens it.
        device: of this rank; None for the default.
        group: the ranks; None for the current tensor axis, else all processes, which are connected if they are not.

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
    axis = _axis(group, opened[0][2].type if opened else "cpu")
    run_on_all(axis, partial(_raise, problem))
    checkpoint, facts, found = opened[0]
    own = {f"versions of {package}": version for package, version in _versions().items()}
    named = {"kinds of checkpoints": checkpoint.kind, "kinds of devices": found.type, **own}
    check_same(checkpoint.path, axis, facts, named)
    run_on_all(axis, partial(checkpoint.check_ranks, [axis.rank]))
    return checkpoint, found, axis.with_shared_memory() if found.type == "cpu" else axis


def _versions() -> dict[str, str]:
    """Package to version, or to "not installed", of those whose results have to be the same on all ranks."""
    return {package: _version(package) for package in ("shardconv", "torch", "transformers")}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def _axis(group: GroupLike, device_type: str) -> Axis:
    """Return the axis of the ranks; initialize torch.distributed if it is not."""
    if _num_connected(group) is None:
        init_parallel(tensor=launched_size(), device_type=device_type)
    return as_axis(group)


def _num_connected(group: GroupLike) -> int | None:
    """Return the size of the current axis; None if there is none."""
    return as_axis(group).size if group is not None or has_groups() or dist.is_initialized() else None


def _has_others(group: GroupLike) -> bool:
    """Whether there are other ranks to communicate with, which may have another checkpoint under the same path."""
    return _num_connected(group) is not None or "MASTER_ADDR" in os.environ


def _check_size(checkpoint: Loadable, group: GroupLike) -> None:
    size, path, manifest = _num_connected(group) or launched_size(), checkpoint.path, checkpoint.manifest
    if size != manifest.tp:
        found = "is 1 process" if size == 1 else f"are {size} processes"
        if checkpoint.source is None:
            other, remedy = "is", f"make one for {size} by shardconv reshard {path} --tp {size}"
        else:
            other, remedy = "would be loaded", f"pass {option(tp=size)}"
        raise WorldSizeError(
            f"{path}: {other} for {manifest.tp} ranks, and there {found}: start it by torchrun --nproc-per-node "
            f"{manifest.tp}{f', or {remedy}' if _is_supported(manifest, size) else ''}"
        )


def _is_supported(manifest: Manifest, tp: int) -> bool:
    try:
        stored_planner(manifest, manifest.request.engine, pad=0).plan(tp)
    except PlanError:
        return False
    return True
