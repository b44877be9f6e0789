"""The selective scan, forward and backward.

Forward a program goes through a sequence, some channels wide. Of a tile of tokens it makes dt and
dt u once. Then, for each of the N numbers of a state, the scan of exp(dt A) and dt u B over the
tile's tokens, all at once: first what each run makes of a state, then, with the state before it,
the states in it. The state after a tile is left in memory: for the program itself, and for
backward.

A tile is RUNS runs of RUN tokens by BD channels. The tokens of a run are a thread's: a tensor of a
tile is a tuple of RUN tensors [RUNS, BD], the i-th of the i-th token of every run.

Backward a program goes through sequences from the end. Of a tile of tokens, and for each of the N
numbers of a state, it makes the states again, from the one that forward left before the tile, and
then their gradients, by the same scan from the last token to the first:

    dh_t = C_t dy_t + a_{t+1} dh_{t+1}

What sums over channels, dB and dC, it leaves for each block of channels; what sums over tokens, dA,
dD and the bias's, for each of the programs that share the sequences. Both are summed in order by
who launches it: the same inputs, the same bits.
"""

import triton
import triton.language as tl

from slipstream.kernels.primitives.device import LOG2E, tokens_of


@triton.jit
def _then_also_before(a, x, pa, px, b, y, pb, py):
    """y -> a y + x, and after it y -> b y + y; and the map of all that is before the last."""
    return a * b, b * x + y, a * pb, pb * x + py


@triton.jit
def scan_runs(b_a, b_x, b_0, REVERSE: tl.constexpr):
    """y before each run [RUNS, BD], if a run makes a y + x of y and b_0 [BD] is before the first;
    REVERSE: before the last, and y after each run."""
    if REVERSE:  # associative_scan's own way to go back takes more shuffles
        b_a, b_x = tl.flip(b_a, 0), tl.flip(b_x, 0)
    both = (b_a, b_x, tl.full(b_a.shape, 1.0, tl.float32), tl.zeros_like(b_x))
    b_a, b_x, b_pa, b_px = tl.associative_scan(both, 0, _then_also_before)
    b_y = b_px + b_pa * b_0[None, :]
    return tl.flip(b_y, 0) if REVERSE else b_y


