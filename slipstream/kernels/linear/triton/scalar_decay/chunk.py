"""One kernel for no transition, no decay or one a token: forward, and all of backward.

    y_i = scale * sum over j <= i of exp(G_i - G_j) (r_i . w_j) x_j          G_i = g_1 + ... + g_i

scans a sequence in chunks of C tokens with S [X, D] = sum of decayed x_j w_j^T in registers.
Reversed it scans from the last token to the first, over j >= i with exp(G_j - G_i). Then, with the
gradients do of o and dS of the state,

    o   scans forward,  r, w, x = q, k, v       and S^T is the state
    dq  scans forward,  r, w, x = do, v, k      and S is the state
    dk  scans reversed, r, w, x = v, do, q      and S is dS
    dv  scans reversed, r, w, x = k, q, do      and S^T is dS

so no scan ever needs the transpose of a product, and none writes anything but its result. The
columns of x are the rows of all products (y^T = S r^T + x^T A^T, S += x^T w): what is computed
stays on the left, in registers, and what is on the right was loaded.

The gradient of g_t is the sum over the pairs i >= t > j of what they add to the loss. Over the i of
its chunk,

    dg_t = sum over i >= t of (q_i . dq_i - k_i . dk_i) + z      z = sum(S * dS) after the chunk

The sums q . dq and k . dk, and what later chunks add to k . dk, are left by the dq and dk scans,
and added up after them. A difference of large sums, z loses digits with each chunk: in 16 bits the
products with S and with dS are rounded apart. So every ANCHOR_INTERVAL chunks the dq scan leaves S,
an anchor, from which the dk scan computes z again.

Few heads with long sequences do not fill a device: SPLIT cuts sequences into segments of `segment`
tokens, each a program of its own. A first scan (not HAS_Y) leaves what a segment adds to the state
and how much it decays, of which common/state_passing.py makes the state that each segment meets.

dg_t is what crosses token t. Nothing crosses a gate below MIN_CROSSED, and its own gradient is 0: a
sum begins there again at 0, since what it would carry are rounding errors of later tokens.

Pairs of tokens of one chunk cancel to float32, for both sides multiply the same rounded numbers.
Those of two chunks are rounded apart, by products with S and with dS. So where a chunk decays to
less than that rounding, pairs on both sides of it are left out: the sum starts anew at the chunk's
end, with what later chunks add to k . dk of its tokens. With S the state before the chunk and dS
the gradient of that after it, they are at most eps / 8 |S| |dS|. The chunk's own pairs are rounded
by eps |q do| |k v|, which is more while |S| |dS| is no more than 8 times |q do| |k v|, whatever the
scale of either.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.scalar_decay import device
from slipstream.kernels.linear.triton.scalar_decay.device import MIN_CROSSED, locate_chunk

GRID = tl.constexpr(64)  # tokens between states that are prefix (kernels/linear/prefix_states.py)


@triton.jit
def load_block(p, stride, o_c, m_c, o_n, N: tl.constexpr, MASKED: tl.constexpr):
    """Rows o_c and columns o_n of a tile at p, zero outside."""
    p = p + o_c[:, None] * stride + o_n[None, :]
    if MASKED:
        return tl.load(p, mask=m_c[:, None] & (o_n < N)[None, :], other=0.0)
    return tl.load(p, mask=m_c[:, None], other=0.0)


@triton.jit
def load_rows(p, at, t, heads, o_c, m_c, o_n, N: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr):
    """Tile [C, BN] of a head's rows from token t of the segment, zero outside.

    at: place of the segment: batch entry, first token, head, and column of the tile, of which
    the pointer p, without TMA, has all already but the column.
    """
    i_b, begin, i_h, column = at
    if TMA:
        b = p.load([i_b, begin + t, i_h, column]).reshape(o_c.shape[0], BN)
    else:
        p += t.to(tl.int64) * (heads * N)
        b = load_block(p, heads * N, o_c, m_c, column + o_n, N, N % BN != 0)
    return b


@triton.jit
def store_block(
    p, at, t, heads, b, o_c, m_c, o_n, N: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr
):
    """The counterpart of _rows for b [BN, C], whose columns are the rows stored."""
    i_b, begin, i_h, column = at
    if TMA:
        b = tl.trans(b.to(p.dtype)).reshape(1, o_c.shape[0], 1, BN)
        p.store([i_b, begin + t, i_h, column], b)
    else:
        p += t.to(tl.int64) * (heads * N) + o_c[None, :] * (heads * N) + (column + o_n)[:, None]
        m = m_c[None, :] & (column + o_n < N)[:, None] if N % BN != 0 else m_c[None, :]
        tl.store(p, b.to(p.dtype.element_ty), mask=m)


@triton.jit
def store_rows(
    p, at, t, heads, b, o_c, m_c, o_n, N: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr
):
    """The counterpart of _rows."""
    i_b, begin, i_h, column = at
    if TMA:
        b = b.to(p.dtype).reshape(1, o_c.shape[0], 1, BN)
        p.store([i_b, begin + t, i_h, column], b)
    else:
        p += t.to(tl.int64) * (heads * N) + o_c[:, None] * (heads * N) + (column + o_n)[None, :]
        m = m_c[:, None] & (column + o_n < N)[None, :] if N % BN != 0 else m_c[:, None]
        tl.store(p, b.to(p.dtype.element_ty), mask=m)


@triton.jit
def locate_segment(
    cu_ptr, i_seg, T, N, segment,
    ANCHOR_INTERVAL: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A segment's first token, tokens, batch entry, tokens of that before it and first anchor."""
    i_n = i_seg.to(tl.int64)
    if SPLIT:
        begin, length, i_s = device.locate_chunk(cu_ptr, i_seg, T, N, segment, PACKED)
        i_b = 0 if PACKED else i_seg // tl.cdiv(T, segment)
        skip = i_s * segment
        begin += skip
        length = tl.minimum(length - skip, segment)
        first_anchor = i_n * tl.cdiv(segment, ANCHOR_INTERVAL)
    elif PACKED:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + i_n + 1).to(tl.int64), T)
        length = tl.maximum(end - begin, 0).to(tl.int32)
        i_b = 0
        skip = tl.full((), 0, tl.int32)
        first_anchor = begin // ANCHOR_INTERVAL + i_n
    else:
        begin = i_n * T
        length = T
        i_b = i_seg
        skip = tl.full((), 0, tl.int32)
        first_anchor = i_n * tl.cdiv(T, ANCHOR_INTERVAL)
    return begin, length, i_b, skip, first_anchor


