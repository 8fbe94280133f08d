"""Checks of the operations of an axis against sums and chunks; each runs on every rank."""

import pytest
import torch
import torch.distributed as dist

from shardconv.distributed import copy_to_tp, gather_from_tp, reduce_from_tp, scatter_to_tp


def everyones(axis, shape, seed=1):
    """The tensors of all ranks of the axis, in order; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(axis.size)]


def from_all(axis, tensor):
    """The tensor of each rank of the axis, in order, by torch alone."""
    tensor = tensor.contiguous()
    found = [torch.empty_like(tensor) for _ in range(axis.size)]
    dist.all_gather(found, tensor, group=axis.group)
    return found


def passed(function, value, grad):
    """Output and gradient of a function; checks that its arguments do not change."""
    argument = value.clone().requires_grad_()
    before, grad_before = argument.detach().clone(), grad.clone()
    output = function(argument)
    output.backward(grad)
    assert torch.equal(argument, before)
    assert torch.equal(grad, grad_before)
    return output.detach(), argument.grad


def check_copy(axis):
    values, grads = everyones(axis, (3, 4)), everyones(axis, (3, 4), seed=2)
    output, grad = passed(lambda x: copy_to_tp(x, group=axis), values[0], grads[axis.rank])
    assert torch.equal(output, values[0])
    torch.testing.assert_close(grad, sum(grads))  # gloo chooses the order of the sum


def check_reduce(axis):
    values, grads = everyones(axis, (3, 4)), everyones(axis, (3, 4), seed=2)
    output, grad = passed(lambda x: reduce_from_tp(x, group=axis), values[axis.rank], grads[0])
    torch.testing.assert_close(output, sum(values))
    assert torch.equal(grad, grads[0])
    largest = reduce_from_tp(values[axis.rank], op=dist.ReduceOp.MAX, group=axis)
    assert torch.equal(largest, torch.stack(values).amax(0))
    with pytest.raises(RuntimeError, match="only the sum over ranks has a gradient"):
        reduce_from_tp(values[axis.rank].requires_grad_(), op=dist.ReduceOp.MAX, group=axis).sum().backward()


def check_scatter_and_gather(axis, dim):
    shape = [4, 8, 12]
    full, grads = everyones(axis, shape)[0], everyones(axis, shape, seed=2)
    chunks = [chunk.contiguous() for chunk in full.chunk(axis.size, dim)]
    grad_chunks = [chunk.contiguous() for chunk in grads[0].chunk(axis.size, dim)]
    output, grad = passed(lambda x: scatter_to_tp(x, dim, group=axis), full, grad_chunks[axis.rank])
    assert output.is_contiguous()
    assert torch.equal(output, chunks[axis.rank])
    assert torch.equal(grad, grads[0])
    output, grad = passed(lambda x: gather_from_tp(x, dim, group=axis), chunks[axis.rank], grads[0])
    assert output.is_contiguous()
    assert torch.equal(output, full)
    assert torch.equal(grad, grad_chunks[axis.rank])
    with pytest.raises(ValueError, match=rf"of dim {dim} is not a multiple of {axis.size} ranks"):
        scatter_to_tp(full.narrow(dim, 0, 3), dim, group=axis)
