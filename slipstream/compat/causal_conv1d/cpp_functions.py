"""causal_conv1d.cpp_functions: forward and backward apart, as mamba_ssm calls them."""

import torch
from torch import Tensor

from slipstream.compat.causal_conv1d.causal_conv1d_interface import causal_conv1d_fn
from slipstream.compat.causal_conv1d.causal_conv1d_interface import causal_conv1d_update as _update


def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    """causal_conv1d_fn without gradients; final_states_out is written if it is given."""
    activation = "silu" if silu_activation else None
    with torch.no_grad():
        if final_states_out is None:
            return causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, activation=activation)
        return causal_conv1d_fn(
            x, weight, bias, seq_idx, initial_states, True, final_states_out, activation
        )[0]


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and initial_states; dx is written if it is given."""
    given = {"x": x, "weight": weight, "bias": bias, "initial_states": initial_states}
    leaves = {n: t.detach().requires_grad_() for n, t in given.items() if t is not None}
    with torch.enable_grad():
        y = causal_conv1d_fn(
            **leaves,
            seq_idx=seq_idx,
            return_final_states=dfinal_states is not None,
            activation="silu" if silu_activation else None,
        )
    douts = dout if dfinal_states is None else (dout, dfinal_states)
    grads = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), douts)))
    gx = grads["x"] if dx is None else dx.copy_(grads["x"])
    dinitial = grads.get("initial_states") if return_dinitial_states else None
    return gx, grads["weight"], grads.get("bias"), dinitial


def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """causal_conv1d_update of x [B, D, T]."""
    activation = "silu" if silu_activation else None
    return _update(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
