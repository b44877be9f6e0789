"""The short convolution's gradient: conv.py's tiles, one after the other.

    dz_t = f'(z_t) dy_t        dx_t = sum_k w_k dz_{t+k}        dw_k = sum_t dz_t x_{t-k}

A program keeps the last W - 1 rows of x and of dz, so that it reads each row of its tiles once: the
tile that begins at t gives dx of the rows from t - W + 1 on. dx of the last W - 1 rows of its last
tile wants dz of the rows that follow, which the next program makes once more. The first tile of a
sequence gives the gradient of its state, whether it has tokens or not.
"""

import triton
import triton.language as tl

from slipstream.kernels.conv.triton import conv


@triton.jit
def _through_norm(b_dy, b_z, eps, SILU: tl.constexpr):
    """The gradient of a run, from that of the run divided by its norm."""
    b_y = b_z
    if SILU:
        b_y *= tl.sigmoid(b_z)
    b_r = tl.rsqrt(tl.sum(b_y * b_y, 0) + eps)
    b_y *= b_r
    return b_r * (b_dy - b_y * tl.sum(b_dy * b_y, 0))


@triton.jit
def _dz(b_dy, b_z, SILU: tl.constexpr):
    if SILU:
        b_s = tl.sigmoid(b_z)
        b_dy *= b_s * (1 + b_z * (1 - b_s))
    return b_dy


@triton.jit
def _add(sums, b_dz, xs, W: tl.constexpr):
    """sums + dz x of each tap."""
    new = ()
    for j in tl.static_range(W):
        new = new + (sums[j] + b_dz * xs[j].to(tl.float32),)
    return new


@triton.jit
def _store_ds(p_ds, ws, dzs, m_d, W: tl.constexpr):
    """The gradient of a state: column W - m has the sum over k >= m of w_k dz of token k - m."""
    # only the first W - 1 tokens of a sequence have read its state
    for m in tl.static_range(1, W + 1):
        b_ds = tl.zeros_like(ws[0])
        for k in tl.static_range(m, W):
            b_ds += ws[W - 1 - k] * dzs[k - m]
        tl.store(p_ds + W - m, b_ds.to(p_ds.dtype.element_ty), mask=m_d)


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


