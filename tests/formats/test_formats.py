"""The tables of ``formats.toml``."""

import msgspec
import pytest

from shardconv.formats.detect import with_grids
from shardconv.formats.format import formats
from shardconv.plan.grid import DIVISOR, FACTOR, PLAIN, SCALE, Grid, GridDim
from shardconv.plan.placement import IndivisibleError, Unit, shard_dim
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError


@pytest.mark.parametrize("name", formats())
def test_the_table_has_the_dtypes_of_each_tensor_of_the_weight(name):
    """A scale in integers is never read as it is: these are exponents."""
    form = formats()[name]
    for suffix, stored in {form.values.suffix: form.values, **form.companions}.items():
        assert stored.dtypes or not stored.role, suffix
        if stored.role in (SCALE, FACTOR, DIVISOR):
            plain = [dtype for dtype in stored.dtypes if stored.numbers_of(dtype) == PLAIN]
            assert all(dtype.startswith(("F", "BF")) for dtype in plain), suffix


def test_scale_of_an_integer_dtype_is_refused():
    tensors = {
        "q_proj.qweight": TensorSpec("I32", (8, 64)),
        "q_proj.qzeros": TensorSpec("I32", (2, 8)),
        "q_proj.scales": TensorSpec("U8", (2, 64)),
    }
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    with pytest.raises(PlanError, match=r"q_proj.scales has dtype U8 \(expected F16 or BF16 or F32\)"):
        with_grids(tensors, config)


#: Targets of groups of settings, the closest first, as match_targets of compressed-tensors sorts them.
TARGETS = ("model.layers.0.mlp.up_proj", "re:.*up_proj", "Linear")


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)])
def test_the_group_with_the_closest_target_counts(order):
    """In any order of the groups: the name of the layer, then a pattern, then the class."""
    groups = {
        f"group_{at}": {
            "targets": [TARGETS[which]], "format": "pack-quantized",
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 32 if which == min(order) else 16},
        }
        for at, which in enumerate(order)
    }  # fmt: skip
    layer = TARGETS[0]
    tensors = {
        f"{layer}.weight_packed": TensorSpec("I32", (64, 8)),
        f"{layer}.weight_scale": TensorSpec("BF16", (64, 2)),
        f"{layer}.weight_shape": TensorSpec("I64", (2,)),
    }
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    grid = with_grids(tensors, config)[f"{layer}.weight_scale"].grid
    assert grid.dims[1].elements == 32


@pytest.mark.parametrize("key", ["content", "role", "numbers"])
def test_grid_of_a_newer_version_is_refused(key):
    grid = Grid("weight_scale", "weight", (64, 64), (GridDim(0), GridDim(1, 32)), ("output", "input"))
    data = msgspec.to_builtins(grid)
    assert msgspec.convert(data, Grid) == grid
    with pytest.raises(ValueError, match=f"{key} of a grid is 'other', which is written by a newer version"):
        msgspec.convert({**data, key: "other"}, Grid)


@pytest.mark.parametrize(
    ("units", "tp", "message"),
    [
        ([Unit(2, 96)], 2, r"192 / 2 = 96 output features per rank is not a multiple of the 64-wide scale block"),
        ([Unit(16, 32, replicate=True)], 32, "a boundary at feature 32 is inside a scale block of 64 output features"),
        ([Unit(64), Unit(64)], 2, "a boundary at feature 32 is inside a scale block of 64 output features"),
    ],
)
def test_arithmetic_of_a_boundary_inside_a_block(units, tp, message):
    """There is none where a rank has several intervals, or several ranks have the same one."""
    placement = shard_dim(0, units, tp)
    blocks = (GridDim(0, 64, 1, "scale block"), GridDim(1))
    grid = Grid("weight_scale", "weight", (placement.size, 64), blocks, ("output", "input"))
    with pytest.raises(IndivisibleError, match=message):
        grid.place(placement, (-(-placement.size // 64), 64))
