"""The devices of ranks: the CPU, and the accelerators that torch can send tensors between."""

import os
from functools import cache
from types import ModuleType

import torch
import torch.distributed as dist

#: A device by name or as torch has it; None for the default.
Device = torch.device | str | None


def accelerator() -> torch.device | None:
    """Return the device type of this machine's accelerators, such as cuda or xpu; None without one.

    An accelerator counts only if torch names a collective backend for it that supports its tensors.
    """
    found = torch.accelerator.current_accelerator()
    if found is None or not torch.accelerator.device_count():
        return None
    backend = dist.Backend.default_device_backend_map.get(found.type, "")
    return found if found.type in dist.Backend.backend_capability.get(backend, ()) else None


def device_types() -> dict[str, int]:
    """Return the device types that ranks can use on this machine, with their numbers of devices; the default first."""
    found = accelerator()
    return {**({} if found is None else {found.type: torch.accelerator.device_count()}), "cpu": 1}


def local_device(device_type: str) -> torch.device:
    """Return the device of this rank: torch's current device, or the one with the index of the local rank.

    The local rank counts if a launcher started the process and the current device is the first: every program begins
    with that one, so it was not selected.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    index = torch.accelerator.current_device_index()
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    return torch.device(device_type, index or local_rank % torch.accelerator.device_count())


def device_module(device: torch.device) -> ModuleType | None:
    """Return torch's module for an accelerator, such as ``torch.cuda``; None for other devices."""
    return None if device.type == "cpu" else _module_of(device.type)


@cache
def _module_of(device_type: str) -> ModuleType | None:
    found = accelerator()
    return torch.get_device_module(found) if found is not None and found.type == device_type else None


def backends_for(ranks: int) -> str:
    """Return the collective backends of that many ranks of one machine, as ``init_process_group`` takes them.

    Backends of accelerators need one for each rank; gloo does not.
    """
    found = accelerator()
    if found is None or torch.accelerator.device_count() < ranks:
        return "gloo"
    return f"cpu:gloo,{found.type}:{dist.get_default_backend_for_device(found)}"


def supports_cpu(group: dist.ProcessGroup) -> bool:
    """Whether a group supports CPU tensors: true for the backends gloo and "cpu:gloo,cuda:nccl", false for nccl."""
    return "cpu:" in dist.get_backend_config(group)


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Device for tensors that exist only to be sent over a group, such as flags and counts."""
    if group is None or supports_cpu(group):
        return torch.device("cpu")
    device_type = dist.get_backend_config(group).partition(":")[0]
    return torch.device(device_type, torch.accelerator.current_device_index())


def sending_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Device for values of a device that one rank sends to another: gloo sends tensors of CPUs only."""
    backends = dict(one.split(":") for one in dist.get_backend_config(group).split(","))
    return torch.device("cpu") if backends.get(device.type, "gloo") == "gloo" else device
