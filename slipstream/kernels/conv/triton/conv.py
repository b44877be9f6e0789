"""The short convolution, forward, backward and one step.

    z_t = bias + sum_k w_k x_{t-k}          k = 0 .. W-1 tokens back, w_k = weight[:, W-1-k]
    y_t = f(z_t) + residual_t
    dz_t = f'(z_t) dy_t        dx_t = sum_k w_k dz_{t+k}        dw_k = sum_t dz_t x_{t-k}

within a sequence; x before its start is the state, whose column W - m is m tokens before it. A
program owns BD channels and some tiles of BT tokens, forward one after the other, so that it keeps
the last W - 1 rows, backward every P-th. A thread holds its channels of each row of the tile, which
are all loaded before the first store, so a row is read about once and nothing moves between
threads. Backward, and in packed sequences, that is for tiles inside of a sequence; at its ends
tokens go one by one.

UNIT: y is each run of BD channels divided by its norm, y / sqrt(sum(y^2) + eps), and a warp has the
run, so that its sums are shuffles.

The D channels may be part of SX in x, dx, the states and the sums of backward; y and dy have D.

Packed, `where` [2, T] has each token's age, its distance from the start of its sequence, and the
sequence.
"""

import triton
import triton.language as tl


@triton.jit
def _taps(w_ptr, o_d, m_d, W: tl.constexpr):
    """The columns of weight."""
    # tuples, and loops that are unrolled: each is W registers of a thread, indexed when compiled
    ws = ()
    for j in tl.static_range(W):
        ws = ws + (tl.load(w_ptr + o_d * W + j, mask=m_d, other=0.0).to(tl.float32),)
    return ws


@triton.jit
def _bias(b_ptr, o_d, m_d, BD: tl.constexpr):
    b_b = tl.zeros([BD], tl.float32)
    if b_ptr is not None:
        b_b += tl.load(b_ptr + o_d, mask=m_d, other=0.0).to(tl.float32)
    return b_b


@triton.jit
def _age_and_sequence(positions_ptr, t, i_b, T):
    """Age and sequence of token t of row i_b of the batch."""
    age, n = t, i_b.to(tl.int64)
    if positions_ptr is not None:
        age = tl.load(positions_ptr + t)
        n = tl.load(positions_ptr + tl.cast(T, tl.int64) + t).to(tl.int64)
    return age, n


@triton.jit
def _window(x_ptr, s_ptr, row, age, n, o_d, m_d, D: tl.constexpr, W: tl.constexpr):
    """x_{t-W+1} .. x_t of a token anywhere, its own row given."""
    xs = ()
    for j in tl.static_range(W):
        back = W - 1 - j
        m = m_d & (age >= back)
        b_x = tl.load(x_ptr + (row - back) * D + o_d, mask=m, other=0.0).to(tl.float32)
        if s_ptr is not None:
            # one of the two loads is masked: the sum is a choice
            p_s = s_ptr + (n * D + o_d) * W + age + j + 1
            b_x += tl.load(p_s, mask=m_d & (age < back), other=0.0).to(tl.float32)
        xs = xs + (b_x,)
    return xs


@triton.jit
def _dot(ws, xs, b_z, W: tl.constexpr):
    for j in tl.static_range(W):
        b_z += ws[j] * xs[j].to(tl.float32)
    return b_z


@triton.jit
def _store_y(
    y_ptr, b_z, b_r, row, o_d, m_d, eps, D: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr
):
    if SILU:
        b_z *= tl.sigmoid(b_z)
    if UNIT:
        b_z *= tl.rsqrt(tl.sum(b_z * b_z, 0) + eps)
    tl.store(y_ptr + row * D + o_d, (b_z + b_r).to(y_ptr.dtype.element_ty), mask=m_d)


@triton.jit
def _before(x_ptr, s_ptr, row, t, n, o_d, m_d, D: tl.constexpr, W: tl.constexpr):
    """x_{t-W+1} .. x_{t-1}, float32; those before the start of a row are the state or 0."""
    xs = ()
    for j in tl.static_range(W - 1):
        back = W - 1 - j
        p_x = x_ptr + (row - back) * D + o_d
        b_x = tl.load(p_x, mask=m_d & (t >= back), other=0.0).to(tl.float32)
        if s_ptr is not None:
            p_s = s_ptr + (n * D + o_d) * W + t + j + 1
            b_x += tl.load(p_s, mask=m_d & (t < back), other=0.0).to(tl.float32)
        xs = xs + (b_x,)
    return xs


