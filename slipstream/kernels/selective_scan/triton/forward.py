"""The forward kernel of the selective scan: a program goes through a sequence, some channels wide.

Of a tile of tokens it makes dt and dt u once. Then, for each of the N numbers of a state, the
scan of exp(dt A) and dt u B over the tile's tokens, all at once: first what each run makes of a
state, then, with the state before it, the states in it. The state after a tile is left in memory:
for the program itself, and for backward.
"""

import triton
import triton.language as tl

from slipstream.kernels.primitives.activations import LOG2E
from slipstream.kernels.primitives.sequences import tokens_of
from slipstream.kernels.selective_scan.triton import tiles


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
    """grid (G * ceil(D / G / BD), S)"""
    L: tl.constexpr = RUN * RUNS
    i_n = tl.program_id(1)
    i_g, o_d, m_d = tiles.channels(tl.program_id(0), D, G, BD, VEC)
    begin, tokens = tokens_of(cu_ptr, i_n, T)
    o_s = (i_n.to(tl.int64) * D + o_d) * N
    b_bias, b_D = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    if bias_ptr is not None:
        b_bias += tiles.load_wide(bias_ptr + o_d, m_d)
    if D_ptr is not None:
        b_D += tiles.load_wide(D_ptr + o_d, m_d)
    # the state after a tile is that of its last run
    o_0 = tl.zeros((RUNS, 1), tl.int32)
    m_after = (tl.arange(0, RUNS) == RUNS - 1)[:, None] & m_d[None, :]
    for i_t in range(tl.cdiv(tokens, L)):
        o_r = i_t * L + RUN * tl.arange(0, RUNS)
        u = tiles.load_tile(u_ptr, u_row, begin, o_r, tokens, o_d, m_d, RUN)
        delta = tiles.load_tile(delta_ptr, delta_row, begin, o_r, tokens, o_d, m_d, RUN)
        dt, du, y = (), (), ()
        b_sum = tl.zeros((RUNS, BD), tl.float32)
        for i in tl.static_range(RUN):
            m = ((o_r + i) < tokens)[:, None] & m_d[None, :]
            b_dt = tiles.step_size(delta[i] + b_bias[None, :], m, SOFTPLUS)
            b_sum += b_dt
            dt, du, y = dt + (b_dt,), du + (b_dt * u[i],), y + (b_D[None, :] * u[i],)
        is_last = (i_t + 1) * L >= tokens
        # the state that this tile leaves, after that which it finds
        o_after = (begin // L + i_t) * (N * D) + o_d
        o_bc = begin + o_r + (i_g * N).to(tl.int64) * rows
        for n in range(N):
            b_A = tiles.load_wide(A_ptr + n * D + o_d, m_d)[None, :] * LOG2E
            b_0 = tiles.load_wide(states_ptr + o_after - N * D + n * D, m_d & (i_t > 0))
            if s_in_ptr is not None:
                b_0 += tiles.load_wide(s_in_ptr + o_s + n, m_d & (i_t == 0))
            a, x = (), ()
            for i in tl.static_range(RUN):
                p_B = B_ptr + o_bc + n * rows + i
                b_B = tiles.load_wide(p_B, (o_r + i) < tokens)[:, None]
                a, x = a + (tl.exp2(dt[i] * b_A),), x + (du[i] * b_B,)
            h = tiles.scan_forward(a, x, tl.exp2(b_sum * b_A), b_0, RUN)
            further = ()
            for i in tl.static_range(RUN):
                p_C = C_ptr + o_bc + n * rows + i
                b_C = tiles.load_wide(p_C, (o_r + i) < tokens)[:, None]
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
                b_z = tiles.load_wide(z_ptr + o_t * z_row + o_d[None, :], m)
                b_y *= b_z / (1.0 + tl.exp(-b_z))
            b_y = tl.cast(b_y, y_ptr.dtype.element_ty)
            tl.store(y_ptr + o_t * D + o_d[None, :], b_y, mask=m)
        # what this tile left is read by other threads
        tl.debug_barrier()
    if tokens == 0:
        for n in range(N):
            b_0 = tl.zeros((BD,), tl.float32)
            if s_in_ptr is not None:
                b_0 += tiles.load_wide(s_in_ptr + o_s + n, m_d)
            tl.store(final_ptr + o_s + n, b_0, mask=m_d)
