# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Cross entropy of rows of V logits, and its gradient in the same program.

    z = scale * logits, then softcap * tanh(z / softcap) if there is a cap
    lse = m + log(sum(exp(z - m)))      m, the largest so far, and the sum go through blocks of BV
    loss = (1 - s) (lse - z[target]) + s (lse - mean(z)) + z_loss lse^2
    dz = (1 + 2 z_loss lse) exp(z - lse) - (1 - s) onehot(target) - s / V
    dlogits = weight dz scale (1 - (z / softcap)^2)

A program has one row: its second pass, for dlogits, finds most of it in the L2 cache. dlogits may
be the logits. Rows whose target is ignore_index have loss and gradient 0 and are not read.
"""

import triton
import triton.language as tl


@triton.jit
def _load_z(p, o_v, m, scale, softcap, CAP: tl.constexpr):
    """z, and -inf where there is none."""
    b_z = tl.load(p + o_v, mask=m, other=0.0).to(tl.float32) * scale
    if CAP:
        b_z = softcap * (2 * tl.sigmoid(2 * b_z / softcap) - 1)
    return tl.where(m, b_z, float("-inf"))


@triton.jit(do_not_specialize=["ignore_index", "weight_stride"])
def cross_entropy_kernel(
    logits_ptr, target_ptr, weight_ptr, loss_ptr, lse_ptr, grad_ptr,
    stride, grad_stride, weight_stride, ignore_index, smoothing, softcap, z_loss, scale,
    V: tl.constexpr, BV: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr,
    HAS_LSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (rows). Reads lse if it is there already, else writes it and loss where wanted."""
    i = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + i)
    live = target != ignore_index
    target = tl.minimum(tl.maximum(target, 0), V - 1)
    p_row = logits_ptr + i * stride
    o_v = tl.arange(0, BV)
    if HAS_LSE:
        lse = tl.load(lse_ptr + i)
    else:
        hit = _load_z(p_row, target, live, scale, softcap, CAP)
        # read by every warp before any of them overwrites it
        tl.debug_barrier()
        top, total, z_sum = float("-inf"), 0.0, 0.0
        for v in tl.range(0, tl.where(live, V, 0), BV, num_stages=STAGES):
            m = v + o_v < V
            b_z = _load_z(p_row, v + o_v, m, scale, softcap, CAP)
            higher = tl.maximum(top, tl.max(b_z, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(b_z - base), 0)
            if SMOOTH:
                z_sum += tl.sum(tl.where(m, b_z, 0.0), 0)
            top = higher
        lse = tl.where(live, top + tl.log(total), 0.0)
        loss = lse - (1 - smoothing) * hit + z_loss * lse * lse
        if SMOOTH:
            loss -= smoothing * z_sum / V
        tl.store(loss_ptr + i, tl.where(live, loss, 0.0))
        if lse_ptr is not None:
            tl.store(lse_ptr + i, lse)
    if grad_ptr is not None:
        factor = scale
        if weight_ptr is not None:
            factor *= tl.load(weight_ptr + i * weight_stride)
        for v in tl.range(0, V, BV, num_stages=STAGES):
            m = v + o_v < V
            b_z = _load_z(p_row, v + o_v, m & live, scale, softcap, CAP)
            b_d = (1 + 2 * z_loss * lse) * tl.exp(b_z - lse)
            b_d -= tl.where(v + o_v == target, 1 - smoothing, 0.0)
            if SMOOTH:
                b_d -= smoothing / V
            if CAP:
                b_t = b_z / softcap
                b_d *= 1 - b_t * b_t
            b_d = tl.where(live, b_d * factor, 0.0).to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + i * grad_stride + v + o_v, b_d, mask=m)


@triton.jit(do_not_specialize=["N", "ignore_index"])
def inverse_count_kernel(target_ptr, out_ptr, N, ignore_index, B: tl.constexpr):
    """out: 1 / how many targets count, or 1 if none does; one program."""
    b_count = tl.zeros([B], tl.int32)
    for i in range(0, N, B):
        o = i + tl.arange(0, B)
        b_target = tl.load(target_ptr + o, mask=o < N, other=0)
        b_count += ((o < N) & (b_target != ignore_index)).to(tl.int32)
    count = tl.maximum(tl.sum(b_count, 0), 1)
    tl.store(out_ptr, 1.0 / count.to(tl.float32))


@triton.jit(do_not_specialize=["N"])
def scale_kernel(x_ptr, s_ptr, N, B: tl.constexpr):
    """x *= s in place, and nothing if s is 1; a few programs, each with every P-th block."""
    s = tl.load(s_ptr)
    step = tl.num_programs(0).to(tl.int64) * B
    for i in range(tl.program_id(0).to(tl.int64) * B, tl.where(s == 1, 0, N), step):
        o = i + tl.arange(0, B)
        b_x = tl.load(x_ptr + o, mask=o < N, other=0.0).to(tl.float32)
        tl.store(x_ptr + o, (b_x * s).to(x_ptr.dtype.element_ty), mask=o < N)
