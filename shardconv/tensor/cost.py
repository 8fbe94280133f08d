"""Communication cost: time of a collective from its bytes, by the alpha-beta model.

The formulas are for the ring algorithms in Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005), section 4. With n ranks and s bytes, a collective is a number of consecutive
messages, and a number of bytes that each rank sends:

| collective | s is the size of | messages | bytes per rank |
|---|---|---|---|
| all_gather | the gathered tensor | n - 1 | (n - 1) / n s |
| reduce_scatter | the input tensor | n - 1 | (n - 1) / n s |
| all_reduce | the tensor | 2 (n - 1) | 2 (n - 1) / n s |
| all_to_all | the local tensor | n - 1 | (n - 1) / n s |
| send | the tensor, to one rank of the next pipeline stage | 1 | s |
"""

import time
from collections.abc import Iterable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from msgspec import Struct

from shardconv.distributed import Axis, GroupLike, as_axis, reduce_from_tp
from shardconv.distributed.devices import device_module, device_types, local_device

#: A message from one rank to another, which is not a collective.
SEND = "send"

#: Collective to the number of times that its ring algorithm passes all ranks.
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}


class Link(Struct, frozen=True):
    """Performance of the link between the ranks of an axis.

    Attributes:
        alpha: link latency in seconds, paid once per message.
        beta: inverse bandwidth in seconds per byte sent by a rank.

    Raises:
        ValueError: if a value is negative.
    """

    alpha: float = 5e-6
    beta: float = 1 / 50e9

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta >= 0):
            raise ValueError(f"link has alpha={self.alpha} s, beta={self.beta} s/byte: both must be >= 0")

    @property
    def bandwidth(self) -> float:
        """Bytes per second; infinite if ``beta`` is 0."""
        return 1 / self.beta if self.beta else float("inf")


def bytes_sent(collective: str, num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each rank sends in a collective.

    Args:
        collective: key of :data:`ROUNDS`, or :data:`SEND`.
        num_bytes: bytes of the larger of a rank's input and output.
        num_ranks: number of ranks.
    """
    if collective == SEND:
        return num_bytes
    return ROUNDS[collective] * (num_ranks - 1) / num_ranks * num_bytes


def collective_time(collective: str, num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds that a collective takes; arguments as in :func:`bytes_sent`.

    Example:
        >>> collective_time("all_gather", 8e9, 4, Link(alpha=0.0, beta=1e-9))
        6.0
    """
    messages = 1 if collective == SEND else ROUNDS[collective] * (num_ranks - 1)
    return messages * link.alpha + bytes_sent(collective, num_bytes, num_ranks) * link.beta


#: Tensor sizes to time, in bytes. After a size that takes longer than ``_MAX_SECONDS``, larger ones are skipped.
SIZES = (*(8**power for power in range(1, 9)), 64 << 20)
_MAX_SECONDS = 0.5
_WARM_UP_RUNS, _TIMED_RUNS = 3, 15


class Timing(Struct, frozen=True):
    """Timing of all-reduces of one size.

    Attributes:
        num_bytes: bytes of the tensor.
        seconds: median of several runs, on the slowest rank.
        fitted_seconds: seconds predicted by the fitted link.
    """

    num_bytes: int
    seconds: float
    fitted_seconds: float

    @property
    def error(self) -> float:
        """Relative error of the fit."""
        return abs(self.fitted_seconds / self.seconds - 1)


class LinkReport(Struct, frozen=True):
    """Result of :func:`measure_link`; ``shardconv plan --measure-link`` prints it.

    Attributes:
        num_ranks: number of ranks.
        backend: backend of torch.distributed.
        device: device type of the tensors, such as ``cpu`` or ``cuda``.
        link: link that fits the timings best.
        timings: one timing per size.
    """

    num_ranks: int
    backend: str
    device: str
    link: Link
    timings: tuple[Timing, ...]


def measure_link(group: GroupLike = None, *, sizes: Sequence[int] = SIZES) -> LinkReport:
    """Time all-reduces of several sizes and fit a link to them.

    All ranks call it and get the same result. Uses :func:`torch.distributed.all_reduce` on the accelerator of the rank
    if there is one and the group has a backend for it, else on the CPU.

    Args:
        group: see :func:`~shardconv.distributed.as_axis`.
        sizes: bytes of the tensors, ascending multiples of 4. Sizes after the first that takes half a second are
            skipped.

    Raises:
        ValueError: if there are fewer than two ranks or two sizes.
    """
    axis = as_axis(group)
    if axis.size < 2 or len(sizes) < 2:
        raise ValueError(f"got {axis.size} ranks and {len(sizes)} sizes, expected at least 2 of each to fit a link")
    backends = dict(entry.split(":") for entry in dist.get_backend_config(axis.group).split(","))
    device = local_device(next(each for each in (*device_types(), *backends) if each in backends))
    measured: dict[int, float] = {}
    for size in sizes:
        measured[size] = _median_seconds(torch.zeros(size // 4, device=device), axis)
        if measured[size] > _MAX_SECONDS and len(measured) > 1:
            break
    link = fit_link(measured.items(), axis.size)
    return LinkReport(
        axis.size,
        backends[device.type],
        device.type,
        link,
        tuple(
            Timing(size, seconds, collective_time("all_reduce", size, axis.size, link))
            for size, seconds in measured.items()
        ),
    )


def _median_seconds(tensor: torch.Tensor, axis: Axis) -> float:
    """Median seconds of an all-reduce on the slowest rank; the same result on all ranks."""
    fastest = min(_timed_all_reduce(tensor, axis) for _ in range(_WARM_UP_RUNS))
    count = _TIMED_RUNS if _max_over_ranks(fastest, tensor.device, axis) * _TIMED_RUNS < _MAX_SECONDS else _WARM_UP_RUNS
    return _max_over_ranks(median(_timed_all_reduce(tensor, axis) for _ in range(count)), tensor.device, axis)


def _timed_all_reduce(tensor: torch.Tensor, axis: Axis) -> float:
    """Seconds of one all-reduce that starts on all ranks at once."""
    dist.barrier(axis.group)
    start = time.perf_counter()
    dist.all_reduce(tensor, group=axis.group)
    if (module := device_module(tensor.device)) is not None:
        module.synchronize(tensor.device)
    return time.perf_counter() - start


def _max_over_ranks(seconds: float, device: torch.device, axis: Axis) -> float:
    local = torch.tensor(seconds, dtype=torch.float64, device=device)
    return float(reduce_from_tp(local, op=dist.ReduceOp.MAX, group=axis))


def fit_link(measured: Iterable[tuple[int, float]], num_ranks: int) -> Link:
    """Fit a link to all-reduce timings by least squares of the relative errors, with alpha and beta >= 0.

    Absolute errors would be dominated by the largest tensors, whose timings do not depend on alpha.

    Args:
        measured: pairs of tensor bytes and measured seconds; at least two.
        num_ranks: number of ranks, at least 2.

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
