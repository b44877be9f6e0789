# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
"""One kernel for the additive family with no decay or one a token: forward, and all of backward.

    y_i = scale * sum over j <= i of exp(G_i - G_j) (r_i . w_j) x_j          G_i = g_1 + ... + g_i

walks a sequence in chunks of C tokens with S [D, X] = sum of decayed w_j x_j^T in registers.
Reversed it walks from the last token to the first, over j >= i with exp(G_j - G_i). Then, with the
gradients do of o and dS of the state,

    o   walks forward,  r, w, x = q, k, v       and S is the state
    dq  walks forward,  r, w, x = do, v, k      and S is the state, transposed
    dk  walks reversed, r, w, x = v, do, q      and S is dS, transposed
    dv  walks reversed, r, w, x = k, q, do      and S is dS

so no walk ever needs the transpose of a product, and none writes anything but its result.

The gradient of g_t is the sum over the pairs i >= t > j of what they add to the loss. Over the i of
its chunk,

    dg_t = sum over i >= t of (q_i . dq_i - k_i . dk_i) + z      z = sum(S * dS) after the chunk

The sums q . dq are written by the dq walk and read by the dk walk, which carries z from
chunk to chunk. A difference of large sums, z loses digits with each chunk: in 16 bits the products
with S and with dS are rounded apart. So every SPAN chunks the dq walk leaves S, an anchor, and the
dk walk takes z from it anew.
"""

import triton
import triton.language as tl

# exp2 of this is 0 in float32 times any state, and a chunk of it is still summed accurately.
LOWEST_GATE = tl.constexpr(-128.0)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _block(p, stride, o_c, m_c, o_n, N: tl.constexpr, MASKED: tl.constexpr):
    """Rows o_c and columns o_n of a tile at p, zero outside."""
    p = p + o_c[:, None] * stride + o_n[None, :]
    if MASKED:
        return tl.load(p, mask=m_c[:, None] & (o_n < N)[None, :], other=0.0)
    return tl.load(p, mask=m_c[:, None], other=0.0)


@triton.jit
def _chunk_gates(p, stride, o_c, m_c, C: tl.constexpr, EXACT: tl.constexpr):
    """G of a chunk in base 2 as a pair that adds up, [C] each, and its last row.

    EXACT sums in float64, so that differences of G are right to float32.
    """
    b_g = tl.load(p + o_c * stride, mask=m_c, other=0.0).to(tl.float32)
    b_g = tl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g)
    if EXACT:
        b_wide = tl.cumsum(b_g.to(tl.float64) * LOG2E, 0)
        b_G = b_wide.to(tl.float32)
        b_low = (b_wide - b_G.to(tl.float64)).to(tl.float32)
    else:
        b_G = tl.cumsum(b_g * LOG2E, 0)
        b_low = tl.zeros_like(b_G)
    G_C = tl.sum(tl.where(o_c == C - 1, b_G, 0.0), 0)
    low_C = tl.sum(tl.where(o_c == C - 1, b_low, 0.0), 0)
    return b_G, b_low, G_C, low_C


@triton.jit
def _decay(seen, b_G, b_low, REVERSE: tl.constexpr, EXACT: tl.constexpr):
    """exp of the gates between tokens i and j where i sees j, else 0, [C, C]."""
    between = b_G[:, None] - b_G[None, :]
    if EXACT:
        between += b_low[:, None] - b_low[None, :]
    if REVERSE:
        between = -between
    return tl.exp2(tl.where(seen, between, float("-inf")))


@triton.jit
def _gate_gradient(p_rows, p_dg, b_row, z, m_c):
    """Writes a chunk's dg from q . dq at p_rows and k . dk in b_row; what it adds to z."""
    b_row = tl.load(p_rows, mask=m_c, other=0.0) - b_row
    tl.store(p_dg, tl.cumsum(b_row, 0, reverse=True) + z, mask=m_c)
    return tl.sum(b_row, 0)


