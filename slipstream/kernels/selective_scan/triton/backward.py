"""The backward kernel of the selective scan: a program goes through sequences from the end.

Of a tile of tokens, and for each of the N numbers of a state, it makes the states again, from the
one that forward left before the tile, and then their gradients, by the same scan from the last
token to the first:

    dh_t = C_t dy_t + a_{t+1} dh_{t+1}

What sums over channels, dB and dC, it leaves for each block of channels; what sums over tokens, dA,
dD and the bias's, for each of the programs that share the sequences. Both are summed in order by
who launches it: the same inputs, the same bits.
"""

import triton
import triton.language as tl

from slipstream.kernels.primitives.activations import LOG2E
from slipstream.kernels.primitives.sequences import tokens_of
from slipstream.kernels.selective_scan.triton.tiles import (
    channels,
    load_tile,
    load_wide,
    scan_forward,
    scan_runs,
    step_size,
)


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