@triton.jit(do_not_specialize=["T", "N", "bits", "tiles", "tiles_each"])
def conv_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, s_ptr, cu_ptr, dx_ptr, ds_ptr, partial_ptr,
    T, N, bits, tiles, tiles_each, eps,
    D: tl.constexpr, SX: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (P ceil(D / BD)), each with tiles_each of the tiles. partial [P, W + 1, D]: sums for dw,
    by column of weight, and for dbias. ds [N, D, W], where there is a state."""
    ND: tl.constexpr = (D + BD - 1) // BD
    i_p = tl.program_id(0) // ND
    o_d = tl.program_id(0) % ND * BD + tl.arange(0, BD)
    m_d = o_d < D
    ws = conv._taps(w_ptr, o_d, m_d, W)
    b_b = conv._bias(b_ptr, o_d, m_d, BD)
    sums = (tl.zeros([BD], tl.float32),) * W
    b_db = tl.zeros([BD], tl.float32)
    # dz of the W - 1 tokens before a tile: dx of these waits for dz of the next ones
    older_dz = (b_db,) * (W - 1)
    first = i_p * tiles_each
    tiles = tl.minimum(tiles, first + tiles_each)
    # of the next tile, and of the one at work
    n, begin, count, t = conv._place(first, cu_ptr, T, N, bits, BT)
    # not n and t themselves: Triton would take what the loop sets to these as never changed
    i_n, i_t = tl.zeros([], tl.int64), tl.zeros([], tl.int32)
    row, left = begin, count
    # The first round only asks for the first tile. Were that loaded before the loop, Triton's pass
    # for coalesced accesses would look through the loop once for each row.
    older = older_dz
    xs = (tl.zeros([BD], x_ptr.dtype.element_ty),) * BT
    dys = (tl.zeros([BD], dy_ptr.dtype.element_ty),) * BT
    for i in range(first - 1, tiles):
        # both are on their way while this tile is at work
        next_left = tl.where(i + 1 < tiles, count - t, 0)
        next_xs = conv._tile(x_ptr, begin + t, next_left, o_d, m_d, SX, BT)
        next_dys = conv._tile(dy_ptr, begin + t, next_left, o_d, m_d, D, BT)
        if (i >= first) & ((left > 0) | (i_t == 0)):
            has_older = (i_t > 0) & (i > first)  # else another program's, or none
            rows, dzs = older + xs, older_dz
            p_dx = dx_ptr + (row - (W - 1)) * SX + o_d
            for group in tl.static_range(0, BT, 2):
                group_dz = (tl.zeros([BD], tl.float32),) * 2
                # a short sequence has few rows: those that are not there cost as much as others
                if group < left:
                    group_dz = ()
                    for r in tl.static_range(group, group + 2):
                        b_z, b_dy = b_b, dys[r].to(tl.float32)
                        if SILU or UNIT:
                            b_z = conv._dot(ws, rows[r : r + W], b_b, W)
                        if UNIT:
                            b_dy = _through_norm(b_dy, b_z, eps, SILU)
                        b_dz = _dz(b_dy, b_z, SILU)
                        group_dz = group_dz + (b_dz,)
                        sums = _add(sums, b_dz, rows[r : r + W], W)
                        b_db += b_dz
                dzs = dzs + group_dz
                # dx of the tokens W - 1 before, all of whose dz are known now
                has_token = has_older
                if group + 2 >= W:
                    has_token = left > group + 1 - W
                if has_token:
                    for r in tl.static_range(group, group + 2):
                        m = m_d & (left > r - W + 1)
                        if r < W - 1:
                            m = m_d & has_older
                        _store_dx(p_dx + r * SX, ws, dzs[r : r + W], m, W)
            # a tile has no fewer tokens than have read the state
            if ds_ptr is not None:
                p_ds = ds_ptr + (i_n * SX + o_d) * W
                if i_t == 0:
                    _store_ds(p_ds, ws, dzs[W - 1 :], m_d, W)
            older, older_dz = _as_floats(rows[BT:], W - 1), dzs[BT:]
            # the last W - 1 tokens of a sequence or a program: their dz are read ahead, as those of
            # another program
            if (left > BT + 1 - W) & ((left <= BT) | (i + 1 == tiles)):
                after, after_dz = older, older_dz
                p_x = x_ptr + (row + BT) * SX + o_d
                p_dy = dy_ptr + (row + BT) * D + o_d
                for r in tl.static_range(W - 1):
                    m = m_d & (left > BT + r)
                    after = after + (tl.load(p_x + r * SX, mask=m, other=0.0).to(tl.float32),)
                    b_z = b_b
                    if SILU or UNIT:
                        b_z = conv._dot(ws, after[r : r + W], b_b, W)
                    b_dy = tl.load(p_dy + r * D, mask=m, other=0.0).to(tl.float32)
                    if UNIT:
                        b_dy = _through_norm(b_dy, b_z, eps, SILU)
                    after_dz = after_dz + (_dz(b_dy, b_z, SILU),)
                    m = m_d & (left > BT + r - W + 1)
                    _store_dx(p_dx + (BT + r) * SX, ws, after_dz[r : r + W], m, W)
        if (i + 1 < tiles) & ((i < first) | (t == 0)):
            # another program's rows, or another sequence: what came before is its state. A tile
            # without tokens may begin past the last one: nothing is read for it.
            older = conv._before(x_ptr, s_ptr, begin + t, t, n, o_d, m_d & (t < count), SX, W)
        xs, dys = next_xs, next_dys
        i_n, row, left, i_t = n, begin + t, count - t, t
        n, begin, count, t = conv._next_place(i + 1, n, begin, count, t, cu_ptr, T, N, BT)
    p_partial = partial_ptr + i_p.to(tl.int64) * (W + 1) * SX + o_d
    for j in tl.static_range(W):
        tl.store(p_partial + j * SX, sums[j], mask=m_d)
    tl.store(p_partial + W * SX, b_db, mask=m_d)
