"""Rounding of floating-point elements to another dtype.

Elements round to the nearest value, ties to even, also to subnormal numbers. F64 rounds to F32 first. Both are as in
``torch.Tensor.to``.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardconv.files.fileio import Bytes

#: Elements of a chunk, whose intermediate values stay in the processor's cache.
_CHUNK = 2**15
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
#: Bits of dtypes with 16 bits: infinity, all but the sign, and the first of the mantissa of BF16, as in a quiet NaN.
_INFINITY, _MAGNITUDE, _QUIET = {"F16": 0x7C00, "BF16": 0x7F80}, 0x7FFF, 0x40
#: Bits of F32: the least value that overflows in F16, the least normal number of F16, and minus the difference of the
#: biases of the exponents.
_F16_OVERFLOW, _F16_NORMAL, _F16_EXPONENT = 0x477FF000, 0x38800000, np.uint32(0xC8000000)


def convert(data: Bytes, dtype: str, target: Bytes, target_dtype: str) -> None:
    """Convert the elements of a buffer.

    Args:
        data: the elements.
        dtype: their dtype in safetensors: F64, F32, F16 or BF16.
        target: the buffer for as many elements.
        target_dtype: their dtype: F32, F16 or BF16.

    Raises:
        OverflowError: if a finite element is too large; the arguments are its index and its value.
    """
    elements, converted = np.frombuffer(data, _NUMPY[dtype]), np.frombuffer(target, _NUMPY[target_dtype])
    with np.errstate(all="ignore"):  # overflow is checked here, and NaN stays NaN
        for start in range(0, len(elements), _CHUNK):
            chunk = elements[start : start + _CHUNK]
            rounded = converted[start : start + _CHUNK]
            rounded[:] = _narrow(widen(chunk, dtype), target_dtype)
            infinite = _is_infinite(rounded, target_dtype)
            if infinite.any() and len(wrong := np.flatnonzero(infinite & ~_is_infinite(chunk, dtype))):
                raise OverflowError(start + int(wrong[0]), float(widen(chunk, dtype, "<f8")[wrong[0]]))


def widen(elements: NDArray[Any], dtype: str, to: str = "<f4") -> NDArray[Any]:
    """Convert elements of a safetensors dtype to a dtype of numpy; elements of BF16 are given as their bits."""
    if dtype == "BF16":
        elements = (elements.astype("<u4") << 16).view("<f4")
    return elements.astype(to, copy=False)


def _narrow(elements: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    return _to_f16(elements) if dtype == "F16" else _to_bf16(elements) if dtype == "BF16" else elements


def _to_f16(elements: NDArray[np.float32]) -> NDArray[Any]:
    """Round in integers, which is faster than numpy's conversion."""
    bits = elements.view("<u4")
    magnitude = bits & 0x7FFFFFFF
    if magnitude.size and magnitude.max() >= _F16_OVERFLOW:
        return elements.astype("<f2")
    rounded = magnitude >> 13
    rounded &= 1  # a tie rounds up to an even mantissa
    rounded += magnitude
    rounded += _F16_EXPONENT + 0xFFF
    rounded >>= 13
    is_subnormal = magnitude < _F16_NORMAL
    magnitude.view("<f4")[:] += 0.5  # its last bit is worth the least subnormal number, so this rounds
    magnitude -= np.float32(0.5).view("<u4")
    np.copyto(rounded, magnitude, where=is_subnormal)
    bits = bits >> 16
    bits &= 0x8000
    rounded |= bits
    return rounded.astype("<u2").view("<f2")


def _to_bf16(elements: NDArray[np.float32]) -> NDArray[Any]:
    bits = elements.view("<u4")
    rounded = bits >> 16
    rounded &= 1  # a tie rounds up to an even mantissa
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    if (nan := np.isnan(elements)).any():
        rounded[nan] = bits[nan] >> 16 | _QUIET
    return rounded


def _is_infinite(elements: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    infinity = _INFINITY.get(dtype)
    infinite: NDArray[np.bool_] = (
        np.isinf(elements) if infinity is None else elements.view("<u2") & _MAGNITUDE == infinity
    )
    return infinite
