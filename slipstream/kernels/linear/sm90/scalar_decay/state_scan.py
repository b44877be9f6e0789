"""The states before the segments of sequences, by the arithmetic of chunk_fwd.py's scan: bit for
bit what that has there.

    S <- exp(G_C) S + (x exp(G_C - G))^T w        chunk after chunk, S [X, D]

is all of a scan that has to go in order. A program has HALF rows and BD columns of S, on which no
other entry depends, and makes no y: so it takes a chunk in a fraction of the time of chunk_fwd.py,
whose programs then begin at every segment at once. Segments (kernels/linear/segments.py) change no
bits therefore.

    load_partition, 1 warp    gate_partition, 1 warp    state_partition, 4 warps
      w, x -- full ---------------------------------->    S
                                factors -- g_full --->
      <-- empty                 <-- g_empty               arrives at both

    buffers                       stages  arrivals a phase: full / empty
    w [C, BD], x [C, HALF]        ST      1 (TMA) / 1
    the factors                   2       1 / 1
"""

from collections import namedtuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.scalar_decay.chunk_fwd import HALF, add_up_gates, load_gates_of
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# shared memory and constants of a launch
Buffers = namedtuple("Buffers", "ws xs factors full empty g_full g_empty")
Constants = namedtuple("Constants", "D X BD C ST HAS_GATE HAS_S_IN HAS_S_OUT")


@gluon.jit
def load_partition(
    w_desc, x_desc, ws, xs, full, empty, row, n, w_col, x_col, C: gl.constexpr, ST: gl.constexpr
):  # fmt: skip
    nbytes: gl.constexpr = w_desc.block_type.nbytes + x_desc.block_type.nbytes
    for i in range(n):
        s = i % ST
        t = row + i * C
        mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
        mbarrier.expect(full.index(s), nbytes)
        sm90.copy_in(w_desc, [t, w_col], full.index(s), ws.index(s))
        sm90.copy_in(x_desc, [t, x_col], full.index(s), xs.index(s))


