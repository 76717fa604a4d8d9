#!/usr/bin/env python
"""Fits the polynomials that stand in for MUFU.EX2 and writes ``fa4gen/blocks/exp2_coefficients.py``.

p(x) = 1 + c1·x + … + cn·x^n approximates 2^x on [0, 1). p0 is exactly 1, so that integers are exact. The largest
relative error is minimised by Remez's exchange. Coefficients are rounded to fp32 one by one, from c1 (whose rounding
costs most) upwards, and those still free are fitted again after each, so that they take up its rounding.

Usage: python scripts/fit_exp2_polynomial.py          prints the module
       python scripts/fit_exp2_polynomial.py --write  writes it
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

DEGREES = (3, 4, 5)
OUTPUT = Path(__file__).resolve().parent.parent / "fa4gen" / "blocks" / "exp2_coefficients.py"
GRID = np.linspace(0.0, 1.0, 1 << 16)


def relative_error(coefficients: list[float] | np.ndarray, x: np.ndarray = GRID) -> np.ndarray:
    """p(x) / 2^x − 1 in float64, coefficients lowest order first."""
    return np.polynomial.polynomial.polyval(x, coefficients) * np.exp2(-x) - 1.0


def remez(fixed: list[float], degree: int) -> np.ndarray:
    """All coefficients of the minimax polynomial that starts with ``fixed``, lowest order first.

    Raises:
        ArithmeticError: the exchange does not settle.
    """
    powers = np.arange(len(fixed), degree + 1)
    count = len(powers) + 1
    points = np.sin(np.linspace(0.0, np.pi / 2, count + 1)[1:]) ** 2
    for _ in range(50):
        weight = np.exp2(-points)
        signs = (-1.0) ** np.arange(count)
        system = np.column_stack([points[:, None] ** powers * weight[:, None], signs])
        free = np.linalg.solve(system, -relative_error(fixed, points))[:-1]
        error = relative_error([*fixed, *free])
        # One extremum a run of equal signs, without the grid point 0, where the error is 0. Fixed coefficients can add
        # a small first run beside 0, which no free one could level: the last ``count`` are the reference.
        runs = np.split(np.arange(1, len(GRID)), np.flatnonzero(np.diff(np.sign(error[1:]))) + 1)
        extrema = [run[np.argmax(np.abs(error[run]))] for run in runs][-count:]
        if len(extrema) < count:
            raise ArithmeticError(f"degree {degree}: {len(extrema)} alternations where {count} are expected")
        levelled = np.ptp(np.abs(error[extrema])) <= 1e-6 * np.abs(error).max()
        points = GRID[extrema]
        if levelled:
            return np.array([*fixed, *free])
    raise ArithmeticError(f"degree {degree}: Remez did not converge")


def fit(degree: int) -> tuple[float, ...]:
    """Coefficients (p0 = 1 first), every one representable in fp32."""
    fixed = [1.0]
    while len(fixed) <= degree:
        fixed.append(float(np.float32(remez(fixed, degree)[len(fixed)])))
    return tuple(fixed)


def render() -> str:
    """The module's source."""
    lines = [
        '"""Minimax polynomials for 2^x on [0, 1): written by scripts/fit_exp2_polynomial.py, not by hand."""',
        "",
        "from __future__ import annotations",
        "",
        '__all__ = ["EXP2_COEFFICIENTS"]',
        "",
        "# Degree -> (p0 = 1, p1, ...), each exact in fp32. Largest relative error in exact arithmetic beside each.",
        "EXP2_COEFFICIENTS: dict[int, tuple[float, ...]] = {",
    ]
    for degree in DEGREES:
        coefficients = fit(degree)
        lines.append(f"    {degree}: (  # {np.abs(relative_error(coefficients)).max():.2e}")
        lines += [f"        {value!r}," for value in coefficients]
        lines.append("    ),")
    return "\n".join([*lines, "}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {OUTPUT.name} instead of printing it")
    if parser.parse_args().write:
        OUTPUT.write_text(render())
    else:
        print(render(), end="")


if __name__ == "__main__":
    main()
