"""The selective scan on sm_90, forward and backward.

Forward a program goes through a sequence, some channels wide, T tokens at a time. While it goes
from token to token, the next tile is on its way from global memory into registers.

A thread keeps the states of
CHANNELS channels, N / LANES numbers each, in registers, and goes from token to token. What it needs
of a token comes from shared memory, where a tile of tokens was put once, softplus and silu taken by
as many threads as there are. So a token takes an exponential and four instructions for a number of
a state, and hardly anything else.

Backward a program goes through sequences from the end, T tokens at a time. From the state that
forward left before a tile it makes those within SUB tokens again, which wait in shared memory, and
goes back over these; then over the SUB tokens before. What sums over channels, dB and dC, it leaves
for each block of channels; what sums over tokens, dA, dD and the bias's, for each of the programs
that share the sequences. Who launches it sums both in order: the same inputs, the same bits.
"""

from slipstream.kernels.primitives.device import LN2, LOG2E
from slipstream.kernels.primitives.sm90 import gl, gluon


@gluon.constexpr_function
def state_layout(N, CHANNELS, LANES, WARPS):
    """The layout of states [BD, N]: the lanes of adjacent channels are adjacent."""
    return gl.BlockedLayout([CHANNELS, N // LANES], [32 // LANES, LANES], [WARPS, 1], [0, 1])


@gluon.constexpr_function
def tile_layout(BD, WARPS):
    """The layout of a tile of tokens [T, BD]."""
    lanes = min(BD // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [WARPS, 1], [1, 0])


@gluon.jit
def softplus(x):
    """log(1 + exp(x)) to 2e-7 of itself, by a polynomial of e = exp(-|x|)."""
    e = gl.exp2(-gl.abs(x) * LOG2E)
    p = 0.005253457929939032
    p = p * e - 0.02958850748836994
    p = p * e + 0.07836166769266129
    p = p * e - 0.13674770295619965
    p = p * e + 0.19111430644989014
    p = p * e - 0.24844369292259216
    p = p * e + 0.33319270610809326
    p = p * e - 0.49999502301216125
    p = p * e + 1.0
    return p * e + gl.maximum(x, 0.0)


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(-x * LOG2E))


@gluon.jit
def step_size(delta, m, SOFTPLUS: gl.constexpr):
    """dt, 0 where there is no token: such leave the state as it is."""
    dt = softplus(delta) if SOFTPLUS else delta
    return gl.where(m, dt, 0.0)


@gluon.jit
def sequence(cu_ptr, i_n, T):
    """First token among all, and number of tokens of sequence n."""
    if cu_ptr is not None:
        begin = gl.maximum(gl.load(cu_ptr + i_n).to(gl.int64), 0)
        end = gl.minimum(gl.load(cu_ptr + i_n + 1).to(gl.int64), T)
        tokens = gl.maximum(end - begin, 0).to(gl.int32)
    else:
        tokens = T
        begin = T.to(gl.int64) * i_n
    return begin, tokens


@gluon.jit
def load_tokens(ptr, row, o_t, tokens, o_d, m_d):
    """Tokens o_t of x [tokens, D] from ptr on, a row each `row`."""
    m = (o_t < tokens)[:, None] & m_d[None, :]
    return gl.load(ptr + o_t[:, None] * row + o_d[None, :], mask=m, other=0.0)


@gluon.jit
def load_vector(ptr, o_d, m_d):
    return gl.load(ptr + o_d, mask=m_d, other=0.0).to(gl.float32)


@gluon.jit
def alloc_rows(T: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory for T rows, which index() gives one by one and as_tile() as one."""
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [T, WIDTH], rows)


@gluon.jit
def as_tile(rows, T: gl.constexpr, WIDTH: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return rows._reinterpret(gl.float32, [T, WIDTH], plain)


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
    S: gl.constexpr = state_layout(NP, CHANNELS, LANES, WARPS)
    C_ROW: gl.constexpr = gl.SliceLayout(1, S)
    N_ROW: gl.constexpr = gl.SliceLayout(0, S)
    TILE: gl.constexpr = tile_layout(BD, WARPS)
    OF_N: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    i_b, i_n = gl.program_id(0) % blocks, gl.program_id(0) // blocks
    i_g, first_d = i_b // NB, (i_b % NB) * BD
    begin, tokens = sequence(cu_ptr, i_n, total)
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
        b_bias += load_vector(bias_ptr, o_d, m_d)
    if D_ptr is not None:
        b_D += load_vector(D_ptr, o_d, m_d)
    dt_s, du_s, y_s = alloc_rows(T, BD), alloc_rows(T, BD), alloc_rows(T, BD)
    B_s, C_s = alloc_rows(T, NP), alloc_rows(T, NP)
    u_ptr += begin * u_row
    delta_ptr += begin * delta_row
    B_ptr += begin * B_row + i_g * N
    C_ptr += begin * C_row + i_g * N
    y_ptr += begin * D
    if states_ptr is not None:
        states_ptr += begin // T * (N * D)
    u = load_tokens(u_ptr, u_row, o_t, tokens, o_d, m_d)
    delta = load_tokens(delta_ptr, delta_row, o_t, tokens, o_d, m_d)
    B = load_tokens(B_ptr, B_row, o_bt, tokens, o_n, m_n)
    C = load_tokens(C_ptr, C_row, o_bt, tokens, o_n, m_n)
    z = u
    if z_ptr is not None:
        z_ptr += begin * z_row
        z = load_tokens(z_ptr, z_row, o_t, tokens, o_d, m_d)
    for done in range(0, tokens, T):
        left = tokens - done
        m = (o_t < left)[:, None] & m_d[None, :]
        b_u, b_z = u, z
        dt = step_size(delta.to(gl.float32) + b_bias[None, :], m, SOFTPLUS)
        gl.thread_barrier()
        as_tile(dt_s, T, BD).store(dt)
        as_tile(du_s, T, BD).store(dt * u.to(gl.float32))
        as_tile(B_s, T, NP).store(B.to(gl.float32))
        as_tile(C_s, T, NP).store(C.to(gl.float32))
        gl.thread_barrier()
        u_ptr += T * u_row
        delta_ptr += T * delta_row
        B_ptr += T * B_row
        C_ptr += T * C_row
        u = load_tokens(u_ptr, u_row, o_t, left - T, o_d, m_d)
        delta = load_tokens(delta_ptr, delta_row, o_t, left - T, o_d, m_d)
        B = load_tokens(B_ptr, B_row, o_bt, left - T, o_n, m_n)
        C = load_tokens(C_ptr, C_row, o_bt, left - T, o_n, m_n)
        if z_ptr is not None:
            z_ptr += T * z_row
            z = load_tokens(z_ptr, z_row, o_t, left - T, o_d, m_d)
        for t in range(0, T, 4):
            for i in gl.static_range(4):
                h = _advance(h, A, dt_s, du_s, B_s, C_s, y_s, t + i, C_ROW, N_ROW)
        gl.thread_barrier()
        y = as_tile(y_s, T, BD).load(TILE) + b_D[None, :] * b_u.to(gl.float32)
        if z_ptr is not None:
            y = y * b_z.to(gl.float32) * sigmoid(b_z.to(gl.float32))
        gl.store(y_ptr + o_t[:, None] * D + o_d[None, :], y.to(y_ptr.dtype.element_ty), mask=m)
        y_ptr += T * D
        if states_ptr is not None:
            gl.store(states_ptr + o_h, h, mask=m_s & (left > T))
            states_ptr += N * D
    gl.store(final_ptr + o_s, h, mask=m_s)


@gluon.jit
def _advance_back(h, A, dt_s, du_s, B_s, t, C_ROW: gl.constexpr, N_ROW: gl.constexpr):
    """The state after token t."""
    s_dt, s_du = dt_s.index(t).load(C_ROW), du_s.index(t).load(C_ROW)
    s_B = B_s.index(t).load(N_ROW)
    return gl.exp2(s_dt[:, None] * A) * h + s_du[:, None] * s_B[None, :]


@gluon.jit
def _load_wide(ptr, row, o_t, tokens, o_d, m_d):
    return load_tokens(ptr, row, o_t, tokens, o_d, m_d).to(gl.float32)


@gluon.jit
def _store(ptr, o, x, m):
    gl.store(ptr + o, x.to(ptr.dtype.element_ty), mask=m)


@gluon.jit
def _load_chunk(
    inputs, rows_of, tiles, b_bias, first, left, o_t, o_d, m_d,
    T: gl.constexpr, SUB: gl.constexpr, BD: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """dt, dt u and dy of T tokens, SUB at a time, to shared memory."""
    u_ptr, delta_ptr, dy_ptr, z_ptr = inputs
    u_row, delta_row, dy_row, z_row = rows_of
    dt_s, du_s, dy_s = tiles
    for j in gl.static_range(T // SUB):
        at, tail = first + j * SUB, left - j * SUB
        m = (o_t < tail)[:, None] & m_d[None, :]
        u = _load_wide(u_ptr + at * u_row, u_row, o_t, tail, o_d, m_d)
        delta = _load_wide(delta_ptr + at * delta_row, delta_row, o_t, tail, o_d, m_d)
        dy = _load_wide(dy_ptr + at * dy_row, dy_row, o_t, tail, o_d, m_d)
        if z_ptr is not None:
            z = _load_wide(z_ptr + at * z_row, z_row, o_t, tail, o_d, m_d)
            dy = dy * z * sigmoid(z)
        dt = step_size(delta + b_bias[None, :], m, SOFTPLUS)
        as_tile(dt_s, T, BD).slice(j * SUB, SUB).store(dt)
        as_tile(du_s, T, BD).slice(j * SUB, SUB).store(dt * u)
        as_tile(dy_s, T, BD).slice(j * SUB, SUB).store(dy)


@gluon.jit
def _back_over_tokens(
    h, dh_after, dA, A, tiles, B_s, C_s, h_s, p_dC, p_dB, dz_ptr, j_first, left, s_n,
    N: gl.constexpr, SUB: gl.constexpr,
):  # fmt: skip
    """SUB tokens from j_first on, of which h is the state before: their states, then from the last
    to the first dB and dC to memory, and what _write_chunk reads in the place of dt, dt u and dy.
    Returns a_t dh_t of the first and dA."""
    S: gl.constexpr = A.type.layout
    C_ROW: gl.constexpr = gl.SliceLayout(1, S)
    N_ROW: gl.constexpr = gl.SliceLayout(0, S)
    dt_s, du_s, dy_s = tiles
    for j in gl.static_range(SUB):
        h_s.index(j).store(h)
        h = _advance_back(h, A, dt_s, du_s, B_s, j_first + j, C_ROW, N_ROW)
    for j in gl.static_range(SUB):
        t_back = j_first + SUB - 1 - j
        s_dt, s_du = dt_s.index(t_back).load(C_ROW), du_s.index(t_back).load(C_ROW)
        s_dy = dy_s.index(t_back).load(C_ROW)
        s_B, s_C = B_s.index(t_back).load(N_ROW), C_s.index(t_back).load(N_ROW)
        before = h_s.index(SUB - 1 - j).load(S)
        dh = dh_after + s_dy[:, None] * s_C[None, :]
        dh_after = dh * gl.exp2(s_dt[:, None] * A)
        w = dh_after * before
        dA += w * s_dt[:, None]
        m_bc = (s_n < N) & (t_back < left)
        gl.store(p_dC + t_back * N, gl.sum(h * s_dy[:, None], 0), mask=m_bc)
        gl.store(p_dB + t_back * N, gl.sum(dh * s_du[:, None], 0), mask=m_bc)
        dt_s.index(t_back).store(gl.sum(w * A, 1))
        du_s.index(t_back).store(gl.sum(dh * s_B[None, :], 1))
        if dz_ptr is not None:
            dy_s.index(t_back).store(gl.sum(h * s_C[None, :], 1))
        h = before
    return dh_after, dA


@gluon.jit
def _write_chunk(
    inputs, rows_of, grads, tiles, b_bias, b_D, dD, dbias, first, left, o_t, o_d, m_d,
    D: gl.constexpr, T: gl.constexpr, SUB: gl.constexpr, BD: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """du, ddelta and dz of T tokens; adds to dD and dbias."""
    u_ptr, delta_ptr, dy_ptr, z_ptr = inputs
    u_row, delta_row, dy_row, z_row = rows_of
    du_ptr, ddelta_ptr, dz_ptr = grads
    dt_s, du_s, dy_s = tiles
    TILE: gl.constexpr = dD.type.layout
    for j in gl.static_range(T // SUB):
        at, tail = first + j * SUB, left - j * SUB
        m = (o_t < tail)[:, None] & m_d[None, :]
        u = _load_wide(u_ptr + at * u_row, u_row, o_t, tail, o_d, m_d)
        x = _load_wide(delta_ptr + at * delta_row, delta_row, o_t, tail, o_d, m_d)
        x += b_bias[None, :]
        dout = _load_wide(dy_ptr + at * dy_row, dy_row, o_t, tail, o_d, m_d)
        dy = dout
        o = (at + o_t[:, None]) * D + o_d[None, :]
        if z_ptr is not None:
            z = _load_wide(z_ptr + at * z_row, z_row, o_t, tail, o_d, m_d)
            gate = sigmoid(z)
            dy = dout * z * gate
            y = as_tile(dy_s, T, BD).slice(j * SUB, SUB).load(TILE) + b_D[None, :] * u
            _store(dz_ptr, o, dout * y * gate * (1.0 + z * (1.0 - gate)), m)
        dx = as_tile(du_s, T, BD).slice(j * SUB, SUB).load(TILE)
        ddelta = u * dx + as_tile(dt_s, T, BD).slice(j * SUB, SUB).load(TILE) * LN2
        if SOFTPLUS:
            ddelta = ddelta * sigmoid(x)
        ddelta = gl.where(m, ddelta, 0.0)
        _store(du_ptr, o, step_size(x, m, SOFTPLUS) * dx + b_D[None, :] * dy, m)
        _store(ddelta_ptr, o, ddelta, m)
        dD += dy * u
        dbias += ddelta
    return dD, dbias


@gluon.jit(do_not_specialize=["total", "blocks", "sequences", "programs", "rows"])
def selective_scan_backward_sm90_kernel(
    u_ptr,  # [tokens, D], a row each u_row
    delta_ptr,
    A_ptr,  # [N, D], float32
    B_ptr,  # [tokens, G, N], a row each B_row
    C_ptr,
    D_ptr,  # [D]
    z_ptr,
    bias_ptr,  # [D]
    s_in_ptr,  # [S, D, N]
    states_ptr,  # [tokens // T, N, D], float32
    dy_ptr,  # [tokens, D], a row each dy_row
    dfinal_ptr,  # [S, D, N]
    du_ptr,  # [tokens, D]
    ddelta_ptr, dz_ptr,
    dA_ptr,  # [programs, N, D], float32
    dB_ptr,  # [blocks, tokens, N], float32
    dC_ptr,
    dD_ptr,  # [programs, D], float32
    dbias_ptr,
    ds_in_ptr,  # [S, D, N]
    cu_ptr,
    total,  # tokens of a row of the batch
    rows,  # tokens of all sequences
    blocks, sequences, programs, u_row, delta_row, z_row, B_row, C_row, dy_row,
    D: gl.constexpr, N: gl.constexpr, G: gl.constexpr, SOFTPLUS: gl.constexpr, T: gl.constexpr,
    SUB: gl.constexpr, NP: gl.constexpr, CHANNELS: gl.constexpr, LANES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """grid (blocks programs), blocks = G ceil(D / G / BD)"""
    BD: gl.constexpr = CHANNELS * 32 // LANES * WARPS
    NB: gl.constexpr = (D // G + BD - 1) // BD
    S: gl.constexpr = state_layout(NP, CHANNELS, LANES, WARPS)
    C_ROW: gl.constexpr = gl.SliceLayout(1, S)
    N_ROW: gl.constexpr = gl.SliceLayout(0, S)
    TILE: gl.constexpr = tile_layout(BD, WARPS)
    OF_N: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    by_channels: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    i_b, i_p = gl.program_id(0) % blocks, gl.program_id(0) // blocks
    i_g, first_d = i_b // NB, (i_b % NB) * BD
    # channels as the states have them, and as the tiles
    s_c, o_c = (
        first_d + gl.arange(0, BD, C_ROW),
        first_d + gl.arange(0, BD, gl.SliceLayout(0, TILE)),
    )
    s_d, o_d = i_g * (D // G) + s_c, i_g * (D // G) + o_c
    m_d = o_c < D // G
    s_n = gl.arange(0, NP, N_ROW)
    o_n, o_bt = gl.arange(0, NP, gl.SliceLayout(0, OF_N)), gl.arange(0, T, gl.SliceLayout(1, OF_N))
    o_t = gl.arange(0, SUB, gl.SliceLayout(1, TILE))
    m_n = o_n < N
    m_s = (s_c < D // G)[:, None] & (s_n < N)[None, :]
    o_h = s_n[None, :] * D + s_d[:, None]
    A = gl.load(A_ptr + o_h, mask=m_s, other=0.0) * LOG2E
    b_bias = gl.zeros([BD], gl.float32, gl.SliceLayout(0, TILE))
    b_D = b_bias
    if bias_ptr is not None:
        b_bias += load_vector(bias_ptr, o_d, m_d)
    if D_ptr is not None:
        b_D += load_vector(D_ptr, o_d, m_d)
    # dt, and in its place sum_n A w; dt u, and sum_n dh B; dy, and sum_n C h
    dt_s, du_s, dy_s = alloc_rows(T, BD), alloc_rows(T, BD), alloc_rows(T, BD)
    B_s, C_s = alloc_rows(T, NP), alloc_rows(T, NP)
    h_s = gl.allocate_shared_memory(gl.float32, [SUB, BD, NP], by_channels)
    inputs, tiles = (u_ptr, delta_ptr, dy_ptr, z_ptr), (dt_s, du_s, dy_s)
    rows_of = u_row, delta_row, dy_row, z_row
    dA = gl.zeros([BD, NP], gl.float32, S)
    dD, dbias = gl.zeros([SUB, BD], gl.float32, TILE), gl.zeros([SUB, BD], gl.float32, TILE)
    for i_n in range(i_p, sequences, programs):
        begin, tokens = sequence(cu_ptr, i_n, total)
        o_s = (s_d.to(gl.int64) + i_n * D)[:, None] * N + s_n[None, :]
        # a_{t+1} dh_{t+1}
        dh_after = gl.zeros([BD, NP], gl.float32, S)
        if dfinal_ptr is not None:
            dh_after += gl.load(dfinal_ptr + o_s, mask=m_s, other=0.0).to(gl.float32)
        chunks = gl.cdiv(tokens, T)
        for i in range(chunks):
            i_c = chunks - 1 - i
            first, left = begin + i_c * T, tokens - i_c * T
            gl.thread_barrier()
            _load_chunk(
                inputs, rows_of, tiles, b_bias, first, left, o_t, o_d, m_d, T, SUB, BD, SOFTPLUS
            )
            p_B, p_C = B_ptr + first * B_row + i_g * N, C_ptr + first * C_row + i_g * N
            as_tile(B_s, T, NP).store(_load_wide(p_B, B_row, o_bt, left, o_n, m_n))
            as_tile(C_s, T, NP).store(_load_wide(p_C, C_row, o_bt, left, o_n, m_n))
            gl.thread_barrier()
            p_h = states_ptr + (begin // T + i_c - 1) * (N * D) + o_h
            o_bc = ((i_b % NB + i_g * NB).to(gl.int64) * rows + first) * N + s_n
            for k in range(T // SUB):
                j_first = T - SUB - k * SUB
                h = gl.load(p_h, mask=m_s & (i_c > 0), other=0.0)
                if s_in_ptr is not None:
                    h += gl.load(s_in_ptr + o_s, mask=m_s & (i_c == 0), other=0.0).to(gl.float32)
                for t in range(0, j_first, 4):
                    for j in gl.static_range(4):
                        h = _advance_back(h, A, dt_s, du_s, B_s, t + j, C_ROW, N_ROW)
                gl.thread_barrier()
                dh_after, dA = _back_over_tokens(
                    h, dh_after, dA, A, tiles, B_s, C_s, h_s, dC_ptr + o_bc, dB_ptr + o_bc, dz_ptr,
                    j_first, left, s_n, N, SUB,
                )  # fmt: skip
            gl.thread_barrier()
            dD, dbias = _write_chunk(
                inputs, rows_of, (du_ptr, ddelta_ptr, dz_ptr), tiles, b_bias, b_D, dD, dbias,
                first, left, o_t, o_d, m_d, D, T, SUB, BD, SOFTPLUS,
            )  # fmt: skip
        if ds_in_ptr is not None:
            _store(ds_in_ptr, o_s, dh_after, m_s)
    gl.store(dA_ptr + i_p.to(gl.int64) * (N * D) + o_h, dA, mask=m_s)
    if dD_ptr is not None:
        gl.store(dD_ptr + i_p * D + o_d, gl.sum(dD, 0), mask=m_d)
    if dbias_ptr is not None:
        gl.store(dbias_ptr + i_p * D + o_d, gl.sum(dbias, 0), mask=m_d)
