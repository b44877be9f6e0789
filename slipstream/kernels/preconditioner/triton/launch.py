"""Launches of the preconditioner: one forward, one backward."""

import math
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.preconditioner.op import CENTRE
from slipstream.kernels.preconditioner.triton.preconditioner import (
    precondition_bwd_kernel,
    precondition_fwd_kernel,
)
from slipstream.runtime.backends import INTERPRETED, device_of
from slipstream.runtime.launch_cache import cached

# tokens and channels at a time
TILE = (8, 16) if INTERPRETED else (64, 16)
WARPS = 8


def forward(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    centre: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    x: float,
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, A after the last token, and A of each token if kept."""
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y, final = torch.empty_like(k), k.new_empty(N, *k.shape[2:], dtype=torch.float32)
    sums = k.new_empty(k.shape if keep else (0,), dtype=torch.float32)
    _run(
        precondition_fwd_kernel, k, final, cu_seqlens, x, eps, k_ptr=k, g_ptr=g, beta_ptr=beta,
        centre_ptr=centre, s_in_ptr=state, s_out_ptr=final, y_ptr=y,
        sums_ptr=sums if keep else None,
    )  # fmt: skip
    return y, final, sums


def backward(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    centre: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    x: float,
    eps: float,
    sums: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
) -> list[Tensor]:
    """Gradients of k, g, beta, and of centre and state if they are given."""
    B, T, H, K = k.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dk = torch.empty_like(k)
    dg, dbeta = (k.new_empty(-(-K // TILE[1]), B, T, H, dtype=torch.float32) for _ in range(2))
    dcentre, dstate = (k.new_empty(N, H, K, dtype=torch.float32) for _ in range(2))
    _run(
        precondition_bwd_kernel, k, dstate, cu_seqlens, x, eps, k_ptr=k, g_ptr=g, beta_ptr=beta,
        centre_ptr=centre, s_in_ptr=state, sums_ptr=sums, dy_ptr=dy, ds_out_ptr=dfinal, dk_ptr=dk,
        dg_ptr=dg, dbeta_ptr=dbeta, dcentre_ptr=dcentre, ds_in_ptr=dstate, tokens=B * T,
    )  # fmt: skip
    grads = [dk, dg.sum(0).to(g.dtype), dbeta.sum(0).to(beta.dtype)]
    if centre is not None:
        grads.append(dcentre.sum((0, 2)).to(centre.dtype))
    if state is not None:
        grads.append(dstate.to(state.dtype))
    return grads


def _run(
    kernel: Any,
    k: Tensor,
    states: Tensor,
    cu_seqlens: Tensor | None,
    x: float,
    eps: float,
    **args: Any,
) -> None:
    H, K = k.shape[2:]
    BT, BD = TILE
    with device_of(k.device):
        cached(kernel)[states.shape[0], H * -(-K // BD)](
            **args, cu_ptr=cu_seqlens, log_x=math.log(x), eps=eps, centre=CENTRE, T=k.shape[1],
            H=H, K=K, BT=BT, BD=BD, num_warps=WARPS,
        )  # fmt: skip
