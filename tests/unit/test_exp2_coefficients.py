"""The committed exp2 polynomials: their error when evaluated in fp32 exactly as the kernel does, and their origin."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from fa4gen.blocks.exp2_coefficients import EXP2_COEFFICIENTS

SCRIPT = Path(__file__).parents[2] / "scripts" / "fit_exp2_polynomial.py"
MAGIC = np.float32(1.5 * 2**23)
MUFU_ERROR = 2.0**-22  # ex2.approx.ftz.f32: maximum relative error stated by the PTX ISA


def fma(a: np.ndarray, b: np.ndarray, c: np.float32) -> np.ndarray:
    """fp32 a·b + c, rounded once, bit for bit.

    The product is exact in float64. The sum is rounded to odd there (2Sum gives the part that was lost), so that only
    the second rounding, to fp32, counts.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), np.float64(c)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    towards_zero = (lost != 0) & (np.sign(lost) != np.sign(total))
    odd = np.where(lost != 0, (bits - towards_zero) | 1, bits)
    return odd.view(np.float64).astype(np.float32)


def kernel_exp2(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    """The kernel's exp2 of fp32 ``x`` on the CPU: clamp, add.rm of the magic number, Horner, exponent add."""
    x = np.maximum(x, np.float32(-127.0))
    rounded = (np.floor(x.astype(np.float64)) + np.float64(MAGIC)).astype(np.float32)  # add.rm: an ulp there is 1
    fraction = x - (rounded - MAGIC)
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = fma(value, fraction, np.float32(coefficient))
    return (value.view(np.uint32) + (rounded.view(np.uint32) << np.uint32(23))).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 rounded to the nearest bf16, ties to even, as an integer pattern."""
    bits = x.astype(np.float32).view(np.uint32)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def samples() -> np.ndarray:
    """[-126, 8], which the softmax spans with a rescale threshold of 8: a grid finer near 0, and the integers."""
    random = np.random.default_rng(0)
    parts = [random.uniform(-126, 8, 200_000), random.uniform(-1, 1, 800_000), -np.exp2(random.uniform(-40, 0, 10_000))]
    return np.concatenate([*parts, np.arange(-126, 9)]).astype(np.float32)


def relative_error(degree: int) -> float:
    x = samples()
    got = kernel_exp2(x, EXP2_COEFFICIENTS[degree])
    return float(np.abs(got / np.exp2(x.astype(np.float64)) - 1).max())


def test_fma_rounds_once() -> None:
    # (1 + 2^-12)² = 1 + 2^-11 + 2^-24 is a tie of fp32; what breaks it is too small for float64.
    a = np.array([1 + 2.0**-12], np.float32)
    assert fma(a, a, np.float32(2.0**-80))[0] == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert fma(a, a, np.float32(-(2.0**-80)))[0] == np.float32(1 + 2.0**-11)


@pytest.mark.parametrize(("degree", "limit"), [(3, 8.8e-5), (4, 4e-6), (5, 2 * MUFU_ERROR)])
def test_error_table(degree: int, limit: float) -> None:
    """FlashAttention-4's table: 8.8e-5 at degree 3, within 2x of MUFU at degree 5. (Ours: 8.6e-5, 3.0e-6, 1.5e-7.)"""
    assert relative_error(degree) <= limit


def test_error_falls_with_degree() -> None:
    third, fourth, fifth = (relative_error(degree) for degree in (3, 4, 5))
    assert third > 20 * fourth and fourth > 15 * fifth


def test_degree_3_is_indistinguishable_in_bf16() -> None:
    """Rounded to bf16 it is at most one unit off, rarely, and its error against exact 2^x is bf16's own 3.9e-3."""
    x = samples()
    exact = np.exp2(x.astype(np.float64))
    got, ideal = to_bf16(kernel_exp2(x, EXP2_COEFFICIENTS[3])), to_bf16(exact.astype(np.float32))
    apart = np.abs(got.astype(np.int64) - ideal.astype(np.int64))
    assert apart.max() <= 1 and (apart > 0).mean() < 0.015
    value = (got << np.uint32(16)).view(np.float32)
    assert np.abs(value / exact - 1).max() < 2.0**-8 * 1.03


def test_integers_are_exact_and_far_negatives_vanish() -> None:
    for coefficients in EXP2_COEFFICIENTS.values():
        x = np.arange(-126, 9).astype(np.float32)
        assert (kernel_exp2(x, coefficients) == np.exp2(x)).all()
        assert kernel_exp2(np.array([-1e30, -np.inf], np.float32), coefficients).max() < 2.0**-126


def test_coefficients_are_fp32_and_start_at_one() -> None:
    assert sorted(EXP2_COEFFICIENTS) == [3, 4, 5]
    for degree, coefficients in EXP2_COEFFICIENTS.items():
        assert len(coefficients) == degree + 1 and coefficients[0] == 1.0
        assert all(float(np.float32(c)) == c for c in coefficients)


def test_script_reproduces_the_committed_file() -> None:
    spec = importlib.util.spec_from_file_location("fit_exp2_polynomial", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.OUTPUT.read_text() == script.render()
