"""After the scan (chunk.py): the gate's gradient.

    dg_t = sum over i >= t of (q_i . dq_i - k_i . dk_i) + z

is what crosses token t. Nothing crosses a gate below MIN_CROSSED, and its own gradient is 0: a
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

from slipstream.kernels.linear.triton.scalar_decay.device import MIN_CROSSED, locate_chunk


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


_SIZES = ["T", "N", "HV", "tokens", "segment", "num_anchors", "min_chunk_gate"]


@triton.jit(do_not_specialize=[*_SIZES, "stride_gb", "stride_gt", "stride_gh"])
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
