"""The device of a rank: choose it, check that the values fit, and copy them to it."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardconv.checkpoint.engine.copy import default_threads
from shardconv.distributed.devices import Device, device_module, device_types, local_device
from shardconv.files.containers.safetensors import DTYPE_BITS, FLOAT_NAMES, target_dtype
from shardconv.layers.sharding import bytes_of
from shardconv.plan.plan import TensorSpec
from shardconv.support import Progress
from shardconv.support.errors import RunError, UsageError, option
from shardconv.support.formatting import counted, size
from shardconv.support.launched import local_ranks

#: Bytes that are copied to a device at once, between two calls of a progress function.
PIECE_BYTES = 8 << 20
#: Minimum number of threads that copy pieces, as they mostly wait for storage.
_MIN_THREADS = 2


def rank_device(device: Device) -> torch.device:
    """Return the device of this rank: the given one, by default an accelerator where there is one, else the CPU.

    Without an index, it is :func:`~shardconv.distributed.devices.local_device`. Ranks can share a device if gloo
    supports its tensors, as for CUDA.

    Raises:
        UsageError: if it does not exist, or ranks cannot use or share it.
    """
    counts = device_types()
    requested = next(iter(counts)) if device is None else str(device)
    kind, _, index = requested.partition(":")
    try:
        torch.device(kind)
    except RuntimeError as error:
        raise UsageError(
            f"device {requested!r} is unknown (expected cpu, cuda or xpu): use {option(device='cpu')}"
        ) from error
    if kind not in counts:
        raise UsageError(
            f"device {requested} cannot be used here (expected {' or '.join(counts)}): use {option(device='cpu')}"
        )
    count = counts[kind]
    found = counted(count, f"{kind} device")
    if index and (not index.isdecimal() or int(index) >= count):
        raise UsageError(f"device {requested} does not exist (found {found}): use {option(device=kind)}")
    if kind not in dist.Backend.backend_capability["gloo"] and (ranks := local_ranks()) > count:
        raise UsageError(f"{ranks} ranks cannot share {found}: use {option(tp=count)}, or {option(device='cpu')}")
    return torch.device(kind, int(index)) if index else local_device(kind)


def check_room(
    device: torch.device,
    tensors: Iterable[TensorSpec],
    dtype: torch.dtype | None,
    tp: int,
    *,
    copied: int = 0,
    fetched: int = 0,
) -> None:
    """Check that the values of the ranks of this host fit in its memory and its devices, before they are read.

    Views of a file need no memory of the host, unless they are converted to another dtype, which the host does also
    for other devices.

    Args:
        device: the device of the rank.
        tensors: dtypes and shapes of the values of the rank.
        dtype: the dtype of floating-point values; None if they stay as they are stored.
        tp: tensor parallel size, for the message.
        copied: bytes of the values that are not views of a file, as they are stored.
        fetched: bytes of files that are read into memory, of which values may be views.

    Raises:
        RunError: if they do not fit.
    """
    tensors = list(tensors)
    needed = sum(num_bytes(tensor, dtype) for tensor in tensors)
    ranks = local_ranks()
    if (module := device_module(device)) is not None:
        sharing, (free, _) = -(-ranks // torch.accelerator.device_count()), module.mem_get_info(device)
        _refuse_more(needed * sharing, free, device, sharing, f"use more ranks ({_more(tp)})")
    converted = sum(num_bytes(tensor, dtype) for tensor in tensors if _is_converted(tensor, dtype))
    in_memory = fetched + max(copied, converted)
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    remedy = f"use more ranks on more hosts ({_more(tp)})"
    if fetched:
        remedy += ", or copy the checkpoint to a disk of this host, where its files are mapped into memory"
    _refuse_more(in_memory * ranks, room, torch.device("cpu"), ranks, remedy)


def _is_converted(tensor: TensorSpec, dtype: torch.dtype | None) -> bool:
    is_other = FLOAT_NAMES.get(tensor.dtype) != str(dtype).removeprefix("torch.")
    return dtype is not None and _is_float(tensor) and is_other


def _is_float(tensor: TensorSpec) -> bool:
    return tensor.dtype.lstrip("B").startswith("F")


def _more(tp: int) -> str:
    return f"{option(tp=2 * tp)}, for a split checkpoint shardconv reshard DIR --tp {2 * tp}"


def _refuse_more(needed: int, room: int, device: torch.device, ranks: int, remedy: str) -> None:
    if needed > room:
        values = f"the values of {ranks} ranks" if ranks > 1 else "the values"
        raise RunError(f"{values} are {size(needed)} and {device} has room for {size(room)}: {remedy}")


def as_torch_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of torch for one of :data:`~shardconv.files.containers.safetensors.TARGET_DTYPES`.

    Raises:
        UsageError: if it is not one of them.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found: torch.dtype = getattr(torch, FLOAT_NAMES[target_dtype(dtype)])
    return found


def num_bytes(tensor: TensorSpec, dtype: torch.dtype | None = None) -> int:
    """Bytes of a tensor, if floating-point values are converted to a dtype."""
    bits = DTYPE_BITS[tensor.dtype] if dtype is None or not _is_float(tensor) else 8 * dtype.itemsize
    return prod(tensor.shape) * bits // 8


def move(module: nn.Module, device: torch.device, progress: Progress | None = None) -> None:
    """Move all values to a device, in place: parameters keep their identity, and tied parameters stay tied.

    Several threads copy the values to pinned memory, from where the device reads them: a copy from the pages of a file
    alone is several times as slow.

    Args:
        module: a module with values on the CPU.
        device: the device.
        progress: called with bytes done and total bytes.
    """
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    most = max(sum(-(-tensor.nbytes // PIECE_BYTES) for tensor in tensors), 1)
    for piece in _pinned(_pieces(tensors, device), most, is_pinned=device.type != "cpu"):
        piece.target.copy_(piece.values)
        done += len(piece.values)
        if piece.moved is not None:
            piece.tensor.data = piece.moved
        if progress is not None:
            progress(done, total)


class _Piece(NamedTuple):
    """Some of the bytes of a tensor.

    Attributes:
        tensor: the tensor.
        values: the bytes.
        target: their place on the device.
        moved: the tensor on the device, for the last bytes; None for others.
    """

    tensor: Tensor
    values: Tensor
    target: Tensor
    moved: Tensor | None


def _pieces(tensors: Iterable[Tensor], device: torch.device) -> Iterator[_Piece]:
    for tensor in tensors:
        moved = torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format).detach()
        parts, targets = (bytes_of(one).split(PIECE_BYTES) for one in (tensor, moved))
        for number, (values, target) in enumerate(zip(parts, targets, strict=True), 1):
            yield _Piece(tensor, values, target, moved if number == len(parts) else None)


def _pinned(pieces: Iterable[_Piece], most: int, *, is_pinned: bool) -> Iterator[_Piece]:
    """Yield pieces with their values in at most ``most`` pinned buffers, into which threads copy them ahead.

    The values of a piece are valid until the next one. Values that are on a device already stay there.
    """
    threads = max(default_threads(local_ranks()), _MIN_THREADS)
    buffers = [
        torch.empty(
            PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=is_pinned
        )  # whatever the default device is
        for _ in range(min(2 * threads, most))
    ]
    with ThreadPoolExecutor(threads, thread_name_prefix="shardconv") as pool:
        copies = (
            (piece, buffer[: len(piece.values)], pool.submit(_copy, buffer, piece.values))
            for piece, buffer in zip(pieces, cycle(buffers), strict=False)
        )
        ahead = deque(islice(copies, len(buffers)))
        while ahead:
            piece, values, copy = ahead.popleft()
            yield piece._replace(values=values) if copy.result() else piece
            ahead.extend(islice(copies, 1))  # into the buffer that is free now


def _copy(buffer: Tensor, values: Tensor) -> bool:
    """Copy values that are in memory, without the interpreter lock; False for values on a device."""
    if values.device.type != "cpu":
        return False
    np.copyto(buffer[: len(values)].numpy(), values.numpy())
    return True
