"""Decays per channel, or free a and b, on sm_90: what needs no state, but of strong chunks.

As triton/dplr/wy.py, whose results these are. Decays are relative to the middle of the chunk: with
G_i the sum of a channel's gates in base 2 from the chunk's start to token i, and m that of its
first half, rounded down,

    reads exp2(G_i - n)    writes exp2(n - G_j)    n = m + APART in the first half, then m - APART

A pair of one half has its decay, and a read of the second half with a write of the first one
2^(2 APART) times its decay, which `together` takes off. So all of them fit bf16, and scores
float32, unless a half decays by more than 2^(-2 LIMIT), and a chunk may decay by twice that. m
depends on later gates, but no bit of a result does: G is a multiple of 2^-12 and n a whole number,
so that n moves exponents alone.

Where a half decays further, but no quarter by more than 2^(-2 LIMIT), the operands of each half are
relative to its own middle and its two quarters, as a chunk's are to its middle and two halves.
Pairs of different halves take a second product of the same operands, moved to n = m by whole powers
of 2 (to_middle). The first 64 channels with such a half decide for the chunk, and channels before
them are moved (to_quarters).

Operands reach down to 2^-106, so that inputs from 2^-20 on stay normal numbers of bf16: digits that
others lost would depend on n. A decay counts as more by what the smallest input but 0 is below
that, down to 2^-70 (excess_of).

float16 has no room for either: n is 0 there, and a half decays by no more than 2^-LIMIT. Other
chunks are strong, and left to intra_safe.py.

    A = q~ b~^T, a~ b~^T, q~ k~^T, a~ k~^T        R = (I + beta ab)^-1 or (I - ab)^-1
    W = -R beta (k exp(G)) or R (a exp(G_prev))   U^T = v^T (R beta)^T or v^T (R ak)^T

A chunk is a program of 4 warps that takes 64 channels at a time. Operands of products are tiles
[C, 64] in shared memory, which later hold those of the inverse (../common.py) and v:
three programs fit a multiprocessor, and one loads while another computes.
"""

from collections import namedtuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.dplr import gate_sums, solve_tril
from slipstream.kernels.linear.sm90.dplr.by_quarters import (
    Scores,
    Tiles,
    anchors_of,
    load_beta,
    of_tokens,
    quarters,
    takes_quarters,
    tiles_at,
    to_quarters,
    with_halves,
)
from slipstream.kernels.linear.triton.dplr.gate_sums import LOWEST_GATE
from slipstream.kernels.primitives import device, sm90
from slipstream.kernels.primitives.sm90 import copy_in, gl, gluon, mbarrier

# constants of a launch, for device functions
Constants = namedtuple("Constants", "K V flat three rows LIMIT APART QUARTERS DELTA GATED")
# where the chunk's q~, b^ and k^ go
Outs = namedtuple("Outs", "q b k")

SMALL = gl.constexpr(20.0)  # inputs of no less than 2^-SMALL keep their digits at any decay
SMALLEST = gl.constexpr(70.0)


@gluon.jit
def made_again(o_t, n, DELTA: gl.constexpr):
    """o_t, computed again for each n if not DELTA: kept across the loop, it goes to the stack."""
    if not DELTA:
        o_t += n >> 31
    return o_t


@gluon.jit
def smaller_of(b_least, b):
    """The lesser of b_least and |b| in float32, of which 0 counts as 1."""
    b = b.to(gl.float32)
    b = gl.where(b < 0.0, -b, b)
    return gl.minimum(b_least, gl.where(b == 0.0, 1.0, b))


