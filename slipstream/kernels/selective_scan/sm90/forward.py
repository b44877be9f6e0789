"""The forward kernel: a program goes through a sequence, some channels wide, T tokens at a time.

While it goes from token to token, the next tile is on its way from global memory into registers.
"""

from slipstream.kernels.primitives.sm90 import gl, gluon
from slipstream.kernels.selective_scan.sm90 import tiles
from slipstream.kernels.selective_scan.sm90.tiles import LOG2E


@gluon.jit
def _advance(h, A, dt_s, du_s, B_s, C_s, y_s, t, C_ROW: gl.constexpr, N_ROW: gl.constexpr):
    """The state after token t, whose output goes to y_s."""
    s_dt, s_du = dt_s.index(t).load(C_ROW), du_s.index(t).load(C_ROW)
    s_B, s_C = B_s.index(t).load(N_ROW), C_s.index(t).load(N_ROW)
    h = gl.exp2(s_dt[:, None] * A) * h + s_du[:, None] * s_B[None, :]
    y_s.index(t).store(gl.sum(h * s_C[None, :], 1))
    return h


@gluon.jit(do_not_specialize=["total", "blocks"])
def selective_scan_forward_sm90_kernel(
    u_ptr,  # [tokens, D], a row each u_row
    delta_ptr,
    A_ptr,  # [N, D], float32
    B_ptr,  # [tokens, G, N], a row each B_row
    C_ptr,
    D_ptr,  # [D]
    z_ptr,
    bias_ptr,  # [D]
    s_in_ptr,  # [S, D, N]
    y_ptr,  # [tokens, D]
    final_ptr,  # [S, D, N]
    states_ptr,  # [tokens // T, N, D], float32
    cu_ptr,
    total,  # tokens of a row of the batch
    blocks, u_row, delta_row, z_row, B_row, C_row,
    D: gl.constexpr, N: gl.constexpr, G: gl.constexpr, SOFTPLUS: gl.constexpr, T: gl.constexpr,
    NP: gl.constexpr, CHANNELS: gl.constexpr, LANES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """grid (blocks S), blocks = G ceil(D / G / BD)"""
    BD: gl.constexpr = CHANNELS * 32 // LANES * WARPS
    NB: gl.constexpr = (D // G + BD - 1) // BD
    S: gl.constexpr = tiles.state_layout(NP, CHANNELS, LANES, WARPS)
    C_ROW: gl.constexpr = gl.SliceLayout(1, S)
    N_ROW: gl.constexpr = gl.SliceLayout(0, S)
    TILE: gl.constexpr = tiles.tile_layout(BD, WARPS)
    OF_N: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    i_b, i_n = gl.program_id(0) % blocks, gl.program_id(0) // blocks
    i_g, first_d = i_b // NB, (i_b % NB) * BD
    begin, tokens = tiles.sequence(cu_ptr, i_n, total)
    # channels as the states have them, and as the tiles
    s_c, o_c = (
        first_d + gl.arange(0, BD, C_ROW),
        first_d + gl.arange(0, BD, gl.SliceLayout(0, TILE)),
    )
    s_d, o_d = i_g * (D // G) + s_c, i_g * (D // G) + o_c
    m_d = o_c < D // G
    s_n = gl.arange(0, NP, N_ROW)
    o_n, o_bt = gl.arange(0, NP, gl.SliceLayout(0, OF_N)), gl.arange(0, T, gl.SliceLayout(1, OF_N))
    o_t = gl.arange(0, T, gl.SliceLayout(1, TILE))
    m_n = o_n < N
    m_s = (s_c < D // G)[:, None] & (s_n < N)[None, :]
    o_s = (i_n.to(gl.int64) * D + s_d)[:, None] * N + s_n[None, :]
    o_h = s_n[None, :] * D + s_d[:, None]
    A = gl.load(A_ptr + o_h, mask=m_s, other=0.0) * LOG2E
    h = gl.zeros([BD, NP], gl.float32, S)
    if s_in_ptr is not None:
        h += gl.load(s_in_ptr + o_s, mask=m_s, other=0.0).to(gl.float32)
    b_bias = gl.zeros([BD], gl.float32, gl.SliceLayout(0, TILE))
    b_D = b_bias
    if bias_ptr is not None:
        b_bias += tiles.load_vector(bias_ptr, o_d, m_d)
    if D_ptr is not None:
        b_D += tiles.load_vector(D_ptr, o_d, m_d)
    dt_s, du_s, y_s = tiles.alloc_rows(T, BD), tiles.alloc_rows(T, BD), tiles.alloc_rows(T, BD)
    B_s, C_s = tiles.alloc_rows(T, NP), tiles.alloc_rows(T, NP)
    u_ptr += begin * u_row
    delta_ptr += begin * delta_row
    B_ptr += begin * B_row + i_g * N
    C_ptr += begin * C_row + i_g * N
    y_ptr += begin * D
    if states_ptr is not None:
        states_ptr += begin // T * (N * D)
    u = tiles.load_tokens(u_ptr, u_row, o_t, tokens, o_d, m_d)
    delta = tiles.load_tokens(delta_ptr, delta_row, o_t, tokens, o_d, m_d)
    B = tiles.load_tokens(B_ptr, B_row, o_bt, tokens, o_n, m_n)
    C = tiles.load_tokens(C_ptr, C_row, o_bt, tokens, o_n, m_n)
    z = u
    if z_ptr is not None:
        z_ptr += begin * z_row
        z = tiles.load_tokens(z_ptr, z_row, o_t, tokens, o_d, m_d)
    for done in range(0, tokens, T):
        left = tokens - done
        m = (o_t < left)[:, None] & m_d[None, :]
        b_u, b_z = u, z
        dt = tiles.step_size(delta.to(gl.float32) + b_bias[None, :], m, SOFTPLUS)
        gl.thread_barrier()
        tiles.as_tile(dt_s, T, BD).store(dt)
        tiles.as_tile(du_s, T, BD).store(dt * u.to(gl.float32))
        tiles.as_tile(B_s, T, NP).store(B.to(gl.float32))
        tiles.as_tile(C_s, T, NP).store(C.to(gl.float32))
        gl.thread_barrier()
        u_ptr += T * u_row
        delta_ptr += T * delta_row
        B_ptr += T * B_row
        C_ptr += T * C_row
        u = tiles.load_tokens(u_ptr, u_row, o_t, left - T, o_d, m_d)
        delta = tiles.load_tokens(delta_ptr, delta_row, o_t, left - T, o_d, m_d)
        B = tiles.load_tokens(B_ptr, B_row, o_bt, left - T, o_n, m_n)
        C = tiles.load_tokens(C_ptr, C_row, o_bt, left - T, o_n, m_n)
        if z_ptr is not None:
            z_ptr += T * z_row
            z = tiles.load_tokens(z_ptr, z_row, o_t, left - T, o_d, m_d)
        for t in range(0, T, 4):
            for i in gl.static_range(4):
                h = _advance(h, A, dt_s, du_s, B_s, C_s, y_s, t + i, C_ROW, N_ROW)
        gl.thread_barrier()
        y = tiles.as_tile(y_s, T, BD).load(TILE) + b_D[None, :] * b_u.to(gl.float32)
        if z_ptr is not None:
            y = y * b_z.to(gl.float32) * tiles.sigmoid(b_z.to(gl.float32))
        gl.store(y_ptr + o_t[:, None] * D + o_d[None, :], y.to(y_ptr.dtype.element_ty), mask=m)
        y_ptr += T * D
        if states_ptr is not None:
            gl.store(states_ptr + o_h, h, mask=m_s & (left > T))
            states_ptr += N * D
    gl.store(final_ptr + o_s, h, mask=m_s)
