"""Cross entropy of rows of V logits, and its gradient in the same program.

    z = scale * logits, then softcap * tanh(z / softcap) if there is a cap
    lse = log(sum(exp(z)))
    loss = (1 - s) (lse - z[target]) + s (lse - mean(z)) + z_loss lse^2
    dz = (1 + 2 z_loss lse) exp(z - lse) - (1 - s) onehot(target) - s / V
    dlogits = weight dz scale (1 - (z / softcap)^2)

A program has one row and goes through it in blocks of BV, in base 2. Each thread keeps the largest
and the sum of its own elements, of INNER neighbours at a time, so that threads exchange numbers
once a row. The second pass, for dlogits, goes from the end of the row to its start: what was read
last is still in the L2 cache. It leaves out the target, which is written after the others. dlogits
may be the logits. Rows whose target is ignore_index have loss and gradient 0 and are not read.

Of a vocabulary in shards (SHARD) the logits are columns `first` to first + V. The first pass then
writes lse, z[target] or 0, and sum(z) of its own columns; the second is given lse of all.

Launches wait for nothing and depend on no device value. The linear layer's rows go through in
chunks of one buffer of logits, which become their gradient in place; dweight is summed over the
chunks in weight's dtype, by the product that adds to it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.common.linear_rows import ClassifierInputs, LinearRows
from slipstream.kernels.loss.eager import LossInputs
from slipstream.kernels.primitives import logit_chunks
from slipstream.kernels.primitives.device import LN2, LOG2E
from slipstream.runtime import backends, launch_cache, token_ids_kernel


@triton.jit
def _base2(b_x, scale, softcap, CAP: tl.constexpr):
    """z in base 2."""
    # tanh(x) = 2 s(2 x) - 1
    if CAP:
        return softcap * LOG2E * (2 * tl.sigmoid(2 * scale / softcap * b_x.to(tl.float32)) - 1)
    return b_x.to(tl.float32) * (scale * LOG2E)


@triton.jit
def add_block(b_z, b_top, b_total):
    """The largest and the sum of 2^(z - largest) of each thread's elements, with b_z's."""
    b_new = tl.maximum(b_top, tl.max(b_z, 1))
    # a thread whose logits are all -inf so far: -inf less itself would be nan
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_total = b_total * tl.exp2(b_top - b_base) + tl.sum(tl.exp2(b_z - b_base[:, None]), 1)
    return b_new, b_total


@triton.jit
def log_sum(b_top, b_total):
    """log2 of the sum over all threads."""
    top = tl.max(b_top, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + tl.log2(tl.sum(b_total * tl.exp2(b_top - base), 0))


@triton.jit
def _grad(b_z, lse, factor, smoothing_each, softcap, CAP: tl.constexpr, SMOOTH: tl.constexpr):
    b_d = factor * tl.exp2(b_z - lse)
    if SMOOTH:
        b_d -= smoothing_each
    if CAP:
        b_t = b_z * (LN2 / softcap)
        b_d *= 1 - b_t * b_t
    return b_d


@triton.jit(do_not_specialize=["ignore_index", "weight_stride", "first"])
def cross_entropy_kernel(
    logits_ptr, target_ptr, weight_ptr, loss_ptr, lse_ptr, grad_ptr, z_sum_ptr,
    stride, grad_stride, weight_stride, ignore_index, first,
    smoothing, smoothing_each, softcap, z_loss, scale,
    V: tl.constexpr, BV: tl.constexpr, INNER: tl.constexpr, CAP: tl.constexpr,
    SMOOTH: tl.constexpr, HAS_LSE: tl.constexpr, SHARD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (rows). With HAS_LSE it reads lse, else it writes loss, and lse if there is a pointer.

    smoothing_each: smoothing / the size of the whole vocabulary."""
    i = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + i)
    live = target != ignore_index
    hits = live
    if SHARD:
        target -= first
        hits = live & (target >= 0) & (target < V)
    # a wrong id reads a logit of the row: it is reported elsewhere (runtime/token_ids_kernel.py)
    target = tl.minimum(tl.maximum(target, 0), V - 1)
    p_row = logits_ptr + i * stride
    o_v = tl.arange(0, BV // INNER)[:, None] * INNER + tl.arange(0, INNER)[None, :]
    # whole blocks want no mask, so that their loads are wide; the rest comes after the loop
    FULL: tl.constexpr = V // BV * BV
    m_end = FULL + o_v < V
    hit = _base2(tl.load(p_row + target, mask=hits, other=0.0), scale, softcap, CAP)
    # first pass: lse, unless it is given
    if HAS_LSE:
        lse = tl.load(lse_ptr + i) * LOG2E
    else:
        b_top = tl.full([BV // INNER], float("-inf"), tl.float32)
        b_total, b_sum = tl.zeros_like(b_top), tl.zeros_like(b_top)
        for v in tl.range(0, tl.where(live, FULL, 0), BV, num_stages=STAGES):
            b_x = tl.load(p_row + v + o_v, eviction_policy="evict_last")
            b_z = _base2(b_x, scale, softcap, CAP)
            b_top, b_total = add_block(b_z, b_top, b_total)
            if SMOOTH:
                b_sum += tl.sum(b_z, 1)
        if FULL < V:
            b_x = tl.load(p_row + FULL + o_v, mask=m_end & live, other=0.0)
            b_z = _base2(b_x, scale, softcap, CAP)
            if SMOOTH:
                b_sum += tl.sum(b_z, 1)  # of 0 beyond the end
            b_top, b_total = add_block(tl.where(m_end, b_z, float("-inf")), b_top, b_total)
        lse = tl.where(live, log_sum(b_top, b_total), 0.0)
        z_sum = tl.sum(b_sum, 0) * LN2
        if SHARD:
            tl.store(loss_ptr + i, tl.where(hits, hit * LN2, 0.0))
            tl.store(z_sum_ptr + i, z_sum)
        else:
            lse_e = lse * LN2
            loss = lse_e - (1 - smoothing) * hit * LN2 + z_loss * lse_e * lse_e
            if SMOOTH:
                loss -= smoothing_each * z_sum
            tl.store(loss_ptr + i, tl.where(live, loss, 0.0))
        if lse_ptr is not None:
            tl.store(lse_ptr + i, lse * LN2)
    # second pass: the gradient, from the end of the row, which is still in the L2 cache
    if grad_ptr is not None:
        factor = scale
        if weight_ptr is not None:
            factor *= tl.load(weight_ptr + i * weight_stride)
        smoothing_each *= factor
        grad_factor = factor * (1 + 2 * z_loss * (lse * LN2))
        p_grad = grad_ptr + i * grad_stride
        # the target is read by every warp before any of them overwrites it
        tl.debug_barrier()
        if FULL < V:
            b_x = tl.load(p_row + FULL + o_v, mask=m_end & live, other=0.0)
            b_z = _base2(b_x, scale, softcap, CAP)
            b_d = tl.where(
                live, _grad(b_z, lse, grad_factor, smoothing_each, softcap, CAP, SMOOTH), 0.0
            )
            tl.store(p_grad + FULL + o_v, b_d.to(grad_ptr.dtype.element_ty), mask=m_end)
        for v in tl.range(0, tl.where(live, FULL, 0), BV, num_stages=STAGES):
            o = FULL - BV - v + o_v
            b_z = _base2(tl.load(p_row + o, eviction_policy="evict_first"), scale, softcap, CAP)
            b_d = _grad(b_z, lse, grad_factor, smoothing_each, softcap, CAP, SMOOTH)
            p = p_grad + o
            tl.store(p, b_d.to(grad_ptr.dtype.element_ty), eviction_policy="evict_first")
        # ignored rows have gradient 0
        for v in range(0, tl.where(live, 0, FULL), BV):
            tl.store(p_grad + v + o_v, tl.zeros_like(o_v).to(grad_ptr.dtype.element_ty))
        # the target's own column, last
        d = factor * (1 - smoothing)
        if CAP:
            t = hit * (LN2 / softcap)
            d *= 1 - t * t
        d = _grad(hit, lse, grad_factor, smoothing_each, softcap, CAP, SMOOTH) - d
        tl.debug_barrier()
        tl.store(p_grad + target, d.to(grad_ptr.dtype.element_ty), mask=hits)


@triton.jit(do_not_specialize=["N"])
def scale_kernel(x_ptr, s_ptr, N, B: tl.constexpr):
    """x *= s in place, and nothing if s is 1; what is 0 stays 0, also where s is inf or NaN.

    A few programs, each with every P-th block."""
    # s of 1, as most losses have it, is a read of one number: no copy, and no wait
    s = tl.load(s_ptr)
    step = tl.num_programs(0).to(tl.int64) * B
    for i in range(tl.program_id(0).to(tl.int64) * B, tl.where(s == 1, 0, N), step):
        o = i + tl.arange(0, B)
        b_x = tl.load(x_ptr + o, mask=o < N, other=0.0).to(tl.float32)
        # rows that do not count have gradients of 0, whatever s is
        b_x = tl.where(b_x == 0, 0.0, b_x * s)
        tl.store(x_ptr + o, b_x.to(x_ptr.dtype.element_ty), mask=o < N)


# (columns of a block, warps), and the longest row in bytes, for which the rows of all running
# programs stay in the L2 cache between both passes: 16 warps a row are four rows a
# multiprocessor. On an H200 148 us for 191 at 4096 x 32000.
CACHED_TILE, CACHED_ROW = (8192, 16), 80 << 10


class Shard(NamedTuple):
    """The columns from `first` on of a vocabulary of `size`. z_sum: [N] float32, written."""

    first: int
    size: int
    z_sum: Tensor | None = None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    options: LossInputs,
    *,
    loss: Tensor | None = None,
    lse: Tensor | None = None,
    grad: Tensor | None = None,
    weight: Tensor | None = None,
    has_lse: bool = False,
    shard: Shard | None = None,
) -> None:
    """One launch over logits [N, V], whose columns are adjacent.

    Args:
        loss: [N] float32, written unless has_lse; with a shard z[target], or 0 if it is elsewhere.
        lse: [N] float32, read if has_lse, else written if given.
        grad: [N, V], written if given; it may be logits.
        weight: float32 [N] or [], factor of each row's gradient; None is 1.
    """
    N, V = logits.shape
    BV, warps = _tile(V, logits.element_size())
    size = V if shard is None else shard.size
    launch_cache.cached(cross_entropy_kernel)[(N,)](
        logits_ptr=logits,
        target_ptr=target,
        weight_ptr=weight,
        loss_ptr=loss,
        lse_ptr=lse,
        grad_ptr=grad,
        z_sum_ptr=None if shard is None else shard.z_sum,
        stride=logits.stride(0),
        grad_stride=0 if grad is None else grad.stride(0),
        weight_stride=0 if weight is None or weight.dim() == 0 else weight.stride(0),
        ignore_index=options.ignore_index,
        first=0 if shard is None else shard.first,
        smoothing=options.label_smoothing,
        smoothing_each=options.label_smoothing / size,
        softcap=options.softcap,
        z_loss=options.z_loss,
        scale=options.logit_scale,
        V=V,
        BV=BV,
        INNER=16 // logits.element_size(),
        CAP=options.softcap != 0.0,
        SMOOTH=options.label_smoothing != 0.0,
        HAS_LSE=has_lse,
        SHARD=shard is not None,
        STAGES=logit_chunks.STAGES,
        num_warps=warps,
    )


def _tile(V: int, element_size: int) -> tuple[int, int]:
    """Columns of a block, and warps."""
    if CACHED_TILE[0] <= V and V * element_size <= CACHED_ROW:
        return CACHED_TILE
    return next((BV, warps) for widest, BV, warps in logit_chunks.TILES if widest >= V)


def inverse_count(target: Tensor, ignore_index: int, size: int | None = None) -> Tensor:
    """1 / how many targets count, float32 []. With a size it also looks for those outside."""
    return token_ids_kernel.scan_inverse_count("target", target, ignore_index, size)


def scale_(x: Tensor, s: Tensor) -> Tensor:
    """x *= s in place, s [] on the device; what is 0 stays 0. Almost free if s is 1."""
    s = s.to(torch.float32)
    programs = min(backends.sm_count(x.get_device()) * 8, -(-x.numel() // 2048))
    launch_cache.cached(scale_kernel)[(programs,)](x, s, x.numel(), 2048, num_warps=4)
    return x


def linear_rows(
    inputs: ClassifierInputs, dloss: Tensor | None, options: LossInputs, grads: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss [N] float32, and with `grads` dhidden [N, D], dweight [V, D], dbias [V] in the dtypes of
    what they belong to; else three empty ones.

    Args:
        dloss: [N] or [] float32, what comes into each row's loss; None is 1.
    """
    hidden, weight, bias, target = inputs
    layer = LinearRows(hidden.contiguous(), weight.contiguous(), bias, grads, weight.dtype)
    target = target.contiguous()
    N, V = hidden.shape[0], weight.shape[0]
    loss = torch.empty(N, dtype=torch.float32, device=hidden.device)
    step = logit_chunks.rows_of_chunk(N, V, hidden.element_size())
    # rows that begin at multiples of 16 bytes are read 16 bytes at a time
    buffer = hidden.new_empty(min(step, N), -(-V // 8) * 8)
    for i in range(0, N, max(step, 1)):
        rows = slice(i, i + step)
        logits = layer.logits(rows, out=buffer[: min(step, N - i), :V])
        cross_entropy(
            logits,
            target[rows],
            options,
            loss=loss[rows],
            grad=logits if grads else None,
            weight=dloss if dloss is None or dloss.dim() == 0 else dloss[rows],
        )
        if grads:
            layer.add(rows, logits)
    dbias = layer.dbias if bias is None else layer.dbias.to(bias.dtype)
    return loss, layer.dhidden, layer.dweight, dbias
