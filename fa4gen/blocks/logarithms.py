"""From natural exponents to those of 2."""

LOG2_E = 1.4426950408889634