@triton.jit
def _tile(x_ptr, i, tiles, T, o_d, m_d, D: tl.constexpr, BT: tl.constexpr):
    """The rows of tile i, 0 where there is none."""
    # a tile never goes over the end of a row of the batch
    NT = tl.cdiv(T, BT)
    t = i % NT * BT
    row = (i // NT).to(tl.int64) * T + t
    xs = ()
    for r in tl.static_range(BT):
        m = m_d & (t + r < T) & (i < tiles)
        xs = xs + (tl.load(x_ptr + (row + r) * D + o_d, mask=m, other=0.0),)
    return xs


@triton.jit(do_not_specialize=["T", "tiles", "tiles_each"])
def conv_fwd_kernel(
    x_ptr, w_ptr, b_ptr, r_ptr, s_ptr, positions_ptr, y_ptr, T, tiles, tiles_each, eps,
    D: tl.constexpr, SX: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (P D / BD), each with so many of the tiles, one after the other, the next of which is on
    its way while one is at work. tiles: of all rows of the batch, the last of a row may be short.
    x [B, T, SX], r, y [B, T, D], w [D, W], s [N, SX, W]"""
    ND: tl.constexpr = (D + BD - 1) // BD
    o_d = tl.program_id(0) % ND * BD + tl.arange(0, BD)
    m_d = o_d < D
    ws = _taps(w_ptr, o_d, m_d, W)
    b_b = _bias(b_ptr, o_d, m_d, BD)
    NT = tl.cdiv(T, BT)
    first = tl.program_id(0) // ND * tiles_each
    tiles = tl.minimum(tiles, first + tiles_each)
    n_first, t_first = (first // NT).to(tl.int64), first % NT * BT
    # the first tile, and the W - 1 rows before it
    xs = _tile(x_ptr, first, tiles, T, o_d, m_d, SX, BT)
    older = _before(x_ptr, s_ptr, n_first * T + t_first, t_first, n_first, o_d, m_d, SX, W)
    for i in range(first, tiles):
        i_b, t = i // NT, i % NT * BT
        row = i_b.to(tl.int64) * T + t
        # asked for before anything of this tile is stored
        following = _tile(x_ptr, i + 1, tiles, T, o_d, m_d, SX, BT)
        rs = ()
        for r in tl.static_range(BT):
            b_r = 0.0
            if r_ptr is not None:
                p_r = r_ptr + (row + r) * D + o_d
                b_r = tl.load(p_r, mask=m_d & (t + r < T), other=0.0)
            rs = rs + (b_r,)
        inside = t >= 0
        if positions_ptr is not None:
            # as old as that, the last token has all the others in its sequence
            age, _ = _age_and_sequence(positions_ptr, tl.minimum(t + BT, T) - 1, i_b, T)
            inside = (t + BT <= T) & (age >= BT + W - 2)
        elif t == 0:
            # another row of the batch: what came before is its state
            older = _before(x_ptr, s_ptr, row, t, i_b.to(tl.int64), o_d, m_d, SX, W)
        rows = older + xs
        if inside:
            for r in tl.static_range(BT):
                b_z = _dot(ws, rows[r : r + W], b_b, W)
                m = m_d & (t + r < T)
                _store_y(y_ptr, b_z, rs[r], row + r, o_d, m, eps, D, SILU, UNIT)
        else:
            # a sequence begins in this tile: each token looks for its own window
            for one in range(tl.minimum(T - t, BT)):
                age, n = _age_and_sequence(positions_ptr, t + one, i_b, T)
                window = _window(x_ptr, s_ptr, row + one, age, n, o_d, m_d, SX, W)
                b_r = 0.0
                if r_ptr is not None:
                    b_r = tl.load(r_ptr + (row + one) * D + o_d, mask=m_d, other=0.0)
                b_z = _dot(ws, window, b_b, W)
                _store_y(y_ptr, b_z, b_r, row + one, o_d, m_d, eps, D, SILU, UNIT)
        # the last W - 1 rows go on to the next tile in registers
        older = ()
        for j in tl.static_range(W - 1):
            older = older + (rows[BT + j].to(tl.float32),)
        xs = following


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


@triton.jit(do_not_specialize=["T", "tiles"])
def conv_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, s_ptr, positions_ptr, dx_ptr, partial_ptr, T, tiles,
    D: tl.constexpr, SX: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Grid as forward. part [P, W + 1, D]: sums for dw, by column of weight, and for dbias."""
    ND: tl.constexpr = (D + BD - 1) // BD
    i_p, P = tl.program_id(0) // ND, tl.num_programs(0) // ND
    o_d = tl.program_id(0) % ND * BD + tl.arange(0, BD)
    m_d = o_d < D
    ws = _taps(w_ptr, o_d, m_d, W)
    b_b = _bias(b_ptr, o_d, m_d, BD)
    # of the program's tiles, always the same ones: dw is the same bits each time
    sums = (tl.zeros([BD], tl.float32),) * W
    b_db = tl.zeros([BD], tl.float32)
    NT = tl.cdiv(T, BT)
    for i in range(i_p, tiles, P):
        i_b, t = i // NT, i % NT * BT
        row = i_b.to(tl.int64) * T + t
        # as old as that, the last token whose dz is wanted has all the others in its sequence
        last = t + BT + W - 2
        age, _ = _age_and_sequence(positions_ptr, tl.minimum(last, T - 1), i_b, T)
        if (last < T) & (age >= BT + 2 * W - 3):
            xs, dys, dzs = (), (), ()
            # dx of BT tokens wants dz of W - 1 more, which with SILU want x of as many again
            for r in tl.static_range(BT + (2 * W - 2 if SILU else W - 1)):
                p_x = x_ptr + (row + r - W + 1) * SX + o_d
                xs = xs + (tl.load(p_x, mask=m_d, other=0.0),)
            for r in tl.static_range(BT + W - 1):
                dys = dys + (tl.load(dy_ptr + (row + r) * D + o_d, mask=m_d, other=0.0),)
            for r in tl.static_range(BT + W - 1):
                b_z = b_b
                if SILU:
                    b_z = _dot(ws, xs[r : r + W], b_b, W)
                b_dz = _dz(dys[r].to(tl.float32), b_z, SILU)  # pyright: ignore[reportAttributeAccessIssue]
                dzs = dzs + (b_dz,)
                # those past the tile count for the tile that they are in
                if r < BT:
                    sums = _add(sums, b_dz, xs[r : r + W], W)
                    b_db += b_dz
                if r >= W - 1:
                    b_dx = tl.zeros([BD], tl.float32)
                    for k in tl.static_range(W):
                        b_dx += ws[W - 1 - k] * dzs[r - W + 1 + k]
                    p_dx = dx_ptr + (row + r - W + 1) * SX + o_d
                    tl.store(p_dx, b_dx.to(dx_ptr.dtype.element_ty), mask=m_d)
        else:
            for r in range(tl.minimum(T - t, BT)):
                b_dx = tl.zeros([BD], tl.float32)
                for k in tl.static_range(W):
                    age, n = _age_and_sequence(positions_ptr, tl.minimum(t + r + k, T - 1), i_b, T)
                    m = m_d & (t + r + k < T) & (age >= k)
                    # past the end of its sequence the window is not read either
                    xs = _window(x_ptr, s_ptr, row + r + k, age, n, o_d, m, SX, W)
                    b_dy = tl.load(dy_ptr + (row + r + k) * D + o_d, mask=m, other=0.0)
                    b_dz = _dz(b_dy.to(tl.float32), _dot(ws, xs, b_b, W), SILU)
                    b_dx += ws[W - 1 - k] * b_dz
                    if k == 0:
                        sums = _add(sums, b_dz, xs, W)
                        b_db += b_dz
                p_dx = dx_ptr + (row + r) * SX + o_d
                tl.store(p_dx, b_dx.to(dx_ptr.dtype.element_ty), mask=m_d)
    p_partial = partial_ptr + i_p.to(tl.int64) * (W + 1) * SX + o_d
    for j in tl.static_range(W):
        tl.store(p_partial + j * SX, sums[j], mask=m_d)
    tl.store(p_partial + W * SX, b_db, mask=m_d)


@triton.jit(do_not_specialize=["T"])
def conv_state_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, s_ptr, cu_ptr, ds_ptr, T,
    D: tl.constexpr, SX: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """ds [N, D, W], column W - m: sum over k >= m of w_k dz of token k - m; grid (D / BD, N)."""
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    n = tl.program_id(1).to(tl.int64)
    ws = _taps(w_ptr, o_d, m_d, W)
    b_b = _bias(b_ptr, o_d, m_d, BD)
    begin, end = n * T, n * T + T
    if cu_ptr is not None:
        begin = tl.maximum(tl.load(cu_ptr + n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + n + 1).to(tl.int64), T)
    # only the first W - 1 tokens of a sequence have read its state
    dzs = ()
    for age in tl.static_range(W - 1):
        m = m_d & (begin + age < end)
        xs = _window(x_ptr, s_ptr, begin + age, age, n, o_d, m, SX, W)
        b_dy = tl.load(dy_ptr + (begin + age) * D + o_d, mask=m, other=0.0).to(tl.float32)
        dzs = dzs + (_dz(b_dy, _dot(ws, xs, b_b, W), SILU),)
    p_ds = ds_ptr + (n * SX + o_d) * W
    for m in tl.static_range(1, W + 1):
        b_ds = tl.zeros([BD], tl.float32)
        for k in tl.static_range(m, W):
            b_ds += ws[W - 1 - k] * dzs[k - m]
        tl.store(p_ds + W - m, b_ds.to(ds_ptr.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["T", "N", "bits"])
def conv_positions_kernel(cu_ptr, positions_ptr, T, N, bits, B: tl.constexpr):
    """where [2, T]: of each token its age and its sequence, the last that begins at it or before.

    Binary search; bits: of N."""
    o_t = tl.program_id(0) * B + tl.arange(0, B)
    m_t = o_t < T
    n = tl.zeros([B], tl.int32)
    for bit in range(bits):
        above = n + (1 << (bits - 1 - bit))
        begin = tl.load(cu_ptr + above, mask=m_t & (above < N), other=0)
        n = tl.where((above < N) & (begin <= o_t), above, n)
    age = o_t - tl.load(cu_ptr + n, mask=m_t, other=0).to(tl.int32)
    tl.store(positions_ptr + o_t, age, mask=m_t)
    tl.store(positions_ptr + tl.cast(T, tl.int64) + o_t, n, mask=m_t)


@triton.jit(do_not_specialize=["num_states"])
def conv_update_kernel(
    x_ptr, s_ptr, w_ptr, b_ptr, r_ptr, index_ptr, y_ptr, stride_n, stride_d, stride_w, num_states,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """One token of sequence n, whose window moves on in place; grid (D / BD, N).

    index [N]: which state is a sequence's; outside of [0, slots) nothing is touched and y is 0."""
    n = tl.program_id(1).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    # an index outside of the pool: y is 0 and no state is touched
    cache_slot, live = n, n >= 0
    if index_ptr is not None:
        cache_slot = tl.load(index_ptr + n).to(tl.int64)
        live = (cache_slot >= 0) & (cache_slot < num_states)
    m = m_d & live
    p_s = s_ptr + cache_slot * stride_n + o_d.to(tl.int64) * stride_d
    # the window a token further on, whose last column is the token
    xs = ()
    for j in tl.static_range(1, W):
        xs = xs + (tl.load(p_s + j * stride_w, mask=m, other=0.0),)
    b_x = tl.load(x_ptr + n * D + o_d, mask=m_d, other=0.0)
    xs = xs + (b_x.to(s_ptr.dtype.element_ty),)
    # every thread has read the window before any of them moves it
    tl.debug_barrier()
    for j in tl.static_range(W):
        tl.store(p_s + j * stride_w, xs[j], mask=m)
    b_z = _dot(_taps(w_ptr, o_d, m, W), xs, _bias(b_ptr, o_d, m_d, BD), W)
    if SILU:
        b_z *= tl.sigmoid(b_z)
    if r_ptr is not None:
        b_z += tl.load(r_ptr + n * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = tl.where(live, b_z, 0.0)
    tl.store(y_ptr + n * D + o_d, b_y.to(y_ptr.dtype.element_ty), mask=m_d)
