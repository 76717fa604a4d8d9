"""Functions of lanes that generated code calls: what numpy has no operator for. All take arrays or numpy scalars."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["NAMESPACE"]

# Generic addresses: shared memory and parameters have windows far above any host pointer.
SHARED_WINDOW = np.uint64(1 << 56)
PARAM_WINDOW = np.uint64(1 << 57)
TINY = np.float32(2.0**-126)
ONE = np.float32(1.0)


class D:
    """numpy types by kind."""

    b1 = np.bool_
    u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
    i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
    f2, f4, f8 = np.float16, np.float32, np.float64
    # 128 bits: no arithmetic, only a type of that size.
    qG = np.complex128


def both(mask: Any, guard: Any) -> Any:
    """Active lanes under a predicate; a mask of None is all lanes."""
    return guard if mask is None else mask & guard


def where(p: Any, a: Any, b: Any) -> Any:
    """selp: a where p, else b. Uniform predicates keep uniform values."""
    if np.ndim(p) == 0:
        return a if p else b
    return np.where(p, a, b)


def widen(a: Any, dtype: Any) -> Any:
    return a.astype(dtype)


def flush(x: Any) -> Any:
    """Denormals to zero, keeping the sign."""
    small = np.abs(x) < TINY
    return np.where(small, x * np.float32(0), x) if np.any(small) else x


def fma(a: Any, b: Any, c: Any) -> Any:
    """fp32 fused multiply-add: the product is exact in fp64, so only a rare double rounding can differ."""
    wide = np.float64
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(np.float32)


def directed(rounding: str, opcode: str, a: Any, b: Any, c: Any = None) -> Any:
    """An fp32 operation rounded toward minus infinity (rm), plus infinity (rp) or zero (rz).

    A product of two fp32 numbers is exact in fp64. Of a sum, the fp64 rounding error is kept beside it (Knuth's
    two-sum), so that the correction of the nearest fp32 number is exact.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    error = np.float64(0)
    if opcode == "mul":
        exact = a * b
    else:
        x, y = (a * b, c.astype(np.float64)) if opcode == "fma" else (a, -b if opcode == "sub" else b)
        exact = x + y
        part = exact - x
        error = (x - (exact - part)) + (y - part)
    result = exact.astype(np.float32)
    above = (result > exact) | ((result == exact) & (error < 0))
    below = (result < exact) | ((result == exact) & (error > 0))
    toward_zero = rounding == "rz"
    lower = above & ((rounding == "rm") | (toward_zero & (result > 0)))
    raise_ = below & ((rounding == "rp") | (toward_zero & (result < 0)))
    result = np.where(lower, np.nextafter(result, np.float32(-np.inf)), result)
    return np.where(raise_, np.nextafter(result, np.float32(np.inf)), result)


def low_f4(x: Any) -> Any:
    return x.astype(np.uint32).view(np.float32)


def high_f4(x: Any) -> Any:
    return (x >> np.uint64(32)).astype(np.uint32).view(np.float32)


def pack_f4(low: Any, high: Any) -> Any:
    return low.view(np.uint32).astype(np.uint64) | (high.view(np.uint32).astype(np.uint64) << np.uint64(32))


def pack(dtype: Any, *parts: Any) -> Any:
    """Equal parts, lowest first, into one wider integer."""
    width = 8 * np.dtype(dtype).itemsize // len(parts)
    result = parts[0].astype(dtype)
    for index, part in enumerate(parts[1:], 1):
        result = result | (part.astype(dtype) << dtype(width * index))
    return result


def unpack(value: Any, index: int, dtype: Any) -> Any:
    """Part ``index`` of a wider integer."""
    shift = value.dtype.type(8 * np.dtype(dtype).itemsize * index)
    return (value >> shift).astype(dtype)


def pack128(low: Any, high: Any) -> Any:
    """Two 64-bit parts in a .b128 register."""
    low, high = np.broadcast_arrays(low, high)
    return np.stack([low, high], axis=-1).view(np.complex128)[..., 0]


def unpack128(value: Any, index: int, dtype: Any) -> Any:
    """Part ``index`` of a .b128 register, counted in elements of ``dtype``."""
    flat = np.ascontiguousarray(value).reshape(-1, 1).view(dtype)
    return flat[:, index].reshape(np.shape(value))


def integer_div(a: Any, b: Any) -> Any:
    """Quotient rounded toward zero, as in C."""
    if a.dtype.kind == "u":
        return a // b
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a)).astype(quotient.dtype)


def integer_rem(a: Any, b: Any) -> Any:
    """Remainder with the sign of the dividend."""
    return a - integer_div(a, b) * b


def bit_field(a: Any, position: Any, length: Any) -> Any:
    one = np.uint32(1)
    return (a >> position) & ((one << np.minimum(length, np.uint32(32))) - one)


def dot_product_2(a: Any, b: Any, c: Any, high: bool, a_type: Any, b_type: Any) -> Any:
    """dp2a: the two 16-bit halves of a times two bytes of b, plus c."""
    shift = np.uint32(16 if high else 0)
    total = c
    for index in range(2):
        half = (a >> np.uint32(16 * index)).astype(np.uint16).view(a_type[0]).astype(np.int64)
        byte = (b >> (shift + np.uint32(8 * index))).astype(np.uint8).view(b_type[0]).astype(np.int64)
        total = total + (half * byte).astype(np.uint32).view(c.dtype)
    return total