@gluon.jit
def by_rows(tile):
    """[4, 16, 64]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 64], tile.dtype)
    return tile._reinterpret(tile.dtype, [4, 16, 64], layout)


@gluon.jit
def excess_of(tile, DELTA: gl.constexpr, GATED: gl.constexpr):
    """How many powers of 2 the smallest input of 64 channels is below 2^-SMALL; tiles as
    decay_operands has them."""
    q, a, b, k = tile
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    b_least = gl.full([16, 64], 1.0, gl.float32, layout)
    qs, reads, bs, keys = by_rows(q), by_rows(a), by_rows(b), by_rows(k)
    for i in range(4):  # the whole tile would be in registers at once
        b_a = reads.index(i).load(layout).to(gl.float32)
        b_least = smaller_of(smaller_of(b_least, b_a), qs.index(i).load(layout))
        if GATED:
            b_least = smaller_of(b_least, b_a * keys.index(i).load(layout).to(gl.float32))
        if not DELTA:
            b_least = smaller_of(b_least, bs.index(i).load(layout))
            b_least = smaller_of(b_least, keys.index(i).load(layout))
    excess = -gl.log2(gl.min(b_least)) - (SMALL - 2.0**-6)
    return gl.minimum(gl.maximum(excess, 0.0), SMALLEST - SMALL)


@gluon.jit
def gates_of(b_g, b_all, b_early, b_late, by_quarters, anchors, n, tile, c):
    """From gates in base 2 [4, 16, 64] and their sums: G - n, and that without a token's own gate;
    n [4, 1, 64]; the largest decay of a half and of a quarter, more with small inputs; by_quarters,
    set also if these channels need it. Writes what anchors_of takes into anchors."""
    three: gl.constexpr = b_g.type.layout
    four: gl.constexpr = b_all.type.layout
    if c.APART > 0:
        b_middle = gate_sums.sum_until(b_all, 2, three)
        anchors.index(n).store(gl.reshape(b_middle, [64]))
    b_scan = gl.associative_scan(b_g, 1, gate_sums.add)
    b_base = gate_sums.sum_before(b_all, quarters(four), three)
    half = gl.max(-gl.minimum(b_early, b_late))
    quarter = gl.max(-b_all)
    b_n = 0.0 * b_base
    if c.APART > 0:
        # blocks.py cuts gates that are further below 0 than half of that
        lowest = -2.0 * gl.min(b_g)
        half = gl.maximum(half, lowest)
        quarter = gl.maximum(quarter, lowest)
        if half > 2 * c.LIMIT - (SMALLEST - SMALL):
            excess = excess_of(tile, c.DELTA, c.GATED)
            half += excess
            quarter += excess
        b_n = b_middle + gl.where(quarters(three) < 2, c.APART, -c.APART)
    if c.QUARTERS:
        by_quarters = by_quarters | (half > 2 * c.LIMIT).to(gl.int32)
        b_first = gate_sums.sum_until(b_all, 1, three)
        b_third = gate_sums.sum_until(b_all, 3, three)
        NK: gl.constexpr = anchors.shape[0] // 3
        anchors.index(NK + n).store(gl.reshape(b_first, [64]))
        anchors.index(2 * NK + n).store(gl.reshape(b_third, [64]))
        _, b_quarters = anchors_of(b_middle, b_first, b_third, c.APART)
        b_n = gl.where(by_quarters != 0, b_quarters, b_n)
    b_off = (b_n - b_base) + gate_sums.FAR  # sums that are to be rounded need not leave FAR before
    b_e, b_before = (b_scan + gate_sums.FAR) - b_off, ((b_scan - b_g) + gate_sums.FAR) - b_off
    return b_e, b_before, b_n, half, quarter, by_quarters


@gluon.jit
def decay_operands(b_e, b_before, tile, c):
    """Operands of products of 64 channels in place; those of q, b and k besides in float32.

    GATED: k has how much each channel erases, and may be b.
    """
    q, a, b, k = tile
    b_a = a.load(c.flat)
    b_q = q.load(c.flat)
    b_before = gl.convert_layout(gl.reshape(b_before, [64, 64]), c.flat)
    b_e = gl.convert_layout(gl.reshape(b_e, [64, 64]), c.flat)
    b_read, b_write = common.exp2_and_inverse(b_e)
    if c.DELTA:
        b_b = b_a * b_write
        if c.GATED:
            b_a = b_a.to(gl.float32) * k.load(c.flat).to(gl.float32)
        b_a = b_a * b_read
    else:
        b_a = b_a * common.exp2_by_parts(b_before)
    a.store(b_a.to(a.dtype))
    b_q = b_q * b_read
    q.store(b_q.to(q.dtype))
    if not c.DELTA:
        b_b = b.load(c.flat) * b_write
    b.store(b_b.to(b.dtype))
    b_k = b_b
    if not c.DELTA:
        b_k = k.load(c.flat) * b_write
        k.store(b_k.to(k.dtype))
    return b_q, b_b, b_k


@gluon.jit
def decay(b_g, strongest, farthest, by_quarters, tile, anchors, n, outs, p_total, o_w, scale, c):
    """64 channels: the chunk's decay, and unless it is strong operands of products in place, q~,
    b^ and k^; the largest decay of a half, or strongest, that of channels before, of a quarter, or
    farthest, and whether the chunk goes by_quarters."""
    q, _, b, _ = tile
    line: gl.constexpr = gl.SliceLayout(0, c.flat)
    three: gl.constexpr = b_g.type.layout
    b_all = gate_sums.rounded(gate_sums.totals_of_quarters(b_g))
    b_early, b_late = gate_sums.halves_of(b_all, three)
    b_total = b_early + b_late
    gl.store(p_total, gl.exp2(gl.convert_layout(gl.reshape(b_total, [64]), line)))
    b_e, b_before, b_n, half, quarter, by_quarters = gates_of(
        b_g, b_all, b_early, b_late, by_quarters, anchors, n, tile, c
    )
    strongest = gl.maximum(strongest, half)
    farthest = gl.maximum(farthest, quarter)
    if not is_strong(strongest, farthest, c.LIMIT, c.APART, c.QUARTERS):
        b_q, b_b, b_k = decay_operands(b_e, b_before, tile, c)
        # b_b is up to 2^105, and what b^ takes of that may be less than float32 has
        b_end = of_tokens(gl.exp2(b_total - b_n + 70), c.flat)
        # n is down to -215, and 55 at most
        b_start = gl.where(b_n < -196, 0.0, common.exp2_or_least(b_n + 70))
        b_q = b_q * of_tokens(b_start, c.flat) * (scale * 2.0**-70)
        gl.store(outs.q + o_w, b_q.to(q.dtype))
        gl.store(outs.b + o_w, (b_b * b_end * 2.0**-70).to(b.dtype))
        if not c.DELTA:
            gl.store(outs.k + o_w, (b_k * b_end * 2.0**-70).to(b.dtype))
    return strongest, farthest, by_quarters


@gluon.jit
def is_strong(
    strongest, farthest, LIMIT: gl.constexpr, APART: gl.constexpr, QUARTERS: gl.constexpr
):
    """Whether intra_safe takes the chunk, not wy: its largest decays are `strongest` in a half and
    `farthest` in a quarter."""
    if QUARTERS:
        strong = farthest > 2 * LIMIT
    else:
        strong = strongest > half_limit(LIMIT, APART)
    return strong


@gluon.jit
def strength_of(strongest, farthest, LIMIT: gl.constexpr, APART: gl.constexpr):
    strength = gl.where(strongest > LIMIT, 1, 0)
    strength = gl.where(strongest > half_limit(LIMIT, APART), 2, strength)
    return gl.where(farthest > 2 * LIMIT, 3, strength)


@gluon.jit
def without_gates(tile, outs, o_w, scale, c):
    """Writes the operands of channels without gates."""
    q, a, b, k = tile
    gl.store(outs.q + o_w, (q.load(c.flat) * scale).to(q.dtype))
    if c.DELTA:
        b_b = a.load(c.flat)
        b.store(b_b)
    else:
        b_b = b.load(c.flat)
        gl.store(outs.k + o_w, k.load(c.flat))
    gl.store(outs.b + o_w, b_b)


@gluon.jit
def half_limit(LIMIT: gl.constexpr, APART: gl.constexpr):
    """The decay that a half may have in a chunk that is not taken by quarters."""
    return 2 * LIMIT if APART > 0 else LIMIT


@gluon.jit
def together(b, by_quarters, APART: gl.constexpr):
    """Takes the factor 2^(2 APART) out of scores [64, 64] between halves; by_quarters, out of those
    between the quarters of a half."""
    if APART > 0:
        layout: gl.constexpr = b.type.layout
        row = (gl.arange(0, 64, gl.SliceLayout(1, layout)) // 16)[:, None]
        column = (gl.arange(0, 64, gl.SliceLayout(0, layout)) // 16)[None, :]
        halves = (row >= 2) & (column < 2)
        even = (column == 0) | (column == 2)
        apart = gl.where(by_quarters != 0, (row == column + 1) & even, halves)
        b *= gl.where(apart, 2.0 ** (-2 * APART), 1.0)
    return b


@gluon.jit(do_not_specialize=["scale", "keep", "T", "N", "HV", "H", "token_heads"])
def dplr_wy_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, 64]
    k_desc,
    a_desc,  # none for delta
    b_desc,  # [tokens, HV * K] by [C, 64], how much each channel erases, gated delta
    v_ptr,  # [tokens, HV, V] of token_heads
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
    # [slots, HV]: 1 if a half decays by more than LIMIT, 2 if further, 3 a quarter too, -1 if the
    # slot has no chunk
    strong_ptr,
    cu_ptr,  # [N + 1]
    scale, keep, T, N, HV, H,
    token_heads,  # of v, write, g and beta from one token to the next: HV, or more
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, DELTA: gl.constexpr, HAS_GATE: gl.constexpr,
    CHANNEL: gl.constexpr, PACKED: gl.constexpr, LIMIT: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """grid (slots * HV,), 4 warps."""
    outs = Outs(q_out_ptr, b_out_ptr, k_out_ptr)
    NK: gl.constexpr = K // 64
    GK: gl.constexpr = K**CHANNEL
    GATED: gl.constexpr = DELTA and beta_ptr is None
    QUARTERS: gl.constexpr = takes_quarters(K, DELTA, APART)
    OPERANDS: gl.constexpr = (2 if DELTA else 4) + GATED
    flat: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    three: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    c: gl.constexpr = Constants(K, V, flat, three, rows, LIMIT, APART, QUARTERS, DELTA, GATED)
    act: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], act)
    line: gl.constexpr = gl.SliceLayout(0, flat)
    # the compiler gives memory on to tiles that come later
    qs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    bs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    reads = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    keys = bs if GATED else reads
    if not DELTA:
        keys = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    tiles = Tiles(qs, reads, bs, keys)
    anchors = reads
    if HAS_GATE:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        anchors = gl.allocate_shared_memory(gl.float32, [3 * NK if QUARTERS else NK, 64], plain)
    pid = gl.program_id(0)
    i_h = pid % HV
    row, num_rows, _ = common.locate_sequence(cu_ptr, pid // HV, T, N, C, C, PACKED, True)
    if PACKED and num_rows <= 0:
        if HAS_GATE:
            gl.store(strong_ptr + pid, -1)
        return
    i_chunk_head = pid.to(gl.int64)
    o_t = 16 * gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, three)))[:, None, None]
    o_t += gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, three)))[None, :, None]
    o_n = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, three)))[None, None, :]
    o_line = gl.arange(0, 64, line)
    o_f = gl.arange(0, 64, gl.SliceLayout(1, flat))[:, None] * K + o_line[None, :]
    token, col = row.to(gl.int64) * token_heads + i_h, i_h // (HV // H) * K
    full = common.alloc_mbarriers(1, NK)
    solve_tril.ready()
    for n in gl.static_range(NK):
        mbarrier.expect(full.index(n), OPERANDS * q_desc.block_type.nbytes)
        copy_in(q_desc, [row, col + n * 64], full.index(n), qs.index(n))
        copy_in((k_desc if DELTA else a_desc), [row, col + n * 64], full.index(n), reads.index(n))
        if GATED or not DELTA:
            copy_in(b_desc, [row, (i_h * K if GATED else col) + n * 64], full.index(n), bs.index(n))
        if not DELTA:
            copy_in(k_desc, [row, col + n * 64], full.index(n), keys.index(n))
    strongest, farthest, by_quarters = -1.0, -1.0, keep * 0
    for n in range(NK):
        o_w = i_chunk_head * (C * K) + n * 64 + o_f
        if HAS_GATE:
            o_row = made_again(o_t, T + n, DELTA)
            p_g = g_ptr + token * GK + o_row * (token_heads * GK) + (n * 64 + o_n) * CHANNEL
            b_g = gl.load(p_g, mask=o_t < num_rows, other=0.0).to(gl.float32)
        mbarrier.wait(full.index(n), 0)
        if num_rows < C:
            common.zero_tail_rows(qs.index(n), num_rows, C, 64)
            common.zero_tail_rows(reads.index(n), num_rows, C, 64)
            if GATED or not DELTA:
                common.zero_tail_rows(bs.index(n), num_rows, C, 64)
            if not DELTA:
                common.zero_tail_rows(keys.index(n), num_rows, C, 64)
            gl.thread_barrier()
        if HAS_GATE:
            b_g = common.at_least(b_g * device.LOG2E, LOWEST_GATE)
            p_total = total_ptr + i_chunk_head * K + n * 64 + o_line
            before = by_quarters
            strongest, farthest, by_quarters = decay(
                b_g, strongest, farthest, by_quarters, tiles_at(tiles, n), anchors, n, outs,
                p_total, o_w, scale, c,
            )  # fmt: skip
            if QUARTERS:
                # those before, if these are the first to want it
                for j in range(n * (by_quarters - before)):
                    to_quarters(anchors, j, tiles_at(tiles, j), c)
        else:
            without_gates(tiles_at(tiles, n), outs, o_w, scale, c)
    common.invalidate_mbarriers(full)
    if HAS_GATE:
        gl.store(strong_ptr + i_chunk_head, strength_of(strongest, farthest, LIMIT, APART))
        if is_strong(strongest, farthest, LIMIT, APART, QUARTERS):
            return
    o_i = gl.arange(0, 64, gl.SliceLayout(1, al))
    o_j = gl.arange(0, 64, gl.SliceLayout(0, al))
    seen, past = o_i[:, None] >= o_j[None, :], o_i[:, None] > o_j[None, :]
    zero = gl.zeros([64, 64], gl.float32, al)
    i_a = i_chunk_head * (C * C)
    if DELTA and not GATED:
        b_beta = load_beta(beta_ptr + token, token_heads, num_rows, al)
    solve_tril.ready()
    b_qb = together(solve_tril.scores(qs, bs, NK, zero), by_quarters, APART)
    solve_tril.put(qb_ptr + i_a, gl.where(seen, b_qb * scale, 0.0).to(act), C, rows)
    if not DELTA:
        b_qk = together(solve_tril.scores(qs, keys, NK, zero), by_quarters, APART)
        solve_tril.put(qk_ptr + i_a, gl.where(seen, b_qk * scale, 0.0).to(act), C, rows)
        b_ak = together(solve_tril.scores(reads, keys, NK, zero), by_quarters, APART)
        b_ak = gl.where(past, b_ak, 0.0).to(act)
        aks = gl.allocate_shared_memory(act, [64, 64], tile)
        aks.store(b_ak)
        sm90.fence_async_shared()
        if keep != 0:
            solve_tril.put(ak_ptr + i_a, b_ak, C, rows)
    b_a = gl.where(past, together(solve_tril.scores(reads, bs, NK, zero), by_quarters, APART), 0.0)
    if DELTA and not GATED:
        b_a = b_a * b_beta[:, None]
    if QUARTERS:
        p_scores = Scores(
            qb_ptr + i_a, None if DELTA else qk_ptr + i_a, None if DELTA else ak_ptr + i_a
        )
        b_a = with_halves(
            b_a, by_quarters, tiles, None if DELTA else aks, anchors,
            beta_ptr + token if DELTA and not GATED else None, token_heads, num_rows, p_scores,
            keep, scale, T, c,
        )  # fmt: skip
    if not DELTA:
        b_a = -b_a
    # again: it would be on the stack since the gates
    token = row.to(gl.int64) * token_heads + (pid + (T >> 31)) % HV
    gl.thread_barrier()
    p_beta = beta_ptr + token if DELTA and not GATED else None
    refs = solve_tril.ChunkRefs(
        v_ptr + token * V, write_ptr + token * V if GATED else None,
        w_out_ptr + i_chunk_head * (C * K), u_out_ptr + i_chunk_head * (V * C), r_ptr + i_a,
    )  # fmt: skip
    solve_tril.solve(
        b_a, None if DELTA else aks, reads, anchors, p_beta, refs, keep, num_rows, token_heads, c
    )
