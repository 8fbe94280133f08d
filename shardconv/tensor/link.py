"""Measure what connects the ranks of an axis: how long a message takes, and a byte.

Owns the timing of all-reduces and the fit of a :class:`~shardconv.tensor.cost.Link` to it. The fit is pure arithmetic.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from shardconv.distributed import Axis, GroupLike, as_axis, reduce_from_tp
from shardconv.tensor.cost import ROUNDS, Link, collective_time

#: Sizes that are timed, in bytes, and the seconds after which no larger one is.
SIZES = (*(8**power for power in range(1, 9)), 64 << 20)
_LONGEST = 0.5
_WARM_UPS, _TIMES = 3, 15


@dataclass(frozen=True, slots=True)
class Timing:
    """One size of all-reduce.

    Attributes:
        num_bytes: of the tensor.
        seconds: that it took, in the middle of several; on the rank where it took longest.
        fitted_seconds: that it takes by the link.
    """

    num_bytes: int
    seconds: float
    fitted_seconds: float

    @property
    def error(self) -> float:
        """How far the fit is off, by the time that was measured."""
        return abs(self.fitted_seconds / self.seconds - 1)


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What ``shardconv plan --measure-link`` says.

    Attributes:
        num_ranks: processes that took part.
        backend: of torch.distributed.
        device: of the tensors, ``cpu`` or ``cuda``.
        link: that fits the timings best.
        timings: one for each size.
    """

    num_ranks: int
    backend: str
    device: str
    link: Link
    timings: tuple[Timing, ...]


def measure_link(group: GroupLike = None, *, sizes: Sequence[int] = SIZES) -> LinkReport:
    """Time all-reduces of several sizes, and fit a link to them; all ranks call it, and get the same.

    Stands on :func:`torch.distributed.all_reduce`, of tensors on the rank's GPU where there is one and the group has a
    backend for it, else on the CPU.

    Args:
        group: see :func:`~shardconv.distributed.as_axis`.
        sizes: bytes of the tensors, ascending and multiples of 4; those after the first that takes half a second are
            left out.

    Raises:
        ValueError: if there is one rank only, which is connected to none, or there are fewer than two sizes.
    """
    axis = as_axis(group)
    if axis.size < 2 or len(sizes) < 2:
        raise ValueError(f"{axis.size} ranks and {len(sizes)} sizes: a link takes two ranks, and a fit two sizes")
    backends = dict(part.split(":") for part in dist.get_backend_config(axis.group).split(","))
    device = torch.device("cpu")
    if torch.cuda.is_available() and "cuda" in backends:
        device = torch.device("cuda", torch.cuda.current_device())
    measured: dict[int, float] = {}
    for size in sizes:
        measured[size] = _seconds(torch.zeros(size // 4, device=device), axis)
        if measured[size] > _LONGEST and len(measured) > 1:
            break
    link = fit_link(measured.items(), axis.size)
    return LinkReport(
        axis.size,
        backends[device.type],
        device.type,
        link,
        tuple(
            Timing(size, one, collective_time("all_reduce", size, axis.size, link)) for size, one in measured.items()
        ),
    )


def _seconds(tensor: torch.Tensor, axis: Axis) -> float:
    """The median time of an all-reduce, the same on all ranks: the largest of theirs."""
    first = min(_time(tensor, axis) for _ in range(_WARM_UPS))
    count = _TIMES if _largest(first, tensor.device, axis) * _TIMES < _LONGEST else _WARM_UPS
    return _largest(median(_time(tensor, axis) for _ in range(count)), tensor.device, axis)


def _time(tensor: torch.Tensor, axis: Axis) -> float:
    """One all-reduce, begun by all ranks at once."""
    dist.barrier(axis.group)
    began = time.perf_counter()
    dist.all_reduce(tensor, group=axis.group)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - began


def _largest(seconds: float, device: torch.device, axis: Axis) -> float:
    most = torch.tensor(seconds, dtype=torch.float64, device=device)
    return float(reduce_from_tp(most, op=dist.ReduceOp.MAX, group=axis))


def fit_link(measured: Iterable[tuple[int, float]], num_ranks: int) -> Link:
    """The link whose times of all-reduces are nearest to those measured, by the sum of squares of relative errors.

    Relative, as else the largest tensors alone would count, which say nothing of alpha. Neither number gets below 0.

    Args:
        measured: bytes of a tensor, and seconds that it took; at least two.
        num_ranks: ranks that took part, at least 2.

    Example:
        >>> link = Link(alpha=1e-5, beta=1e-9)
        >>> fit_link([(size, collective_time("all_reduce", size, 4, link)) for size in (8, 10**6)], 4)
        Link(alpha=1e-05, beta=1e-09)
    """
    messages = ROUNDS["all_reduce"] * (num_ranks - 1)
    rows = [(messages / seconds, messages / num_ranks * size / seconds) for size, seconds in measured]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    alpha, beta = ((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant)
    if alpha < 0:
        return Link(0.0, b / bb)
    return Link(a / aa, 0.0) if beta < 0 else Link(alpha, beta)
