"""Redistribution between all layouts: values, gradients and collectives, compared with torch and another search."""

import math
from itertools import combinations, product

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from shardconv.tensor import plan_redistribution, redistribute, redistribution_cost
from shardconv.tensor.cost import Link
from shardconv.tensor.sharded import START_SECONDS
from tests.support.matrix import cases, each_once
from tests.support.mesh_layouts import (
    ALL,
    S0,
    S1,
    P,
    R,
    added_up,
    gradient_of,
    layouts,
    local_shard,
    lying,
    mesh_of,
    numbers,
    spied,
)
from tests.support.ranks import on_ranks

MESHES = [("pairs", 1), ("four", 1), ("four", 2)]
#: Sizes that are a multiple of all ranks, that are not, and that leave some ranks empty.
SHAPES = [(8, 12), (7, 5), (3, 1)]


# --- a separate search: breadth first, over layouts as strings ------------------------------------------------------


def name_of(layout):
    return tuple(f"S{each.dim}" if isinstance(each, Shard) else type(each).__name__[0] for each in layout)


def is_order_kept(layout, axes):
    """Whether the axes of a dim that change are its innermost ones."""
    for dim in {each for each in layout if each[0] == "S"}:
        sharding = [axis for axis, each in enumerate(layout) if each == dim]
        changing = [axis in axes for axis in sharding]
        if changing != sorted(changing):
            return False
    return True


def neighbours(layout, ndim):
    """(layout, collective or None, axes) of each layout that one communication, or none, leads to."""
    shards = [f"S{dim}" for dim in range(ndim)]
    for size in range(1, len(layout) + 1):
        for axes in combinations(range(len(layout)), size):
            for ends in product(["R", "P", *shards], repeat=size):
                pairs = {(layout[axis][0], end[0]) for axis, end in zip(axes, ends, strict=True)}
                after = tuple(ends[axes.index(axis)] if axis in axes else each for axis, each in enumerate(layout))
                if (
                    len(pairs) > 1
                    or after == layout
                    or not is_order_kept(layout, axes)
                    or not is_order_kept(after, axes)
                ):
                    continue
                collective = {
                    ("S", "R"): "all_gather", ("S", "S"): "all_to_all", ("P", "R"): "all_reduce",
                    ("P", "S"): "reduce_scatter", ("R", "S"): None, ("R", "P"): None, ("S", "P"): None,
                }.get(pairs.pop(), "impossible")  # fmt: skip
                if collective != "impossible":
                    yield after, collective, axes


def elements(shape, sizes, layout):
    found = list(shape)
    for size, each in zip(sizes, layout, strict=True):
        if each[0] == "S":
            found[int(each[1:])] = math.ceil(found[int(each[1:])] / size)
    return math.prod(found)


def seconds(collective, shape, sizes, axes, before, after, itemsize, links):
    """The ring formulas, implemented separately."""
    ranks = math.prod(sizes[axis] for axis in axes)
    if collective is None:
        return 0.0
    first, second = elements(shape, sizes, before), elements(shape, sizes, after)
    size = ranks * min(first, second) if collective in ("all_gather", "reduce_scatter") else max(first, second)
    rounds = (ranks - 1) * (2 if collective == "all_reduce" else 1)
    alpha, beta = (max(getattr(links[axis], name) for axis in axes) for name in ("alpha", "beta"))
    return START_SECONDS + rounds * alpha + rounds / ranks * size * itemsize * beta


def least(shape, sizes, source, weight, *, sums=True):
    """Layout to the smallest total weight of a path to it, with or without partial sums (Bellman-Ford)."""
    found, changed = {source: 0.0}, [source]
    while changed:
        layout = changed.pop()
        for after, collective, axes in neighbours(layout, len(shape)):
            new = found[layout] + weight(collective, axes, layout, after)
            if "P" in after and not sums:
                continue
            if new < found.get(after, math.inf) - 1e-15:
                found[after] = new
                changed.append(after)
    return found


@pytest.mark.parametrize(
    ("sizes", "shape"), [((2,), (8, 12)), ((4,), (8, 12)), ((2, 2), (8, 12)), ((2, 2), (7, 5)), ((2, 2), (3, 1))]
)
def test_no_plan_has_more_collectives_than_needed(sizes, shape):
    """With tensors so small that the time of a message does not depend on its size."""
    for source in layouts(len(sizes)):
        fewest = least(shape, sizes, name_of(source), lambda collective, *_: collective is not None)
        for target in layouts(len(sizes)):
            plan = plan_redistribution(shape, 4, sizes, source, target)
            number = sum(step.communicates(sizes)[0] for step in plan)
            assert number == fewest[name_of(target)], (source, target, plan)


LINKS = [None, Link(alpha=1e-3), {0: Link(alpha=0.0), 1: Link(alpha=1e-4, beta=1e-9)}]


