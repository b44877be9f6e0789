"""Decays per channel, or free a and b, on sm_90: what needs no state, but of strong chunks.

As triton/dplr/wy.py, whose results these are. Decays are relative to the middle of the chunk: with
G_i the sum of a channel's gates in base 2 from the chunk's start to token i, and m that of its
first half, rounded down,

    reads exp2(G_i - n)    writes exp2(n - G_j)    n = m + APART in the first half, then m - APART

A pair of one half has its decay, and a read of the second half with a write of the first one
2^(2 APART) times its decay, which `together` takes off. So all of them fit bf16, and scores
float32, unless a half decays by more than 2^(-2 LIMIT), and a chunk may decay by twice that. m
depends on later gates, but no bit of a result does: G is a multiple of 2^-12 and n a whole number,
so that n moves exponents alone. float16 has no room for it: n is 0 there, and a half decays by no
more than 2^-LIMIT. Other chunks are strong, and left to intra_safe.py.

    A = q~ b~^T, a~ b~^T, q~ k~^T, a~ k~^T        R = (I + beta ab)^-1 or (I - ab)^-1
    W = -R beta (k exp(G)) or R (a exp(G_prev))   U^T = v^T (R beta)^T or v^T (R ak)^T

A chunk is a program of 4 warps that takes 64 channels at a time. Operands of products are tiles
[C, 64] in shared memory, which later hold those of the inverse (common/tril_inverse.py) and v:
three programs fit a multiprocessor, and one loads while another computes.
"""

from slipstream.kernels.linear.sm90.common.device import (
    alloc_mbarriers,
    at_least,
    exp2_by_parts,
    exp2_or_least,
    invalidate_mbarriers,
    locate_sequence,
    zero_tail_rows,
)
from slipstream.kernels.linear.sm90.dplr.solve_tril import (
    put,
    ready,
    scores,
    solve,
    together,
)
from slipstream.kernels.primitives.gluon_compat import (
    copy_in,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
)

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-256.0)
FAR = gl.constexpr(3072.0)  # float32 beside it are multiples of 2^-12


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def rounded(b):
    """To multiples of 2^-12, of which sums and differences are exact up to 2^12."""
    return (b + FAR) - FAR


@gluon.jit
def sums_of_quarters(b_g):
    """Of gates in base 2 [4, 16, 64], quarters of a chunk: their sums from the quarter's start,
    these without a token's own gate, and of quarters [1, 4, 64], known to all threads.

    A thread has 16 tokens of two channels, and adds their gates up.
    """
    four: gl.constexpr = gl.BlockedLayout([1, 4, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    b_e = gl.associative_scan(b_g, 1, add)
    b_all = gl.convert_layout(gl.sum(b_g, 1), gl.SliceLayout(0, four))[None, :, :]
    return rounded(b_e), rounded(b_e - b_g), rounded(b_all)


@gluon.jit
def sum_before(b_all, quarter, three: gl.constexpr):
    """The sum of quarters before `quarter` [4, 1, 1], in the layout of tokens [4, 1, 64]."""
    four: gl.constexpr = b_all.type.layout
    other = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, four)))[None, :, None]
    b_sum = gl.sum(gl.where(other < quarter, b_all, 0.0), 1)
    return gl.convert_layout(b_sum[:, None, :], three)


@gluon.jit
def sum_from(b_all, quarter, three: gl.constexpr):
    """The sum of `quarter` and those after it, as sum_before."""
    four: gl.constexpr = b_all.type.layout
    other = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, four)))[None, :, None]
    b_sum = gl.sum(gl.where(other < quarter, 0.0, b_all), 1)
    return gl.convert_layout(b_sum[:, None, :], three)


@gluon.jit
def quarters(layout: gl.constexpr):
    return gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]


