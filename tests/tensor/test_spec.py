"""Layouts of tensors: valid placements, and the equivalent dicts."""

import copy
import re

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from shardconv.tensor import check_placements, dims_of, merge_dims, normalize_dims, placements_of
from shardconv.tensor.spec import local_shape
from tests.support.mesh_layouts import S0, S1, P, R, mesh_of
from tests.support.ranks import on_ranks


def test_placements_are_those_of_torch():
    import shardconv.tensor  # noqa: PLC0415

    assert (shardconv.tensor.Replicate, shardconv.tensor.Shard, shardconv.tensor.Partial) == (Replicate, Shard, Partial)
    assert shardconv.tensor.__all__ == sorted(shardconv.tensor.__all__)


@pytest.mark.parametrize(
    ("shape", "sizes", "placements", "expected"),
    [
        ((8, 6), (2, 2), [Shard(-2), Shard(-1)], (S0, S1)),
        ((8, 6), (2, 2), [S0, S0], (S0, S0)),
        ((8, 6), (2, 2), [R, P], (R, P)),
        ((), (2,), [P], (P,)),
        ((0, 3), (2,), [S0], (S0,)),
    ],
    ids=["negative dims", "dim over two axes", "partial", "scalar", "empty"],
)
def test_valid_layouts(shape, sizes, placements, expected):
    assert check_placements(shape, sizes, placements) == expected


def test_uneven_layout_is_valid_on_request():
    assert check_placements((5, 6), (2, 2), [S0, R], uneven=True) == (S0, R)


@pytest.mark.parametrize(
    ("shape", "placements", "message"),
    [
        ((8, 6), [S0], "1 placements for 2 axes: pass one per axis"),
        ((8, 6), [S0, R, R], "3 placements for 2 axes"),
        ((8, 6), [Shard(2), R], "dim 2 in S(2), shape [8, 6] over mesh (0: 2, 1: 2) is out of range for 2 dims"),
        ((8, 6), [Shard(-3), R], "dim -3 in S(-3)"),
        ((), [S0, R], "out of range for 0 dims"),
        ((5, 6), [S0, R], "dim 0 of size 5 is not divisible by 2: pad it, or pass uneven=True"),
        ((8, 6), [S1, S1], "dim 1 of size 6 is not divisible by 4"),
        ((8, 6), [Partial("max"), R], "Partial has reduce_op 'max', expected 'sum'"),
    ],
)
def test_invalid_layouts(shape, placements, message):
    with pytest.raises(
        ValueError, match=re.escape(message).replace(r"S\(2\)", ".*").replace(r"S\(\-3\)", ".*")
    ) as error:
        check_placements(shape, (2, 2), placements)
    assert str(list(shape)) in str(error.value)
    assert "mesh (0: 2, 1: 2)" in str(error.value)


def test_strided_shards_are_refused():
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415 - users get them from torch

    with pytest.raises(ValueError, match=r"shape \[8\] over mesh \(0: 2\): .* is not Replicate, Shard or Partial"):
        check_placements((8,), (2,), [_StridedShard(0, split_factor=2)])


