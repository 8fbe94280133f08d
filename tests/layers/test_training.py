"""Training of a small GPT: unsharded, tensor parallel, with data parallelism, and continued at another tp.

Losses of fifty steps in float64 are compared to 1e-9, as sums over ranks round differently and errors accumulate.
The limit is about a million times the rounding error of one step, and far below the effect of a wrong gradient.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardconv
from shardconv.convert import gather_state_dict, load_full_state_dict
from shardconv.distributed import init_parallel
from tests.support.gpt import GPT, WIDTH, Block, batch
from tests.support.matrix import MATRIX
from tests.support.ranks import on_ranks

STEPS = 50


def unsharded_state():
    torch.manual_seed(1)
    return {name: tensor.double() for name, tensor in GPT().state_dict().items()}


def train(model, steps, part=slice(None)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step)[part])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def loaded(axis, state):
    model = GPT(axis).double()
    load_full_state_dict(model, state)
    return model


@on_ranks("four")
def test_tensor_and_data_parallel(axis):
    """Check tp=2 with two replicas under torch's DistributedDataParallel, each with half of the batch."""
    groups = init_parallel(tensor=2, data=2)
    unsharded = GPT().double()
    unsharded.load_state_dict(unsharded_state())
    expected = train(unsharded, range(STEPS))
    model = DistributedDataParallel(loaded(groups.tensor, unsharded_state()), process_group=groups.data.group)
    half = slice(groups.data.rank * 4, groups.data.rank * 4 + 4)
    found = train(model, range(STEPS), half)
    dist.all_reduce(found, group=groups.data.group)
    shardconv.distributed.groups._current.groups = None
    torch.testing.assert_close(found / 2, expected, rtol=1e-9, atol=0)


def train_some(axis, state, first, last):
    model = loaded(axis, state)
    losses = train(model, range(first, last))
    full = gather_state_dict(model)
    return {"losses": losses, "state": {name: tensor.clone() for name, tensor in full.items()}}


def test_tensor_parallel_and_continued_at_another_tp(ranks):
    unsharded = GPT().double()
    unsharded.load_state_dict(unsharded_state())
    expected = train(unsharded, range(STEPS))
    begun = ranks("pairs", train_some, unsharded_state(), 0, 25)[0]
    continued = ranks("four", train_some, begun["state"], 25, STEPS)[0]
    found = torch.cat([begun["losses"], continued["losses"]])
    assert expected[-1] < 0.5 * expected[0]  # the model learns
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    assert list(continued["state"]) == list(unsharded.state_dict())
    for name, tensor in unsharded.state_dict().items():
        torch.testing.assert_close(continued["state"][name], tensor, rtol=1e-7, atol=1e-9)


@MATRIX
@on_ranks("pairs")
def test_compiled_block(axis):
    torch.manual_seed(2)
    block = Block(axis).double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    eager_x, compiled_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = block(eager_x)
    expected.square().sum().backward()
    grads = [parameter.grad.clone() for parameter in block.parameters()]
    block.zero_grad()
    found = torch.compile(block, fullgraph=True)(compiled_x)
    found.square().sum().backward()
    # The compiler fuses and reorders sums.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(compiled_x.grad, eager_x.grad, rtol=1e-11, atol=1e-12)
    for parameter, grad in zip(block.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-11, atol=1e-12)