@gluon.jit
def gates_of(b_g, APART: gl.constexpr):
    """Of gates in base 2 [4, 16, 64]: G - n, that without a token's own gate; n [4, 1, 64]; m, the
    sums of both halves [1, 1, 64]."""
    three: gl.constexpr = b_g.type.layout
    b_e, b_before, b_all = sums_of_quarters(b_g)
    four: gl.constexpr = b_all.type.layout
    b_base = sum_before(b_all, quarters(four), three)
    other = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, four)))[None, :, None]
    b_early = gl.sum(gl.where(other < 2, b_all, 0.0), 1)
    b_late = gl.sum(gl.where(other < 2, 0.0, b_all), 1)
    b_early = gl.convert_layout(b_early[:, None, :], three)
    b_late = gl.convert_layout(b_late[:, None, :], three)
    b_middle = 0.0 * b_early
    b_n = 0.0 * b_base
    if APART > 0:
        b_middle = gl.floor(b_early)
        b_n = b_middle + gl.where(quarters(three) < 2, APART, -APART)
    b_off = b_n - b_base
    return b_e - b_off, b_before - b_off, b_n, b_middle, b_early, b_late


@gluon.jit
def decay_operands(
    b_e, b_before, q, a, b, k, flat: gl.constexpr, DELTA: gl.constexpr, GATED: gl.constexpr
):
    """Operands of products of 64 channels in place; those of q, b and k besides in float32.

    GATED: k has how much each channel erases, and may be b.
    """
    b_a = a.load(flat)
    b_q = q.load(flat)
    b_before = gl.convert_layout(gl.reshape(b_before, [64, 64]), flat)
    b_e = gl.convert_layout(gl.reshape(b_e, [64, 64]), flat)
    b_write = exp2_by_parts(-b_e)
    b_read = exp2_by_parts(b_e)
    if DELTA:
        b_b = b_a * b_write
        if GATED:
            b_a = b_a.to(gl.float32) * k.load(flat).to(gl.float32)
        b_a = b_a * b_read
    else:
        b_a = b_a * exp2_by_parts(b_before)
    a.store(b_a.to(a.dtype))
    b_q = b_q * b_read
    q.store(b_q.to(q.dtype))
    if not DELTA:
        b_b = b.load(flat) * b_write
    b.store(b_b.to(b.dtype))
    b_k = b_b
    if not DELTA:
        b_k = k.load(flat) * b_write
        k.store(b_k.to(k.dtype))
    return b_q, b_b, b_k


@gluon.jit
def of_tokens(b, b_g, flat: gl.constexpr):
    """b [4, 1, 64] for each token [64, 64]."""
    b, _ = gl.broadcast(b, b_g)
    return gl.convert_layout(gl.reshape(b, [64, 64]), flat)


