"""Launches of the running mean: one forward, one backward."""

from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.kernels.running_mean.inputs import MeanInputs
from slipstream.kernels.running_mean.triton import backward, forward
from slipstream.runtime import backends, launch_cache

# tokens and channels at a time
TILE = (8, 16) if backends.INTERPRETED else (64, 16)


def means(inputs: MeanInputs, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o in v's dtype, the state after the last token, and r and M before each token if kept."""
    k, v, w, u, start, cu_seqlens = inputs
    o, after = torch.empty_like(v), torch.empty_like(start)
    shape = k.shape if keep else (0,)
    r, mean = (k.new_empty(shape, dtype=torch.float32) for _ in range(2))
    _run(
        forward.running_mean_fwd_kernel, k, start, cu_seqlens, k_ptr=k, v_ptr=v, w_ptr=w, u_ptr=u,
        s_in_ptr=start, s_out_ptr=after, o_ptr=o, r_ptr=r if keep else None,
        mean_ptr=mean if keep else None,
    )  # fmt: skip
    return o, after, r, mean


def means_backward(
    inputs: MeanInputs, r: Tensor, mean: Tensor, do: Tensor, dafter: Tensor | None
) -> list[Tensor]:
    """Gradients of k, v, w, u and start."""
    k, v, w, u, start, cu_seqlens = inputs
    do, dafter = do.contiguous(), None if dafter is None else dafter.contiguous()
    dk, dv, dstart = torch.empty_like(k), torch.empty_like(v), torch.empty_like(start)
    dw, du = (k.new_empty(start.shape[0], k.shape[2], dtype=torch.float32) for _ in range(2))
    _run(
        backward.running_mean_bwd_kernel, k, start, cu_seqlens, r_ptr=r, mean_ptr=mean, v_ptr=v,
        w_ptr=w, u_ptr=u, do_ptr=do, ds_out_ptr=dafter, dk_ptr=dk, dv_ptr=dv, dw_ptr=dw, du_ptr=du,
        ds_in_ptr=dstart,
    )  # fmt: skip
    return [dk, dv, dw.sum(0).to(w.dtype), du.sum(0).to(u.dtype), dstart]


def _run(
    kernel: Any, x: Tensor, start: Tensor, cu_seqlens: Tensor | None, **tensors: Tensor | None
) -> None:
    """x [B, T, D], all contiguous."""
    D, (BT, BD) = x.shape[2], TILE
    with backends.device_of(x.device):
        launch_cache.cached(kernel)[start.shape[0], triton.cdiv(D, BD)](
            **tensors, cu_ptr=cu_seqlens, T=x.shape[1], D=D, BT=BT, BD=BD, num_warps=8
        )
