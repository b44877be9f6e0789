"""Shared by the forward and the backward kernel: layouts, loads and the functions of a token.

A thread keeps the states of CHANNELS channels, N / LANES numbers each, in registers, and goes from
token to token. What it needs of a token comes from shared memory, where a tile of tokens was put
once, softplus and silu taken by as many threads as there are. So a token takes an exponential and
four instructions for a number of a state, and hardly anything else.
"""

from slipstream.kernels.primitives.sm90 import gl, gluon

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


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
