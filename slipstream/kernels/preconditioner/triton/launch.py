"""Launches of the preconditioner: one forward, one backward."""

import math

import torch
from torch import Tensor

from slipstream.kernels.preconditioner.inputs import CENTRE, Inputs
from slipstream.kernels.preconditioner.triton.preconditioner import precondition_kernel
from slipstream.runtime.backends import INTERPRETED, device_of
from slipstream.runtime.launch_cache import cached

# tokens and channels at a time
TILE = (8, 16) if INTERPRETED else (64, 16)
WARPS = 8


def forward(inputs: Inputs, keep: bool, inverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, A after the last token, 1 / the factors if wanted, and A of each token if kept."""
    k = inputs.k
    y, by = torch.empty_like(k), k.new_empty(k.shape if inverse else (0,))
    final = k.new_empty(inputs.sequences, *k.shape[2:], dtype=torch.float32)
    sums = k.new_empty(k.shape if keep else (0,), dtype=torch.float32)
    _run(
        inputs, y_ptr=y, s_out_ptr=final, by_ptr=by if inverse else None,
        sums_ptr=sums if keep else None,
    )  # fmt: skip
    return y, final, by, sums


def backward(
    inputs: Inputs, sums: Tensor, dy: Tensor, dfinal: Tensor | None, dby: Tensor | None
) -> list[Tensor]:
    """Gradients of k, g, beta, and of centre and state if they are given."""
    k, g, beta, centre, state, *_ = inputs
    (B, T, H, K), N = k.shape, inputs.sequences
    dk = torch.empty_like(k)
    dg, dbeta = (k.new_empty(-(-K // TILE[1]), B, T, H, dtype=torch.float32) for _ in range(2))
    dcentre, dstate = (k.new_empty(N, H, K, dtype=torch.float32) for _ in range(2))
    _run(
        inputs, sums_ptr=sums, dy_ptr=dy, dby_ptr=dby, ds_out_ptr=dfinal, dk_ptr=dk, dg_ptr=dg,
        dbeta_ptr=dbeta, dcentre_ptr=dcentre, ds_in_ptr=dstate,
    )  # fmt: skip
    grads = [dk, dg.sum(0).to(g.dtype), dbeta.sum(0).to(beta.dtype)]
    if centre is not None:
        grads.append(dcentre.sum((0, 2)).to(centre.dtype))
    if state is not None:
        grads.append(dstate.to(state.dtype))
    return grads


def _run(inputs: Inputs, **tensors: Tensor | None) -> None:
    """None what is not among the tensors."""
    B, T, H, K = inputs.k.shape
    BT, BD = TILE
    names = ("s_out_ptr", "y_ptr", "by_ptr", "sums_ptr", "dy_ptr", "dby_ptr", "ds_out_ptr",
             "dk_ptr", "dg_ptr", "dbeta_ptr", "dcentre_ptr", "ds_in_ptr")  # fmt: skip
    with device_of(inputs.k.device):
        cached(precondition_kernel)[inputs.sequences, H * -(-K // BD)](
            k_ptr=inputs.k, g_ptr=inputs.g, beta_ptr=inputs.beta, centre_ptr=inputs.centre,
            s_in_ptr=inputs.state, **(dict.fromkeys(names) | tensors), cu_ptr=inputs.cu_seqlens,
            log_x=math.log(inputs.x), eps=inputs.eps, centre=CENTRE, T=T,
            tokens=None if tensors.get("dy_ptr") is None else B * T, H=H, K=K, BT=BT, BD=BD,
            num_warps=WARPS,
        )  # fmt: skip
