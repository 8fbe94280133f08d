"""Messages through shared memory: what comes out is what each rank gave, as torch's own gather has it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_operations
import torch
import torch.distributed as dist

from shardconv.distributed import exchange, gather_from_tp, reduce_from_tp

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is Linux's")
LAYOUTS = ["pairs", "strided", "four"]
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def shared(axis):
    axis = axis.with_exchange()
    assert axis.exchange is not None
    return axis


def everyones(axis, message):
    """By torch's own gather."""
    found = [torch.empty_like(message) for _ in range(axis.size)]
    dist.all_gather(found, message, group=axis.group)
    return torch.stack(found)


def check_messages(axis):
    axis = shared(axis)
    generator = torch.Generator().manual_seed(axis.ranks[axis.rank])
    for number in range(14):
        for dtype in DTYPES:
            shape = ((), (0,), (3,), (2, 0, 5), (1, 1, 64), (7, 33), (5, 4, 3))[number % 7]
            message = (torch.randn(shape, generator=generator) * 50).to(dtype)
            expected = everyones(axis, message)
            if axis.rank == number % axis.size:
                time.sleep(0.004 * (number % 5 == 0))  # longer than the others look for it
            assert torch.equal(axis.exchange.give(message), expected)


def check_many(axis):
    """No slot is written while it is read: ranks give and read at paces of their own."""
    axis = shared(axis)
    for number in range(1000):
        mine = torch.full((512,), float(number * axis.size + axis.rank))
        given = axis.exchange.give(mine)
        assert given[:, 0].tolist() == given[:, -1].tolist() == [number * axis.size + r for r in range(axis.size)]


def check_operations(axis):
    test_operations.check_copy(shared(axis))
    test_operations.check_reduce(shared(axis))
    for dim in (0, 1, 2, -1):
        test_operations.check_scatter_and_gather(shared(axis), dim)


def check_reductions(axis):
    """Sums of halves have one rounding, and are the same on every rank, to the bit."""
    for message in (torch.randn(1, 1, 96).bfloat16(), torch.randint(-9, 9, (4, 4))):
        mine = message * (axis.ranks[axis.rank] + 1)
        all_of = everyones(axis, mine)
        total = reduce_from_tp(mine, group=shared(axis))
        assert total.dtype == mine.dtype
        assert torch.equal(total, all_of.double().sum(0).to(mine.dtype))
        assert len({tuple(each.tolist()) for each in everyones(axis, total).flatten(1).double()}) == 1
        for op, expected in ((dist.ReduceOp.MAX, all_of.amax(0)), (dist.ReduceOp.MIN, all_of.amin(0))):
            assert torch.equal(reduce_from_tp(mine, op=op, group=shared(axis)), expected)


def check_long(axis):
    """What is longer than a slot goes through the group."""
    axis = shared(axis)
    whole = exchange.SLOT_BYTES // 4
    for size in (whole, whole + 1):
        message = torch.arange(size, dtype=torch.float32) + axis.ranks[axis.rank]
        assert axis.exchange.fits(message) == (size == whole)
        assert torch.equal(gather_from_tp(message, 0, group=axis), everyones(axis, message).flatten())


def check_calls_differ(axis):
    """What is not the same call on all ranks is told to all of them."""
    mine = (torch.zeros(2), torch.zeros(1, dtype=torch.int64))[axis.rank % 2]  # of equal length
    for message, purpose in ((torch.zeros(4 + axis.rank), ""), (mine, ""), (torch.zeros(3), str(axis.rank))):
        exchange = shared(axis).exchange
        with pytest.raises(RuntimeError, match="the ranks do not call the same"):
            exchange.give(message, purpose)
        with pytest.raises(RuntimeError, match="an earlier message between the ranks was interrupted"):
            exchange.give(torch.zeros(1))


def check_interrupted(axis):
    """Who was interrupted cannot go on, and is not waited for longer than the group would."""
    exchange = shared(axis).exchange
    exchange._timeout = 3
    exchange.give(torch.zeros(1))
    if axis.rank == 0:

        def interrupt(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            exchange.give(torch.zeros(1))
        with pytest.raises(RuntimeError, match="was interrupted"):
            exchange.give(torch.zeros(1))
    else:
        time.sleep(0.5)
        exchange.give(torch.zeros(1))  # what the first gave is there
        with pytest.raises(RuntimeError, match="was not heard of for 3 s"):
            exchange.give(torch.zeros(1))
    dist.barrier(axis.group)


def check_threads(axis):
    exchange = shared(axis).exchange
    exchange._lock.acquire()  # as another thread has
    with pytest.raises(RuntimeError, match="two threads"):
        exchange.give(torch.zeros(1))


def check_inference_mode(axis):
    with torch.inference_mode():
        axis = shared(axis)
        assert axis.exchange.give(torch.ones(2)).sum() == 2 * axis.size
    assert reduce_from_tp(torch.ones(2, requires_grad=True), group=axis).sum() == 2 * axis.size


def check_not_here(axis):
    """One rank that cannot open the memory is enough for none to use it."""
    join = exchange._join
    exchange._join = (lambda *_: None) if axis.rank == axis.size - 1 else join
    try:
        assert axis.with_exchange().exchange is None
    finally:
        exchange._join = join


def check_nothing_is_left(axis):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        shared(axis)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "check",
    [
        check_messages, check_many, check_operations, check_reductions, check_long, check_calls_differ,
        check_interrupted, check_threads, check_inference_mode, check_not_here, check_nothing_is_left,
    ],
)  # fmt: skip
def test_exchange(ranks, layout, check):
    ranks(layout, check)


def test_a_rank_that_ended_is_named(tmp_path):
    script = """
import os, sys, torch, torch.distributed as dist
from shardconv.distributed import as_axis
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
axis = as_axis().with_exchange()
axis.exchange.give(torch.zeros(1))
print(os.getpid(), flush=True)
if rank:
    os._exit(0)  # and stays there, unreaped
axis.exchange.give(torch.zeros(1))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    error = processes[0].communicate(timeout=60)[1]
    pid = processes[1].communicate(timeout=60)[0].strip()
    assert f"PeerError: rank 1 of the group, process {pid}, has ended" in error
