"""2^x on the MUFU unit or on the FMA units."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fa4gen.blocks.exp2_coefficients import EXP2_COEFFICIENTS
from fa4gen.blocks.ptx import add_round_down, bits_of, float_of

# 1.5 * 2^23: adding it leaves floor(x) in the low mantissa bits of the sum.
_ROUND_TO_INTEGER = 12582912.0
_LOWEST_EXPONENT = -127.0


@cute.jit
def exp2_mufu(x: Float32) -> Float32:
    """2^x by ``ex2.approx.ftz``: about 2^-22 relative error, 16 a clock and SM."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def exp2_polynomial(x: Float32, degree: cutlass.Constexpr[int]) -> Float32:
    """2^x = 2^floor(x) · p(x - floor(x)) with a minimax polynomial of ``degree`` 3 to 5 (FlashAttention-4, 3.2).

    For x <= 0 as softmax needs it; below -127 the result is 2^-127 with its exponent field at zero, that is 0 or a
    denormal. Relative error: see ``EXP2_COEFFICIENTS``.
    """
    coefficients = EXP2_COEFFICIENTS[degree]
    x = cute.arch.fmax(x, _LOWEST_EXPONENT, nan=True)  # a NaN score must not come out as a probability
    rounded = add_round_down(x, _ROUND_TO_INTEGER)
    fraction = x - (rounded - _ROUND_TO_INTEGER)
    p = Float32(coefficients[degree])
    for i in cutlass.range_constexpr(degree):
        p = p * fraction + coefficients[degree - 1 - i]
    return float_of(bits_of(p) + (bits_of(rounded) << 23))


@cute.jit
def exp2_polynomial_pair(x0: Float32, x1: Float32, degree: cutlass.Constexpr[int]):
    """``exp2_polynomial`` of two numbers with packed f32x2 arithmetic, half the issue slots. sm_100 and later."""
    coefficients = EXP2_COEFFICIENTS[degree]
    x = tuple(cute.arch.fmax(x, _LOWEST_EXPONENT, nan=True) for x in (x0, x1))
    rounded = cute.arch.add_packed_f32x2(x, _pair(_ROUND_TO_INTEGER), rnd="rm", ftz=True)
    fraction = cute.arch.sub_packed_f32x2(x, cute.arch.sub_packed_f32x2(rounded, _pair(_ROUND_TO_INTEGER)))
    p = _pair(coefficients[degree])
    for i in cutlass.range_constexpr(degree):
        p = cute.arch.fma_packed_f32x2(p, fraction, _pair(coefficients[degree - 1 - i]))
    return tuple(float_of(bits_of(p[i]) + (bits_of(rounded[i]) << 23)) for i in (0, 1))


def _pair(x: float):
    return Float32(x), Float32(x)
