"""Dropout whose masks agree where ranks hold the same and differ where they hold different parts."""

import hashlib
import itertools
import random
from weakref import WeakValueDictionary

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardconv.distributed import Axis, GroupLike, as_axis


class ParallelDropout(nn.Dropout):
    """nn.Dropout for tensors that are replicated or split over the ranks of the tensor axis.

    On replicated input it is nn.Dropout: ranks that are seeded alike draw alike. On split input every call draws one
    number from the default generator of the CPU, and a mask from a generator that this number and the rank seed. So
    the default generators stay in step, and the mask is drawn again alike under ``torch.utils.checkpoint``.

    The ranks of the tensor axis have to be seeded alike, as in ``torch.manual_seed(0)`` on all of them. The first call
    checks it.

    Args:
        p: the probability that an element is set to zero.
        inplace: as nn.Dropout's.
        input_is_parallel: whether the input is split.
        group: see :func:`~shardconv.distributed.as_axis`.

    Raises:
        RuntimeError: on the first call, if the ranks are not seeded alike.

    Example:
        >>> dropout = ParallelDropout(0.5, input_is_parallel=True)
        >>> dropout(torch.ones(4, 4)).shape
        torch.Size([4, 4])
    """

    def __init__(
        self,
        p: float = 0.5,
        inplace: bool = False,
        *,
        input_is_parallel: bool = False,
        group: GroupLike = None,
    ) -> None:
        super().__init__(p, inplace)
        self.input_is_parallel = input_is_parallel
        self.axis = as_axis(group)
        self._is_checked = self.axis.size == 1

    def forward(self, input: Tensor) -> Tensor:
        """The input with some elements zero and the others scaled by 1 / (1 - p); as it is in evaluation."""
        if not self.training or self.p == 0:
            return input
        if not self._is_checked and not torch.compiler.is_compiling():
            check_seeds(self.axis, input.device)
            self._is_checked = True
        if not self.input_is_parallel or self.axis.size == 1:
            return super().forward(input)
        seed = torch.randint(2**62, ())
        mask = _mask(input.detach(), seed, self.axis.rank, 1 - self.p)
        mask = mask / (1 - self.p) if self.p < 1 else mask
        return input.mul_(mask) if self.inplace else input * mask


def check_seeds(axis: Axis, device: torch.device, *, has_others: bool = False) -> None:
    """Compare the states of the default generators, without drawing from them. All ranks have to call it.

    Args:
        axis: the ranks.
        device: whose generator is compared beside the CPU's.
        has_others: whether those of Python and numpy are compared, too; they differ unless somebody seeds them.

    Raises:
        RuntimeError: if they differ.
    """
    state = torch.cat([_seeds(device), _others()]) if has_others else _seeds(device)
    unequal = torch.tensor(int(not torch.equal(_firsts(state, axis, device), state)), device=axis.message_device)
    dist.all_reduce(unequal, op=dist.ReduceOp.MAX, group=axis.group)
    if unequal:
        raise RuntimeError(
            f"the ranks {list(axis.ranks)} are seeded differently, so their masks would not fit together: "
            f"call torch.manual_seed with the same number on all of them"
            f"{', and random.seed and numpy.random.seed, too' * has_others}"
        )


#: The axes of seed checks by number, which is how the operator of a compiled graph refers to them.
_axes: WeakValueDictionary[int, Axis] = WeakValueDictionary()
_numbers = itertools.count()


class SeedCheck:
    """:func:`check_seeds` in every pass, also of a compiled graph.

    Dynamo cannot trace the check, so a graph has it as one operator. That it changes a tensor keeps it in the graph.

    Args:
        axis: the ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis, self._number, self._checked = axis, next(_numbers), torch.zeros(())
        _axes[self._number] = axis

    def __reduce__(self) -> tuple[type["SeedCheck"], tuple[Axis]]:
        """A copy has a number of its own, which other processes would not know."""
        return SeedCheck, (self.axis,)

    def __call__(self, device: torch.device, *, has_others: bool) -> None:
        """Check the generators. All ranks have to call it.

        Args:
            device: see :func:`check_seeds`.
            has_others: likewise.

        Raises:
            RuntimeError: if they differ.
        """
        if torch.compiler.is_compiling():
            _check_seeds(self._checked, self._number, device, has_others)
        else:
            check_seeds(self.axis, device, has_others=has_others)


@torch.library.custom_op("shardconv::check_seeds", mutates_args=("checked",))
def _check_seeds(checked: Tensor, axis: int, device: torch.device, has_others: bool) -> None:
    checked.fill_(1)
    check_seeds(_axes[axis], device, has_others=has_others)


_check_seeds.register_fake(lambda *_: None)


def _others() -> Tensor:
    """A digest of the states of Python's and numpy's generators, by which some models mask, or leave out layers."""
    states = repr((random.getstate(), [part.tolist() for part in map(numpy.asarray, numpy.random.get_state())]))
    return torch.frombuffer(bytearray(hashlib.sha256(states.encode()).digest()), dtype=torch.uint8)


def share_seeds(axis: Axis, device: torch.device) -> None:
    """Take over the states of the first rank's default generators. All ranks have to call it."""
    state = _firsts(_seeds(device), axis, device)
    own = len(torch.get_rng_state())
    torch.set_rng_state(state[:own])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[own:], device)


def _seeds(device: torch.device) -> Tensor:
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state


def _firsts(state: Tensor, axis: Axis, device: torch.device) -> Tensor:
    where = device if dist.get_backend(axis.group) == "nccl" else torch.device("cpu")
    first = state.to(where, copy=True)
    dist.broadcast(first, axis.ranks[0], group=axis.group)
    return first.cpu()


@torch.library.custom_op("shardconv::dropout_mask", mutates_args=())
def _mask(input: Tensor, seed: Tensor, rank: int, keep: float) -> Tensor:
    """Ones with probability ``keep`` and zeros, of the shape of ``input``, out of nothing but seed and rank."""
    generator = torch.Generator(input.device).manual_seed((int(seed) + rank * 0x9E3779B97F4A7C15) % 2**63)
    return torch.empty_like(input).bernoulli_(keep, generator=generator)


_mask.register_fake(lambda like, *_: torch.empty_like(like))
