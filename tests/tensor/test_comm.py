"""Single communications of tensors and their gradients, compared with chunks and sums by torch."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardconv.tensor import CommSpec, Cost, LinkReport
from shardconv.tensor.comm import axis_over
from shardconv.tensor.cost import Link, collective_time
from tests.support.mesh_layouts import mesh_of, numbers, spied
from tests.support.ranks import on_ranks

LAYOUTS = ["pairs", "four"]


def check(spec, mesh, tensors, collectives):
    """Check a communication of this rank.

    Args:
        spec: the communication.
        mesh: its mesh.
        tensors: the local tensor, the gradient of the output, the expected output, and the expected gradient.
        collectives: the expected ones of forward and backward.
    """
    local, grad, expected, expected_grad = (one.contiguous() for one in tensors)
    argument, given = local.clone().requires_grad_(), grad.clone()
    with spied() as forward:
        output = spec.apply(argument, mesh)
    with spied() as backward:
        output.backward(given)
    assert output.is_contiguous()
    assert torch.equal(output.detach(), expected), spec
    assert torch.equal(argument.grad, expected_grad), spec
    assert torch.equal(argument, local)
    assert torch.equal(given, grad)
    assert collectives == tuple([kind for kind, _ in seen] for seen in (forward, backward)), spec


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks()
def test_every_kind(axis):
    """Check each kind; with its name in Colossal-AI, if it has one."""
    mesh, n, r = mesh_of(axis, 1), axis.size, axis.rank
    full, other = numbers((2 * n, 3 * n), 1), numbers((2 * n, 3 * n), 2)
    mine, theirs, rows = full.chunk(n, 1)[r], other.chunk(n, 1)[r], other.chunk(n, 0)[r]
    summands = [numbers((2 * n, 3 * n), rank) for rank in range(n)]
    first = summands[0] if r == 0 else torch.zeros_like(full)
    placed = torch.cat([rows if rank == r else torch.zeros_like(rows) for rank in range(n)])
    # GATHER_FWD_SPLIT_BWD
    check(CommSpec("all_gather", 0, gather_dims=1), mesh, (mine, other, full, theirs), (["all_gather"], []))
    # SPLIT_FWD_GATHER_BWD
    check(CommSpec("chunk", 0, shard_dims=-1), mesh, (full, theirs, mine, other), ([], ["all_gather"]))
    # ALL2ALL_FWD_ALL2ALL_BWD
    spec = CommSpec("all_to_all", 0, gather_dims=1, shard_dims=0)
    check(spec, mesh, (mine, rows, full.chunk(n, 0)[r], theirs), (["all_to_all"], ["all_to_all"]))
    # ALLREDUCE_FWD_IDENTITY_BWD
    check(CommSpec("all_reduce", 0), mesh, (summands[r], full, sum(summands), full), (["all_reduce"], []))
    # IDENTITY_FWD_ALLREDUCE_BWD
    check(CommSpec("copy", 0), mesh, (full, summands[r], full, sum(summands)), ([], ["all_reduce"]))
    spec = CommSpec("reduce_scatter", 0, shard_dims=0)
    check(spec, mesh, (summands[r], rows, sum(summands).chunk(n)[r], other), (["reduce_scatter"], ["all_gather"]))
    check(CommSpec("to_partial", 0), mesh, (summands[0], other, first, other), ([], []))
    check(CommSpec("shard_to_partial", 0, gather_dims=0), mesh, (rows, full, placed, full.chunk(n)[r]), ([], []))


@on_ranks("four")
def test_several_axes(axis):
    """Check that the first axis is the outermost; test_redistribute.py has each kind over several axes."""
    mesh, full = mesh_of(axis, 2), numbers((4, 8), 1)
    row, column = mesh.get_coordinate()
    tile, stripe = full.chunk(2, 0)[row].chunk(2, 1)[column], full.chunk(4, 1)[2 * row + column]
    for dims, block in (((0, 1), tile), ((1, 1), stripe)):
        gather = CommSpec("all_gather", ("data", "tensor"), gather_dims=dims)
        assert torch.equal(gather.apply(block.contiguous(), mesh), full)
    turned = CommSpec("chunk", ("tensor", "data"), shard_dims=(1, 1)).apply(full, mesh)
    assert torch.equal(turned, full.chunk(4, 1)[2 * column + row])


@on_ranks("four")
def test_axes(axis):
    mesh = mesh_of(axis, 2)
    assert axis_over(mesh, ["tensor"]).group is mesh.get_group("tensor")
    assert axis_over(mesh, [0, 1]).group is dist.group.WORLD
    assert axis_over(mesh, [1, 0]).ranks == (0, 2, 1, 3)
    # torch sorts the ranks of groups, which then differ from those of the mesh
    crossed = DeviceMesh("cpu", [3, 1, 0, 2], mesh_dim_names=("tensor",))
    assert axis_over(crossed, ["tensor"]).ranks == (3, 1, 0, 2)
    gathered = CommSpec("all_gather", 0, gather_dims=0).apply(torch.tensor([dist.get_rank()]), crossed)
    assert gathered.tolist() == [3, 1, 0, 2]
    part = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match=r"global rank \d is not in mesh \(0: 2\)"):
            axis_over(part, [0])


@on_ranks("four")
def test_one_rank(axis):
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    mesh, x = init_device_mesh("cpu", (4, 1)), torch.randn(3, 4)
    with spied() as seen:
        for spec in (
            CommSpec("all_gather", 1, gather_dims=0), CommSpec("all_reduce", 1), CommSpec("copy", 1),
            CommSpec("reduce_scatter", 1, shard_dims=0), CommSpec("to_partial", 1),
        ):  # fmt: skip
            assert torch.equal(spec.apply(x, mesh), x)
            assert spec.cost(mesh).total == 0
    assert seen == []


LINK = Link(alpha=2e-6, beta=1e-9)


@pytest.mark.parametrize(
    ("collective", "dims", "forward", "backward"),
    [
        ("all_gather", {"gather_dims": 0}, "all_gather", None),
        ("chunk", {"shard_dims": 0}, None, "all_gather"),
        ("all_to_all", {"gather_dims": 0, "shard_dims": 1}, "all_to_all", "all_to_all"),
        ("all_reduce", {}, "all_reduce", None),
        ("copy", {}, None, "all_reduce"),
        ("reduce_scatter", {"shard_dims": 0}, "reduce_scatter", "all_gather"),
        ("to_partial", {}, None, None),
        ("shard_to_partial", {"gather_dims": 0}, None, None),
    ],
)
def test_costs(collective, dims, forward, backward):
    spec = CommSpec(collective, 1, num_bytes=4096, **dims)
    expected = [collective_time(name, 4096, 8, LINK) if name else 0.0 for name in (forward, backward)]
    assert spec.cost((2, 8), LINK) == Cost(*expected, sum(expected))
    assert spec.cost((2, 8), {1: LINK}) == Cost(*expected, sum(expected))
    assert spec.cost((2, 8), LINK, forward_only=True) == Cost(expected[0], 0.0, expected[0])
    assert spec.cost((2, 1), LINK) == Cost(0.0, 0.0, 0.0)


def test_cost_over_several_axes_is_that_of_the_slowest():
    """Colossal-AI used the larger alpha, but the smaller beta."""
    spec = CommSpec("all_gather", (0, 1), gather_dims=(0, 0), num_bytes=1 << 20)
    links = {0: Link(alpha=1e-5, beta=1e-9), 1: Link(alpha=1e-6, beta=1e-8)}
    assert spec.cost((2, 4), links).forward == collective_time("all_gather", 1 << 20, 8, Link(alpha=1e-5, beta=1e-8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"collective": "allgather", "axes": 0},
            "collective 'allgather' is unknown: use one of all_gather, all_reduce",
        ),
        ({"collective": "all_reduce", "axes": ()}, "pass at least one axis, each once"),
        ({"collective": "all_reduce", "axes": (0, 0)}, "pass at least one axis, each once"),
        ({"collective": "all_gather", "axes": 0}, "all_gather over axes [0]: gather_dims is [], expected 1 dims"),
        ({"collective": "all_gather", "axes": (0, 1), "gather_dims": 0}, "gather_dims is [0], expected 2 dims"),
        (
            {"collective": "all_gather", "axes": 0, "gather_dims": 0, "shard_dims": 1},
            "shard_dims is [1], expected 0 dims",
        ),
        ({"collective": "all_reduce", "axes": 0, "gather_dims": 0}, "gather_dims is [0], expected 0 dims"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CommSpec(**arguments)


#: Calls on a mesh that has the axis ``tensor`` of two ranks, and their errors.
INVALID = {
    "dim": (
        lambda mesh: CommSpec("all_gather", 0, gather_dims=2).apply(torch.zeros(3, 4), mesh),
        r"all_gather: dim 2 is out of range for shape \[3, 4\]",
    ),
    "shape of the block": (
        lambda mesh: CommSpec("all_gather", 0, gather_dims=0).apply(torch.zeros(5, 7), mesh, shape=(6, 7)),
        r"mesh \(tensor: 2\): local tensor of rank \d .*, expected \[3, 7\] of \[6, 7",
    ),
    "axis": (
        lambda mesh: CommSpec("all_reduce", "data").apply(torch.zeros(3, 4), mesh),
        r"axis 'data' is not an axis of mesh \(tensor: 2\)",
    ),
    "missing link": (
        lambda mesh: CommSpec("all_reduce", "tensor", num_bytes=1).cost(mesh, {}),
        r"axis 0 of mesh \(tensor: 2\) does not have a link",
    ),
    "link of another axis": (
        lambda mesh: CommSpec("all_reduce", "tensor", num_bytes=1).cost(mesh, {"data": LINK}),
        "axis 'data' is not an axis of mesh",
    ),
}


@pytest.mark.parametrize("name", INVALID)
@on_ranks("pairs")
def test_invalid_arguments_on_a_mesh(axis, name):
    call, message = INVALID[name]
    with pytest.raises(ValueError, match=message):
        call(mesh_of(axis, 1))


def test_specs_are_values():
    spec = CommSpec("all_gather", "tensor", gather_dims=0, num_bytes=8)
    assert spec == CommSpec("all_gather", ("tensor",), gather_dims=[0], num_bytes=8)
    assert hash(spec) == hash(CommSpec("all_gather", ["tensor"], gather_dims=(0,), num_bytes=8))
    with pytest.raises(AttributeError):
        spec.num_bytes = 9


@pytest.mark.parametrize("links", [LinkReport(2, "gloo", "cpu", Link(), ()), {0: 1e-9}], ids=["report", "number"])
def test_invalid_links(links):
    with pytest.raises(ValueError, match=r"expected Link: use \.link of a LinkReport"):
        CommSpec("all_reduce", 0, num_bytes=8).cost((2,), links)
