"""Launches of the KL divergence behind two linear layers: no synchronisation.

The rows go through in chunks of two buffers of logits, the student's of which become their gradient
in place.
"""

import torch
from torch import Tensor

from slipstream.common.linear_rows import LinearRows
from slipstream.kernels.loss.triton.kl_div import kl_div_kernel
from slipstream.kernels.primitives import logit_chunks
from slipstream.runtime.backends import device_of
from slipstream.runtime.launch_cache import cached


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
    with device_of(s.device):
        cached(kl_div_kernel)[(N,)](
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
