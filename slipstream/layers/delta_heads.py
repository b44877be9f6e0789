"""Heads and steps that GatedDeltaNet, KimiDeltaAttention and similar layers share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.kernels.mixer_step import block_inputs
from slipstream.layers import base, call
from slipstream.nn import decoding, linear, projections
from slipstream.ops.norm import l2_norm
from slipstream.runtime.consistent import consistent_scope


class DeltaHeads(base.Mixer):
    """Heads of q, k and v out of one projection, with a decay and a norm of each head's output.

    Args:
        hidden_size: D. num_heads: H, heads of q and k.
        head_dim: K; None is D / H. head_v_dim: V; None is K.
        num_v_heads: HV, heads of v, a multiple of H; None is H.
        norm_eps: of the norm, whose weight [V] the heads share.
        mode, layer_idx: as Mixer.

    keys is H K, values is HV V, and channels those of q, k and v together.
    """

    conv: Any
    qkv_proj: Any
    g_down: Any
    g_up: Any
    o_proj: Any
    A_log: Any
    dt_bias: Any
    allow_neg_eigval: bool
    # f of _output
    gate_activation = "sigmoid"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None,
        head_v_dim: int | None,
        num_v_heads: int | None,
        norm_eps: float,
        mode: str | None,
        layer_idx: int,
    ) -> None:
        super().__init__(mode, layer_idx)
        if head_dim is None:
            base.expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
            head_dim = hidden_size // num_heads
        self.num_heads, self.head_dim, self.head_v_dim = num_heads, head_dim, head_v_dim or head_dim
        self.num_v_heads = num_v_heads or num_heads
        base.expect_divisor("num_heads", num_heads, "num_v_heads", self.num_v_heads)
        self.keys, self.values = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.channels = 2 * self.keys + self.values
        self.norm_eps = norm_eps

    def _add_decay_and_norm(self, decay_heads: int, decay_channels: int) -> None:
        """Adds the last parameters: A_log [decay_heads], dt_bias [decay_channels], norm_weight
        [V]."""
        self.A_log = nn.Parameter(torch.empty(decay_heads))
        self.dt_bias = nn.Parameter(torch.empty(decay_channels))
        self._add_norm(self.head_v_dim)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.A_log is not None:
            base.reset_decay(self.A_log, self.dt_bias)

    def _heads_of(
        self, qkv: Tensor, unit: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [B, T, H, K], normalised by unit, and v [B, T, HV, V]"""
        qk, v = qkv.split([2 * self.keys, self.values], dim=-1)
        qk = qk.unflatten(-1, (2 * self.num_heads, self.head_dim))
        q, k = (qk if unit is None else unit(qk)).chunk(2, dim=2)
        return q, k, v.unflatten(-1, (self.num_v_heads, self.head_v_dim))

    def _split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [B, T, H, K] and v [B, T, HV, V] of all of their channels each"""
        q, k = (y.unflatten(-1, (self.num_heads, self.head_dim)) for y in (q, k))
        return q, k, v.unflatten(-1, (self.num_v_heads, self.head_v_dim))

    def _heads_of_token(self, x: Tensor, state: call.State) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of one token, q and k normalised; the window of the convolution moves on."""
        qkv = decoding.convolution(self.conv, self.qkv_proj(x), state.get("conv"))
        return self._heads_of(qkv, l2_norm)

    def _block_terms(
        self, qkv: Tensor, g: Tensor, beta: Tensor, lower_bound: float | None = None
    ) -> tuple[list[Tensor], Tensor] | None:
        """Returns for a step of a consistent model q, k, v, log decays and betas of the whole
        blocks that its tokens are in, and the window of the convolution, by one launch. None where
        what makes them has to be called one after the other.

        qkv [N, 1, C], g [N, 1, HV] or [N, 1, HV, K] and beta [N, 1, HV] as projected.
        """
        step, conv = consistent_scope.step, getattr(self, "conv", None)
        if step is None or not step.of_tokens or conv is None or linear.is_hooked(conv):
            return None
        parameters = self.A_log, self.dt_bias
        tokens = block_inputs.TokenInputs(
            qkv[:, 0],
            conv.weight,
            conv.bias,
            g[:, 0],
            *parameters,
            beta[:, 0],
            step.counts,
            conv.activation is not None,
            self.allow_neg_eigval,
            lower_bound,
        )
        if block_inputs.unsupported_reason(tokens, self.head_dim) is not None:
            return None
        blocks = block_inputs.Blocks(*step.take(len(block_inputs.Blocks._fields)))
        block_inputs.block_inputs(tokens, blocks)
        return [*blocks[1:]], blocks.window.mT

    def _gate_of(self, x: Tensor) -> Tensor | None:
        """The gate of _output [B, T, HV V], of low rank; None is none."""
        return self.g_up(self.g_down(x))

    def _output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """The norm of o [B, T, HV, V] by f(gate), through o_proj."""
        o = decoding.output_norm(o, gate, self.norm_weight, self.norm_eps, self.gate_activation)
        return self.o_proj(o.flatten(-2))


# qkv as projected, the gate of _output, and further arguments of ops.mixer_step, with a raw beta
StepInputs = tuple[Tensor, Tensor | None, dict[str, Any]]


class SteppedDeltaHeads(DeltaHeads):
    """Adds a step of one token by ops.mixer_step, where there is a convolution."""

    verifies_drafts = True

    def decode(
        self, x: Tensor, state: call.State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        if self.has_fused_step():
            return self._fused_step(x, state, **options)
        o = self._recurrence(x, *self._heads_of_token(x, state), state)
        return self._output(o, self._gate_of(x))

    def has_fused_step(self) -> bool:
        return self.conv is not None

    def _fused_step(
        self,
        x: Tensor,
        state: call.State,
        norm: nn.Module | None = None,
        residual: projections.Residual = None,
    ) -> Any:
        qkv, z, terms = self._step_inputs(x, norm)
        q, k, v = self._heads_of(qkv)
        options: dict[str, Any] = {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "use_qk_l2norm_in_kernel": True,
            "z": None if z is None else z.view_as(v),
            "z_activation": self.gate_activation,
            "norm_weight": self.norm_weight,
            "norm_eps": self.norm_eps,
        }
        y = decoding.mixer(q, k, v, state, self.conv, **options | terms)
        return projections.projected(y, self.o_proj, residual)

    def _step_inputs(self, x: Tensor, norm: nn.Module | None) -> StepInputs:
        raise NotImplementedError

    def _recurrence(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: call.State) -> Tensor:
        """o [N, 1, HV, V]; state["recurrent"] is updated in place."""
        g, beta = self._gates(x)
        return decoding.recurrence(q, k, v, state, g=g, beta=beta)

    def _gates(self, x: Tensor) -> Any:
        """g [B, T, HV] or [B, T, HV, K] and beta [B, T, HV]"""
        raise NotImplementedError
