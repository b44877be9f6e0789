"""Launches of the losses: no synchronisation, nothing that depends on device values.

The linear layer's rows go through in chunks of one buffer of logits, which become their gradient
in place; dweight is summed over the chunks in weight's dtype, by the product that adds to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common.linear_rows import ClassifierInputs, LinearRows
from slipstream.kernels.loss.reference import LossInputs
from slipstream.kernels.loss.triton.cross_entropy import cross_entropy_kernel, scale_kernel
from slipstream.kernels.primitives import logit_chunks
from slipstream.runtime.backends import device_of, sm_count
from slipstream.runtime.launch_cache import cached
from slipstream.runtime.token_ids_kernel import scan_inverse_count

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
    with device_of(logits.device):
        cached(cross_entropy_kernel)[(N,)](
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
    return scan_inverse_count("target", target, ignore_index, size)


def scale_(x: Tensor, s: Tensor) -> Tensor:
    """x *= s in place, s [] on the device; what is 0 stays 0. Almost free if s is 1."""
    s = s.to(torch.float32)
    with device_of(x.device):
        programs = min(sm_count(x.get_device()) * 8, -(-x.numel() // 2048))
        cached(scale_kernel)[(programs,)](x, s, x.numel(), 2048, num_warps=4)
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
