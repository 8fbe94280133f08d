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


def passed(spec, mesh, local, grad, **options):
    """Output, gradient, and collectives of forward and backward; checks that arguments do not change."""
    argument = local.clone().requires_grad_()
    before, grad_before = argument.detach().clone(), grad.clone()
    with spied() as forward:
        output = spec.apply(argument, mesh, **options)
    with spied() as backward:
        output.backward(grad)
    assert torch.equal(argument, before)
    assert torch.equal(grad, grad_before)
    assert output.is_contiguous()
    return output.detach(), argument.grad, [kind for kind, _ in forward], [kind for kind, _ in backward]


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks()
def test_patterns(axis):
    """Check each of Colossal-AI's patterns, by its name there."""
    mesh, n, r = mesh_of(axis, 1), axis.size, axis.rank
    full, other = numbers((2 * n, 3 * n), 1), numbers((2 * n, 3 * n), 2)
    mine, theirs = [x.contiguous() for x in full.chunk(n, 1)], [x.contiguous() for x in other.chunk(n, 1)]
    rows = [x.contiguous() for x in other.chunk(n, 0)]
    summands = [numbers((4, 3), rank) for rank in range(n)]
    cases = {
        "GATHER_FWD_SPLIT_BWD": (
            CommSpec("all_gather", 0, gather_dims=1), mine[r], other, full, theirs[r], ["all_gather"], [],
        ),
        "SPLIT_FWD_GATHER_BWD": (
            CommSpec("chunk", 0, shard_dims=-1), full, theirs[r], mine[r], other, [], ["all_gather"],
        ),
        "ALL2ALL_FWD_ALL2ALL_BWD": (
            CommSpec("all_to_all", 0, gather_dims=1, shard_dims=0), mine[r], rows[r],
            full.chunk(n, 0)[r], theirs[r], ["all_to_all"], ["all_to_all"],
        ),
        "ALLREDUCE_FWD_IDENTITY_BWD": (
            CommSpec("all_reduce", 0), summands[r], summands[0], sum(summands), summands[0], ["all_reduce"], [],
        ),
        "IDENTITY_FWD_ALLREDUCE_BWD": (
            CommSpec("copy", 0), summands[0], summands[r], summands[0], sum(summands), [], ["all_reduce"],
        ),
    }  # fmt: skip
    for name, (spec, local, grad, output, local_grad, forward, backward) in cases.items():
        found = passed(spec, mesh, local, grad)
        assert torch.equal(found[0], output), name
        assert torch.equal(found[1], local_grad), name
        assert found[2:] == (forward, backward), name


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks()
def test_others(axis):
    mesh, n, r = mesh_of(axis, 1), axis.size, axis.rank
    summands, grad = [numbers((2 * n, 3), rank) for rank in range(n)], numbers((2 * n, 3), 9)
    chunks = grad.chunk(n)
    found = passed(CommSpec("reduce_scatter", 0, shard_dims=0), mesh, summands[r], chunks[r])
    assert torch.equal(found[0], sum(summands).chunk(n)[r])
    assert torch.equal(found[1], grad)
    assert found[2:] == (["reduce_scatter"], ["all_gather"])
    found = passed(CommSpec("to_partial", 0), mesh, summands[0], grad)
    assert torch.equal(found[0], summands[0] if r == 0 else torch.zeros(2 * n, 3).double())
    assert torch.equal(found[1], grad)
    assert found[2:] == ([], [])
    found = passed(CommSpec("shard_to_partial", 0, gather_dims=0), mesh, chunks[r], summands[0])
    assert torch.equal(found[0].chunk(n)[r], chunks[r])
    assert found[0].abs().sum() == chunks[r].abs().sum()
    assert torch.equal(found[1], summands[0].chunk(n)[r])
    assert found[2:] == ([], [])


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks()
def test_uneven(axis):
    """Check sizes as of torch.chunk; with 5 over 4 ranks, the last one is empty."""
    mesh, n, r = mesh_of(axis, 1), axis.size, axis.rank
    full, other = numbers((5, 7), 1), numbers((5, 7), 2)

    def block(x, dim):
        chunks = x.chunk(n, dim)
        return chunks[r].contiguous() if r < len(chunks) else x.narrow(dim, 0, 0).contiguous()

    found = passed(CommSpec("all_gather", 0, gather_dims=0), mesh, block(full, 0), other, shape=(5, 7))
    assert torch.equal(found[0], full)
    assert torch.equal(found[1], block(other, 0))
    spec = CommSpec("all_to_all", 0, gather_dims=0, shard_dims=1)
    found = passed(spec, mesh, block(full, 0), block(other, 1), shape=(5, 7))
    assert torch.equal(found[0], block(full, 1))
    assert torch.equal(found[1], block(other, 0))
    found = passed(CommSpec("reduce_scatter", 0, shard_dims=0), mesh, full, block(other, 0))
    assert torch.equal(found[0], n * block(full, 0))
    assert torch.equal(found[1], other)
    found = passed(CommSpec("chunk", 0, shard_dims=1), mesh, full, block(other, 1))
    assert torch.equal(found[0], block(full, 1))
    assert torch.equal(found[1], other)
    if n == 2:
        with pytest.raises(
            ValueError, match=r"mesh \(tensor: 2\): local tensor of rank \d .*, expected \[3, 7\] of \[6, 7"
        ):
            CommSpec("all_gather", 0, gather_dims=0).apply(full, mesh, shape=(6, 7))


@on_ranks("four")
def test_several_axes(axis):
    """Check MIXGATHER_FWD_SPLIT_BWD and others over both axes at once; the first axis is the outermost."""
    mesh = mesh_of(axis, 2)
    row, column = mesh.get_coordinate()
    full, other = numbers((4, 8), 1), numbers((4, 8), 2)

    def tile(x):
        return x.chunk(2, 0)[row].chunk(2, 1)[column].contiguous()

    def stripe(x):
        return x.chunk(4, 1)[2 * row + column].contiguous()

    spec = CommSpec("all_gather", ("data", "tensor"), gather_dims=(0, 1))
    found = passed(spec, mesh, tile(full), other)
    assert torch.equal(found[0], full)
    assert torch.equal(found[1], tile(other))
    assert found[2:] == (["all_gather"], [])
    found = passed(CommSpec("all_gather", (0, 1), gather_dims=(1, 1)), mesh, stripe(full), other)
    assert torch.equal(found[0], full)
    found = passed(
        CommSpec("all_to_all", (0, 1), gather_dims=(0, 1), shard_dims=(1, 1)), mesh, tile(full), stripe(other)
    )
    assert torch.equal(found[0], stripe(full))
    assert torch.equal(found[1], tile(other))
    assert found[2:] == (["all_to_all"], ["all_to_all"])
    found = passed(CommSpec("reduce_scatter", (0, 1), shard_dims=(1, 1)), mesh, full, stripe(other))
    assert torch.equal(found[0], 4 * stripe(full))
    found = passed(CommSpec("all_reduce", (0, 1)), mesh, full, other)
    assert torch.equal(found[0], 4 * full)
    turned = CommSpec("chunk", ("tensor", "data"), shard_dims=(1, 1)).apply(full, mesh)
    assert torch.equal(turned, full.chunk(4, 1)[2 * column + row])
    with spied() as seen:  # one axis only
        only = CommSpec("all_gather", "tensor", gather_dims=1).apply(tile(full), mesh)
    assert torch.equal(only, full.chunk(2, 0)[row])
    assert seen == [("all_gather", only.nbytes)]


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