@triton.jit
def scan_forward(b_a, b_x, b_total, b_0, RUN: tl.constexpr):
    """h before each run, and then h_t = a_t h_{t-1} + x_t of a tile; b_total: the product of a."""
    b_h = b_x[0]
    for i in tl.static_range(1, RUN):
        b_h = b_a[i] * b_h + b_x[i]
    b_h = scan_runs(b_total, b_h, b_0, False)
    h = (b_h,)
    for i in tl.static_range(RUN):
        b_h = b_a[i] * b_h + b_x[i]
        h = h + (b_h,)
    return h


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as exact for small results as for large ones."""
    e = tl.exp(-tl.abs(x))
    w = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(w == 1.0, e, tl.log(w) * (e / (w - 1.0)))


@triton.jit
def channels(i_d, D: tl.constexpr, G: tl.constexpr, BD: tl.constexpr, VEC: tl.constexpr):
    """Group of a program, its channels, and which of them are there."""
    NB: tl.constexpr = (D // G + BD - 1) // BD
    i_g = i_d // NB
    o_c = (i_d % NB) * BD + tl.arange(0, BD)
    o_d = i_g * (D // G) + o_c
    # channels a thread takes, fewer than it could load at once: the others go along the tokens
    o_d = tl.max_contiguous(tl.multiple_of(o_d, VEC), VEC)
    return i_g, o_d, o_c < D // G


@triton.jit
def load_wide(ptr, m):
    return tl.load(ptr, mask=m, other=0.0).to(tl.float32)


@triton.jit
def load_tile(ptr, row, begin, o_r, tokens, o_d, m_d, RUN: tl.constexpr):
    """A tile of x [tokens, D], a row each `row`: o_r are the first tokens of the runs."""
    tile = ()
    for i in tl.static_range(RUN):
        m = ((o_r + i) < tokens)[:, None] & m_d[None, :]
        tile = tile + (load_wide(ptr + (begin + o_r + i)[:, None] * row + o_d[None, :], m),)
    return tile


@triton.jit
def step_size(b_delta, m, SOFTPLUS: tl.constexpr):
    """dt, 0 where there is no token: such leave the state as it is."""
    b_dt = softplus(b_delta) if SOFTPLUS else b_delta
    return tl.where(m, b_dt, 0.0)


@triton.jit(do_not_specialize=["T", "rows"])
def selective_scan_forward_kernel(
    u_ptr,  # [tokens, D], a row each u_row
    delta_ptr,
    A_ptr,  # [N, D], float32
    B_ptr,  # [G, N, tokens], float32
    C_ptr,
    D_ptr,  # [D]
    z_ptr,
    bias_ptr,  # [D]
    s_in_ptr,  # [S, D, N]
    y_ptr,  # [tokens, D]
    final_ptr,  # [S, D, N]
    states_ptr,  # [tokens // L, N, D], float32
    cu_ptr, T,
    rows,  # tokens of all sequences
    u_row, delta_row, z_row,
    D: tl.constexpr, N: tl.constexpr, G: tl.constexpr, SOFTPLUS: tl.constexpr, RUN: tl.constexpr,
    RUNS: tl.constexpr, BD: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """grid (G * ceil(D / G / BD) * S,): axis 0 alone has room for any number of sequences."""
    L: tl.constexpr = RUN * RUNS
    BLOCKS: tl.constexpr = (D // G + BD - 1) // BD * G
    i_n = tl.program_id(0) // BLOCKS
    i_g, o_d, m_d = channels(tl.program_id(0) % BLOCKS, D, G, BD, VEC)
    begin, tokens = tokens_of(cu_ptr, i_n, T)
    o_s = (i_n.to(tl.int64) * D + o_d) * N
    b_bias, b_D = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    if bias_ptr is not None:
        b_bias += load_wide(bias_ptr + o_d, m_d)
    if D_ptr is not None:
        b_D += load_wide(D_ptr + o_d, m_d)
    # the state after a tile is that of its last run
    o_0 = tl.zeros((RUNS, 1), tl.int32)
    m_after = (tl.arange(0, RUNS) == RUNS - 1)[:, None] & m_d[None, :]
    for i_t in range(tl.cdiv(tokens, L)):
        o_r = i_t * L + RUN * tl.arange(0, RUNS)
        u = load_tile(u_ptr, u_row, begin, o_r, tokens, o_d, m_d, RUN)
        delta = load_tile(delta_ptr, delta_row, begin, o_r, tokens, o_d, m_d, RUN)
        dt, du, y = (), (), ()
        b_sum = tl.zeros((RUNS, BD), tl.float32)
        for i in tl.static_range(RUN):
            m = ((o_r + i) < tokens)[:, None] & m_d[None, :]
            b_dt = step_size(delta[i] + b_bias[None, :], m, SOFTPLUS)
            b_sum += b_dt
            dt, du, y = dt + (b_dt,), du + (b_dt * u[i],), y + (b_D[None, :] * u[i],)
        is_last = (i_t + 1) * L >= tokens
        # the state that this tile leaves, after that which it finds
        o_after = (begin // L + i_t) * (N * D) + o_d
        o_bc = begin + o_r + (i_g * N).to(tl.int64) * rows
        for n in range(N):
            b_A = load_wide(A_ptr + n * D + o_d, m_d)[None, :] * LOG2E
            b_0 = load_wide(states_ptr + o_after - N * D + n * D, m_d & (i_t > 0))
            if s_in_ptr is not None:
                b_0 += load_wide(s_in_ptr + o_s + n, m_d & (i_t == 0))
            a, x = (), ()
            for i in tl.static_range(RUN):
                p_B = B_ptr + o_bc + n * rows + i
                b_B = load_wide(p_B, (o_r + i) < tokens)[:, None]
                a, x = a + (tl.exp2(dt[i] * b_A),), x + (du[i] * b_B,)
            h = scan_forward(a, x, tl.exp2(b_sum * b_A), b_0, RUN)
            further = ()
            for i in tl.static_range(RUN):
                p_C = C_ptr + o_bc + n * rows + i
                b_C = load_wide(p_C, (o_r + i) < tokens)[:, None]
                further = further + (y[i] + h[i + 1] * b_C,)
            y = further
            p_after = (states_ptr + o_after + n * D)[None, :] + o_0
            tl.store(p_after, h[RUN], mask=m_after & (not is_last))
            tl.store((final_ptr + o_s + n)[None, :] + o_0, h[RUN], mask=m_after & is_last)
        for i in tl.static_range(RUN):
            m = ((o_r + i) < tokens)[:, None] & m_d[None, :]
            o_t = (begin + o_r + i)[:, None]
            b_y = y[i]
            if z_ptr is not None:
                b_z = load_wide(z_ptr + o_t * z_row + o_d[None, :], m)
                b_y *= b_z / (1.0 + tl.exp(-b_z))
            b_y = tl.cast(b_y, y_ptr.dtype.element_ty)
            tl.store(y_ptr + o_t * D + o_d[None, :], b_y, mask=m)
        # what this tile left is read by other threads
        tl.debug_barrier()
    if tokens == 0:
        for n in range(N):
            b_0 = tl.zeros((BD,), tl.float32)
            if s_in_ptr is not None:
                b_0 += load_wide(s_in_ptr + o_s + n, m_d)
            tl.store(final_ptr + o_s + n, b_0, mask=m_d)


@triton.jit
def _sum(x, RUN: tl.constexpr):
    """Over a tile's tokens, [BD]."""
    b_x = x[0]
    for i in tl.static_range(1, RUN):
        b_x += x[i]
    return tl.sum(b_x, 0)