LARGE = [
    ((2, 2), (8, 12)), ((2, 2), (1024, 1024)), ((2, 2), (1023, 513)), ((4, 2), (2**15, 2**14)), ((8,), (640, 9, 16)),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "shape", "links"), each_once(LARGE, LINKS))
def test_no_path_is_cheaper(sizes, shape, links):
    """Large tensors take two collectives rather than one over all ranks."""
    links = {axis: links[axis] for axis in range(len(sizes))} if isinstance(links, dict) else links
    by_axis = links if isinstance(links, dict) else dict.fromkeys(range(len(sizes)), links or Link())

    def weight(collective, axes, before, after):
        return seconds(collective, shape, sizes, axes, before, after, 2, by_axis)

    def starts(source, target):
        plan = plan_redistribution(shape, torch.bfloat16, sizes, source, target, links)
        return START_SECONDS * sum(step.communicates(sizes)[0] for step in plan)

    for source in layouts(len(sizes)):
        cheapest = [least(shape, sizes, name_of(source), weight, sums=sums) for sums in (False, True)]
        for target in layouts(len(sizes)):
            expected = cheapest[P in (*source, *target)][name_of(target)]
            found = redistribution_cost(shape, torch.bfloat16, sizes, source, target, links).forward
            found += starts(source, target)
            # The sums have another order.
            assert found == pytest.approx(expected, rel=1e-12, abs=0), (source, target)


@pytest.mark.parametrize(
    ("size", "sizes", "source", "target", "expected"),
    [
        (4096, (2,), [S0], [S1], [("all_to_all", (0,))]),
        (4096, (2,), [P], [S1], [("reduce_scatter", (0,))]),
        (4096, (2,), [R], [S1], [("chunk", (0,))]),
        (4096, (2,), [S0], [P], [("shard_to_partial", (0,))]),
        (4096, (2,), [Shard(-1)], [S1], []),
        (8, (2, 2), [S0, S0], [R, R], [("all_gather", (0, 1))]),
        (4096, (8, 8), [S0, S0], [R, R], [("all_gather", (1,)), ("all_gather", (0,))]),
        (4096, (2, 2), [P, P], [S1, S0], [("reduce_scatter", (0, 1))]),
        (4096, (2, 2), [P, P], [R, S0], [("reduce_scatter", (1,)), ("all_reduce", (0,))]),
        (4096, (2, 2), [S0, S1], [S1, S0], [("all_to_all", (0, 1))]),
    ],
)
def test_chosen_collectives(size, sizes, source, target, expected):
    """Paths that can be checked manually."""
    plan = plan_redistribution((size, size), 4, sizes, source, target)
    assert [(step.collective, step.axes) for step in plan] == expected


def test_inner_axis_is_gathered_before_the_outer_one():
    first, *_ = plan_redistribution((4096, 4096), 4, (2, 2), [S0, S0], [R, S0])
    assert first.axes != (0,)


BETA_ONLY = Link(alpha=0.0, beta=1e-6)


def test_cost_includes_backward():
    cost = redistribution_cost((1024,), 4, (4,), [Replicate()], [Shard(0)], BETA_ONLY)
    assert cost.forward == 0
    assert cost.backward == pytest.approx(3 / 4 * 4096e-6, rel=1e-12)
    assert cost.total == cost.backward


# --- execution ------------------------------------------------------------------------------------------------------


def check_pair(mesh, shape, source, target, links=None):
    full, weights = numbers(shape, 1), numbers(shape, 2)
    local = lying(full, mesh, source).requires_grad_()
    before = local.detach().clone()
    tensor = DTensor.from_local(local, mesh, source, shape=full.shape, stride=full.stride())
    plan = plan_redistribution(shape, full.dtype, mesh, source, target, links)
    sent = [step for step in plan if step.communicates(mesh)[0]]
    with spied() as seen, CommDebugMode() as mode:
        found = redistribute(tensor, target, links=links)
    assert [kind for kind, _ in seen] == [step.collective for step in sent]
    assert mode.get_total_counts() == len(sent)
    if not any(mesh.get_coordinate()):
        assert [num_bytes for _, num_bytes in seen] == [step.num_bytes for step in sent]
    assert (found.placements, found.shape, found.stride()) == (target, full.shape, full.stride())
    output = found.to_local(grad_placements=gradient_of(target))
    assert output.is_contiguous()
    assert torch.equal(added_up(output.detach(), mesh, target), local_shard(full, mesh, target))
    with spied() as seen:
        output.backward(local_shard(weights, mesh, gradient_of(target)))
    back = plan_redistribution(shape, full.dtype, mesh, gradient_of(target), gradient_of(source), links)
    assert [kind for kind, _ in seen] == [step.collective for step in back if step.communicates(mesh)[0]]
    # Of (full * weights).sum(), whatever the layout.
    assert torch.equal(local.grad, local_shard(weights, mesh, gradient_of(source)))
    assert torch.equal(local.detach(), before)


