"""Minimax polynomials for 2^x on [0, 1): written by scripts/fit_exp2_polynomial.py, not by hand."""

from __future__ import annotations

__all__ = ["EXP2_COEFFICIENTS"]

# Degree -> (p0 = 1, p1, ...), each exact in fp32. Largest relative error in exact arithmetic beside each.
EXP2_COEFFICIENTS: dict[int, tuple[float, ...]] = {
    3: (  # 8.56e-05
        1.0,
        0.6951167583465576,
        0.22764506936073303,
        0.07706698775291443,
    ),
    4: (  # 2.90e-06
        1.0,
        0.6930448412895203,
        0.2412802278995514,
        0.05224243551492691,
        0.0134267034009099,
    ),
    5: (  # 8.24e-08
        1.0,
        0.6931512951850891,
        0.2401645928621292,
        0.055799514055252075,
        0.009017480537295341,
        0.0018669525161385536,
    ),
}
