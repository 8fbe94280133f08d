"""Dropout for replicated and sharded tensors, and checks that all ranks have the same random state."""

import hashlib
import itertools
import random
from weakref import WeakValueDictionary

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardconv.distributed import Axis, GroupLike, as_axis
from shardconv.distributed.devices import device_module
from shardconv.layers.features import check_tag
from shardconv.layers.init import state_of_first_rank


class ParallelDropout(nn.Dropout):
    """nn.Dropout for tensors that are replicated or sharded over the ranks of the tensor axis.

    On replicated input it is nn.Dropout: ranks that are seeded alike draw the same mask. On sharded input every call
    draws one number from the default CPU generator, and the mask from a new generator whose seed is that number and the
    rank. So the default generators of the ranks stay equal, and ``torch.utils.checkpoint`` reproduces the mask.

    The ranks of the tensor axis must be seeded alike, for example by ``torch.manual_seed(0)`` on all of them. The first
    call checks this.

    Args:
        p: probability that an element is set to zero.
        inplace: as in nn.Dropout.
        input_is_parallel: whether the input is sharded, along any dim.
        group: see :func:`~shardconv.distributed.as_axis`.

    Raises:
        RuntimeError: on the first call in training, if the ranks are not seeded alike.
        ValueError: in forward, if the tag of the input contradicts ``input_is_parallel`` (see
            :class:`~shardconv.layers.RegisterParallelDim`).

    Shape:
        - input and output: [*], any shape; the full tensor, or this rank's shard.

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
        """Set elements to zero and scale the others by 1 / (1 - p); in evaluation, return the input."""
        check_tag(input, range(input.dim()) if self.input_is_parallel else [None], self.axis, self.__repr__)
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
    """Compare the states of the default generators without drawing from them. All ranks must call it.

    Args:
        axis: the ranks.
        device: device whose generator is compared, beside the CPU's.
        has_others: also compare the generators of Python and numpy.

    Raises:
        RuntimeError: if they differ.
    """
    state = torch.cat([_seeds(device), _other_seeds()]) if has_others else _seeds(device)
    unequal = torch.tensor(int(not torch.equal(state_of_first_rank(state, axis), state)), device=axis.message_device)
    dist.all_reduce(unequal, op=dist.ReduceOp.MAX, group=axis.group)
    if unequal:
        raise RuntimeError(
            f"ranks {list(axis.ranks)} are seeded differently, so their dropout masks would not match: call "
            f"torch.manual_seed{', random.seed and numpy.random.seed' * has_others} with the same number on all of them"
        )


#: The axes of seed checks by number: the operator in a compiled graph takes the number as its argument.
_axes: WeakValueDictionary[int, Axis] = WeakValueDictionary()
_numbers = itertools.count()


class SeedCheck:
    """:func:`check_seeds` in every forward pass, also of a compiled graph.

    Dynamo cannot trace the check, so it is a custom operator. It modifies a tensor so that the compiler keeps it.

    Args:
        axis: the ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis, self._number, self._checked = axis, next(_numbers), torch.zeros(())
        _axes[self._number] = axis

    def __reduce__(self) -> tuple[type["SeedCheck"], tuple[Axis]]:
        """Pickle the axis only: the number is valid in this process only."""
        return SeedCheck, (self.axis,)

    def __call__(self, device: torch.device, *, has_others: bool) -> None:
        """Check the generators. All ranks must call it.

        Args:
            device: see :func:`check_seeds`.
            has_others: see :func:`check_seeds`.

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


def _other_seeds() -> Tensor:
    """Return a digest of the states of Python's and numpy's generators; some models use them for masks or LayerDrop."""
    states = repr((random.getstate(), [field.tolist() for field in map(numpy.asarray, numpy.random.get_state())]))
    return torch.frombuffer(bytearray(hashlib.sha256(states.encode()).digest()), dtype=torch.uint8)


def share_seeds(axis: Axis, device: torch.device) -> None:
    """Copy the states of the first rank's default generators. All ranks must call it."""
    state = state_of_first_rank(_seeds(device), axis)
    cpu_size = len(torch.get_rng_state())
    torch.set_rng_state(state[:cpu_size])
    if (module := device_module(device)) is not None:
        module.set_rng_state(state[cpu_size:].clone(), device)  # some generators read from the start of the storage


def _seeds(device: torch.device) -> Tensor:
    state = torch.get_rng_state()
    module = device_module(device)
    return state if module is None else torch.cat([state, module.get_rng_state(device)])


@torch.library.custom_op("shardconv::dropout_mask", mutates_args=())
def _mask(input: Tensor, seed: Tensor, rank: int, keep: float) -> Tensor:
    """Draw a mask shaped like ``input``: 1 with probability ``keep``, else 0. It depends on seed and rank only."""
    generator = torch.Generator(input.device).manual_seed((int(seed) + rank * 0x9E3779B97F4A7C15) % 2**63)
    return torch.empty_like(input).bernoulli_(keep, generator=generator)


_mask.register_fake(lambda like, *_: torch.empty_like(like))