def permute_bytes(a: Any, b: Any, selector: Any) -> Any:
    """prmt in its default mode: four bytes picked from the eight of {b, a}; bit 3 of a selector replicates the sign."""
    source = pack(np.uint64, a, b)
    result = np.uint32(0)
    for index in range(4):
        pick = (selector >> np.uint32(4 * index)) & np.uint32(15)
        byte = (source >> ((pick & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte > 127, np.uint32(255), np.uint32(0))
        result = result | (np.where(pick > 7, sign, byte) << np.uint32(8 * index))
    return result


def to_integer(x: Any, dtype: Any) -> Any:
    """A rounded float to an integer: NaN is 0, the rest saturates."""
    info = np.iinfo(dtype)
    wide = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    clipped = np.where(wide >= float(info.max), float(info.min), np.maximum(wide, float(info.min)))
    return np.where(wide >= float(info.max), info.max, clipped.astype(dtype)).astype(dtype)


def reciprocal(x: Any) -> Any:
    return ONE / x


def rsqrt(x: Any) -> Any:
    return ONE / np.sqrt(x)


def _bf16_bits(x: Any) -> Any:
    """bf16 of a float32, round to nearest even, in the high half of a uint32."""
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nan = x != x
    return np.where(nan, np.uint32(0x7FFF0000), rounded) if np.any(nan) else rounded


def bf16(x: Any) -> Any:
    return (_bf16_bits(x) >> np.uint32(16)).astype(np.uint16)


def bf16x2(low: Any, high: Any) -> Any:
    return (_bf16_bits(low) >> np.uint32(16)) | (_bf16_bits(high) & np.uint32(0xFFFF0000))


def f4_of_bf16(x: Any) -> Any:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16x2(low: Any, high: Any) -> Any:
    return pack(np.uint32, low.astype(np.float16).view(np.uint16), high.astype(np.float16).view(np.uint16))


def _fp8_table(exponent_bits: int, mantissa_bits: int, infinity: bool) -> np.ndarray:
    """The 256 values of an 8-bit float as float32. Without infinity (e4m3) only S.1111.111 is NaN."""
    code = np.arange(256, dtype=np.int64)
    sign = np.where(code & 128, -1.0, 1.0)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    normal = (1 + mantissa / 2.0**mantissa_bits) * 2.0 ** (exponent - bias)
    value = np.where(exponent > 0, normal, mantissa / 2.0**mantissa_bits * 2.0 ** (1 - bias))
    top = exponent == (1 << exponent_bits) - 1
    if infinity:
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where(top & (mantissa == (1 << mantissa_bits) - 1), np.nan, value)
    return (sign * value).astype(np.float32)


FP8 = {"e4m3": _fp8_table(4, 3, False), "e5m2": _fp8_table(5, 2, True)}


def _fp8_bits(x: Any, name: str) -> Any:
    """Nearest finite 8-bit float, ties to even codes, saturating; NaN stays NaN (0x7f)."""
    table = FP8[name]
    finite = np.isfinite(table[:128])
    values = table[:128][finite].astype(np.float64)
    magnitude = np.minimum(np.abs(np.asarray(x, np.float64)), values[-1])
    upper = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    lower = upper - 1
    up, down = values[upper] - magnitude, magnitude - values[lower]
    code = np.where((up < down) | ((up == down) & (upper % 2 == 0)), upper, lower)
    code = np.where(np.isnan(x), 0x7F, code) | np.where(np.signbit(x), 128, 0)
    return code.astype(np.uint16)


def f16x2_of_fp8(x: Any, name: str) -> Any:
    """Two 8-bit floats in 16 bits as two halves, exactly."""
    low, high = (FP8[name][(x >> np.uint16(shift)) & np.uint16(255)] for shift in (0, 8))
    return f16x2(low, high)


def halves(x: Any, name: str) -> tuple[Any, Any]:
    """Both 16-bit floats of 32 bits in fp32, low first. ``name``: "f16" or "bf16"."""
    parts = (unpack(x, index, np.uint16) for index in (0, 1))
    if name == "bf16":
        low, high = (f4_of_bf16(part) for part in parts)
    else:
        low, high = (part.view(np.float16).astype(np.float32) for part in parts)
    return low, high


def e4m3x2(low: Any, high: Any) -> Any:
    return _fp8_bits(low, "e4m3") | (_fp8_bits(high, "e4m3") << np.uint16(8))


def e5m2x2(low: Any, high: Any) -> Any:
    return _fp8_bits(low, "e5m2") | (_fp8_bits(high, "e5m2") << np.uint16(8))


# What generated code sees by name.
NAMESPACE = {name: value for name, value in globals().items() if not name.startswith("_") and name != "annotations"} | {
    "c0": np.uint64(0),
    "c_u4_one": np.uint32(1),
    "c24": np.uint32(24),
    "c16": np.uint8(16),
    "c32": np.uint8(32),
    "c_offset": np.uint32(0x00FFFFFF),
}