@pytest.mark.parametrize(
    ("dims", "num_dims", "sizes", "expected"),
    [
        ({0: [0], -1: [1]}, 2, (2, 2), (S0, S1)),
        ({0: 1}, 2, (2, 2), (R, S0)),
        ({-1: [0, 1]}, 2, (2, 2), (S1, S1)),
        ({1: [0], -1: [-1]}, 2, (2, 2), (S1, S1)),
        ({}, 2, (2, 2), (R, R)),
        ({2: (0, 2), 0: []}, 3, (2, 2, 2), (Shard(2), R, Shard(2))),
    ],
    ids=["negative dim", "one axis", "two axes", "dim given twice", "no dims", "tuple of axes"],
)
def test_placements_of_dims(dims, num_dims, sizes, expected):
    assert placements_of(dims, num_dims, sizes) == expected


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({2: [0]}, "dim 2 in {2: [0]} is out of range for 2 dims"),
        ({0: [2]}, "axis 2 is not an axis of mesh (0: 2, 1: 2)"),
        ({0: ["tensor"]}, "axis 'tensor' is not an axis of mesh (0: 2, 1: 2)"),
        ({0: [0], 1: [0]}, "axis 0 of mesh (0: 2, 1: 2) is used twice in {0: [0], 1: [0]}"),
        ({0: [1, 1]}, "axis 1 of mesh (0: 2, 1: 2) is used twice"),
        ({0: [1, -1]}, "axis 1 of mesh (0: 2, 1: 2) is used twice"),
        (
            {0: [1, 0]},
            "dim 0 has axes [1, 0] in another order than mesh (0: 2, 1: 2): torch shards a dim in mesh order",
        ),
    ],
)
def test_invalid_dims(dims, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        placements_of(dims, 2, (2, 2))


@pytest.mark.parametrize(("layout", "dims"), [([S0, S1], {0: [0], 1: [1]}), ([S1, R, S1], {1: [0, 2]})])
def test_dims_of_placements(layout, dims):
    assert dims_of(layout) == dims


@pytest.mark.parametrize("layout", [(R, R), (S0, S0), (S1, S0), (R, S1)])
def test_placements_of_dims_of_placements_are_the_same(layout):
    assert placements_of(dims_of(layout), 2, (2, 2)) == layout


def test_partial_placements_have_no_dims():
    with pytest.raises(ValueError, match="is neither Shard nor Replicate: redistribute the tensor first"):
        dims_of([S0, P])


@pytest.mark.parametrize(
    ("convert", "ndim", "dims", "expected"),
    [
        (normalize_dims, 2, {-1: [0], 0: [1]}, {1: [0], 0: [1]}),
        (merge_dims, 2, {1: [0], -1: [1]}, {1: [0, 1]}),
        (merge_dims, 3, {-1: [1], 2: [0]}, {2: [1, 0]}),
    ],
)
def test_negative_dims(convert, ndim, dims, expected):
    """Check that the order stays, and that, unlike in Colossal-AI, the argument does, too."""
    given = copy.deepcopy(dims)
    found = convert(ndim, given)
    assert list(found.items()) == list(expected.items())
    if convert is merge_dims:
        next(iter(found.values())).append(9)
    assert list(given.items()) == list(dims.items())


@pytest.mark.parametrize("convert", [normalize_dims, merge_dims])
@pytest.mark.parametrize("dim", [2, -3])
def test_dims_out_of_range_are_refused(convert, dim):
    with pytest.raises(ValueError, match=f"dim {dim} .* is out of range for 2 dims"):
        convert(2, {dim: [0]})


def test_normalize_dims_refuses_duplicates():
    """Unlike in Colossal-AI."""
    with pytest.raises(ValueError, match=r"dim 1 occurs twice in \{1: \[0\], -1: \[1\]\}: merge the entries"):
        normalize_dims(2, {1: [0], -1: [1]})


@on_ranks("four")
def test_axes_of_a_mesh_have_names(axis):
    mesh = mesh_of(axis, 2)
    assert placements_of({0: ["data"], -1: ["tensor"]}, 2, mesh) == (S0, S1)
    assert placements_of({1: ["data", "tensor"]}, 2, mesh) == (S1, S1)
    assert placements_of({1: "tensor", -1: "data"} | {1: "data", -1: "tensor"}, 2, mesh) == (S1, S1)

    with pytest.raises(ValueError, match=r"axis 'pipeline' is not an axis of mesh \(data: 2, tensor: 2\)"):
        placements_of({0: "pipeline"}, 2, mesh)
    with pytest.raises(ValueError, match=r"shape \[8, 5\] over mesh \(data: 2, tensor: 2\): dim 1 of size 5"):
        check_placements((8, 5), mesh, [R, S1])


@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (3, 1), (0, 2)])
@on_ranks("four")
def test_local_shapes(axis, shape):
    """Check against torch's distribute_tensor."""
    import torch  # noqa: PLC0415 - only the ranks need torch

    mesh = mesh_of(axis, 2)
    for layout in ((S0, S0), (S1, S0), (S0, S1), (R, S1), (S1, S1)):
        expected = distribute_tensor(torch.zeros(shape), mesh, layout).to_local().shape
        assert local_shape(shape, (2, 2), layout, mesh.get_coordinate()) == expected
