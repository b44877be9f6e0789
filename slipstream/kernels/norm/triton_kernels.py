"""One pair of kernels for every norm.

    h = x + residual            rounded to the dtype in which it is kept
    z = h f(gate)               gate_first, else h
    u = (z - mean) rstd         rstd = 1 / sqrt(sum((z - mean)^2) / N + eps), mean 0 unless centred
    y = u w + b                 times f(gate) unless gate_first

over rows of D features, N = D, or 1 for the l2 norm. There are R x G rows: group g of each of R
tokens has w[g] and b[g]; a program works on one group, so its w stays in registers. Backward, with
d = dy w, dy times f(gate) first unless gate_first,

    dz = rstd (d - mean(d) - u sum(d u) / N)        mean(d) only if centred
    dh = dz + what comes into h                     dz times f(gate) if gate_first
    dw = sum over tokens of dy u        db = sum of dy
    dgate = dy (u w + b) f'(gate)       or dz h f'(gate) if gate_first

A row is in registers, so it is read once; LEAN: as it was loaded, in half of the registers that its
float32 would take, so that more programs are at work, and is converted again after the sums. One
that is too long for them (BD < D) goes through in a loop, forward two or three times, of which the
later ones find it in the L1 cache, and twice backward, by a kernel for the two sums and one that
has columns of its own.
dw and db are sums of a few programs' partial sums, each over a fixed share of the tokens.

Symbols: BR rows and BD columns of a tile, P programs a group, i_g group, o_d column.
"""

import triton
import triton.language as tl

from slipstream.kernels.primitives.device import wait_for_earlier

# Columns up to which w and b are in registers while a row's sums are awaited, and between rows.
SAVED = tl.constexpr(8192)


@triton.jit
def _gate(b_g, SILU: tl.constexpr):
    """f(gate) and its derivative."""
    b_g = b_g.to(tl.float32)
    b_s = tl.sigmoid(b_g)
    if SILU:
        return b_g * b_s, b_s * (1 + b_g * (1 - b_s))
    return b_s, b_s * (1 - b_s)


@triton.jit
def _affine(w_ptr, b_ptr, o, m, ZERO_CENTERED: tl.constexpr):
    """w and b as rows, 1 and 0 where there is none."""
    b_w, b_b = 1.0, 0.0
    if w_ptr is not None:
        b_w = tl.load(w_ptr + o, mask=m, other=0.0).to(tl.float32)[None, :]
        if ZERO_CENTERED:
            b_w += 1
    if b_ptr is not None:
        b_b = tl.load(b_ptr + o, mask=m, other=0.0).to(tl.float32)[None, :]
    return b_w, b_b


