"""The short convolution, forward, backward and one step.

    z_t = bias + sum_k w_k x_{t-k}          k = 0 .. W-1 tokens back, w_k = weight[:, W-1-k]
    y_t = f(z_t) + residual_t
    dz_t = f'(z_t) dy_t        dx_t = sum_k w_k dz_{t+k}        dw_k = sum_t dz_t x_{t-k}

within a sequence; x before its start is the state, whose column W - m is m tokens before it. A
program owns BD channels and some tiles of BT tokens of a sequence, one after the other, so that it
keeps the last W - 1 rows. A thread holds its channels of each row of the tile, which are all loaded
before the first store, so a row is read once and nothing moves between threads.

UNIT: y is each run of BD channels divided by its norm, y / sqrt(sum(y^2) + eps), and a warp has the
run, so that its sums are shuffles.

The D channels may be part of SX in x, dx, the states and the sums of backward; y and dy have D.

Packed, sequence n begins at token cu[n], and its tiles are those from cu[n] // BT + n on. The last
of them has no tokens if fewer are enough.

Of the gradient a program keeps the last W - 1 rows of x and of dz, so that it reads each row of its
tiles once: the tile that begins at t gives dx of the rows from t - W + 1 on. dx of the last W - 1
rows of its last tile wants dz of the rows that follow, which the next program makes once more. The
first tile of a sequence gives the gradient of its state, whether it has tokens or not.
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
def _packed(n, cu_ptr, T, N):
    """First token of packed sequence n among all, and how many it has."""
    # offsets that are wrong read and write nothing outside of the T tokens
    begin = tl.minimum(tl.maximum(tl.load(cu_ptr + n).to(tl.int64), 0), T)
    end = tl.load(cu_ptr + n + 1).to(tl.int64)
    end = tl.where(n + 1 < N, tl.minimum(tl.maximum(end, begin), T), T)
    return begin, (end - begin).to(tl.int32)


@triton.jit
def _place(i, cu_ptr, T, N, bits, BT: tl.constexpr):
    """Of tile i: its sequence n, that one's first token among all and how many it has, and the
    tile's first token in it. bits: of N."""
    if cu_ptr is None:
        tiles_each = tl.cdiv(T, BT)
        n = (i // tiles_each).to(tl.int64)
        begin, count, t = n * T, T, i % tiles_each * BT
    else:
        low = tl.zeros([], tl.int32)
        for bit in range(bits):
            above = low + (1 << (bits - 1 - bit))
            offset = tl.load(cu_ptr + above, mask=above < N, other=0)
            low = tl.where((above < N) & (offset // BT + above <= i), above, low)
        n = low.to(tl.int64)
        begin, count = _packed(n, cu_ptr, T, N)
        # below 0 only where offsets are wrong
        t = tl.maximum((i - n - begin // BT) * BT, 0).to(tl.int32)
    return n, begin, count, t


@triton.jit
def _next_place(i, n, begin, count, t, cu_ptr, T, N, BT: tl.constexpr):
    """Of tile i + 1, from that of tile i."""
    t += BT
    if cu_ptr is None:
        past_end = t >= T
        n, begin = tl.where(past_end, n + 1, n), tl.where(past_end, begin + T, begin)
        t = tl.where(past_end, 0, t)
    elif i - n >= (begin + count) // BT:
        n = tl.minimum(n + 1, N - 1)
        begin, count = _packed(n, cu_ptr, T, N)
        t = tl.zeros([], tl.int32)
    return n, begin, count, t


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
def _tile(x_ptr, row, left, o_d, m_d, D: tl.constexpr, BT: tl.constexpr):
    """BT rows from `row` on, 0 for those past the `left` that there are."""
    xs = ()
    for r in tl.static_range(BT):
        xs = xs + (tl.load(x_ptr + (row + r) * D + o_d, mask=m_d & (r < left), other=0.0),)
    return xs


@triton.jit(do_not_specialize=["T", "N", "bits", "tiles", "tiles_each"])
def conv_fwd_kernel(
    x_ptr, w_ptr, b_ptr, r_ptr, s_ptr, cu_ptr, y_ptr, T, N, bits, tiles, tiles_each, eps,
    D: tl.constexpr, SX: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (P D / BD), each with so many of the tiles, one after the other, the next of which is on
    its way while one is at work. tiles: of all sequences, the last of one may be short. x [B, T,
    SX], r, y [B, T, D], w [D, W], s [N, SX, W]"""
    ND: tl.constexpr = (D + BD - 1) // BD
    o_d = tl.program_id(0) % ND * BD + tl.arange(0, BD)
    m_d = o_d < D
    ws = _taps(w_ptr, o_d, m_d, W)
    b_b = _bias(b_ptr, o_d, m_d, BD)
    first = tl.program_id(0) // ND * tiles_each
    tiles = tl.minimum(tiles, first + tiles_each)
    # the first tile, and the W - 1 rows before it
    n, begin, count, t = _place(first, cu_ptr, T, N, bits, BT)
    xs = _tile(x_ptr, begin + t, count - t, o_d, m_d, SX, BT)
    # a tile without tokens may begin past the last one: nothing is read for it
    older = _before(x_ptr, s_ptr, begin + t, t, n, o_d, m_d & (t < count), SX, W)
    for i in range(first, tiles):
        row, left = begin + t, count - t
        # asked for before anything of this tile is stored
        n, begin, count, t = _next_place(i, n, begin, count, t, cu_ptr, T, N, BT)
        more = i + 1 < tiles
        following = _tile(x_ptr, begin + t, tl.where(more, count - t, 0), o_d, m_d, SX, BT)
        rs = ()
        for r in tl.static_range(BT):
            b_r = 0.0
            if r_ptr is not None:
                p_r = r_ptr + (row + r) * D + o_d
                b_r = tl.load(p_r, mask=m_d & (r < left), other=0.0)
            rs = rs + (b_r,)
        rows = older + xs
        # groups of 1, 1, 2 and 4 rows: what a short sequence has not got is not computed, and of a
        # long one four rows at once hide each other's latency
        for group in tl.static_range(BT):
            if (group & (group - 1)) == 0:  # noqa: SIM102
                if group < left:
                    for r in tl.static_range(group, 2 * group if group > 0 else 1):
                        b_z = _dot(ws, rows[r : r + W], b_b, W)
                        m = m_d & (r < left)
                        _store_y(y_ptr, b_z, rs[r], row + r, o_d, m, eps, D, SILU, UNIT)
        # the last W - 1 rows go on to the next tile in registers
        older = ()
        for j in tl.static_range(W - 1):
            older = older + (rows[BT + j].to(tl.float32),)
        if more & (t == 0):
            # another sequence: what came before is its state
            older = _before(x_ptr, s_ptr, begin, t, n, o_d, m_d, SX, W)
        xs = following


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
    ws = _taps(w_ptr, o_d, m_d, W)
    b_b = _bias(b_ptr, o_d, m_d, BD)
    sums = (tl.zeros([BD], tl.float32),) * W
    b_db = tl.zeros([BD], tl.float32)
    # dz of the W - 1 tokens before a tile: dx of these waits for dz of the next ones
    older_dz = (b_db,) * (W - 1)
    first = i_p * tiles_each
    tiles = tl.minimum(tiles, first + tiles_each)
    # of the next tile, and of the one at work
    n, begin, count, t = _place(first, cu_ptr, T, N, bits, BT)
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
        next_xs = _tile(x_ptr, begin + t, next_left, o_d, m_d, SX, BT)
        next_dys = _tile(dy_ptr, begin + t, next_left, o_d, m_d, D, BT)
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
                            b_z = _dot(ws, rows[r : r + W], b_b, W)
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
                        b_z = _dot(ws, after[r : r + W], b_b, W)
                    b_dy = tl.load(p_dy + r * D, mask=m, other=0.0).to(tl.float32)
                    if UNIT:
                        b_dy = _through_norm(b_dy, b_z, eps, SILU)
                    after_dz = after_dz + (_dz(b_dy, b_z, SILU),)
                    m = m_d & (left > BT + r - W + 1)
                    _store_dx(p_dx + (BT + r) * SX, ws, after_dz[r : r + W], m, W)
        if (i + 1 < tiles) & ((i < first) | (t == 0)):
            # another program's rows, or another sequence: what came before is its state. A tile
            # without tokens may begin past the last one: nothing is read for it.
            older = _before(x_ptr, s_ptr, begin + t, t, n, o_d, m_d & (t < count), SX, W)
        xs, dys = next_xs, next_dys
        i_n, row, left, i_t = n, begin + t, count - t, t
        n, begin, count, t = _next_place(i + 1, n, begin, count, t, cu_ptr, T, N, BT)
    p_partial = partial_ptr + i_p.to(tl.int64) * (W + 1) * SX + o_d
    for j in tl.static_range(W):
        tl.store(p_partial + j * SX, sums[j], mask=m_d)
    tl.store(p_partial + W * SX, b_db, mask=m_d)