@gluon.jit
def decay(
    b_g, strongest, q, a, b, k, middle, q_out_ptr, b_out_ptr, k_out_ptr, p_total, o_w, scale,
    flat: gl.constexpr, LIMIT: gl.constexpr, APART: gl.constexpr, DELTA: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """64 channels: the chunk's decay, and unless it is strong operands of products in place, q~,
    b^, k^ and the middle; the largest decay of a half, or strongest, that of channels before."""
    line: gl.constexpr = gl.SliceLayout(0, flat)
    b_e, b_before, b_n, b_middle, b_early, b_late = gates_of(b_g, APART)
    strongest = gl.maximum(strongest, gl.max(-gl.minimum(b_early, b_late)))
    if APART > 0:  # blocks.py cuts what is further below 0 than half a half
        strongest = gl.maximum(strongest, gl.max(-2.0 * b_g))
    b_total = b_early + b_late
    gl.store(p_total, gl.exp2(gl.convert_layout(gl.reshape(b_total, [64]), line)))
    if strongest <= strong_from(LIMIT, APART):
        middle.store(gl.reshape(b_middle, [64]))
        b_q, b_b, b_k = decay_operands(b_e, b_before, q, a, b, k, flat, DELTA, GATED)
        b_end = of_tokens(gl.exp2(b_total - b_n), b_g, flat)
        b_start = gl.where(b_n < -126, 0.0, exp2_or_least(b_n))
        b_q = b_q * of_tokens(b_start * scale, b_g, flat)
        gl.store(q_out_ptr + o_w, b_q.to(q.dtype))
        gl.store(b_out_ptr + o_w, (b_b * b_end).to(b.dtype))
        if not DELTA:
            gl.store(k_out_ptr + o_w, (b_k * b_end).to(b.dtype))
    return strongest


@gluon.jit
def strong_from(LIMIT: gl.constexpr, APART: gl.constexpr):
    """What halves of a chunk that is not strong decay by at most."""
    return 2 * LIMIT if APART > 0 else LIMIT


@gluon.jit(do_not_specialize=["scale", "keep", "T", "N", "HV", "H"])
def dplr_wy_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, 64]
    k_desc,
    a_desc,  # none for delta
    b_desc,  # [tokens, HV * K] by [C, 64], how much each channel erases, gated delta
    v_ptr,  # [tokens, HV, V]
    write_ptr,  # [tokens, HV, V], gated delta
    g_ptr,  # [tokens, HV, K] or [tokens, HV]
    beta_ptr,  # [tokens, HV], delta; none for gated delta
    q_out_ptr,  # [slots, HV, C, K]: scale q exp(G)
    w_out_ptr,  # W
    b_out_ptr,  # b exp(G_C - G)
    k_out_ptr,  # k exp(G_C - G), dplr
    u_out_ptr,  # [slots, HV, V, C]: U, float32
    total_ptr,  # [slots, HV, K]: exp(G_C)
    qb_ptr,  # [slots, HV, C, C], scaled
    qk_ptr,  # scaled, dplr
    ak_ptr,  # dplr, if keep
    r_ptr,  # if keep
    strong_ptr,  # [slots, HV]: 1 if a half decays by more than LIMIT, 2 if the chunk is strong
    cu_ptr,  # [N + 1]
    scale,
    keep,
    T,
    N,
    HV,
    H,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    DELTA: gl.constexpr,
    HAS_GATE: gl.constexpr,
    CHANNEL: gl.constexpr,
    PACKED: gl.constexpr,
    LIMIT: gl.constexpr,
    APART: gl.constexpr,
):
    """grid (slots * HV,), 4 warps."""
    NK: gl.constexpr = K // 64
    GK: gl.constexpr = K**CHANNEL
    GATED: gl.constexpr = DELTA and beta_ptr is None
    OPERANDS: gl.constexpr = (2 if DELTA else 4) + GATED
    flat: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    three: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    act: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], act)
    line: gl.constexpr = gl.SliceLayout(0, flat)
    # the compiler gives memory on to tiles that come later
    qs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    bs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    reads = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    keys = reads
    if GATED:
        keys = bs
    if not DELTA:
        keys = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    middles = reads
    if HAS_GATE:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        middles = gl.allocate_shared_memory(gl.float32, [NK, 64], plain)
    pid = gl.program_id(0)
    i_h = pid % HV
    row, num_rows, _ = locate_sequence(cu_ptr, pid // HV, T, N, C, C, PACKED, True)
    i_chunk_head = pid.to(gl.int64)
    o_t = 16 * gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, three)))[:, None, None]
    o_t += gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, three)))[None, :, None]
    o_n = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, three)))[None, None, :]
    o_f = gl.arange(0, 64, gl.SliceLayout(1, flat))[:, None] * K
    o_line = gl.arange(0, 64, line)
    o_f += o_line[None, :]
    token = row.to(gl.int64) * HV + i_h
    full = alloc_mbarriers(1, NK)
    ready()
    col = i_h // (HV // H) * K
    for n in gl.static_range(NK):
        mbarrier.expect(full.index(n), OPERANDS * q_desc.block_type.nbytes)
        copy_in(q_desc, [row, col + n * 64], full.index(n), qs.index(n))
        copy_in((k_desc if DELTA else a_desc), [row, col + n * 64], full.index(n), reads.index(n))
        if GATED:
            copy_in(b_desc, [row, i_h * K + n * 64], full.index(n), bs.index(n))
        if not DELTA:
            copy_in(b_desc, [row, col + n * 64], full.index(n), bs.index(n))
            copy_in(k_desc, [row, col + n * 64], full.index(n), keys.index(n))
    strongest = -1.0
    for n in range(NK):
        o_w = i_chunk_head * (C * K) + n * 64 + o_f
        if HAS_GATE:
            p_g = g_ptr + token * GK + o_t * (HV * GK) + (n * 64 + o_n) * CHANNEL
            b_g = gl.load(p_g, mask=o_t < num_rows, other=0.0).to(gl.float32)
        mbarrier.wait(full.index(n), 0)
        if num_rows < C:
            zero_tail_rows(qs.index(n), num_rows, C, 64)
            zero_tail_rows(reads.index(n), num_rows, C, 64)
            if GATED:
                zero_tail_rows(bs.index(n), num_rows, C, 64)
            if not DELTA:
                zero_tail_rows(bs.index(n), num_rows, C, 64)
                zero_tail_rows(keys.index(n), num_rows, C, 64)
            gl.thread_barrier()
        if HAS_GATE:
            b_g = at_least(b_g * LOG2E, LOWEST)
            p_total = total_ptr + i_chunk_head * K + n * 64 + o_line
            strongest = decay(
                b_g, strongest, qs.index(n), reads.index(n), bs.index(n), keys.index(n),
                middles.index(n), q_out_ptr, b_out_ptr, k_out_ptr, p_total, o_w, scale, flat,
                LIMIT, APART, DELTA, GATED,
            )  # fmt: skip
        else:
            gl.store(q_out_ptr + o_w, (qs.index(n).load(flat) * scale).to(act))
            if DELTA:
                b_b = reads.index(n).load(flat)
                bs.index(n).store(b_b)
            else:
                b_b = bs.index(n).load(flat)
                gl.store(k_out_ptr + o_w, keys.index(n).load(flat))
            gl.store(b_out_ptr + o_w, b_b)
    invalidate_mbarriers(full)
    if HAS_GATE:
        too_strong = strongest > strong_from(LIMIT, APART)
        strength = gl.where(too_strong, 2, gl.where(strongest > LIMIT, 1, 0))
        gl.store(strong_ptr + i_chunk_head, strength)
        if too_strong:
            return
    o_i = gl.arange(0, 64, gl.SliceLayout(1, al))
    o_j = gl.arange(0, 64, gl.SliceLayout(0, al))
    seen = o_i[:, None] >= o_j[None, :]
    past = o_i[:, None] > o_j[None, :]
    zero = gl.zeros([64, 64], gl.float32, al)
    i_a = i_chunk_head * (C * C)
    if DELTA and not GATED:
        p_beta = beta_ptr + token
        b_beta = gl.load(p_beta + o_i * HV, mask=o_i < num_rows, other=0.0).to(gl.float32)
    ready()
    b_qb = together(scores(qs, bs, NK, zero), 0, APART)
    put(qb_ptr + i_a, gl.where(seen, b_qb * scale, 0.0).to(act), C, rows)
    if not DELTA:
        b_qk = together(scores(qs, keys, NK, zero), 0, APART)
        put(qk_ptr + i_a, gl.where(seen, b_qk * scale, 0.0).to(act), C, rows)
        b_ak = gl.where(past, together(scores(reads, keys, NK, zero), 0, APART), 0.0).to(act)
        aks = gl.allocate_shared_memory(act, [64, 64], tile)
        aks.store(b_ak)
        fence_async_shared()
        if keep != 0:
            put(ak_ptr + i_a, b_ak, C, rows)
    b_a = gl.where(past, together(scores(reads, bs, NK, zero), 0, APART), 0.0)
    if DELTA and not GATED:
        b_a = b_a * b_beta[:, None]
    if not DELTA:
        b_a = -b_a
        # again: it would be on the stack since the gates
        token = row.to(gl.int64) * HV + (pid + (T >> 31)) % HV
    gl.thread_barrier()
    solve(
        b_a, None if DELTA else aks, reads, middles,
        beta_ptr + token if DELTA and not GATED else None, v_ptr + token * V,
        write_ptr + token * V if GATED else None, w_out_ptr + i_chunk_head * (C * K),
        u_out_ptr + i_chunk_head * (V * C), r_ptr + i_a, keep, num_rows, HV, K, V, DELTA, APART,
    )  # fmt: skip