@triton.jit
def _load_z(
    x_ptr, r_ptr, gate_ptr, h_ptr, o, m,
    SILU: tl.constexpr, GATE_FIRST: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """z of a tile; writes h."""
    b_z = tl.load(x_ptr + o, mask=m, other=0.0).to(tl.float32)
    if r_ptr is not None:
        b_z += tl.load(r_ptr + o, mask=m, other=0.0).to(tl.float32)
        if ROUND:
            # h is kept in x's dtype, and backward reads that: both normalise the same numbers
            b_z = b_z.to(x_ptr.dtype.element_ty).to(tl.float32)
    if h_ptr is not None:
        tl.store(h_ptr + o, b_z.to(h_ptr.dtype.element_ty), mask=m)
    if GATE_FIRST:
        b_f, _ = _gate(tl.load(gate_ptr + o, mask=m, other=0.0), SILU)
        b_z *= b_f
    return b_z


@triton.jit
def _recompute(b_x, b_rstd):
    """x as float32 once more, by way of a 0 that is not known before rstd is: the compiler would
    convert it once, and keep that."""
    zero = (b_rstd.to(tl.int32, bitcast=True) >> 31).to(tl.int16)
    return (b_x.to(tl.int16, bitcast=True) ^ zero).to(b_x.dtype, bitcast=True).to(tl.float32)


@triton.jit
def _load_last(gate_ptr, o, m, GATE_FIRST: tl.constexpr):
    """The gate of what is normalised, None where there is none: before a row's sums are awaited, so
    that it is on its way with the row."""
    b_g = None
    if gate_ptr is not None and not GATE_FIRST:
        b_g = tl.load(gate_ptr + o, mask=m, other=0.0)
    return b_g


@triton.jit
def _store_y(y_ptr, b_g, b_u, b_w, b_b, o, m, SILU: tl.constexpr):
    b_y = b_u * b_w + b_b
    if b_g is not None:
        b_f, _ = _gate(b_g, SILU)
        b_y *= b_f
    tl.store(y_ptr + o, b_y.to(y_ptr.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["R"])
def norm_fwd_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, gate_ptr, y_ptr, h_ptr, stats_ptr, R, eps,
    G: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    CENTRE: tl.constexpr, L2: tl.constexpr, ZERO_CENTERED: tl.constexpr, SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr, ROUND: tl.constexpr, LEAN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (R / BR G). x, r, gate, y, h [R, G, D]; w, b [G, D]; stats [1 or 2, R, G]: rstd, mean
    of rows."""
    wait_for_earlier(PDL)
    i_g = tl.program_id(0) % G
    N: tl.constexpr = 1 if L2 else D
    o_d, o_r = tl.arange(0, BD), tl.program_id(0) // G * BR + tl.arange(0, BR)
    # a program of one row always has one: no bound to test
    m_r = o_r < R if BR > 1 else tl.full([1], True, tl.int1)
    # tokens times features may be more than 32 bits
    row = o_r.to(tl.int64) * G + i_g
    m = m_r[:, None] & (o_d < D)[None, :]
    o = row[:, None] * D + o_d[None, :]
    if BR == 1:
        # one address a pointer, and small offsets: all loads of a row are issued at once
        first, o = tl.program_id(0).to(tl.int64) * D, o_d[None, :]
        x_ptr += first
        y_ptr += first
        if r_ptr is not None:
            r_ptr += first
        if gate_ptr is not None:
            gate_ptr += first
        if h_ptr is not None:
            h_ptr += first
    b_mean = tl.zeros([BR], tl.float32)
    if BD >= D:
        if LEAN:
            b_x = tl.load(x_ptr + o, mask=m, other=0.0)
            b_z = b_x.to(tl.float32)
        else:
            b_z = _load_z(x_ptr, r_ptr, gate_ptr, h_ptr, o, m, SILU, GATE_FIRST, ROUND)
        b_g = _load_last(gate_ptr, o, m, GATE_FIRST)
        # on their way while the sums are awaited, if there are registers for them
        if BD <= SAVED:
            b_w, b_b = _affine(w_ptr, b_ptr, i_g * D + o_d, o_d < D, ZERO_CENTERED)
        if CENTRE:
            # the mean comes off before squares are summed: sum(z^2) / D - mean^2 cancels
            b_mean = tl.sum(b_z, 1) / D
            # columns past D hold 0, which less the mean would count
            b_z = tl.where(m, b_z - b_mean[:, None], 0.0)
        b_rstd = tl.rsqrt(tl.sum(b_z * b_z, 1) / N + eps)
        if BD > SAVED:
            b_w, b_b = _affine(w_ptr, b_ptr, i_g * D + o_d, o_d < D, ZERO_CENTERED)
        if LEAN:
            b_z = _recompute(b_x, b_rstd[:, None])
        _store_y(y_ptr, b_g, b_z * b_rstd[:, None], b_w, b_b, o, m, SILU)
    else:
        # a column's sum stays in its thread over the rounds: threads are added up once, at the end
        if CENTRE:
            b_sum = tl.zeros([BR, BD], tl.float32)
            for c in range(0, D, BD):
                m = m_r[:, None] & (c + o_d < D)[None, :]
                b_sum += _load_z(x_ptr, r_ptr, gate_ptr, None, o + c, m, SILU, GATE_FIRST, ROUND)
            b_mean = tl.sum(b_sum, 1) / D
        b_square = tl.zeros([BR, BD], tl.float32)
        for c in range(0, D, BD):
            m = m_r[:, None] & (c + o_d < D)[None, :]
            b_z = _load_z(x_ptr, r_ptr, gate_ptr, None, o + c, m, SILU, GATE_FIRST, ROUND)
            b_z = tl.where(m, b_z - b_mean[:, None], 0.0)
            b_square += b_z * b_z
        b_rstd = tl.rsqrt(tl.sum(b_square, 1) / N + eps)
        # h is written in the last round alone, which reads the row from the L1 cache
        for c in range(0, D, BD):
            m_d = c + o_d < D
            m = m_r[:, None] & m_d[None, :]
            b_w, b_b = _affine(w_ptr, b_ptr, i_g * D + c + o_d, m_d, ZERO_CENTERED)
            b_z = _load_z(x_ptr, r_ptr, gate_ptr, h_ptr, o + c, m, SILU, GATE_FIRST, ROUND)
            b_u = (b_z - b_mean[:, None]) * b_rstd[:, None]
            b_g = _load_last(gate_ptr, o + c, m, GATE_FIRST)
            _store_y(y_ptr, b_g, b_u, b_w, b_b, o + c, m, SILU)
    if stats_ptr is not None:
        tl.store(stats_ptr + row, b_rstd, mask=m_r)
        if CENTRE:
            tl.store(stats_ptr + R.to(tl.int64) * G + row, b_mean, mask=m_r)


@triton.jit
def _load_terms(
    dy_ptr, h_ptr, gate_ptr, stats_ptr, o, m, b_w, b_rstd, b_mean, eps,
    SILU: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """A tile's dy, dy past the gate, u, d, h, f, f' and rstd, which the l2 norm makes again where
    there are no stats; dy and d are 0 outside, u is finite."""
    b_h = tl.load(h_ptr + o, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(dy_ptr + o, mask=m, other=0.0).to(tl.float32)
    b_z, b_dz, b_f, b_df = b_h, b_dy, 1.0, 0.0
    if gate_ptr is not None:
        b_f, b_df = _gate(tl.load(gate_ptr + o, mask=m, other=0.0), SILU)
        if GATE_FIRST:
            b_z = b_h * b_f
        else:
            b_dz = b_dy * b_f
    if stats_ptr is None:
        # of short rows, within a warp: less than to write and read it (norm_options.py)
        b_rstd = tl.rsqrt(tl.sum(b_z * b_z, 1) + eps)
    b_u = (b_z - b_mean[:, None]) * b_rstd[:, None]
    return b_dy, b_dz, b_u, b_dz * b_w, b_h, b_f, b_df, b_rstd


@triton.jit
def _load_stats(stats_ptr, row, m_r, rows, CENTRE: tl.constexpr):
    b_rstd = tl.load(stats_ptr + row, mask=m_r, other=0.0)
    b_mean = tl.zeros_like(b_rstd)
    if CENTRE:
        b_mean = tl.load(stats_ptr + rows + row, mask=m_r, other=0.0)
    return b_rstd, b_mean


@triton.jit(do_not_specialize=["R"])
def norm_sums_kernel(
    dy_ptr, h_ptr, w_ptr, gate_ptr, stats_ptr, sums_ptr, R,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, CENTRE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, SILU: tl.constexpr, GATE_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """sums [2, R, G]: of d u and of d over a row that is too long for registers; grid (R G)."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    i_g = tl.program_id(0) % G
    rows = R.to(tl.int64) * G
    b_rstd, b_mean = _load_stats(stats_ptr, row, row < rows, rows, CENTRE)
    # by column, as in forward's loop: added up across threads once
    b_du, b_sum = tl.zeros([1, BD], tl.float32), tl.zeros([1, BD], tl.float32)
    for c in tl.range(0, D, BD, num_stages=STAGES):
        o_d = c + tl.arange(0, BD)
        o, m = row[:, None] * D + o_d[None, :], (o_d < D)[None, :]
        b_w, _ = _affine(w_ptr, None, i_g * D + o_d, o_d < D, ZERO_CENTERED)
        _, _, b_u, b_d, _, _, _, _ = _load_terms(
            dy_ptr, h_ptr, gate_ptr, stats_ptr, o, m, b_w, b_rstd, b_mean, 0.0, SILU, GATE_FIRST
        )  # fmt: skip
        b_du += b_d * b_u
        b_sum += b_d
    tl.store(sums_ptr + row, tl.sum(b_du, 1))
    tl.store(sums_ptr + rows + row, tl.sum(b_sum, 1))


@triton.jit(do_not_specialize=["R"])
def norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, b_ptr, gate_ptr, stats_ptr, sums_ptr,
    dx_ptr, dr_ptr, dgate_ptr, dw_ptr, db_ptr, R, eps,
    G: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    CENTRE: tl.constexpr, L2: tl.constexpr, ZERO_CENTERED: tl.constexpr, SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (P, column blocks, G). dw, db [P, G, D]: partial sums; dx and dr are one gradient in two
    dtypes. sums is given if there is more than one column block; stats is not for short rows of the
    l2 norm."""
    i_p, P, i_g = tl.program_id(0), tl.num_programs(0), tl.program_id(2)
    N: tl.constexpr = 1 if L2 else D
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    rows = R.to(tl.int64) * G
    if BD <= SAVED:
        b_w, b_b = _affine(w_ptr, b_ptr, i_g * D + o_d, m_d, ZERO_CENTERED)
    # every P-th tile of rows, whatever runs when: the partial sums, and so dw and db, are the same
    # bits each time, which atomic additions would not be
    b_dw = tl.zeros([BR, BD], tl.float32)
    b_db = tl.zeros([BR, BD], tl.float32)
    for i in tl.range(i_p * BR, R, P * BR, num_stages=STAGES):
        o_r = i + tl.arange(0, BR)
        m_r = o_r < R
        row = o_r.to(tl.int64) * G + i_g
        m = m_r[:, None] & m_d[None, :]
        o = row[:, None] * D + o_d[None, :]
        b_rstd, b_mean = tl.zeros([BR], tl.float32), tl.zeros([BR], tl.float32)
        if stats_ptr is not None:
            b_rstd, b_mean = _load_stats(stats_ptr, row, m_r, rows, CENTRE)
        if BD > SAVED:
            # again for each row: there are no registers to keep it in
            b_w, b_b = _affine(w_ptr, b_ptr, i_g * D + o_d, m_d, ZERO_CENTERED)
        b_dy, b_dz, b_u, b_d, b_h, b_f, b_df, b_rstd = _load_terms(
            dy_ptr, h_ptr, gate_ptr, stats_ptr, o, m, b_w, b_rstd, b_mean, eps, SILU, GATE_FIRST
        )  # fmt: skip
        if dw_ptr is not None:
            b_dw += b_dz * b_u
        if db_ptr is not None:
            b_db += b_dz
        if sums_ptr is not None:
            b_du = tl.load(sums_ptr + row, mask=m_r, other=0.0)
        else:
            b_du = tl.sum(b_d * b_u, 1)
        b_dh = b_d - b_u * (b_du / N)[:, None]
        if CENTRE:
            if sums_ptr is not None:
                b_sum = tl.load(sums_ptr + rows + row, mask=m_r, other=0.0)
            else:
                b_sum = tl.sum(b_d, 1)
            b_dh -= (b_sum / D)[:, None]
        b_dh *= b_rstd[:, None]
        if gate_ptr is not None:
            if GATE_FIRST:
                b_dgate = b_dh * b_h * b_df
                b_dh *= b_f
            else:
                b_dgate = b_dy * (b_u * b_w + b_b) * b_df
            tl.store(dgate_ptr + o, b_dgate.to(dgate_ptr.dtype.element_ty), mask=m)
        if dh_ptr is not None:
            # of h itself, which the caller also got: added in float32, rounded once
            b_dh += tl.load(dh_ptr + o, mask=m, other=0.0).to(tl.float32)
        tl.store(dx_ptr + o, b_dh.to(dx_ptr.dtype.element_ty), mask=m)
        if dr_ptr is not None:
            tl.store(dr_ptr + o, b_dh.to(dr_ptr.dtype.element_ty), mask=m)
    o_w = (i_p.to(tl.int64) * G + i_g) * D + o_d
    if dw_ptr is not None:
        tl.store(dw_ptr + o_w, tl.sum(b_dw, 0), mask=m_d)
    if db_ptr is not None:
        tl.store(db_ptr + o_w, tl.sum(b_db, 0), mask=m_d)