@triton.jit
def _times_silu(x, z, RUN: tl.constexpr):
    gated = ()
    for i in tl.static_range(RUN):
        gated = gated + (x[i] * z[i] / (1.0 + tl.exp(-z[i])),)
    return gated


@triton.jit
def _scan_back(a, dh, b_next, b_total, b_end, RUN: tl.constexpr):
    """dh_t = dh_t + a_{t+1} dh_{t+1} of a tile; b_next: a after each run's last token.
    b_total: the product of these a. b_end: dh after the tile."""
    b_dh = dh[RUN - 1]
    for i in tl.static_range(1, RUN):
        b_dh = dh[RUN - 1 - i] + a[RUN - i] * b_dh
    b_dh = scan_runs(b_total, b_dh, b_end, True)
    b_dh = dh[RUN - 1] + b_next * b_dh
    tile = (b_dh,)
    for i in tl.static_range(1, RUN):
        b_dh = dh[RUN - 1 - i] + a[RUN - i] * b_dh
        tile = (b_dh,) + tile
    return tile


@triton.jit
def _store_of_tokens(
    pointers, rows, outputs, place, b_bias, b_D, dt, dy, y, gx, ga, D: tl.constexpr,
    SOFTPLUS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """du, ddelta and dz of a tile's tokens; what each adds to dD and to the bias's gradient."""
    u_ptr, delta_ptr, z_ptr, dy_ptr = pointers
    u_row, delta_row, z_row, dy_row = rows
    du_ptr, ddelta_ptr, dz_ptr = outputs
    begin, o_r, tokens, o_d, m_d = place
    # again, which is faster than to hold them in registers meanwhile
    u = load_tile(u_ptr, u_row, begin, o_r, tokens, o_d, m_d, RUN)
    delta = load_tile(delta_ptr, delta_row, begin, o_r, tokens, o_d, m_d, RUN)
    if z_ptr is not None:
        z = load_tile(z_ptr, z_row, begin, o_r, tokens, o_d, m_d, RUN)
        dout = load_tile(dy_ptr, dy_row, begin, o_r, tokens, o_d, m_d, RUN)
    dD, dbias = (), ()
    for i in tl.static_range(RUN):
        m = ((o_r + i) < tokens)[:, None] & m_d[None, :]
        o_t = (begin + o_r + i)[:, None]
        b_ddelta = u[i] * gx[i] + ga[i]
        if SOFTPLUS:
            b_ddelta *= 1.0 / (1.0 + tl.exp(-(delta[i] + b_bias[None, :])))
        b_ddelta = tl.where(m, b_ddelta, 0.0)
        o_x = o_t * D + o_d[None, :]
        b_du = dt[i] * gx[i] + b_D[None, :] * dy[i]
        tl.store(du_ptr + o_x, b_du.to(du_ptr.dtype.element_ty), mask=m)
        tl.store(ddelta_ptr + o_x, b_ddelta.to(ddelta_ptr.dtype.element_ty), mask=m)
        if z_ptr is not None:
            b_s = 1.0 / (1.0 + tl.exp(-z[i]))
            b_dz = dout[i] * y[i] * b_s * (1.0 + z[i] * (1.0 - b_s))
            tl.store(dz_ptr + o_x, b_dz.to(dz_ptr.dtype.element_ty), mask=m)
        dD, dbias = dD + (dy[i] * u[i],), dbias + (b_ddelta,)
    return dD, dbias


@triton.jit(do_not_specialize=["T", "S", "rows"])
def selective_scan_backward_kernel(
    u_ptr,  # [tokens, D], a row each u_row
    delta_ptr,
    A_ptr,  # [N, D], float32
    B_ptr,  # [G, N, tokens], float32
    C_ptr,
    D_ptr,  # [D]
    z_ptr,
    bias_ptr,  # [D]
    s_in_ptr,  # [S, D, N]
    states_ptr,  # [tokens // L, N, D], float32
    dy_ptr,  # [tokens, D], a row each dy_row
    dfinal_ptr,  # [S, D, N]
    carry_ptr,  # [tokens // L, N, D], float32: dh of a tile's first token
    du_ptr,  # [tokens, D]
    ddelta_ptr, dz_ptr,
    dA_ptr,  # [programs along the sequences, N, D], zeros
    dB_ptr,  # [blocks of channels, N, tokens]
    dC_ptr,
    dD_ptr,  # [programs along the sequences, D]
    dbias_ptr,
    ds_in_ptr,  # [S, D, N]
    cu_ptr,
    T, S,
    rows,  # tokens of all sequences
    u_row, delta_row, z_row, dy_row,
    D: tl.constexpr, N: tl.constexpr, G: tl.constexpr, SOFTPLUS: tl.constexpr, RUN: tl.constexpr,
    RUNS: tl.constexpr, BD: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """grid (G * ceil(D / G / BD), programs along the sequences)"""
    L: tl.constexpr = RUN * RUNS
    i_d, i_p = tl.program_id(0), tl.program_id(1)
    i_g, o_d, m_d = channels(i_d, D, G, BD, VEC)
    b_bias, b_D = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    if bias_ptr is not None:
        b_bias += load_wide(bias_ptr + o_d, m_d)
    if D_ptr is not None:
        b_D += load_wide(D_ptr + o_d, m_d)
    b_dD, b_dbias = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    # what goes to the tile before is the first run's
    o_0 = tl.zeros((RUNS, 1), tl.int32)
    m_before = (tl.arange(0, RUNS) == 0)[:, None] & m_d[None, :]
    dA_ptr += i_p.to(tl.int64) * (N * D) + o_d
    o_partial = i_d.to(tl.int64) * N * rows
    for i_s in range(tl.cdiv(S - i_p, tl.num_programs(1))):
        i_n = i_p + i_s * tl.num_programs(1)
        begin, tokens = tokens_of(cu_ptr, i_n, T)
        o_s = (i_n.to(tl.int64) * D + o_d) * N
        tiles = tl.cdiv(tokens, L)
        for i_back in range(tiles):
            i_t = tiles - 1 - i_back
            o_r = i_t * L + RUN * tl.arange(0, RUNS)
            # of the token after each run
            m = ((o_r + RUN) < tokens)[:, None] & m_d[None, :]
            p_next = delta_ptr + (begin + o_r + RUN)[:, None] * delta_row + o_d[None, :]
            b_dt_next = step_size(load_wide(p_next, m) + b_bias[None, :], m, SOFTPLUS)
            u = load_tile(u_ptr, u_row, begin, o_r, tokens, o_d, m_d, RUN)
            delta = load_tile(delta_ptr, delta_row, begin, o_r, tokens, o_d, m_d, RUN)
            dy = load_tile(dy_ptr, dy_row, begin, o_r, tokens, o_d, m_d, RUN)
            if z_ptr is not None:
                z = load_tile(z_ptr, z_row, begin, o_r, tokens, o_d, m_d, RUN)
                dy = _times_silu(dy, z, RUN)
            dt, du, y, gx, ga = (), (), (), (), ()
            b_sum = tl.zeros((RUNS, BD), tl.float32)
            for i in tl.static_range(RUN):
                m = ((o_r + i) < tokens)[:, None] & m_d[None, :]
                b_dt = step_size(delta[i] + b_bias[None, :], m, SOFTPLUS)
                b_sum += b_dt
                dt, du, y = dt + (b_dt,), du + (b_dt * u[i],), y + (b_D[None, :] * u[i],)
                # of dt u, and of dt by the decay
                gx, ga = gx + (tl.zeros_like(b_dt),), ga + (tl.zeros_like(b_dt),)
            b_sum_next = b_sum - dt[0] + b_dt_next  # pyright: ignore[reportGeneralTypeIssues]
            o_bc = begin + o_r + (i_g * N).to(tl.int64) * rows
            for n in range(N):
                b_A = load_wide(A_ptr + n * D + o_d, m_d)[None, :]
                b_A2 = b_A * LOG2E
                p_n = (begin // L + i_t - 1) * (N * D) + n * D + o_d
                b_0 = load_wide(states_ptr + p_n, m_d & (i_t > 0))
                if s_in_ptr is not None:
                    b_0 += load_wide(s_in_ptr + o_s + n, m_d & (i_t == 0))
                b_end = load_wide(carry_ptr + p_n + N * D, m_d & (i_back > 0))
                if dfinal_ptr is not None:
                    b_end += load_wide(dfinal_ptr + o_s + n, m_d & (i_back == 0))
                a, x, dh = (), (), ()
                for i in tl.static_range(RUN):
                    m_t = (o_r + i) < tokens
                    b_B = load_wide(B_ptr + o_bc + n * rows + i, m_t)[:, None]
                    b_C = load_wide(C_ptr + o_bc + n * rows + i, m_t)[:, None]
                    a, x = a + (tl.exp2(dt[i] * b_A2),), x + (du[i] * b_B,)
                    dh = dh + (b_C * dy[i],)
                h = scan_forward(a, x, tl.exp2(b_sum * b_A2), b_0, RUN)
                b_next, b_total = tl.exp2(b_dt_next * b_A2), tl.exp2(b_sum_next * b_A2)
                dh = _scan_back(a, dh, b_next, b_total, b_end, RUN)
                dA, more_gx, more_ga, more_y = (), (), (), ()
                for i in tl.static_range(RUN):
                    m_t = (o_r + i) < tokens
                    b_B = load_wide(B_ptr + o_bc + n * rows + i, m_t)[:, None]
                    b_w = dh[i] * a[i] * h[i]  # dh_t a_t h_{t-1}
                    dA = dA + (b_w * dt[i],)
                    more_gx, more_ga = (
                        more_gx + (gx[i] + dh[i] * b_B,),
                        more_ga + (ga[i] + b_w * b_A,),
                    )
                    if z_ptr is not None:
                        b_C = load_wide(C_ptr + o_bc + n * rows + i, m_t)[:, None]
                        more_y = more_y + (y[i] + h[i + 1] * b_C,)
                    else:
                        more_y = more_y + (y[i],)
                    p_rows = o_partial + n * rows + begin + o_r + i
                    tl.store(dB_ptr + p_rows, tl.sum(dh[i] * du[i], 1), mask=m_t)
                    tl.store(dC_ptr + p_rows, tl.sum(h[i + 1] * dy[i], 1), mask=m_t)
                gx, ga, y = more_gx, more_ga, more_y
                p_A = dA_ptr + n * D
                tl.store(p_A, tl.load(p_A, mask=m_d, other=0.0) + _sum(dA, RUN), mask=m_d)
                tl.store(carry_ptr + p_n[None, :] + o_0, dh[0], mask=m_before & (i_t > 0))
                if ds_in_ptr is not None:
                    p_s = (ds_in_ptr + o_s + n)[None, :] + o_0
                    b_ds = a[0] * dh[0]  # pyright: ignore[reportGeneralTypeIssues]
                    tl.store(p_s, b_ds, mask=m_before & (i_t == 0))
            place = begin, o_r, tokens, o_d, m_d
            dD, dbias = _store_of_tokens(
                (u_ptr, delta_ptr, z_ptr, dy_ptr), (u_row, delta_row, z_row, dy_row),
                (du_ptr, ddelta_ptr, dz_ptr), place, b_bias, b_D, dt, dy, y, gx, ga,
                D, SOFTPLUS, RUN,
            )  # fmt: skip
            b_dD += _sum(dD, RUN)
            b_dbias += _sum(dbias, RUN)
            # what this tile left is read by other threads
            tl.debug_barrier()
        if ds_in_ptr is not None:
            for n in range(N):
                b_end = tl.zeros((BD,), tl.float32)
                if dfinal_ptr is not None:
                    b_end += load_wide(dfinal_ptr + o_s + n, m_d)
                tl.store(ds_in_ptr + o_s + n, b_end, mask=m_d & (tokens == 0))
    if dD_ptr is not None:
        tl.store(dD_ptr + i_p * D + o_d, b_dD, mask=m_d)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + i_p * D + o_d, b_dbias, mask=m_d)
