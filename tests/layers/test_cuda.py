"""The layers on CUDA tensors, on two ranks with gloo, which may share a device."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch import nn

import shardconv
from shardconv.convert import convert_parallel_embedding, convert_parallel_linear, gather_state_dict
from shardconv.layers import ColumnParallelLinear, ParallelDropout, ParallelEmbedding, RowParallelLinear
from shardconv.layers.functional import parallel_cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")

#: Rounding errors of sums over ranks in float64.
NEAR = {"rtol": 1e-12, "atol": 1e-12}


def check_pair(axis):
    torch.manual_seed(1)
    column = ColumnParallelLinear(16, 32, dtype=torch.float64, device="cuda", group=axis)
    row = RowParallelLinear(32, 16, dtype=torch.float64, device="cuda", group=axis)
    torch.manual_seed(1)
    first = nn.Linear(16, 32, dtype=torch.float64, device="cuda")
    second = nn.Linear(32, 16, dtype=torch.float64, device="cuda")
    assert torch.equal(column.master_weight, first.weight)
    assert torch.equal(row.master_weight, second.weight)
    x = torch.randn(5, 16, dtype=torch.float64, device="cuda", requires_grad=True)
    mine = x.detach().clone().requires_grad_()
    expected, found = second(F.gelu(first(x))), row(F.gelu(column(mine)))
    torch.testing.assert_close(found, expected, **NEAR)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(mine.grad, x.grad, **NEAR)
    torch.testing.assert_close(row.weight.grad, second.weight.grad.chunk(axis.size, 1)[axis.rank], **NEAR)


def check_embedding_and_loss(axis):
    torch.manual_seed(2)
    table = nn.Embedding(21, 8, padding_idx=3, dtype=torch.float64, device="cuda")
    torch.manual_seed(2)
    split = ParallelEmbedding(21, 8, 3, dim=0, dtype=torch.float64, device="cuda", group=axis)
    assert torch.equal(split.master_weight, table.weight)
    ids = torch.tensor([0, 3, 20, 20], device="cuda")
    assert torch.equal(split(ids), table(ids))
    logits = torch.randn(6, 8 * axis.size, dtype=torch.float64, device="cuda", requires_grad=True)
    target = torch.arange(6, device="cuda")
    mine = logits.detach().chunk(axis.size, 1)[axis.rank].clone().requires_grad_()
    expected = F.cross_entropy(logits, target, label_smoothing=0.1)
    found = parallel_cross_entropy(mine, target, label_smoothing=0.1, num_classes=8 * axis.size, group=axis)
    torch.testing.assert_close(found, expected, **NEAR)
    expected.backward()
    found.backward()
    torch.testing.assert_close(mine.grad, logits.grad.chunk(axis.size, 1)[axis.rank], **NEAR)


def check_conversion_and_dropout(axis):
    unsharded = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double().cuda()
    expected = unsharded(torch.arange(20, device="cuda"))
    state = {name: tensor.clone() for name, tensor in unsharded.state_dict().items()}
    convert_parallel_embedding(unsharded, 0, group=axis)
    convert_parallel_linear(nn.ModuleList([unsharded[1]]), -1, group=axis)
    convert_parallel_linear(nn.ModuleList([unsharded[3]]), 0, group=axis)
    torch.testing.assert_close(unsharded(torch.arange(20, device="cuda")), expected, **NEAR)
    assert all(torch.equal(tensor, state[name]) for name, tensor in gather_state_dict(unsharded).items())
    dropout = ParallelDropout(0.5, input_is_parallel=True, group=axis)
    assert set(dropout(torch.ones(64, 64, device="cuda")).unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("check", [check_pair, check_embedding_and_loss, check_conversion_and_dropout])
def test_on_cuda(ranks, check):
    ranks("pairs", check)


def check_load(axis, split):
    on_cpu, model = (shardconv.load(split, device=device, group=axis) for device in ("cpu", "cuda"))
    assert {parameter.device.type for parameter in (*model.parameters(), *model.buffers())} == {"cuda"}
    ids = torch.arange(12)[None] + 3
    expected, found = on_cpu(ids).logits, model(ids.cuda()).logits.cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))  # other kernels


def test_load_on_cuda(ranks, tmp_path):
    shardconv.split(Path(__file__).parents[2] / "examples/demo-model", tmp_path / "split", tp=2)
    ranks("pairs", check_load, tmp_path / "split")
