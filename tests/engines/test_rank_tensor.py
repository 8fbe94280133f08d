"""Rank tensors, compared with full tensors after the same operations.

torch computes the expected elements, and which of them a rank holds, from a full tensor and a full mask.
"""

import re
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812 - as everywhere

from shardconv.engines.rank_tensor import HeldShard, RankTensor, positions_of
from shardconv.layers.sharding import take_shard
from shardconv.plan.placement import Placement, Unit, shard_dim
from shardconv.support.errors import NotHeldError


def rank_tensor(full, placement, rank, reads=None, *, is_slice=False):
    """A rank tensor, whose shard is a slice if it can be, and the mask of the elements that it holds."""

    def read():
        if reads is not None:
            reads.append(rank)
        intervals = [one for one, _ in placement.local_intervals(rank)]
        if is_slice and len(placement.ranks[rank]) == len(intervals) == 1:
            return full.narrow(placement.dim, intervals[0].start, intervals[0].size)
        return take_shard(full, placement, rank).contiguous()

    shard = HeldShard("w", tuple(full.shape), placement.dim, positions_of(placement, rank), read, "split it again")
    shape = [1] * full.dim()
    shape[placement.dim] = -1
    mask = (shard.positions >= 0).view(shape).expand(full.shape).contiguous()
    return RankTensor.of(shard, full.dtype), mask


@st.composite
def tensors(draw):
    """A full tensor of distinct numbers, and a placement: even, fused, padded or with replicas."""
    tp = draw(st.integers(2, 4))
    dim = draw(st.integers(0, 2))
    shape = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(dim + 1, 3)))]
    kind = draw(st.sampled_from(["even", "fused", "padded", "replicas"]))
    units = {
        "even": [Unit(tp * draw(st.integers(1, 3)))],
        "fused": [Unit(tp, 2), Unit(tp), Unit(tp, 3)],
        "padded": [Unit(draw(st.integers(1, 9)), pad=True)],
        "replicas": [Unit(1, 3, replicate=True)],
    }[kind]
    shape[dim] = sum(unit.count * unit.size for unit in units)
    full = torch.arange(1.0, prod(shape) + 1).view(shape)
    return full, shard_dim(dim, units, tp), draw(st.integers(0, tp - 1))


#: Operations that weight loaders use, on a tensor with at least one dim; numbers are taken modulo its sizes.
OPERATIONS = {
    "narrow": lambda t, d, a, b: t.narrow(d, a % t.shape[d], min(b, t.shape[d] - a % t.shape[d])),
    "select": lambda t, d, a, b: t.select(d, a % t.shape[d]),
    "slice": lambda t, d, a, b: t[a % t.shape[0] :: b],
    "chunk": lambda t, d, a, b: (chunks := t.chunk(b, d))[a % len(chunks)],
    "split": lambda t, d, a, b: (parts := t.split(b, d))[a % len(parts)],
    "unbind": lambda t, d, a, b: (parts := t.unbind(d))[a % len(parts)],
    "unsqueeze": lambda t, d, a, b: t.unsqueeze(d),
    "transpose": lambda t, d, a, b: t.transpose(d, a % t.dim()),
    "movedim": lambda t, d, a, b: t.movedim(d, a % t.dim()),
    "flatten": lambda t, d, a, b: t.flatten(0, min(1, t.dim() - 1)),
    "unflatten": lambda t, d, a, b: t.unflatten(d, (b, -1)) if t.shape[d] % b == 0 else t,
    "expand": lambda t, d, a, b: t.unsqueeze(0).expand(b, *t.shape),
    "double": lambda t, d, a, b: t.double(),
    "contiguous": lambda t, d, a, b: t.contiguous(),
    "to": lambda t, d, a, b: t.to(torch.float64),
    "negative": lambda t, d, a, b: -t,
    "plus": lambda t, d, a, b: t + a,
    "cat": lambda t, d, a, b: torch.cat([t, t.narrow(d, a % t.shape[d], 1)], d),
    "reshape": lambda t, d, a, b: t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t,
    "squeeze": lambda t, d, a, b: t.squeeze(d),
}
steps = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9), st.integers(1, 4))


def apply(tensor, chain):
    for name, dim, a, b in chain:
        if tensor.dim() == 0 or 0 in tensor.shape:
            break
        tensor = OPERATIONS[name](tensor, dim % tensor.dim(), a, b)
    return tensor


@given(tensors(), st.lists(steps, max_size=5), st.booleans())
@settings(max_examples=400)
def test_views_equal_those_of_the_full_tensor_or_raise(made, chain, is_slice):
    """They may raise for held elements only if a view merges dims, or after ``cat``."""
    full, placement, rank = made
    reads = []
    lazy, mask = rank_tensor(full, placement, rank, reads, is_slice=is_slice)
    expected = apply(full, chain)
    held = apply(mask.double(), [step for step in chain if step[0] not in {"negative", "plus"}]).bool()
    try:
        found = apply(lazy, chain)
        is_unread = reads == []
        values = found + torch.zeros(())
    except NotHeldError as error:
        message = str(error)
    else:
        message = ""
    if message:
        # cat of tensors with one element along a dim may take another dim for the sharded one
        assert not held.all() or "mixes elements" in message or "cat" in {name for name, *_ in chain}
        assert re.fullmatch("w: .*: split it again", message)
        return
    assert held.all()
    assert tuple(found.shape) == tuple(expected.shape)
    copies = {"contiguous", "to", "double", "cat", "reshape", "negative", "plus"}
    assert is_unread or copies & {name for name, *_ in chain}
    assert torch.equal(values, expected)
    assert type(values) is torch.Tensor
    assert len(reads) <= 1


