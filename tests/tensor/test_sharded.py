"""Sharded tensors: creation, moves to another mesh, and parameters of modules."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardconv.layers import ParallelEmbedding, ParallelLinear
from shardconv.tensor import (
    from_global,
    from_local,
    named_sharded_parameters,
    redistribute,
    shard_parameter,
    to_mesh,
)
from tests.support.mesh_layouts import S0, S1, P, R, added_up, layouts, local_shard, mesh_of, numbers, spied
from tests.support.ranks import on_ranks

MESHES = [("pairs", 1), ("four", 1), ("four", 2)]


@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (3, 1)])
@pytest.mark.parametrize(("layout", "ndim"), MESHES)
@on_ranks()
def test_from_global(axis, ndim, shape):
    """Check against torch's distribute_tensor, without messages and in compiled graphs."""
    mesh, full, grad = mesh_of(axis, ndim), numbers(shape, 1), numbers(shape, 2)
    for layout in layouts(ndim):
        leaf = full.clone().requires_grad_()
        with spied() as seen:
            found = from_global(leaf * 2, mesh, layout)
        assert seen == []
        assert (found.placements, found.shape) == (layout, full.shape)
        local = found.to_local()
        assert torch.equal(added_up(local.detach(), mesh, layout), local_shard(2 * full, mesh, layout))
        if P not in layout:
            assert torch.equal(local, distribute_tensor(2 * full, mesh, layout).to_local())
        local.backward(local_shard(grad, mesh, layout))
        assert torch.equal(leaf.grad, 2 * grad)


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_from_local(axis):
    mesh, n = mesh_of(axis, 1), axis.size
    even, uneven = numbers((2 * n, 3), 1), numbers((2 * n - 1, 3), 2)
    leaf = local_shard(even, mesh, [S0]).requires_grad_()
    found = from_local(leaf, mesh, [Shard(-2)])
    assert found.placements == (S0,)
    assert torch.equal(found.full_tensor(), even)
    found.to_local().sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))
    assert from_local(leaf, mesh, [S0], shape=even.shape).shape == even.shape
    found = from_local(local_shard(uneven, mesh, [S0]), mesh, [S0], shape=uneven.shape)
    assert torch.equal(found.full_tensor(), uneven)
    assert torch.equal(from_local(even, mesh, [P]).full_tensor(), n * even)
    with pytest.raises(
        ValueError, match=rf"shape \[{2 * n + 1}, 3\] over mesh \(tensor: {n}\), .* has shape \[99, 3\], expected"
    ):
        from_local(torch.zeros(99, 3), mesh, [S0], shape=(2 * n + 1, 3))
    with pytest.raises(ValueError, match="out of range for 2 dims"):
        from_local(even, mesh, [Shard(2)])
    with pytest.raises(ValueError, match="2 placements for 1 axes"):
        from_local(even, mesh, [S0, S0])


@on_ranks("four")
def test_other_meshes(axis):
    """Check moves from a 2x2 mesh to all four ranks and to pairs, replicated in between."""
    square, line, pair = (
        mesh_of(axis, 2),
        init_device_mesh("cpu", (4,), mesh_dim_names=("all",)),
        mesh_of(axis, 2)["tensor"],
    )
    full, grad = numbers((5, 6), 1), numbers((5, 6), 2)
    for source, target, mesh in (((S0, P), (S1,), line), ((S0, S0), (S0,), pair), ((R, R), (P,), pair)):
        leaf = full.clone().requires_grad_()
        found = redistribute(from_global(leaf, square, source), target, mesh)
        assert (found.device_mesh, found.placements) == (mesh, target)
        assert torch.equal(added_up(found.to_local().detach(), mesh, target), local_shard(full, mesh, target))
        found.to_local().backward(local_shard(grad, mesh, target))
        assert torch.equal(leaf.grad, grad)
    replicated = from_global(full, square, [R, R])
    with spied() as seen:
        moved = to_mesh(replicated, line)
    assert seen == []
    assert (moved.device_mesh, moved.placements) == (line, (R,))
    assert torch.equal(moved.to_local(), full)
    with pytest.raises(
        ValueError, match=r"shape \[5, 6\] over mesh \(data: 2, tensor: 2\) has .*mesh \(all: 4\): use redistr"
    ):
        to_mesh(from_global(full, square, [S0, R]), line)
    with pytest.raises(ValueError, match="expected Replicate to move it"):
        to_mesh(from_global(full, square, [P, R]), line)
    few = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match=r"global rank \d is not in mesh \(0: 2\)"):
            to_mesh(replicated, few)


