"""A process group without other processes that counts the collectives of a forward pass, for one rank."""

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardconv.distributed import Axis


class Call(NamedTuple):
    """One collective.

    Attributes:
        collective: a key of :data:`shardconv.tensor.cost.ROUNDS`.
        num_bytes: bytes of the larger one of input and output.
        in_layer: whether a layer of the decoder called it, rather than a module before or after the layers.
    """

    collective: str
    num_bytes: int
    in_layer: bool


class CountingGroup(dist.ProcessGroup):
    """A process group without other processes, which counts collectives instead of running them.

    The functions of ``torch.distributed``, which need not be initialized, call its methods with the tensors that they
    would send. Results are correct on the meta device only, where tensors do not have values.

    Args:
        ranks: the number of ranks; this process is the first.

    Attributes:
        calls: the collectives so far.
        in_layer: ``in_layer`` of the next calls.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg] # torch's stub lacks this signature
        self.calls: list[Call] = []
        self.in_layer = False

    def _count(self, collective: str, tensor: Tensor) -> None:
        """Count a collective; ``tensor`` is the larger one of its input and output."""
        self.calls.append(Call(collective, tensor.nbytes, self.in_layer))

    # The overrides have the one signature that torch.distributed calls. They return None: there is nothing to wait for.
    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> None:  # type: ignore[override]
        """Count an all-reduce; of tensors with values only the maximum, which over equal ranks is the value itself."""
        if any(not tensor.is_meta for tensor in tensors) and opts.reduceOp != dist.ReduceOp(dist.ReduceOp.MAX):
            raise RuntimeError("values cannot be summed over ranks that do not exist: use the meta device")
        for tensor in tensors:
            self._count("all_reduce", tensor)

    def all_gather_single(self, output: Tensor, *_: object) -> None:  # type: ignore[override]
        """Count an all-gather; leave the output as it is."""
        self._count("all_gather", output)

    # what torch.distributed calls before torch 2.13
    _allgather_base = all_gather_single  # type: ignore[assignment]


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{name} is a collective that is not counted")

    return refuse


_COLLECTIVE = re.compile("_?(all|barrier|broadcast|gather|recv|reduce|scatter|send)")
for _name in dir(dist.ProcessGroup):  # torch's own methods would silently do nothing on the meta device
    if _COLLECTIVE.match(_name) and _name not in vars(CountingGroup):
        setattr(CountingGroup, _name, _refused(_name))


class CountedAxis(Axis):
    """The tensor axis of the first rank of a :class:`CountingGroup`."""

    @classmethod
    def of(cls, group: CountingGroup) -> Self:
        """Return the axis of a group."""
        return cls("tensor", 0, group.size(), tuple(range(group.size())), group)

    @property
    def message_device(self) -> torch.device:
        """The CPU; the group does not have a backend, as it is not registered with torch.distributed."""
        return torch.device("cpu")