def rows(count=8, tp=2, rank=1, behind=3):
    full = torch.arange(1.0, count * behind + 1).view(count, behind)
    return full, rank_tensor(full, shard_dim(0, [Unit(count)], tp), rank)[0]


def test_contiguous_interval_is_not_copied():
    """Its view is a view of the shard."""
    full = torch.arange(24.0).view(4, 6)
    placement, shards = shard_dim(1, [Unit(6)], 2), []
    lazy, _ = rank_tensor(full, placement, 1)
    shard = take_shard(full, placement, 1).contiguous()
    lazy.shard.__dict__["read"] = lambda: shards.append(1) or shard
    held = lazy.narrow(1, 3, 3).read()
    assert held.data_ptr() == shard.data_ptr()
    assert torch.equal(held, full[:, 3:])
    assert shards == [1]


@pytest.mark.parametrize("is_slice", [False, True])
@pytest.mark.parametrize("dtype", [torch.int16, torch.float64])
def test_view_as_a_dtype_of_another_size(dtype, is_slice):
    full = torch.arange(32.0).view(4, 8)
    lazy, _ = rank_tensor(full, shard_dim(1, [Unit(8)], 2), 1, is_slice=is_slice)
    assert torch.equal(lazy[:, 4:].view(dtype), full[:, 4:].view(dtype))


def test_copy_into_a_parameter():
    full, lazy = rows()
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    parameter.data.copy_(lazy.narrow(0, 4, 4))
    assert torch.equal(parameter.data, full[4:])
    parameter.data[1:3].copy_(lazy[6:])
    assert torch.equal(parameter.data[1:3], full[6:])


MASK = torch.ones(8, dtype=torch.bool)


@pytest.mark.parametrize("read", [
    lambda t: t.sum(), lambda t: t.numpy(), lambda t: t.tolist(), lambda t: t[0, 0].item(), lambda t: bool(t[0, 0]),
    lambda t: torch.cat([t, t]).sum(), lambda t: torch.stack([t]), lambda t: (t.clone() * 2).sum(),
    lambda t: t.float().bfloat16() + MASK.view(-1, 1),
    lambda t: F.linear(torch.ones(1, 3), t), lambda t: torch.equal(t, t), lambda t: t.data_ptr(),
    lambda t: t.untyped_storage()[0], lambda t: t[[0, 1]], lambda t: t[MASK],
    lambda t: t.t().contiguous().sum(), lambda t: t.view(torch.int32) + MASK.view(-1, 1), lambda t: t.exp().tolist(),
    lambda t: t.as_strided((2,), (1,), 8).sum(),
    lambda t: torch.empty(8, 3).copy_(t), lambda t: t.view(torch.uint8).sum(),
    lambda t: t.repeat(2, 1), lambda t: list(map(float, t[0])), lambda t: torch.save(t, "/dev/null"),
])  # fmt: skip
def test_reading_missing_elements_is_an_error(read):
    _, lazy = rows()
    with pytest.raises((NotHeldError, RuntimeError, NotImplementedError, TypeError)):
        read(lazy)


@pytest.mark.parametrize("write", [
    lambda t: t.zero_(), lambda t: t.mul_(2), lambda t: t[4:].copy_(torch.ones(4, 3)), lambda t: t.__setitem__(5, 0),
    lambda t: torch.add(t, t, out=t),
])  # fmt: skip
def test_writing_is_an_error(write):
    """The value would be lost."""
    _, lazy = rows()
    with pytest.raises((TypeError, NotHeldError)):
        write(lazy)


def test_metadata_does_not_read_values():
    full, lazy = rows()
    assert (lazy.shape, lazy.dtype, lazy.numel(), lazy.dim(), lazy.device) == (
        full.shape, full.dtype, full.numel(), full.dim(), full.device
    )  # fmt: skip
    assert torch.empty_like(lazy).shape == lazy.shape
    assert torch.equal(torch.zeros_like(lazy), torch.zeros(8, 3))
    assert repr(lazy) == "RankTensor('w', shape=[8, 3], dtype=torch.float32)"


def test_message_has_the_missing_elements():
    _, lazy = rows()
    with pytest.raises(NotHeldError, match=r"^w: elements \[2, 4\) of dim 0 are not on this rank, which holds"):
        lazy[2:6].sum()


def test_concatenation_promotes_dtypes():
    full, lazy = rows()
    part = lazy.narrow(0, 4, 4)
    joined = torch.cat([part, part.to(torch.float64), part.to(torch.int32)]) + 0
    expected = full[4:]
    assert torch.equal(joined, torch.cat([expected, expected.to(torch.float64), expected.to(torch.int32)]))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([lazy, lazy[:, :2]])


def test_conjugate_is_computed():
    full = torch.complex(torch.arange(4.0), torch.ones(4))
    lazy, _ = rank_tensor(full, shard_dim(0, [Unit(4)], 2), 0)
    assert torch.equal(lazy[:2].conj() + 0, full[:2].conj() + 0)
    with pytest.raises(NotHeldError):
        lazy.conj()


def test_rank_without_elements():
    """A loader can skip an expert of another rank, but not read it."""
    full = torch.ones(4, 3)
    lazy, _ = rank_tensor(full, Placement(0, 4, (shard_dim(0, [Unit(4)], 1).ranks[0], ())), 1)
    assert lazy.narrow(0, 0, 2).shape == (2, 3)
    with pytest.raises(NotHeldError, match="which holds nothing of 4"):
        lazy.sum()
