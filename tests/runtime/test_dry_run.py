"""The meters, on operations with known bytes."""

import pytest
import torch
import torch.distributed as dist

from shardconv.distributed import gather_from_tp, reduce_from_tp
from shardconv.distributed.operations import REDUCE_SCATTER
from shardconv.runtime.dry_run import Call, CountedAxis, CountingGroup, LiveBytes, held_tensors

KB = 1024


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_live_bytes(device):
    given = torch.zeros(KB, dtype=torch.uint8, device=device)
    with LiveBytes([given]) as live:
        first = given + given
        assert (live.now, live.peak) == (KB, KB)
        view = first.view(2, -1)[1:]
        first.add_(1)
        kept = given.view(4, -1)
        assert live.now == KB
        second = torch.cat([first, first])
        assert (live.now, live.peak) == (3 * KB, 3 * KB)
        del first
        assert live.now == 3 * KB  # the view holds it
        del view
        assert live.now == 2 * KB
        parts = second.sort()  # values, and indices of eight bytes each
        assert live.now == live.peak == 2 * KB + 2 * KB + 8 * 2 * KB
        del parts, kept, second
        assert live.now == 0
    _ = given + given  # not counted
    assert (live.now, live.peak) == (0, 20 * KB)


def test_cache_key_has_everything_that_shapes_depend_on():
    def on(device):
        x, y = torch.ones(4, 6, device=device), torch.ones(6, device=device, dtype=torch.float64)
        made = [x + y, x.t() + 1, x + 1, 2 * x, x.mean(0), x.mean(0, True), x.mean((0, 1)), torch.cat([x, x]),
                torch.cat([x, x], 1), torch.cat([x.t(), x.t()]), x.pow(2), x.pow(2.0), x.half() * x, x @ x.t(),
                x.to(torch.int64) * 2, x.to(torch.int64) * 2.5, x[:2] + 1, x.neg(), x.rsqrt()]  # fmt: skip
        return [(one.shape, one.stride(), one.dtype) for one in made]

    with LiveBytes([]):
        assert on("meta") + on("meta") == on("cpu") + on("cpu")


def test_collectives_are_counted():
    group = CountingGroup(4)
    axis = CountedAxis.of(group)
    summed = reduce_from_tp(torch.empty(3, 5, device="meta"), group=axis)
    group.in_layer = True
    gathered = gather_from_tp(torch.empty(3, 5, dtype=torch.bfloat16, device="meta"), group=axis)
    assert (summed.shape, gathered.shape) == ((3, 5), (3, 20))
    assert group.calls == [Call("all_reduce", 60, False), Call("all_gather", 120, True)]
    same = torch.tensor([1, 2])
    assert torch.equal(reduce_from_tp(same, op=dist.ReduceOp.MAX, group=axis), same)


def test_sum_of_values_over_counted_ranks_is_an_error():
    with pytest.raises(RuntimeError, match="values cannot be summed over ranks that do not exist"):
        reduce_from_tp(torch.ones(2), group=CountedAxis.of(CountingGroup(2)))


@pytest.mark.parametrize(
    "collective",
    [
        lambda x, group: dist.broadcast(x, group_src=0, group=group),
        lambda x, group: getattr(dist, REDUCE_SCATTER)(x[:2], x, group=group),
        lambda x, group: dist.all_to_all_single(x, x, group=group),
        lambda x, group: dist.all_gather([x, x], x, group=group),
        lambda _, group: group.barrier(),
    ],
    ids=["broadcast", REDUCE_SCATTER, "all_to_all_single", "all_gather", "barrier"],
)
def test_collectives_that_cannot_be_counted_are_errors(collective):
    with pytest.raises(NotImplementedError, match="is a collective that is not counted"):
        collective(torch.empty(4, device="meta"), CountingGroup(2))


def test_held_tensors():
    class Cache:
        def __init__(self, *held):
            self.layers, self.itself, self.sizes = held, self, {"seen": 3}

    one, two = torch.ones(2), torch.ones(3)
    assert {id(tensor) for tensor in held_tensors(Cache({"states": [one]}, Cache(two, one)))} == {id(one), id(two)}
    assert held_tensors(None) == []
