"""Log-probability of the target and entropy of rows of V logits, and their gradient.

    z = scale logits        m = max z       l = sum e^(z - m)       s = sum e^(z - m) (z - m)
    log_prob = z[target] - m - log l        entropy = log l - s / l
    dz = u (onehot(target) - p) - e p (log p + entropy)             u, e: what comes into each

By l and s entropy is no difference of large numbers where one class has nearly all. When the
maximum grows by d, s becomes e^-d (s - d l) and l becomes e^-d l.

A program has one row and goes through it in base 2, in blocks of BV; each thread has the maximum
and the sums of its own elements. Where a gradient is wanted, a second pass goes from the end of
the row, which is still in the L2 cache; the gradient may be the logits. It leaves out the target's
column, which is written after the others. Rows whose target is ignore_index are not read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.common.linear_rows import ClassifierInputs, LinearRows
from slipstream.kernels.primitives import device, logit_chunks
from slipstream.runtime import launch_cache, token_ids


@triton.jit
def _finite(x):
    """0 for the maximum of nothing: -inf less itself would be nan."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _add_block(b_z, b_top, b_sum, b_off):
    """m, l and s of each thread's elements, with b_z's."""
    b_new = tl.maximum(b_top, tl.max(b_z, 1))
    b_base = _finite(b_new)
    b_less, b_p = tl.exp2(b_top - b_base), tl.exp2(b_z - b_base[:, None])
    b_gap = tl.where(b_z == float("-inf"), 0.0, b_p * (b_z - b_base[:, None]))
    b_off = b_less * (b_off + (_finite(b_top) - b_base) * b_sum) + tl.sum(b_gap, 1)
    return b_new, b_less * b_sum + tl.sum(b_p, 1), b_off


@triton.jit
def _grad(b_z, lse, entropy, scale, up, down):
    """Without the target's own part; down in base 2."""
    b_log = tl.where(b_z == float("-inf"), 0.0, b_z - lse + entropy)
    return -scale * tl.exp2(b_z - lse) * (up + down * b_log)


