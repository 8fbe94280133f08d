"""Rounding of elements, compared bit for bit with ``torch.Tensor.to``."""

import numpy as np
import pytest
import torch

from shardconv.checkpoint.engine.arrays import round_to

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
INFINITY, MAX = float("inf"), {"F16": 65504.0, "BF16": 3.3895313892515355e38, "F32": 3.4028234663852886e38}


def converted(tensor: torch.Tensor, dtype: str, to: str) -> torch.Tensor:
    target = bytearray(tensor.numel() * DTYPES[to].itemsize)
    round_to(memoryview(tensor.view(torch.uint8).numpy().tobytes()), dtype, memoryview(target), to)
    return torch.frombuffer(target, dtype=DTYPES[to])


def every_pattern(dtype: str) -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])


def near_ties(to: str) -> torch.Tensor:
    """Every element of a dtype with 16 bits, the ties above each, and their neighbors in float32."""
    values = every_pattern(to)
    away = torch.full_like(values, INFINITY).copysign(values)
    ties = (values.double() + torch.nextafter(values, away).double()) / 2
    bits = torch.cat([values.float(), ties.float()]).view(torch.int32)
    return torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)


def random_bits(dtype: str) -> torch.Tensor:
    data = np.random.default_rng(0).bytes(2**21)
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype])


def without_overflow(tensor: torch.Tensor, to: str) -> torch.Tensor:
    return tensor[~(tensor.isfinite() & tensor.to(DTYPES[to]).isinf())]


INPUTS = {
    "every bf16": ("BF16", every_pattern("BF16")),
    "every fp16": ("F16", every_pattern("F16")),
    "random fp32": ("F32", random_bits("F32")),
    "fp32 near ties of fp16": ("F32", near_ties("F16")),
    "fp32 near ties of bf16": ("F32", near_ties("BF16")),
    "random fp64": ("F64", random_bits("F64")),
    "fp64 near ties of fp16": ("F64", near_ties("F16").double()),
}


@pytest.mark.parametrize("to", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("name", INPUTS)
def test_elements_equal_those_of_torch(name, to):
    dtype, tensor = INPUTS[name][0], without_overflow(INPUTS[name][1], to)
    found, expected = converted(tensor, dtype, to), tensor.to(DTYPES[to])
    bits = BITS[expected.itemsize]
    assert torch.equal(found.isnan(), expected.isnan())
    number = ~expected.isnan()  # the payloads of NaN differ between torch's own kernels
    assert torch.equal(found[number].view(bits), expected[number].view(bits))


@pytest.mark.parametrize("to", ["F32", "F16", "BF16"])
def test_nan_keeps_its_sign(to):
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32)
    found = converted(bits.view(torch.float32), "F32", to)
    assert found.isnan().all()
    assert torch.signbit(found).tolist() == [False, False, True, True]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("dtype", "to"), [("F32", "F16"), ("F32", "BF16"), ("BF16", "F16"), ("F64", "F32")])
def test_first_element_that_overflows(dtype, to, sign):
    tensor = torch.zeros(2**16 + 9, dtype=DTYPES[dtype])
    tensor[3], tensor[2**16 + 5] = sign * INFINITY, sign * float(torch.finfo(DTYPES[dtype]).max)
    with pytest.raises(OverflowError) as raised:
        converted(tensor, dtype, to)
    assert raised.value.args == (2**16 + 5, float(tensor[2**16 + 5]))


@pytest.mark.parametrize("to", ["F32", "F16", "BF16"])
def test_largest_values_that_do_not_overflow(to):
    """A value less than half a unit above the largest rounds to it."""
    unit = {"F16": 32.0, "BF16": 2.0**120, "F32": 2.0**104}[to]
    below, tie = MAX[to] + unit / 2 * (1 - 2.0**-10), MAX[to] + unit / 2
    assert converted(torch.tensor([below], dtype=torch.float64), "F64", to).tolist() == [MAX[to]]
    with pytest.raises(OverflowError):
        converted(torch.tensor([tie], dtype=torch.float64), "F64", to)
