"""The short convolution's gradient where no sequences are packed: conv.py's, one tile after the
other.

    dz_t = f'(z_t) dy_t        dx_t = sum_k w_k dz_{t+k}        dw_k = sum_t dz_t x_{t-k}

A program keeps the last W - 1 rows of x and of dz, so that it reads each row of its tiles once: the
tile that begins at t gives dx of the rows from t - W + 1 on. dx of the last W - 1 rows of its last
tile wants dz of the rows that follow, which the next program makes once more.
"""

import triton
import triton.language as tl

from slipstream.kernels.conv.triton.conv import (
    _add,
    _before,
    _bias,
    _dot,
    _dz,
    _taps,
    _through_norm,
    _tile,
)


@triton.jit
def _store_dx(p_dx, ws, dzs, m, W: tl.constexpr):
    b_dx = ws[W - 1] * dzs[0]
    for k in tl.static_range(1, W):
        b_dx += ws[W - 1 - k] * dzs[k]
    tl.store(p_dx, b_dx.to(p_dx.dtype.element_ty), mask=m)


@triton.jit
def _as_floats(xs, N: tl.constexpr):
    result = ()
    for j in tl.static_range(N):
        result = result + (xs[j].to(tl.float32),)
    return result


@triton.jit(do_not_specialize=["T", "tiles", "tiles_each"])
def conv_bwd_rolling_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, s_ptr, dx_ptr, partial_ptr, T, tiles, tiles_each, eps,
    D: tl.constexpr, SX: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (P ceil(D / BD)), each with tiles_each of the tiles. partial [P, W + 1, D]: sums for dw,
    by column of weight, and for dbias."""
    ND: tl.constexpr = (D + BD - 1) // BD
    i_p = tl.program_id(0) // ND
    o_d = tl.program_id(0) % ND * BD + tl.arange(0, BD)
    m_d = o_d < D
    ws = _taps(w_ptr, o_d, m_d, W)
    b_b = _bias(b_ptr, o_d, m_d, BD)
    sums = (tl.zeros([BD], tl.float32),) * W
    b_db = tl.zeros([BD], tl.float32)
    # dz of the W - 1 tokens before a tile: dx of these waits for dz of the next ones
    older_dz = (b_db,) * (W - 1)
    NT = tl.cdiv(T, BT)
    first = i_p * tiles_each
    tiles = tl.minimum(tiles, first + tiles_each)
    # The first round only asks for the first tile. Were that loaded before the loop, Triton's pass
    # for coalesced accesses would look through the loop once for each row.
    older = older_dz
    xs = (tl.zeros([BD], x_ptr.dtype.element_ty),) * BT
    dys = (tl.zeros([BD], dy_ptr.dtype.element_ty),) * BT
    for i in range(first - 1, tiles):
        i_b, t = (i // NT).to(tl.int64), i % NT * BT
        row = i_b * T + t
        # both are on their way while this tile is at work
        next_xs = _tile(x_ptr, i + 1, tiles, T, o_d, m_d, SX, BT)
        next_dys = _tile(dy_ptr, i + 1, tiles, T, o_d, m_d, D, BT)
        if i >= first:
            m_older = m_d & (t > 0) & (i > first)  # else another program's, or none
            rows, dzs = older + xs, older_dz
            p_dx = dx_ptr + (row - (W - 1)) * SX + o_d
            left = T - t
            for r in tl.static_range(BT):
                b_z, b_dy = b_b, dys[r].to(tl.float32)
                if SILU or UNIT:
                    b_z = _dot(ws, rows[r : r + W], b_b, W)
                if UNIT:
                    b_dy = _through_norm(b_dy, b_z, eps, SILU)
                b_dz = _dz(b_dy, b_z, SILU)
                dzs = dzs + (b_dz,)
                sums = _add(sums, b_dz, rows[r : r + W], W)
                b_db += b_dz
                # dx of the token W - 1 before, all of whose dz are known now
                m = m_d & (left > r - W + 1)
                if r < W - 1:
                    m = m_older
                _store_dx(p_dx + r * SX, ws, dzs[r : r + W], m, W)
            older, older_dz = _as_floats(rows[BT:], W - 1), dzs[BT:]
            # the last W - 1 tokens of a row or a program: their dz are read ahead, as those of
            # another program
            if (t + BT >= T) | (i + 1 == tiles):
                after, after_dz = older, older_dz
                p_x = x_ptr + (row + BT) * SX + o_d
                p_dy = dy_ptr + (row + BT) * D + o_d
                for r in tl.static_range(W - 1):
                    m = m_d & (left > BT + r)
                    after = after + (tl.load(p_x + r * SX, mask=m, other=0.0).to(tl.float32),)
                    b_z = b_b
                    if SILU or UNIT:
                        b_z = _dot(ws, after[r : r + W], b_b, W)
                    b_dy = tl.load(p_dy + r * D, mask=m, other=0.0).to(tl.float32)
                    if UNIT:
                        b_dy = _through_norm(b_dy, b_z, eps, SILU)
                    after_dz = after_dz + (_dz(b_dy, b_z, SILU),)
                    m = m_d & (left > BT + r - W + 1)
                    _store_dx(p_dx + (BT + r) * SX, ws, after_dz[r : r + W], m, W)
        i_n, t_n = ((i + 1) // NT).to(tl.int64), (i + 1) % NT * BT
        if (i + 1 < tiles) & ((i < first) | (t_n == 0)):
            # another program's rows, or another row of the batch: what came before is its state
            older = _before(x_ptr, s_ptr, i_n * T + t_n, t_n, i_n, o_d, m_d, SX, W)
        xs, dys = next_xs, next_dys
    p_partial = partial_ptr + i_p.to(tl.int64) * (W + 1) * SX + o_d
    for j in tl.static_range(W):
        tl.store(p_partial + j * SX, sums[j], mask=m_d)
    tl.store(p_partial + W * SX, b_db, mask=m_d)
