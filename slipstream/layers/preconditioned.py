"""Gated DeltaNet and Kimi delta attention whose keys are preconditioned before they are written."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from slipstream.kernels.elementwise.inputs import CENTRE
from slipstream.kernels.elementwise.preconditioner import squashed
from slipstream.layers import base, delta_heads, kda
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.layers.gated_deltanet import GatedDeltaNet
from slipstream.nn import decoding
from slipstream.ops import norm, precond_gated_delta_rule
from slipstream.ops._fp32 import widen
from slipstream.ops.precond_kda import chunk_precond_kda, fused_recurrent_precond_kda


class KeyPreconditioner(nn.Module):
    """The projections of a layer for the preconditioner of its keys.

        g_atk = -exp(A_log) softplus(x W_a + dt_bias);  beta_atk = sigmoid(x W_b)

    Args:
        hidden_size: D. num_heads: H, heads of keys.
        squash, eps: as `x` and `eps` of ops.chunk_precond_gated_delta_rule.
    """

    def __init__(self, hidden_size: int, num_heads: int, squash: float, eps: float) -> None:
        super().__init__()
        self.squash, self.eps = squash, eps
        self.ab_proj = base.NormalLinear(hidden_size, 2 * num_heads)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.centre = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        base.reset_decay(self.A_log, self.dt_bias)
        nn.init.constant_(self.centre, CENTRE)

    def forward(self, x: Tensor) -> dict[str, Any]:
        """x [B, T, D] -> arguments of the preconditioned operators"""
        a, b = self.ab_proj(x).chunk(2, dim=-1)
        return {
            "g_atk": decoding.decay_gate(a, self.A_log, self.dt_bias),
            "beta_atk": b.sigmoid(),
            # a copy: FSDP frees the parameter where this forward ends
            "log_atk_scale": self.centre.clone(),
            "x": self.squash,
            "eps": self.eps,
        }

    def step(self, x: Tensor, k: Tensor, state: Tensor) -> Tensor:
        """k [N, 1, H, K] of the next token by its factors; state [N, H, K] is updated in place."""
        given, wide = self(x), widen(k)[:, 0]
        squares = widen(given["beta_atk"])[:, 0, :, None] * wide.square()
        state.mul_(given["g_atk"][:, 0, :, None].exp()).add_(squares)
        factors = squashed(state, given["log_atk_scale"], self.squash, self.eps)
        return (wide * factors).to(k.dtype)[:, None]


def preconditioned_step(
    q: Tensor, k: Tensor, written: Tensor, v: Tensor, state: Tensor, g: Tensor, beta: Tensor
) -> Tensor:
    """Computes a step of the operators: q, k, written [N, 1, H, K], g [N, 1, HV] or [N, 1, HV, K]
    -> o."""
    if v.shape[2] != k.shape[2]:
        group = v.shape[2] // k.shape[2]
        q, k, written = (y.repeat_interleave(group, dim=2) for y in (q, k, written))
    decay = g.exp() if g.dim() == 4 else g.exp()[..., None]
    beta = beta[..., None]
    a, b = (decay * k).to(k.dtype), (-beta * written).to(k.dtype)
    return decoding.recurrence(
        q, written, (beta * v).to(v.dtype), {"recurrent": state}, g=g, a=a, b=b
    )


class _Preconditioned(delta_heads.SteppedDeltaHeads):
    """The base of both layers. Their other base class has the other projections."""

    leaves_states = False  # not the preconditioner's
    # by chunks, and token by token
    rules: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]]

    def __init__(
        self, *args: Any, squash_x: float = 1.5, squash_eps: float = 1e-6, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        size = self.o_proj.out_features
        self.preconditioner = KeyPreconditioner(size, self.num_heads, squash_x, squash_eps)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        qkv, conv = call.convolved(self.conv, self.qkv_proj(x))
        q, k, v = self._heads_of(qkv, norm.l2_norm)
        g, beta = self._gates(x)
        o, states = self.rules[self.recurrent(x, call.context)](
            q=q, k=k, v=v, g=g, beta=beta,
            **self.preconditioner(x),
            **call.sequence(call.pasts("recurrent", "preconditioner")),
        )  # fmt: skip
        recurrent, preconditioner = states or (None, None)
        after = call.new_state(recurrent=recurrent, preconditioner=preconditioner, conv=conv)
        return self._output(o, self._gate_of(x)), after

    def has_fused_step(self) -> bool:
        return False

    def decode(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        q, k, v = self._heads_of_token(x, state)
        written = self.preconditioner.step(x, k, state["preconditioner"])
        o = preconditioned_step(q, k, written, v, state["recurrent"], *self._gates(x))
        return self._output(o, self._gate_of(x))


class PrecondGatedDeltaNet(_Preconditioned, GatedDeltaNet):
    """GatedDeltaNet by ops.chunk_precond_gated_delta_rule.

    Args:
        squash_x: the factors of keys are from 1 / squash_x to squash_x.
        squash_eps: added to the sums of squares.
        the others: as GatedDeltaNet.

    State: that of GatedDeltaNet and preconditioner [N, H, K].
    Source: "Preconditioned DeltaNet" (arXiv 2604.21100), as flash-linear-attention 0.6.0 has it.
    """

    rules = (
        precond_gated_delta_rule.chunk_precond_gated_delta_rule,
        precond_gated_delta_rule.fused_recurrent_precond_gated_delta_rule,
    )


class PrecondKDA(_Preconditioned, kda.KimiDeltaAttention):
    """KimiDeltaAttention by ops.chunk_precond_kda.

    Args:
        squash_x: the factors of keys are from 1 / squash_x to squash_x.
        squash_eps: added to the sums of squares.
        the others: as KimiDeltaAttention.

    State: that of KimiDeltaAttention and preconditioner [N, H, K].
    Source: "Preconditioned DeltaNet" (arXiv 2604.21100), as flash-linear-attention 0.6.0 has it.
    """

    rules = chunk_precond_kda, fused_recurrent_precond_kda
