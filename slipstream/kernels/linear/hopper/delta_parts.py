"""What the walks of the delta rule on sm_90 share: where a program is and what it finds there."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from slipstream.kernels.gluon import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from slipstream.kernels.linear.hopper.parts import place_in


@gluon.jit
def opening(
    cu_ptr, T, N, HV, segment, TILES: gl.constexpr, BV: gl.constexpr, C: gl.constexpr,
    PACKED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Of a program that walks one of TILES tiles of BV columns of a head: the first column, the
    head and the slot; first token and tokens of the slot, its chunks, and where the first of them
    is among those of all heads; the sequence, the segment's number in it, whether it is the last.
    With BV 1 the first column is the tile's number.
    """
    pid = gl.program_id(0)
    i_v = (pid % TILES) * BV
    i_h = (pid // TILES) % HV
    slot = pid // TILES // HV
    row, length, first, i_n, i_s, last = place_in(cu_ptr, slot, T, N, segment, C, PACKED, SPLIT)
    n = gl.cdiv(length, C)
    chunk = gl.where(n > 0, first, 0) * HV + i_h
    return i_v, i_h, slot, row, length, n, chunk, i_n, i_s, last


@gluon.jit
def rows_of(rows_ptr, chunk, HV, C: gl.constexpr, HAS_GATE: gl.constexpr):
    """beta and G of a chunk of one head, and how far it is to the next chunk's."""
    ROWS: gl.constexpr = 1 + HAS_GATE
    return rows_ptr + chunk.to(gl.int64) * (ROWS * C), HV * (ROWS * C)


@gluon.jit
def state_of(slot, i_h, HV, K: gl.constexpr, V: gl.constexpr):
    """Where a head's state begins, of [slots, HV, K, V]."""
    return (slot * gl.full([], 1, gl.int64) * HV + i_h) * (K * V)


@gluon.jit
def window_of(
    windows_ptr, slot, i_h, HV, length, n, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr
):
    """Of a packed sequence of n chunks in a span (delta_windows.py): its first chunk there, its
    tokens and chunks, where S of the first is kept; and where the head's state at a border begins,
    whether the sequence comes from the span before and goes on to the next.
    """
    first = gl.load(windows_ptr + slot * 4)
    past = gl.load(windows_ptr + slot * 4 + 1)
    kept = gl.load(windows_ptr + slot * 4 + 2)
    o_mark = state_of(gl.load(windows_ptr + slot * 4 + 3), i_h, HV, K, V)
    tokens = gl.minimum(length - first * C, (past - first) * C)
    return first, tokens, past - first, kept, o_mark, first > 0, past < n


@gluon.jit
def met(ends, b_s, o_k, o_v, V: gl.constexpr, HAS_S_IN: gl.constexpr, CUT: gl.constexpr):
    """The state that a walk begins with, as rows o_v and columns o_k, b_s where there is none.

    CUT: ends has states at the borders of a span too, as window_of says.
    """
    if CUT:
        s_in_ptr, _, o_state, m_in_ptr, _, o_mark, before, _ = ends
        if before:
            o_in = o_mark + o_k[None, :] * V + o_v[:, None]
            b_s = gl.load(m_in_ptr + o_in)
        elif HAS_S_IN:
            o_in = o_state + o_k[None, :] * V + o_v[:, None]
            b_s = gl.load(s_in_ptr + o_in).to(gl.float32)
    elif HAS_S_IN:
        s_in_ptr, _, o_state = ends
        o_in = o_state + o_k[None, :] * V + o_v[:, None]
        b_s = gl.load(s_in_ptr + o_in).to(gl.float32)
    return b_s


@gluon.jit
def hand_on(ends, b_s, none, o_k, o_v, V: gl.constexpr, HAS_S_OUT: gl.constexpr, CUT: gl.constexpr):
    """The state that a walk ends with, to where it is wanted.

    none: 0, which no compiler knows: the loop would keep what it has in common with o_in.
    """
    if CUT:
        _, s_out_ptr, o_state, _, m_out_ptr, o_mark, _, after = ends
        if after:
            o_out = o_mark + none + o_k[None, :] * V + o_v[:, None]
            gl.store(m_out_ptr + o_out, b_s)
        elif HAS_S_OUT:
            o_out = o_state + none + o_k[None, :] * V + o_v[:, None]
            gl.store(s_out_ptr + o_out, b_s.to(s_out_ptr.dtype.element_ty))
    elif HAS_S_OUT:
        _, s_out_ptr, o_state = ends
        o_out = o_state + none + o_k[None, :] * V + o_v[:, None]
        gl.store(s_out_ptr + o_out, b_s.to(s_out_ptr.dtype.element_ty))


@gluon.jit
def stages(
    k_desc, v_desc, r_desc, TILES: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr,
    BV: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    """Shared memory for ST chunks of k, TILES of BV columns of v, R, and ROWS numbers a token."""
    dtype: gl.constexpr = k_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ks = gl.allocate_shared_memory(dtype, [ST, C, K], k_desc.layout)
    vs = gl.allocate_shared_memory(dtype, [TILES * ST, C, BV], v_desc.layout)
    rs = gl.allocate_shared_memory(dtype, [ST, C, C], r_desc.layout)
    gs = gl.allocate_shared_memory(gl.float32, [ST, ROWS * C], plain)
    return ks, vs, rs, gs


@gluon.jit
def scores_of(
    qs, ks, gs, q_empty, empty, b, s, seen, al: gl.constexpr, ol: gl.constexpr,
    C: gl.constexpr, HAS_GATE: gl.constexpr, STARTS: gl.constexpr,
):  # fmt: skip
    """Of a chunk tril(q k^T decay) beta as a left operand, q, and if HAS_GATE exp(G), which with
    STARTS gs has already, negated. Leaves q's buffer b and, as one of its readers, stage s.
    """
    b_q = qs.index(b).load(gl.DotOperandLayout(0, al, 2))
    zero = gl.zeros([C, C], gl.float32, al)
    b_a = warpgroup_mma(b_q, ks.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
    b_beta = gs.index(s).slice(0, C).load(gl.SliceLayout(0, al))
    b_start = 1.0
    if HAS_GATE:
        sums = gs.index(s).slice(C, C)
        G_i = sums.load(gl.SliceLayout(1, al))
        G_j = sums.load(gl.SliceLayout(0, al))
        if STARTS:
            b_start = gs.index(s).slice(2 * C, C).load(gl.SliceLayout(1, ol))
        else:
            b_start = gl.exp2(sums.load(gl.SliceLayout(1, ol)))
    b_a = warpgroup_mma_wait(0, deps=(b_a,))
    mbarrier.arrive(q_empty.index(b), count=1)
    mbarrier.arrive(empty.index(s), count=1)
    if HAS_GATE:
        between = G_i[:, None] - G_j[None, :]
        b_a = b_a * gl.exp2(gl.where(seen, between, float("-inf")))
    b_a = gl.where(seen, b_a * b_beta[None, :], 0.0)
    return gl.convert_layout(b_a.to(ks.dtype), gl.DotOperandLayout(0, ol, 2)), b_q, b_start