@gluon.jit
def gate_partition(
    factors, g_full, g_empty, p_g, stride_g, length, n, C: gl.constexpr, HAS_GATE: gl.constexpr
):
    """exp(G) and exp(G_C - G), as chunk_fwd.py's gates_of has them."""
    if HAS_GATE:
        o_c = gl.arange(0, C, gl.BlockedLayout([2], [32], [1], [0]))
        # those of four chunks are on their way, for they come from further than a chunk takes
        b_g = load_gates_of(p_g, stride_g, o_c, length)
        b_g1 = load_gates_of(p_g, stride_g, o_c + C, length)
        b_g2 = load_gates_of(p_g, stride_g, o_c + 2 * C, length)
        b_g3 = load_gates_of(p_g, stride_g, o_c + 3 * C, length)
        for i in range(n):
            a = i % 2
            b_g4 = load_gates_of(p_g, stride_g, o_c + (i + 4) * C, length)
            b_G, G_C = add_up_gates(b_g, o_c, C)
            b_g = b_g1
            b_g1 = b_g2
            b_g2 = b_g3
            b_g3 = b_g4
            mbarrier.wait(g_empty.index(a), ((i // 2) & 1) ^ 1)
            factors.index(2 * a).store(gl.exp2(b_G))
            factors.index(2 * a + 1).store(gl.exp2(G_C - b_G))
            sm90.fence_async_shared()
            mbarrier.arrive(g_full.index(a), count=1)


@gluon.jit
def load_x(buffers, i, length, c, sl: gl.constexpr, xa: gl.constexpr):
    """x^T exp(G_C - G) of chunk i, and exp(G_C) for each row of S; w of it is there then."""
    ws, xs, factors, full, _, g_full, _ = buffers
    s = i % c.ST
    a = i % 2
    num_rows = length - i * c.C
    mbarrier.wait(full.index(s), (i // c.ST) & 1)
    if num_rows < c.C:
        common.zero_tail_rows(ws.index(s), num_rows, c.C, c.BD)
        common.zero_tail_rows(xs.index(s), num_rows, c.C, HALF)
        sm90.fence_async_shared()
        gl.thread_barrier()
    b_x = xs.index(s).permute((1, 0)).load(xa)
    if c.HAS_GATE:
        mbarrier.wait(g_full.index(a), (i // 2) & 1)
        b_last = factors.index(2 * a).slice(c.C - 1, 1).load(gl.SliceLayout(1, sl))
        b_end = factors.index(2 * a + 1).load(gl.SliceLayout(0, xa))
        b_x = (b_x.to(gl.float32) * b_end[None, :]).to(xs.dtype)
    else:
        b_last = gl.zeros([1], gl.float32, gl.SliceLayout(1, sl))
    return b_x, b_last


@gluon.jit
def state_partition(
    buffers, s_in_ptr, s_out_ptr, p_states, o_s, size, every, length, n, i_x, i_d, c
):
    ws, _, _, _, empty, _, g_empty = buffers
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BD, 16])
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    o_x = i_x + gl.arange(0, HALF, gl.SliceLayout(1, sl))
    o_d = i_d + gl.arange(0, c.BD, gl.SliceLayout(0, sl))
    o_a = o_d[None, :] * c.X + o_x[:, None]
    if c.HAS_S_IN:
        b_s = gl.load(s_in_ptr + o_s + o_a).to(gl.float32)
    else:
        b_s = gl.zeros([HALF, c.BD], gl.float32, sl)
    p_states += o_a
    begin = 0
    if n > 0:
        b_x, b_last = load_x(buffers, 0, length, c, sl, xa)
        for i in range(n):
            if i == begin:
                gl.store(p_states, b_s)
                p_states += size
                begin += every
            if c.HAS_GATE:
                b_s *= b_last[:, None]
            b_s = warpgroup_mma(b_x, ws.index(i % c.ST), b_s, is_async=True)
            b_next = b_x
            if i + 1 < n:  # while that goes on
                b_next, b_last = load_x(buffers, i + 1, length, c, sl, xa)
            b_s, b_x = sm90.warpgroup_mma_wait(0, deps=(b_s, b_x))
            b_x = b_next
            mbarrier.arrive(empty.index(i % c.ST), count=1)
            if c.HAS_GATE:
                mbarrier.arrive(g_empty.index(i % 2), count=1)
    if c.HAS_S_OUT:
        gl.store(s_out_ptr + o_s + o_a, b_s.to(s_out_ptr.dtype.element_ty))


_SIZES = ["T", "N", "HV", "HR", "HX", "segment", "stride_gb", "stride_gt", "stride_gh"]


@gluon.jit(do_not_specialize=_SIZES)
def scalar_decay_state_scan_sm90_kernel(
    w_desc,  # [tokens, HR * D] by [C, BD]: k
    x_desc,  # [tokens, HX * X] by [C, HALF]: v
    g_ptr,  # [B, T, HV] by strides
    s_in_ptr,  # [N, HV, D, X]
    s_out_ptr,  # [N, HV, D, X]
    states_ptr,  # [segments, HV, D, X], before them; none of segments past a sequence's end
    cu_ptr,  # [N + 1]
    T, N, HV, HR, HX, segment, stride_gb, stride_gt, stride_gh,
    D: gl.constexpr, X: gl.constexpr, BD: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
    HAS_GATE: gl.constexpr, HAS_S_IN: gl.constexpr, HAS_S_OUT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """grid (X / HALF * D / BD * HV * N,), 4 warps: a tile of S of one head and sequence."""
    c: gl.constexpr = Constants(D, X, BD, C, ST, HAS_GATE, HAS_S_IN, HAS_S_OUT)
    NX: gl.constexpr = X // 64
    ND: gl.constexpr = D // BD
    pid = gl.program_id(0)
    i_x = pid % NX * HALF
    i_d = pid // NX % ND * BD
    i_h = pid // NX // ND % HV
    i_n = pid // NX // ND // HV
    row, length, _, _, _, _ = common.locate_segment(cu_ptr, i_n, T, N, T, C, PACKED, False)
    n = gl.cdiv(length, C)
    first = row // segment + i_n if PACKED else i_n * gl.cdiv(T, segment)
    dtype: gl.constexpr = x_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ws = gl.allocate_shared_memory(dtype, [ST, C, BD], w_desc.layout)
    xs = gl.allocate_shared_memory(dtype, [ST, C, HALF], x_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [4, C], plain)
    full = common.alloc_mbarriers(1, ST)
    empty = common.alloc_mbarriers(1, ST)
    # without gates these would be unused, and the compiler gives unused barriers' memory away
    g_full, g_empty = full, empty
    if HAS_GATE:
        g_full, g_empty = common.alloc_mbarriers(1, 2), common.alloc_mbarriers(1, 2)
    w_col = i_h // (HV // HR) * D + i_d
    x_col = i_h // (HV // HX) * X + i_x
    o_s = (i_n.to(gl.int64) * HV + i_h) * (D * X)
    size = HV.to(gl.int64) * (D * X)
    p_states = states_ptr + first.to(gl.int64) * size + i_h * (D * X)
    # what is not given: something else, for only the first part takes None
    p_in = s_in_ptr if HAS_S_IN else states_ptr
    p_out = s_out_ptr if HAS_S_OUT else states_ptr
    p_g = states_ptr
    if HAS_GATE:
        i_b = 0 if PACKED else i_n
        p_g = g_ptr + i_h.to(gl.int64) * stride_gh + stride_gb.to(gl.int64) * i_b
        p_g += (row - i_b * T).to(gl.int64) * stride_gt
    buffers = Buffers(ws, xs, factors, full, empty, g_full, g_empty)
    gl.warp_specialize(
        [
            (state_partition, (
                buffers, p_in, p_out, p_states, o_s, size, segment // C, length, n, i_x, i_d, c)),
            (gate_partition, (
                factors, g_full, g_empty, p_g, stride_gt, length, n, C, HAS_GATE)),
            (load_partition, (
                w_desc, x_desc, ws, xs, full, empty, row, n, w_col, x_col, C, ST)),
        ],
        [1, 1],
        [40, 24],
    )  # fmt: skip