#: Placements of a tensor of shape [4, 4] on one axis, and the error.
INVALID = {
    "dim": ([Shard(2)], r"dim 2 .*shape \[4, 4\] over mesh \(tensor: 2\)"),
    "number": ([S0, S1], r"shape \[4, 4\] over mesh \(tensor: 2\): got 2 placements for 1 axes"),
}


@pytest.mark.parametrize("name", INVALID)
@on_ranks("pairs")
def test_redistribute_refuses_invalid_placements(axis, name):
    placements, message = INVALID[name]
    tensor = from_global(numbers((4, 4), 1), mesh_of(axis, 1), [S0])
    with pytest.raises(ValueError, match=message):
        redistribute(tensor, placements)


class Net(nn.Module):
    """Two layers with one weight, one of them in a submodule."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"second": nn.Linear(4, 4)})
        self.inner["second"].weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_parameters(axis):
    mesh, net = mesh_of(axis, 1), Net().double()
    full = net.first.weight.detach().clone()
    assert list(named_sharded_parameters(net)) == []
    found = shard_parameter(net, "inner.second.weight", mesh, [S0])
    assert isinstance(found, nn.Parameter)
    assert isinstance(found.data, DTensor)
    assert net.first.weight is net.inner["second"].weight is found
    assert torch.equal(found.full_tensor(), full)
    assert torch.equal(found.to_local(), local_shard(full, mesh, [S0]))
    shard_parameter(net.inner["second"], "bias", mesh, [R])
    assert not shard_parameter(net, "scale", mesh, [S0]).requires_grad
    # A shared parameter is listed once, under its first name; a replicated one is not listed.
    names = dict(named_sharded_parameters(net))
    assert list(names) == ["scale", "first.weight"]
    assert all(parameter is net.get_parameter(name) for name, parameter in names.items())
    assert [name for name, _ in named_sharded_parameters(net, prefix="net")] == ["net.scale", "net.first.weight"]
    assert [name for name, _ in named_sharded_parameters(net, recurse=False)] == ["scale"]
    assert [name for name, _ in named_sharded_parameters(net, "net", recurse=False)] == ["net.scale"]
    for name, message in (
        ("first.weight", "first.weight is sharded already: redistribute it"),
        ("third.weight", "Net does not have a parameter 'third.weight'"),
        ("first", "Net does not have a parameter 'first'"),
    ):
        with pytest.raises(ValueError, match=message):
            shard_parameter(net, name, mesh, [S0])
    with pytest.raises(ValueError, match=r"dim 1 .*shape \[4\] over mesh"):
        shard_parameter(net, "first.bias", mesh, [S1])


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_layers(axis):
    """Check shards of parallel layers, also after a parameter was replaced."""
    net = nn.Sequential(
        ParallelEmbedding(16, 8, dim=0, group=axis), ParallelLinear(8, 8, dim=1, group=axis),
        ParallelLinear(8, 8, dim=0, group=axis), nn.Linear(8, 8),
    )  # fmt: skip
    assert [name for name, _ in named_sharded_parameters(net)] == ["0.weight", "1.weight", "1.bias", "2.weight"]
    net[1].weight = nn.Parameter(net[1].weight.detach().clone())
    assert [name for name, _ in named_sharded_parameters(net)] == ["0.weight", "1.weight", "1.bias", "2.weight"]
    other = nn.Module()
    other.borrowed = net[0].weight
    assert [name for name, _ in named_sharded_parameters(other)] == ["borrowed"]
    assert [name for name, _ in named_sharded_parameters(net[1], "up")] == ["up.weight", "up.bias"]
    with pytest.raises(ValueError, match=re.escape("2.weight is sharded already")):
        shard_parameter(net, "2.weight", mesh_of(axis, 1), [S0])
