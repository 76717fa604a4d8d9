"""Views of (batch, seqlen, heads, head_dim) tensors in the mode order that tiles want."""

import cutlass.cute as cute


def rows_first(t: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, head_dim) as (seqlen, head_dim, heads, batch)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))


def columns_first(t: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, head_dim) as (head_dim, seqlen, heads, batch): V as the N x K operand of PV."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[3, 1, 2, 0]))


def packed_rows_first(t: cute.Tensor, gqa_ratio: int) -> cute.Tensor:
    """(batch, seqlen, heads, head_dim) as ((gqa_ratio, seqlen), head_dim, heads / gqa_ratio, batch).

    Row ``i`` is query ``i // gqa_ratio`` of head ``i % gqa_ratio`` of its group.
    """
    b, s, h, d = t.layout.shape
    sb, ss, sh, sd = t.layout.stride
    layout = cute.make_layout(((gqa_ratio, s), d, h // gqa_ratio, b), stride=((sh, ss), sd, sh * gqa_ratio, sb))
    return cute.make_tensor(t.iterator, layout)


def lse_rows(t: cute.Tensor) -> cute.Tensor:
    """(batch, heads, seqlen) as (seqlen, heads, batch)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 1, 0]))


def packed_lse_rows(t: cute.Tensor, gqa_ratio: int) -> cute.Tensor:
    """(batch, heads, seqlen) as ((gqa_ratio, seqlen), heads / gqa_ratio, batch)."""
    b, h, s = t.layout.shape
    sb, sh, ss = t.layout.stride
    return cute.make_tensor(
        t.iterator, cute.make_layout(((gqa_ratio, s), h // gqa_ratio, b), stride=((sh, ss), sh * gqa_ratio, sb))
    )
