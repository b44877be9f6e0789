"""DeltaNet: the delta rule behind short convolutions."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.layers import base, delta_heads
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.nn import decoding, projections
from slipstream.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from slipstream.ops.norm import l2_norm


class DeltaNet(delta_heads.SteppedDeltaHeads):
    """The delta rule, with a norm after it.

        q, k, v = silu(conv(x W_qkv));  q, k = l2_norm(q), l2_norm(k);  beta = sigmoid(x W_b)
        y = rms_norm_per_head(delta_rule(q, k, v, beta)) W_o

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K; None is D / H.
        head_v_dim: V; None is K.
        conv_size: taps of the convolution; None leaves it out, and silu stays.
        use_gate: multiplies the norm by silu(x W_g).
        allow_neg_eigval: beta in (0, 2).
        norm_eps: of the norm, whose weight [V] the heads share.
        use_beta: without, beta is 1.
        conv_bias: whether the convolution has a bias.
        qk_activation: of queries and keys, "silu", "relu", "elu_plus_one" or None; that of values
            is silu.
        qk_norm: "l2", or "sum": each head's features divided by their sum.
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, V] and conv [N, H (2 K + V), W].
    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, section 3.3.
    """

    leaves_states = True
    gate_activation = "silu"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = 4,
        use_gate: bool = False,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        use_beta: bool = True,
        conv_bias: bool = False,
        qk_activation: str | None = "silu",
        qk_norm: str = "l2",
    ) -> None:
        heads = num_heads, head_dim, head_v_dim, None
        super().__init__(hidden_size, *heads, norm_eps, mode, layer_idx)
        self.allow_neg_eigval = allow_neg_eigval
        if qk_activation not in ("silu", "relu", "elu_plus_one", None):
            raise ValueError(
                f"qk_activation: want 'silu', 'relu', 'elu_plus_one' or None, got {qk_activation!r}"
            )
        if qk_norm not in ("l2", "sum"):
            raise ValueError(f"qk_norm: want 'l2' or 'sum', got {qk_norm!r}")
        self.qk_activation, self.qk_norm = qk_activation, qk_norm
        self.qkv_proj = base.NormalLinear(hidden_size, self.channels)
        self.b_proj = base.NormalLinear(hidden_size, num_heads) if use_beta else None
        self.g_proj = base.NormalLinear(hidden_size, self.values) if use_gate else None
        self.o_proj = base.NormalLinear(self.values, hidden_size)
        self.conv = None
        if conv_size:
            # one for all of q, k and v; where q and k have another activation, it comes after it
            f = "silu" if qk_activation == "silu" else None
            self.conv = base.ShortConvolution(self.channels, conv_size, conv_bias, f)
        self.A_log = self.dt_bias = None
        self._add_norm(self.head_v_dim)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        qkv, conv = self.qkv_proj(x), None
        if self.conv is not None or self.qk_activation == "silu":
            qkv, conv = call.convolved(self.conv, qkv)
        q, k, v = self._activated(qkv)
        _, beta = self._gates(x)
        rule = fused_recurrent_delta_rule if self.recurrent(x, call.context) else chunk_delta_rule
        o, recurrent = rule(q, k, v, beta, **call.sequence(call.past("recurrent")))
        after = call.new_state(recurrent=recurrent, conv=conv)
        return self._output(o, self._gate_of(x)), after

    def _heads_of_token(self, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv_proj(x)
        if self.conv is not None or self.qk_activation == "silu":
            qkv = decoding.convolution(self.conv, qkv, state.get("conv"))
        return self._activated(qkv)

    def _activated(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heads of what the convolution returns."""
        q, k, v = self._heads_of(qkv, self._normalised)
        return q, k, v if self.qk_activation == "silu" else F.silu(v)

    def _normalised(self, qk: Tensor) -> Tensor:
        if self.qk_activation != "silu":
            qk = base.FEATURE_MAPS[self.qk_activation](qk)
        return l2_norm(qk) if self.qk_norm == "l2" else qk / qk.sum(-1, keepdim=True)

    def _gates(self, x: Tensor) -> tuple[None, Tensor]:
        if self.b_proj is None:
            beta = x.new_ones(*x.shape[:2], self.num_heads)
        else:
            beta = self.b_proj(x).sigmoid()
        return None, 2 * beta if self.allow_neg_eigval else beta

    def _gate_of(self, x: Tensor) -> Tensor | None:
        return None if self.g_proj is None else self.g_proj(x)

    def has_fused_step(self) -> bool:
        usual = self.qk_activation == "silu" and self.qk_norm == "l2"
        return self.conv is not None and usual

    def _step_inputs(self, x: Tensor, norm: nn.Module | None) -> delta_heads.StepInputs:
        qkv, beta, z = projections.linears(x, (self.qkv_proj, self.b_proj, self.g_proj), norm)
        terms: dict[str, Any] = {"beta": beta}
        if beta is None:
            terms["beta"] = x.new_ones(*x.shape[:2], self.num_heads)
            terms |= {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False}
        return qkv, z, terms