@triton.jit
def pool_rows_of(
    rows_ptr, i_seg, i_b, begin, skip, T, segment, PACKED: tl.constexpr, SPLIT: tl.constexpr
):
    """Where rows of a segment's sequence are; begin to skip as locate_segment has them."""
    i_n = i_seg
    if SPLIT:
        i_n = i_seg - skip // segment - (begin - skip) // segment if PACKED else i_b
    return rows_ptr + i_n.to(tl.int64) * tl.cdiv(T, GRID)


@triton.jit
def store_to_pool(
    pool_ptr, p_rows, tokens, i_h, HV, b_s, o_v, o_k, m_s, V: tl.constexpr, K: tl.constexpr
):
    """Writes b_s [V, K], the state after `tokens` tokens of a sequence, to its row of the pool, if
    it has one (kernels/linear/prefix_states.py)."""
    row = tl.load(p_rows + tokens // GRID - 1, mask=tokens % GRID == 0, other=-1)
    p = pool_ptr + (row.to(tl.int64) * HV + i_h) * (V * K) + o_v[:, None] * K + o_k[None, :]
    tl.store(p, b_s.to(pool_ptr.dtype.element_ty), mask=m_s & (row >= 0))


@triton.jit
def store_later(p_rows, rows, tokens, t, b_k, b_y, o_c, m_c):
    """Writes later chunks' part of k . dk, behind `rows` rows of all tokens. b_y [BX, C]."""
    b_row = tl.sum(tl.trans(b_k).to(tl.float32) * b_y, 0)
    tl.store(p_rows + rows.to(tl.int64) * tokens + t + o_c, b_row, mask=m_c)


@triton.jit
def first_chunk_of(begin, skip, i_seg, T, segment, C: tl.constexpr, PACKED: tl.constexpr):
    """The number of the first chunk of a segment; locate_chunk gives them."""
    start = begin - skip
    if PACKED:
        first = start // C + i_seg - skip // segment - start // segment
    else:
        first = start // T * tl.cdiv(T, C)
    return first + skip // C


_SIZES = ["T", "N", "HV", "HR", "HX", "tokens", "segment", "num_anchors"]
_STRIDES = ["stride_gb", "stride_gt", "stride_gh"]


@triton.jit(do_not_specialize=["scale", "scale_in", "scale_out", *_SIZES, *_STRIDES])
def scalar_decay_chunk_kernel(
    r_ptr,  # [tokens, HR, D], or, if TMA, a descriptor of [B, T, HR, D]; so w, x, y, qk
    w_ptr,  # [tokens, HR, D]
    x_ptr,  # [tokens, HX, X]
    y_ptr,  # [tokens, HV, X]
    g_ptr,  # [B, T, HV] by strides
    s_in_ptr,  # [segments, HV, D, X], or [segments, HV, X, D] if TRANSPOSED; times scale_in
    s_out_ptr,  # the same; times scale_out
    total_ptr,  # [segments, HV]: G over the segment in base 2
    qk_ptr,  # [tokens, HX, X]: q for the dq scan, k for the dk scan
    rows_ptr,  # [NX, HV, tokens]: q . dq; or [2 * NX, ..]: k . dk, what later chunks add to it
    z_ptr,  # [NX, anchors, HV]: sum(S * dS) after an anchor interval
    anchor_ptr,  # [anchors, HV, X, D]
    cu_ptr,  # [N + 1]
    scale, scale_in, scale_out, T, N, HV, HR, HX, tokens, segment, num_anchors,
    stride_gb, stride_gt, stride_gh,
    D: tl.constexpr, X: tl.constexpr, BD: tl.constexpr, BX: tl.constexpr, C: tl.constexpr,
    ANCHOR_INTERVAL: tl.constexpr, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr,
    HAS_Y: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DG: tl.constexpr, HAS_S_IN: tl.constexpr,
    HAS_S_OUT: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr,
    TMA: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr,
    pool_ptr=None,  # [rows, HV, V, K], a pool
    to_ptr=None,  # [N, T / 64, rounded up]: rows of it for S after 64 tokens; none below 0
):  # fmt: skip
    """grid (ceil(X / BX) * HV * segments,): a program scans one tile of X of one head and segment.

    Without SPLIT a segment is a sequence.
    """
    if not GROUPED:  # tiles of one shape then share their offsets, and with them registers
        HR = HV
        HX = HV
    pid = tl.program_id(0)
    NX: tl.constexpr = (X + BX - 1) // BX
    # q_i . dq_i - k_i . dk_i has no share of the pair (i, i), which may dwarf the rest: left out
    # of both in float32, and equal in both to the last bit or two else.
    DIAGONAL_LAST: tl.constexpr = HAS_DG and FP32
    # The last product is y's, which is waited for: then w's are done, too, before w's tile is that
    # of the next turn (compiler/smem_hazards.py). Only where products go on meanwhile; else it
    # would spill.
    LAST: tl.constexpr = C >= 64 and not FP32
    i_x = pid % NX
    i_h = (pid // NX) % HV
    i_seg = pid // NX // HV
    i_n = i_seg.to(tl.int64)
    begin, length, i_b, skip, first_anchor = locate_segment(
        cu_ptr, i_seg, T, N, segment, ANCHOR_INTERVAL * C, PACKED, SPLIT
    )

    o_c = tl.arange(0, C)
    o_d = tl.arange(0, BD)
    o_n = tl.arange(0, BX)
    o_x = i_x * BX + o_n
    i_r = i_h // (HV // HR)
    i_w = i_h // (HV // HX)
    r_ptr = device.rows_of_head(r_ptr, begin, HR, i_r, D, TMA)
    w_ptr = device.rows_of_head(w_ptr, begin, HR, i_r, D, TMA)
    x_ptr = device.rows_of_head(x_ptr, begin, HX, i_w, X, TMA)
    if HAS_Y:
        y_ptr = device.rows_of_head(y_ptr, begin, HV, i_h, X, TMA)
    if HAS_GATE:
        g_ptr += i_h.to(tl.int64) * stride_gh
        g_ptr += begin * stride_gt if PACKED else i_b * stride_gb + skip.to(tl.int64) * stride_gt

    m_s = (o_x < X)[:, None] & (o_d < D)[None, :]
    o_s = o_x[:, None] * D + o_d[None, :]
    i_s = (i_n * HV + i_h) * (D * X)
    o_io = o_s if TRANSPOSED else o_d[None, :] * X + o_x[:, None]
    b_s = device.load_initial_state(s_in_ptr, i_s, o_io, m_s, scale_in, BX, BD, HAS_S_IN)
    if HAS_DG:
        qk_ptr = device.rows_of_head(qk_ptr, begin, HX, i_w, X, TMA)
        rows_ptr += (i_x * HV + i_h).to(tl.int64) * tokens + begin
        anchor_ptr += (first_anchor * HV + i_h) * (D * X)

    if to_ptr is not None:
        p_to = pool_rows_of(to_ptr, i_seg, i_b, begin, skip, T, segment, PACKED, SPLIT)
    chunks = tl.cdiv(tl.maximum(length, 0), C)
    if HAS_DG:
        segment_anchors = tl.cdiv(chunks, ANCHOR_INTERVAL)
    else:
        segment_anchors = 1
    total = 0.0
    # one loop in another: the state is written, or met, where the outer one turns, and the inner
    # one has no branch that would keep its loads from being issued ahead
    for i_anchor in range(segment_anchors):
        if HAS_DG:
            anchor, first, count = device.anchor_chunks(
                i_anchor, segment_anchors, chunks, ANCHOR_INTERVAL, REVERSE
            )
            p_a = anchor_ptr + anchor.to(tl.int64) * HV * (D * X) + o_s
            if REVERSE:
                # by axis: one reduction over both breaks Triton 3.6's compiler on sm_100
                b_z = tl.sum(b_s * tl.load(p_a, mask=m_s, other=0.0), 1)
                p_z = z_ptr + (i_x.to(tl.int64) * num_anchors + first_anchor + anchor) * HV + i_h
                tl.store(p_z, tl.sum(b_z, 0) * scale_out)
        else:
            first = 0
            count = chunks
        for i in range(count):
            i_c = first + count - 1 - i if REVERSE else first + i
            t = i_c * C
            m_c = o_c < length - t
            b_w = load_rows(w_ptr, (i_b, skip, i_r, 0), t, HR, o_c, m_c, o_d, D, BD, TMA)  # [C, BD]
            at_x = (i_b, skip, i_w, i_x * BX)
            b_x = load_rows(x_ptr, at_x, t, HX, o_c, m_c, o_n, X, BX, TMA)
            b_x = tl.trans(b_x)  # [BX, C]
            if HAS_Y:
                b_r = load_rows(r_ptr, (i_b, skip, i_r, 0), t, HR, o_c, m_c, o_d, D, BD, TMA)
                b_a = tl.dot(b_w, tl.trans(b_r), input_precision=PRECISION)  # [j, i]
                b_y = tl.dot(b_s.to(b_r.dtype), tl.trans(b_r), input_precision=PRECISION)  # [BX, C]
            # decayed to the chunk's end, from where the state goes on; in reverse to its start
            b_x_decayed = b_x
            if HAS_GATE:
                b_G, b_low, G_C, low_C = device.load_chunk_gates(
                    g_ptr + t.to(tl.int64) * stride_gt, stride_gt, o_c, m_c, C, FP32
                )
                b_start = tl.exp2(b_G)
                b_end = tl.exp2((G_C - b_G) + (low_C - b_low))
                b_x_decayed = (b_x * (b_start if REVERSE else b_end)[None, :]).to(b_x.dtype)
                total += G_C
            if HAS_Y:
                b_a, diag = device.masked_scores(
                    b_a, o_c, b_G if HAS_GATE else None, b_low if HAS_GATE else None,
                    REVERSE, HAS_GATE, DIAGONAL_LAST, FP32,
                )  # fmt: skip
                if HAS_GATE:
                    b_y *= (b_end if REVERSE else b_start)[None, :]
                if HAS_DG and REVERSE:
                    b_qk = load_rows(qk_ptr, at_x, t, HX, o_c, m_c, o_n, X, BX, TMA)
                    store_later(rows_ptr, NX * HV, tokens, t, b_qk, b_y * scale, o_c, m_c)
                if not LAST:
                    b_y = tl.dot(b_x, b_a.to(b_x.dtype), b_y, input_precision=PRECISION)
            if HAS_GATE:
                b_s *= tl.exp2(G_C)
            b_s = tl.dot(b_x_decayed, b_w, b_s, input_precision=PRECISION)  # [BX, BD]
            if to_ptr is not None:
                done = skip + t + C
                store_to_pool(pool_ptr, p_to, done, i_h, HV, b_s, o_x, o_d, m_s, X, D)
            if HAS_Y:
                if LAST:
                    b_y = tl.dot(b_x, b_a.to(b_x.dtype), b_y, input_precision=PRECISION)
                b_y *= scale
                # the gate's share by token, while y is in float32
                if HAS_DG:
                    if not REVERSE:
                        b_qk = load_rows(qk_ptr, at_x, t, HX, o_c, m_c, o_n, X, BX, TMA)
                    b_row = tl.sum(tl.trans(b_qk).to(tl.float32) * b_y, 0)
                if DIAGONAL_LAST:
                    b_y += (diag * scale)[None, :] * b_x
                at = (i_b, skip, i_h, i_x * BX)
                store_block(y_ptr, at, t, HV, b_y, o_c, m_c, o_n, X, BX, TMA)
                if HAS_DG:
                    tl.store(rows_ptr + t + o_c, b_row, mask=m_c)
        if HAS_DG and not REVERSE:
            tl.store(p_a, b_s, mask=m_s)
    if HAS_S_OUT:
        tl.store(s_out_ptr + i_s + o_io, b_s * scale_out, mask=m_s)
    if SPLIT and (HAS_GATE and not HAS_Y):
        tl.store(total_ptr + i_n * HV + i_h, total, mask=i_x == 0)


@triton.jit
def _advance(later, later_goes_on, value, goes_on):
    return value + goes_on * later, goes_on * later_goes_on


@triton.jit
def _chunk_sums(b, C: tl.constexpr):
    """The sum of b [BT, BH] over each token's chunk."""
    BT: tl.constexpr = b.shape[0]
    BH: tl.constexpr = b.shape[1]
    b_sum = tl.sum(tl.reshape(b, (BT // C, C, BH)), 1)
    return tl.reshape(tl.broadcast_to(b_sum[:, None, :], (BT // C, C, BH)), (BT, BH))


_DG_SIZES = ["T", "N", "HV", "tokens", "segment", "num_anchors", "min_chunk_gate"]


@triton.jit(do_not_specialize=[*_DG_SIZES, "stride_gb", "stride_gt", "stride_gh"])
def scalar_decay_dg_kernel(
    q_rows_ptr,  # [NX, HV, tokens]: q . dq
    k_rows_ptr,  # [2 * NK, HV, tokens]: k . dk, then what later chunks add to it
    z_ptr,  # [NX, anchors, HV]
    g_ptr,  # [B, T, HV] by strides
    dg_ptr,  # [tokens, HV]
    cu_ptr,  # [N + 1]
    T, N, HV, tokens, segment, num_anchors,
    min_chunk_gate,  # of a chunk that nothing crosses, the sum of its gates is less
    stride_gb, stride_gt, stride_gh,
    NX: tl.constexpr, NK: tl.constexpr, TOKENS: tl.constexpr, C: tl.constexpr, BT: tl.constexpr,
    BH: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """grid (ceil(HV / BH) * anchors,): BH heads of an anchor interval of TOKENS, from its last BT
    tokens on."""
    pid = tl.program_id(0)
    NH = tl.cdiv(HV, BH)
    i_anchor = pid // NH
    o_h = (pid % NH) * BH + tl.arange(0, BH)
    o_t = tl.arange(0, BT)
    if SPLIT:
        each = tl.cdiv(segment, TOKENS)
        begin, length, i_s = locate_chunk(cu_ptr, i_anchor // each, T, N, segment, PACKED)
        first = i_s * segment + (i_anchor % each) * TOKENS
        length = tl.minimum(length, (i_s + 1) * segment)
    else:
        begin, length, i_s = locate_chunk(cu_ptr, i_anchor, T, N, TOKENS, PACKED)
        first = i_s * TOKENS
    i_b = 0 if PACKED else begin // T
    p_g = g_ptr + i_b * stride_gb + (begin - i_b * T) * stride_gt + o_h.to(tl.int64) * stride_gh
    b_z = tl.zeros((BH,), tl.float32)
    for x in tl.static_range(NX):
        p_z = z_ptr + (tl.full((), x, tl.int64) * num_anchors + i_anchor) * HV + o_h
        b_z += tl.load(p_z, mask=(o_h < HV) & (first < length), other=0.0)
    ends = (o_t % C == C - 1)[:, None]
    for i in range(TOKENS // BT):
        t = first + TOKENS - (i + 1) * BT
        m = (t + o_t < length)[:, None] & (o_h < HV)[None, :]
        b = tl.zeros((BT, BH), tl.float32)
        b_later = tl.zeros((BT, BH), tl.float32)
        for x in tl.static_range(NX):
            o = (tl.full((), x, tl.int64) * HV + o_h[None, :]) * tokens + begin + (t + o_t)[:, None]
            b += tl.load(q_rows_ptr + o, mask=m, other=0.0)
            if x < NK:
                b -= tl.load(k_rows_ptr + o, mask=m, other=0.0)
                o += tl.full((), NK * HV, tl.int64) * tokens
                b_later += tl.load(k_rows_ptr + o, mask=m, other=0.0)
        at = (t + o_t[:, None]).to(tl.int64)
        b_g = tl.load(p_g[None, :] + at * stride_gt, mask=m, other=0.0).to(tl.float32)
        restarts = ends & (_chunk_sums(b_g, C) < min_chunk_gate)
        b += tl.where(restarts, _chunk_sums(b_later, C), 0.0)
        goes_on = tl.where(b_g >= MIN_CROSSED, 1.0, 0.0)
        b *= goes_on
        goes_on = tl.where(restarts, 0.0, goes_on)
        scanned = tl.associative_scan((b, goes_on), 0, _advance, reverse=True)
        b_dg = scanned[0] + scanned[1] * b_z[None, :]
        p_dg = dg_ptr + (begin + at) * HV + o_h[None, :]
        tl.store(p_dg, b_dg.to(dg_ptr.dtype.element_ty), mask=m)
        b_z = tl.sum(tl.where(o_t[:, None] == 0, b_dg, 0.0), 0)
