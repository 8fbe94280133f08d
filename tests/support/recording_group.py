"""A process group that records its collectives and runs them with gloo.

It is registered with torch as a backend, so it records all calls of torch, from
any caller.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from shardconv.distributed import Axis, as_axis
from shardconv.distributed.groups import new_members_group


class RecordingGroup(dist.ProcessGroup):
    """Passes collectives on to gloo, and records kind and bytes of those with values of the model."""

    def __init__(self, gloo: Any) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self._gloo = gloo
        self._thread = ThreadPoolExecutor(1)  # torch's modes are per thread
        self.seen: list[tuple[str, int]] = []

    def allreduce(self, tensors, opts):
        for tensor in tensors:
            self.seen.append(("all_reduce", tensor.nbytes))
            self._thread.submit(_on_copies, lambda own: self._gloo.allreduce([own], opts), tensor).result()

    def all_gather_single(self, gathered, chunk, opts):
        self.seen.append(("all_gather", gathered.nbytes))
        gather = self._gloo._allgather_base
        self._thread.submit(_on_copies, lambda *own: gather(*own, opts), gathered, chunk).result()

    _allgather_base = all_gather_single  # what torch.distributed calls before torch 2.13

    def broadcast(self, tensors, opts):
        return self._gloo.broadcast(tensors, opts)  # seeds, at the start of generation

    def barrier(self, opts):
        return self._gloo.barrier(opts)

    def taken(self) -> list[tuple[str, int]]:
        """Return and clear the record."""
        seen, self.seen = self.seen, []
        return seen


def _on_copies(collective, output, *inputs):
    """Run a collective hidden from torch's meters, on copies, as gloo's threads hold them longer than the call."""
    own = output.clone()
    collective(own, *(one.clone() for one in inputs)).wait()
    output.copy_(own)


def recording_axis(axis: Axis) -> Axis:
    """An axis over the same processes whose group is a :class:`RecordingGroup`."""
    if "recording" not in dist.Backend.backend_list:
        dist.Backend.register_backend("recording", _make, devices=["cpu"])
    return as_axis(new_members_group(axis.ranks, "recording"))


def _make(store, rank, size, timeout):
    return RecordingGroup(dist.ProcessGroupGloo(store, rank, size, timeout))