@triton.jit(do_not_specialize=["ignore_index"])
def log_probs_kernel(
    logits_ptr, target_ptr, log_prob_ptr, entropy_ptr, dlog_prob_ptr, dentropy_ptr, grad_ptr,
    stride, grad_stride, ignore_index, scale,
    V: tl.constexpr, BV: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (rows). log_prob, entropy, dlog_prob, dentropy [rows], float32; grad like logits, or
    None, and then dlog_prob and dentropy are too."""
    i = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + i)
    live = target != ignore_index
    # a wrong id reads a logit of the row: it is reported elsewhere
    target = tl.minimum(tl.maximum(target, 0), V - 1)
    p_row = logits_ptr + i * stride
    factor = scale * device.LOG2E
    hit = tl.load(p_row + target, mask=live, other=0.0).to(tl.float32) * factor
    o_v = tl.arange(0, BV // INNER)[:, None] * INNER + tl.arange(0, INNER)[None, :]
    # whole blocks want no mask, so that their loads are wide; the rest comes after the loop
    FULL: tl.constexpr = V // BV * BV
    m_end = FULL + o_v < V
    b_top = tl.full([BV // INNER], float("-inf"), tl.float32)
    b_sum, b_off = tl.zeros_like(b_top), tl.zeros_like(b_top)
    for v in tl.range(0, tl.where(live, FULL, 0), BV, num_stages=STAGES):
        b_x = tl.load(p_row + v + o_v, eviction_policy="evict_last")
        b_top, b_sum, b_off = _add_block(b_x.to(tl.float32) * factor, b_top, b_sum, b_off)
    if FULL < V:
        b_x = tl.load(p_row + FULL + o_v, mask=m_end & live, other=0.0)
        b_z = tl.where(m_end, b_x.to(tl.float32) * factor, float("-inf"))
        b_top, b_sum, b_off = _add_block(b_z, b_top, b_sum, b_off)
    # over all threads
    base = _finite(tl.max(b_top, 0))
    b_less = tl.exp2(b_top - base)
    total = tl.sum(b_less * b_sum, 0)
    log_total = tl.log2(total)
    off = tl.sum(b_less * (b_off + (_finite(b_top) - base) * b_sum), 0)
    lse, entropy = base + log_total, log_total - off / total
    tl.store(log_prob_ptr + i, tl.where(live, (hit - base - log_total) * device.LN2, 0.0))
    tl.store(entropy_ptr + i, tl.where(live, entropy * device.LN2, 0.0))
    if grad_ptr is not None:
        up, down = tl.load(dlog_prob_ptr + i), tl.load(dentropy_ptr + i) * device.LN2
        p_grad = grad_ptr + i * grad_stride
        # the target is read by every warp before any of them overwrites it
        tl.debug_barrier()
        if FULL < V:
            b_x = tl.load(p_row + FULL + o_v, mask=m_end & live, other=0.0)
            b_d = _grad(b_x.to(tl.float32) * factor, lse, entropy, scale, up, down)
            b_d = tl.where(live, b_d, 0.0)
            tl.store(p_grad + FULL + o_v, b_d.to(grad_ptr.dtype.element_ty), mask=m_end)
        for v in tl.range(0, tl.where(live, FULL, 0), BV, num_stages=STAGES):
            o = FULL - BV - v + o_v
            b_z = tl.load(p_row + o, eviction_policy="evict_first").to(tl.float32) * factor
            b_d = _grad(b_z, lse, entropy, scale, up, down)
            p = p_grad + o
            tl.store(p, b_d.to(grad_ptr.dtype.element_ty), eviction_policy="evict_first")
        # ignored rows have gradient 0
        for v in range(0, tl.where(live, 0, FULL), BV):
            tl.store(p_grad + v + o_v, tl.zeros_like(o_v).to(grad_ptr.dtype.element_ty))
        d = scale * up + _grad(hit, lse, entropy, scale, up, down)
        tl.debug_barrier()
        tl.store(p_grad + target, d.to(grad_ptr.dtype.element_ty), mask=live)


def forward(inputs: ClassifierInputs, scale: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """log_prob and entropy [N]."""
    token_ids.expect_ids("target", inputs.target, inputs.weight.shape[0], ignore_index)
    log_prob, entropy, *_ = _through_chunks(inputs, None, scale, ignore_index)
    return log_prob, entropy


def backward(
    inputs: ClassifierInputs, dlog_prob: Tensor, dentropy: Tensor, scale: float, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dhidden, dweight and dbias."""
    incoming = dlog_prob.contiguous(), dentropy.contiguous()
    _, _, *grads = _through_chunks(inputs, incoming, scale, ignore_index)
    return grads[0], grads[1], grads[2]


def _through_chunks(
    inputs: ClassifierInputs, grads: tuple[Tensor, Tensor] | None, scale: float, ignore_index: int
) -> list[Tensor]:
    """log_prob and entropy [N], and with grads, dlog_prob and dentropy [N], also dhidden, dweight
    and dbias. One buffer holds the logits of a chunk of rows, which become their gradient."""
    hidden, weight = inputs.hidden.contiguous(), inputs.weight.contiguous()
    layer = LinearRows(hidden, weight, inputs.bias, grads is not None, weight.dtype)
    target = inputs.target.contiguous()
    N, V = hidden.shape[0], weight.shape[0]
    outputs = [torch.empty(N, dtype=torch.float32, device=hidden.device) for _ in range(2)]
    step = logit_chunks.rows_of_chunk(N, V, hidden.element_size())
    # a number of columns that the compiler knows to be a multiple of 16: loads are wide
    buffer = hidden.new_empty(min(step, N), -(-V // 16) * 16)
    BV, warps = next((BV, warps) for widest, BV, warps in logit_chunks.TILES if widest >= V)
    for i in range(0, N, max(step, 1)):
        rows = slice(i, i + step)
        logits = layer.logits(rows, out=buffer[: min(step, N - i), :V])
        incoming = (None, None) if grads is None else (grads[0][rows], grads[1][rows])
        launch_cache.cached(log_probs_kernel)[(len(logits),)](
            logits_ptr=logits,
            target_ptr=target[rows],
            log_prob_ptr=outputs[0][rows],
            entropy_ptr=outputs[1][rows],
            dlog_prob_ptr=incoming[0],
            dentropy_ptr=incoming[1],
            grad_ptr=None if grads is None else logits,
            stride=logits.stride(0),
            grad_stride=0 if grads is None else logits.stride(0),
            ignore_index=ignore_index,
            scale=scale,
            V=V,
            BV=BV,
            INNER=16 // logits.element_size(),
            STAGES=logit_chunks.STAGES,
            num_warps=warps,
        )
        if grads is not None:
            layer.add(rows, logits)
    return [*outputs, layer.dhidden, layer.dweight, layer.dbias.to(weight.dtype)]
