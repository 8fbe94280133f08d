"""Shared-memory channel: its results equal those of torch's all_gather."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardconv.distributed import gather_from_tp, reduce_from_tp, shared_memory
from tests.support.matrix import cases
from tests.support.operation_checks import check_copy, check_reduce, check_scatter_and_gather, from_all

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="requires memfd_create (Linux)")
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
    axis = axis.with_shared_memory()
    assert axis.channel is not None
    return axis


def check_messages(axis):
    axis = shared(axis)
    generator = torch.Generator().manual_seed(axis.ranks[axis.rank])
    for number in range(14):
        for dtype in DTYPES:
            shape = ((), (0,), (3,), (2, 0, 5), (1, 1, 64), (7, 33), (5, 4, 3))[number % 7]
            message = (torch.randn(shape, generator=generator) * 50).to(dtype)
            expected = torch.stack(from_all(axis, message))
            if axis.rank == number % axis.size:
                time.sleep(0.004 * (number % 5 == 0))  # longer than the others poll
            assert torch.equal(axis.channel.all_gather(message), expected)


def check_many(axis):
    """Check that no slot is overwritten while a rank reads it, with ranks of different speeds."""
    axis = shared(axis)
    for number in range(1000):
        mine = torch.full((512,), float(number * axis.size + axis.rank))
        messages = axis.channel.all_gather(mine)
        assert messages[:, 0].tolist() == messages[:, -1].tolist() == [number * axis.size + r for r in range(axis.size)]


def check_operations(axis):
    check_copy(shared(axis))
    check_reduce(shared(axis))
    for dim in (0, 1, 2, -1):
        check_scatter_and_gather(shared(axis), dim)


def check_reductions(axis):
    """Check that sums in half precision are rounded once, and bitwise equal on all ranks."""
    for message in (torch.randn(1, 1, 96).bfloat16(), torch.randint(-9, 9, (4, 4))):
        mine = message * (axis.ranks[axis.rank] + 1)
        inputs = torch.stack(from_all(axis, mine))
        total = reduce_from_tp(mine, group=shared(axis))
        assert total.dtype == mine.dtype
        assert torch.equal(total, inputs.double().sum(0).to(mine.dtype))
        assert len({tuple(each.tolist()) for each in torch.stack(from_all(axis, total)).flatten(1).double()}) == 1
        for op, expected in ((dist.ReduceOp.MAX, inputs.amax(0)), (dist.ReduceOp.MIN, inputs.amin(0))):
            assert torch.equal(reduce_from_tp(mine, op=op, group=shared(axis)), expected)


def check_long(axis):
    """Check that messages longer than a slot use the process group."""
    axis = shared(axis)
    longest = shared_memory.SLOT_BYTES // 4
    for size in (longest, longest + 1):
        message = torch.arange(size, dtype=torch.float32) + axis.ranks[axis.rank]
        assert axis.channel.fits(message) == (size == longest)
        assert torch.equal(gather_from_tp(message, 0, group=axis), torch.cat(from_all(axis, message)))


def check_calls_differ(axis):
    """Check that mismatched calls raise an error on all ranks."""
    mine = (torch.zeros(2), torch.zeros(1, dtype=torch.int64))[axis.rank % 2]  # of equal length
    for message, purpose in ((torch.zeros(4 + axis.rank), ""), (mine, ""), (torch.zeros(3), str(axis.rank))):
        channel = shared(axis).channel
        with pytest.raises(RuntimeError, match="ranks made different calls"):
            channel.all_gather(message, purpose)
        with pytest.raises(RuntimeError, match="an earlier call on the shared-memory channel was interrupted"):
            channel.all_gather(torch.zeros(1))


def check_interrupted(axis):
    """Check that an interrupted rank cannot continue, and that its peers wait for the timeout of the group."""
    channel = shared(axis).channel
    channel._timeout = 1
    channel.all_gather(torch.zeros(1))
    if axis.rank == 0:

        def interrupt(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            channel.all_gather(torch.zeros(1))
        with pytest.raises(RuntimeError, match="was interrupted"):
            channel.all_gather(torch.zeros(1))
    else:
        time.sleep(0.5)
        channel.all_gather(torch.zeros(1))  # the message of rank 0 was sent
        with pytest.raises(RuntimeError, match="sent no message within 1 s"):
            channel.all_gather(torch.zeros(1))
    dist.barrier(axis.group)


def check_threads(axis):
    channel = shared(axis).channel
    channel._lock.acquire()  # as another thread does
    with pytest.raises(RuntimeError, match="two threads"):
        channel.all_gather(torch.zeros(1))


def check_inference_mode(axis):
    with torch.inference_mode():
        axis = shared(axis)
        assert axis.channel.all_gather(torch.ones(2)).sum() == 2 * axis.size
    assert reduce_from_tp(torch.ones(2, requires_grad=True), group=axis).sum() == 2 * axis.size


def check_one_rank_cannot_join(axis):
    """Check that no rank uses the channel if one of them cannot map the memory."""
    join = shared_memory._join
    shared_memory._join = (lambda *_: None) if axis.rank == axis.size - 1 else join
    try:
        assert axis.with_shared_memory().channel is None
    finally:
        shared_memory._join = join


def check_no_descriptor_leaks(axis):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        shared(axis)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


CHECKS = [
    check_messages, check_many, check_operations, check_reductions, check_long, check_calls_differ, check_interrupted,
    check_threads, check_inference_mode, check_one_rank_cannot_join, check_no_descriptor_leaks,
]  # fmt: skip
#: Checks that take seconds run by default on one layout.
SLOW = {check_messages: "four", check_interrupted: "strided"}


@pytest.mark.parametrize(
    ("layout", "check"),
    cases(itertools.product(LAYOUTS, CHECKS), lambda layout, check: SLOW.get(check, layout) == layout),
)
def test_shared_memory(ranks, layout, check):
    ranks(layout, check)


def test_exited_rank_is_named(tmp_path):
    script = """
import os, sys, torch, torch.distributed as dist
from shardconv.distributed import as_axis
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
axis = as_axis().with_shared_memory()
axis.channel.all_gather(torch.zeros(1))
print(os.getpid(), flush=True)
if rank:
    os._exit(0)  # and remains a zombie
axis.channel.all_gather(torch.zeros(1))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )
        for rank in (0, 1)
    ]  # fmt: skip
    error = processes[0].communicate(timeout=60)[1]
    pid = processes[1].communicate(timeout=60)[0].strip()
    assert f"PeerError: rank 1 of the group (process {pid}) exited" in error