@pytest.mark.parametrize(
    ("layout", "ndim", "shape", "first"),
    cases(
        [(*mesh, shape, first) for mesh in MESHES for shape in SHAPES for first in ALL],
        lambda layout, ndim, shape, first: shape == SHAPES[1],
    ),
)
@on_ranks()
def test_every_pair(axis, ndim, shape, first):
    mesh = mesh_of(axis, ndim)
    for source in layouts(ndim):
        for target in layouts(ndim) if source[0] == first else ():
            try:
                check_pair(mesh, shape, source, target)
            except AssertionError as error:
                raise AssertionError(f"{shape}: {source} to {target}") from error


@pytest.mark.parametrize(
    "links",
    cases([Link(alpha=1.0), {"data": Link(alpha=1.0), "tensor": Link()}], lambda links: isinstance(links, dict)),
)
@on_ranks("four")
def test_in_many_steps(axis, links):
    """Check plans with low latency, which change one axis at a time in the order that nested shards require."""
    mesh = mesh_of(axis, 2)
    for shape in ((8, 12), (7, 5)):
        for source in layouts(2):
            for target in (layouts(2)[3], layouts(2)[8], layouts(2)[10], layouts(2)[15]):
                check_pair(mesh, shape, source, target, links)


@on_ranks("four")
def test_three_axes(axis):
    """Check three axes, one of them of one rank, and a tensor of three dims."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pipeline", "data", "tensor"))
    ends = [(Shard(0), Shard(0), Shard(0)), (R, Shard(2), P), (Shard(2), R, Shard(1)), (P, P, Shard(-1))]
    for shape in ((4, 6, 8), (5, 3, 7)):
        for source, target in product(ends, ends):
            shards = [Shard(each.dim % 3) if isinstance(each, Shard) else each for each in source]
            wanted = tuple(Shard(each.dim % 3) if isinstance(each, Shard) else each for each in target)
            full = numbers(shape, 1)
            tensor = DTensor.from_local(lying(full, mesh, shards), mesh, shards, shape=full.shape, stride=full.stride())
            found = redistribute(tensor, target)
            assert found.placements == wanted
            assert torch.equal(added_up(found.to_local(), mesh, wanted), local_shard(full, mesh, wanted))


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_kinds_of_tensors(axis):
    """Check half precision, booleans, scalars, empty and non-contiguous tensors, and pending results."""
    mesh = mesh_of(axis, 1)
    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        full = numbers((5, 6), 1).to(dtype)
        local = local_shard(full, mesh, [Shard(0)])
        tensor = DTensor.from_local(local, mesh, [Shard(0)], shape=full.shape, stride=full.stride())
        assert torch.equal(redistribute(tensor, [Shard(1)]).to_local(), local_shard(full, mesh, [Shard(1)]))
        assert torch.equal(redistribute(tensor, [R]).to_local(), full)
    scalar = DTensor.from_local(torch.tensor(2.0), mesh, [P])
    assert redistribute(scalar, [R]).to_local().item() == 2 * axis.size
    empty = DTensor.from_local(torch.zeros(0, 3), mesh, [Shard(1)])
    assert redistribute(empty, [Shard(0)]).shape == (0, 3 * axis.size)
    full = numbers((4 * axis.size, 8), 3)
    turned = DTensor.from_local(local_shard(full, mesh, [Shard(0)]), mesh, [Shard(0)]).t()
    found = redistribute(turned, [Shard(0)])
    assert torch.equal(found.to_local(), local_shard(full.t(), mesh, [Shard(0)]))
    assert found.to_local().is_contiguous()
    late = DTensor.from_local(local_shard(full, mesh, [Shard(0)]), mesh, [Shard(0)]).redistribute(
        placements=[R], async_op=True
    )
    assert torch.equal(redistribute(late, [Shard(1)]).to_local(), local_shard(full, mesh, [Shard(1)]))
    with torch.inference_mode():
        assert torch.equal(redistribute(turned, [R]).to_local(), full.t())
    assert redistribute(turned, [Shard(-1)]) is turned


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_second_gradients(axis):
    mesh = mesh_of(axis, 1)
    full = numbers((4 * axis.size, 8), 3)
    for source, target in product(([Shard(0)], [R]), ([Shard(1)], [R])):
        local = local_shard(full, mesh, source).requires_grad_()
        output = redistribute(DTensor.from_local(local, mesh, source), target).to_local()
        (grad,) = torch.autograd.grad((output**3).sum(), local, create_graph=True)
        (second,) = torch.autograd.grad((grad**2).sum(), local)
        # Of x**3 first 3 x**2, then of 9 x**4 36 x**3.
        assert torch.equal(second, 36 * local.detach() ** 3)