_SIZES = ["T", "HV", "HR", "HX", "tokens", "stride_gb", "stride_gt", "stride_gh"]


@triton.jit(do_not_specialize=["scale", "scale_in", "scale_out", *_SIZES])
def linear_walk_kernel(
    r_ptr,  # [tokens, HR, D]
    w_ptr,  # [tokens, HR, D]
    x_ptr,  # [tokens, HX, X]
    y_ptr,  # [tokens, HV, X]
    g_ptr,  # [B, T, HV] by strides
    s_in_ptr,  # [N, HV, D, X], or [N, HV, X, D] if TRANSPOSED; times scale_in
    s_out_ptr,  # the same; times scale_out
    qk_ptr,  # [tokens, HX, X]: q for the dq walk, k for the dk walk
    rows_ptr,  # [NX, HV, tokens]: q . dq
    dg_ptr,  # [NX, tokens, HV]
    anchor_ptr,  # [spans, HV, D, X]
    cu_ptr,  # [N + 1]
    scale,
    scale_in,
    scale_out,
    T,
    HV,
    HR,
    HX,
    tokens,
    stride_gb,
    stride_gt,
    stride_gh,
    D: tl.constexpr,
    X: tl.constexpr,
    BD: tl.constexpr,
    BX: tl.constexpr,
    C: tl.constexpr,
    SPAN: tl.constexpr,
    REVERSE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_DG: tl.constexpr,
    HAS_S_IN: tl.constexpr,
    HAS_S_OUT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (ceil(X / BX) * HV * N,): one program walks one tile of X of one head and sequence."""
    if not GROUPED:  # tiles of one shape then share their offsets, and with them registers
        HR = HV
        HX = HV
    pid = tl.program_id(0)
    NX: tl.constexpr = (X + BX - 1) // BX
    DM: tl.constexpr = D != BD
    XM: tl.constexpr = X % BX != 0
    # q_i . dq_i - k_i . dk_i has no share of the pair (i, i), which may dwarf the rest: left out
    # of both in float32, and equal in both to the last bit or two else.
    OWN_LAST: tl.constexpr = HAS_DG and EXACT
    i_x = pid % NX
    i_h = (pid // NX) % HV
    i_n = (pid // NX // HV).to(tl.int64)
    if PACKED:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + i_n + 1).to(tl.int64), T)
        length = tl.maximum(end - begin, 0).to(tl.int32)
        first_span = begin // (SPAN * C) + i_n
    else:
        begin = i_n * T
        length = T
        first_span = i_n * tl.cdiv(T, SPAN * C)

    o_c = tl.arange(0, C)
    o_d = tl.arange(0, BD)
    o_x = i_x * BX + tl.arange(0, BX)
    i_r = begin * HR + i_h // (HV // HR)
    r_ptr += i_r * D
    w_ptr += i_r * D
    x_ptr += (begin * HX + i_h // (HV // HX)) * X
    y_ptr += (begin * HV + i_h) * X
    if HAS_GATE:
        g_ptr += i_h.to(tl.int64) * stride_gh
        g_ptr += begin * stride_gt if PACKED else i_n * stride_gb

    m_s = (o_d < D)[:, None] & (o_x < X)[None, :]
    o_s = o_d[:, None] * X + o_x[None, :]
    i_s = (i_n * HV + i_h) * (D * X)
    o_io = o_x[None, :] * D + o_d[:, None] if TRANSPOSED else o_s
    if HAS_S_IN:
        b_s = tl.load(s_in_ptr + i_s + o_io, mask=m_s, other=0.0).to(tl.float32) * scale_in
    else:
        b_s = tl.zeros((BD, BX), tl.float32)
    if HAS_DG:
        qk_ptr += (begin * HX + i_h // (HV // HX)) * X
        rows_ptr += (i_x * HV + i_h).to(tl.int64) * tokens + begin
        dg_ptr += (i_x.to(tl.int64) * tokens + begin) * HV + i_h
        anchor_ptr += (first_span * HV + i_h) * (D * X)

    chunks = tl.cdiv(length, C)
    if HAS_DG:
        spans = tl.cdiv(chunks, SPAN)
    else:
        spans = 1
    for i_span in range(spans):
        if HAS_DG:
            span = spans - 1 - i_span if REVERSE else i_span
            first = span * SPAN
            count = tl.minimum(chunks - first, SPAN)
            p_a = anchor_ptr + span.to(tl.int64) * HV * (D * X) + o_s
            if REVERSE:
                # by axis: one reduction over both breaks Triton 3.6's compiler on sm_100
                b_z = tl.sum(b_s * tl.load(p_a, mask=m_s, other=0.0), 1)
                z = tl.sum(b_z, 0) * scale_out
        else:
            first = 0
            count = chunks
        for i in range(count):
            i_c = first + count - 1 - i if REVERSE else first + i
            t = (i_c * C).to(tl.int64)
            m_c = o_c < length - i_c * C
            b_r = _block(r_ptr + t * (HR * D), HR * D, o_c, m_c, o_d, D, DM)  # [C, BD]
            b_w = _block(w_ptr + t * (HR * D), HR * D, o_c, m_c, o_d, D, DM)  # [C, BD]
            b_x = _block(x_ptr + t * (HX * X), HX * X, o_c, m_c, o_x, X, XM)  # [C, BX]
            b_a = tl.dot(b_r, tl.trans(b_w), input_precision=PRECISION)  # [C, C]
            if REVERSE:
                seen = o_c[:, None] <= o_c[None, :]
            else:
                seen = o_c[:, None] >= o_c[None, :]
            if HAS_GATE:
                b_G, b_low, G_C, low_C = _chunk_gates(
                    g_ptr + t * stride_gt, stride_gt, o_c, m_c, C, EXACT
                )
                if OWN_LAST:
                    own = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_a, 0.0), 1)
                    seen = seen & (o_c[:, None] != o_c[None, :])
                b_a *= _decay(seen, b_G, b_low, REVERSE, EXACT)
            else:
                b_a = tl.where(seen, b_a, 0.0)
            b_a = b_a.to(b_x.dtype)
            b_y = tl.dot(b_r, b_s.to(b_r.dtype), input_precision=PRECISION)  # [C, BX]
            b_kept = b_x
            if HAS_GATE:
                b_start = tl.exp2(b_G)
                b_end = tl.exp2((G_C - b_G) + (low_C - b_low))
                b_y *= (b_end if REVERSE else b_start)[:, None]
                b_s *= tl.exp2(G_C)
                b_kept = (b_x * (b_start if REVERSE else b_end)[:, None]).to(b_x.dtype)
            b_y = tl.dot(b_a, b_x, b_y, input_precision=PRECISION)
            b_s = tl.dot(tl.trans(b_w), b_kept, b_s, input_precision=PRECISION)  # [BD, BX]
            b_y *= scale
            if HAS_DG:
                b_qk = _block(qk_ptr + t * (HX * X), HX * X, o_c, m_c, o_x, X, XM)  # [C, BX]
                b_row = tl.sum(b_qk.to(tl.float32) * b_y, 1)
            if OWN_LAST:
                b_y += (own * scale)[:, None] * b_x
            m_y = m_c[:, None] & (o_x < X)[None, :] if XM else m_c[:, None]
            p_y = y_ptr + t * (HV * X) + o_c[:, None] * (HV * X) + o_x[None, :]
            tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_y)
            if HAS_DG:
                if REVERSE:
                    p_dg = dg_ptr + (t + o_c) * HV
                    z += _gate_gradient(rows_ptr + t + o_c, p_dg, b_row, z, m_c)
                else:
                    tl.store(rows_ptr + t + o_c, b_row, mask=m_c)
        if HAS_DG and not REVERSE:
            tl.store(p_a, b_s, mask=m_s)
    if HAS_S_OUT:
        tl.store(s_out_ptr + i_s + o_io, b_s * scale_out, mask=m_s)
