"""The tables of ``formats.toml``."""

import pytest

from shardconv.errors import PlanError
from shardconv.formats.detect import with_grids
from shardconv.formats.format import formats
from shardconv.plan.grid import DIVISOR, FACTOR, PLAIN, SCALE
from shardconv.plan.plan import TensorSpec


@pytest.mark.parametrize("name", formats())
def test_the_table_has_the_dtypes_of_each_tensor_of_the_weight(name):
    """A scale in integers is never read as it is: these are exponents."""
    form = formats()[name]
    for suffix, stored in {form.suffix: form.values, **form.companions}.items():
        assert stored.dtypes or not stored.role, suffix
        if stored.role in (SCALE, FACTOR, DIVISOR):
            plain = [dtype for dtype, numbers in stored.dtypes.items() if numbers == PLAIN]
            assert all(dtype.startswith(("F", "BF")) for dtype in plain), suffix


def test_scale_of_an_integer_dtype_is_refused():
    tensors = {
        "q_proj.qweight": TensorSpec("I32", (8, 64)),
        "q_proj.qzeros": TensorSpec("I32", (2, 8)),
        "q_proj.scales": TensorSpec("U8", (2, 64)),
    }
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    with pytest.raises(PlanError, match=r"q_proj.scales has dtype U8 \(expected F32 or BF16 or F16\)"):
        with_grids(tensors, config)
