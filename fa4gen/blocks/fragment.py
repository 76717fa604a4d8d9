"""Views of WGMMA accumulator registers."""

import cutlass.cute as cute


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2, N/8), M, N') seen as (row, column): mode 0 has 2·M rows a thread, mode 1 its columns."""
    (a, b, c), m, n = acc.layout.shape
    (sa, sb, sc), sm, sn = acc.layout.stride
    return cute.make_tensor(acc.iterator, cute.make_layout(((b, m), (a, c, n)), stride=((sb, sm), (sa, sc, sn))))


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """The accumulator of S in the register order that the A operand of PV wants: no data moves."""
    (a, b, c), m, n = acc.layout.shape
    (sa, sb, sc), sm, sn = acc.layout.stride
    return cute.make_tensor(
        acc.iterator, cute.make_layout(((a, b, 2), m, (c // 2, n)), stride=((sa, sb, sc), sm, (2 * sc, sn)))
    )
