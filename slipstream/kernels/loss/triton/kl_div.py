"""KL divergence of two rows of V logits, and the gradient of the second in the same program.

    p = softmax(t / T), q = softmax(s / T)                  t of the teacher, s of the student
    loss = T^2 KL(p || q) = T^2 (sum(p (t - s)) / T - lse(t / T) + lse(s / T))
    ds = weight T (q - p)

A program has one row and goes through it in base 2, in blocks of BV, each thread with the largest,
the sum and the weighted sum of its own elements (cross_entropy.py). ds may be s. Rows that are not
live have loss and gradient 0 and are not read. A class with t = -inf has p = 0 and adds nothing.

Behind two linear layers the rows go through in chunks of two buffers of logits, the student's of
which become their gradient in place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.common.linear_rows import LinearRows
from slipstream.kernels.loss.triton.cross_entropy import LN2, LOG2E, add_block, log_sum
from slipstream.kernels.primitives import logit_chunks
from slipstream.runtime import launch_cache


@triton.jit
def _load(p, m, factor):
    return tl.where(m, tl.load(p, mask=m, other=0.0).to(tl.float32) * factor, float("-inf"))


@triton.jit(do_not_specialize=["weight_stride"])
def kl_div_kernel(
    s_ptr, t_ptr, live_ptr, weight_ptr, loss_ptr, grad_ptr,
    s_stride, t_stride, grad_stride, weight_stride, temperature,
    V: tl.constexpr, BV: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (rows). live bool [N]; weight float32 [N], or stride 0; loss float32 [N]."""
    i = tl.program_id(0).to(tl.int64)
    live = i >= 0
    if live_ptr is not None:
        live = tl.load(live_ptr + i).to(tl.int1)
    p_s, p_t = s_ptr + i * s_stride, t_ptr + i * t_stride
    factor = LOG2E / temperature
    o_v = tl.arange(0, BV // INNER)[:, None] * INNER + tl.arange(0, INNER)[None, :]
    b_top_s = tl.full([BV // INNER], float("-inf"), tl.float32)
    b_top, b_sum_s = b_top_s, tl.zeros_like(b_top_s)
    b_sum, b_off = b_sum_s, b_sum_s
    for v in tl.range(0, tl.where(live, V, 0), BV, num_stages=STAGES):
        m = v + o_v < V
        b_s, b_t = _load(p_s + v + o_v, m, factor), _load(p_t + v + o_v, m, factor)
        b_new = tl.maximum(b_top, tl.max(b_t, 1))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        # running sums of the teacher relative to its maximum: of p, and of p (t - s)
        b_p = tl.exp2(b_t - b_base[:, None])
        b_less = tl.exp2(b_top - b_base)
        b_gap = tl.where(b_t == float("-inf"), 0.0, b_p * (b_t - b_s))
        b_off = b_off * b_less + tl.sum(b_gap, 1)
        b_sum = b_sum * b_less + tl.sum(b_p, 1)
        b_top = b_new
        b_top_s, b_sum_s = add_block(b_s, b_top_s, b_sum_s)
    # over all threads
    top = tl.max(b_top, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    b_less = tl.exp2(b_top - base)
    total = tl.sum(b_sum * b_less, 0)
    lse_t, lse_s = base + tl.log2(total), log_sum(b_top_s, b_sum_s)
    loss = (tl.sum(b_off * b_less, 0) / total - lse_t + lse_s) * LN2 * temperature * temperature
    tl.store(loss_ptr + i, tl.where(live, loss, 0.0))
    if grad_ptr is not None:
        # ds = weight T (q - p), from the end of the row
        rise = temperature
        if weight_ptr is not None:
            rise *= tl.load(weight_ptr + i * weight_stride)
        p_grad = grad_ptr + i * grad_stride
        # rows that are not live get zeros by the same loop
        for v in tl.range(0, V, BV, num_stages=STAGES):
            o = (V - 1) // BV * BV - v + o_v
            m = (o < V) & live
            b_s, b_t = _load(p_s + o, m, factor), _load(p_t + o, m, factor)
            b_d = rise * (tl.exp2(b_s - lse_s) - tl.exp2(b_t - lse_t))
            b_d = tl.where(live, b_d, 0.0)
            tl.store(p_grad + o, b_d.to(grad_ptr.dtype.element_ty), mask=o < V)


def kl_div(
    s: Tensor,
    t: Tensor,
    live: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    loss: Tensor,
    grad: Tensor | None,
) -> None:
    """One launch over logits [N, V] whose columns are adjacent; weight [N] or []; grad may be s."""
    N, V = s.shape
    BV, warps = next((BV, warps) for widest, BV, warps in logit_chunks.TILES if widest >= V)
    launch_cache.cached(kl_div_kernel)[(N,)](
        s_ptr=s,
        t_ptr=t,
        live_ptr=live,
        weight_ptr=weight,
        loss_ptr=loss,
        grad_ptr=grad,
        s_stride=s.stride(0),
        t_stride=t.stride(0),
        grad_stride=0 if grad is None else grad.stride(0),
        weight_stride=0 if weight is None or weight.dim() == 0 else weight.stride(0),
        temperature=temperature,
        V=V,
        BV=BV,
        INNER=16 // s.element_size(),
        STAGES=logit_chunks.STAGES,
        num_warps=warps,
    )


def linear_rows(
    student: tuple[Tensor, Tensor, Tensor | None],
    teacher: tuple[Tensor, Tensor, Tensor | None],
    live: Tensor | None,
    dloss: Tensor | None,
    temperature: float,
    grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As eager.kl_rows; gradients in the dtypes of what they belong to."""
    hidden, weight, bias = student
    layers = LinearRows(*student, grads, weight.dtype), LinearRows(*teacher, False, weight.dtype)
    N, V = hidden.shape[0], weight.shape[0]
    loss = torch.empty(N, dtype=torch.float32, device=hidden.device)
    step = logit_chunks.rows_of_chunk(N, V, 2 * hidden.element_size())
    # rows that begin at multiples of 16 bytes are read 16 bytes at a time
    buffers = hidden.new_empty(2, min(step, N), -(-V // 8) * 8)
    for i in range(0, N, max(step, 1)):
        rows = slice(i, i + step)
        s, t = (x.logits(rows, y[: min(step, N - i), :V]) for x, y in zip(layers, buffers))
        kl_div(
            s,
            t,
            None if live is None else live[rows],
            dloss if dloss is None or dloss.dim() == 0 else dloss[rows],
            temperature,
            loss[rows],
            s if grads else None,
        )
        if grads:
            layers[0].add(rows, s)
    dbias = layers[0].dbias if bias is None else layers[0].dbias.to(bias.dtype)
    return loss, layers[0].dhidden, layers[0].dweight, dbias
