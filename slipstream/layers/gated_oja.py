"""A layer of the gated Oja rule."""

from typing import Any

from torch import Tensor

from slipstream.layers.base import NormalLinear, ShortConvolution
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.layers.delta_heads import DeltaHeads
from slipstream.nn import decoding
from slipstream.ops._preprocess import for_value_heads
from slipstream.ops.gated_oja_rule import chunk_gated_oja_rule, fused_recurrent_gated_oja_rule
from slipstream.ops.norm import l2_norm
from slipstream.ops.recurrent_step import recurrent_step


class GatedOja(DeltaHeads):
    """Kimi delta attention with the roles of keys and values exchanged, behind convolutions.

        q, k, v = silu(conv(x W_qkv));  q, v = l2_norm(q), l2_norm(v)
        gv = -exp(A_log) softplus(x W_f1 W_f2 + dt_bias);  beta = sigmoid(x W_b)
        y = (rms_norm_per_head(gated_oja_rule(q, k, v, gv, beta)) * sigmoid(x W_g1 W_g2)) W_o

    Args:
        hidden_size: D.
        num_heads: H, heads of queries and keys.
        head_dim: K; None is D / H.
        head_v_dim: V; None is K.
        conv_size: taps of the convolution; None leaves it out, and silu stays.
        norm_eps: of the norm, whose weight [V] the heads share.
        num_v_heads: HV, heads of values and gates, a multiple of H; None is H.
        conv_bias: whether the convolution has a bias.
        allow_neg_eigval: beta in (0, 2).
        gate_low_rank_dim: rank of the two gates; None is V.
        mode, layer_idx: as Mixer.

    State: recurrent [N, HV, K, V] and conv [N, 2 H K + HV V, W].
    Source: the operator of fla-core 0.6.0, which has no layer of it; this is KDA's.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = 4,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        num_v_heads: int | None = None,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        gate_low_rank_dim: int | None = None,
    ) -> None:
        heads = num_heads, head_dim, head_v_dim, num_v_heads
        super().__init__(hidden_size, *heads, norm_eps, mode, layer_idx)
        self.allow_neg_eigval = allow_neg_eigval
        rank = gate_low_rank_dim or self.head_v_dim
        self.qkv_proj = NormalLinear(hidden_size, self.channels)
        self.f_down = NormalLinear(hidden_size, rank)
        self.f_up = NormalLinear(rank, self.values)
        self.b_proj = NormalLinear(hidden_size, self.num_v_heads)
        self.g_down = NormalLinear(hidden_size, rank)
        self.g_up = NormalLinear(rank, self.values)
        self.o_proj = NormalLinear(self.values, hidden_size)
        self.conv = ShortConvolution(self.channels, conv_size, conv_bias) if conv_size else None
        self._add_decay_and_norm(self.num_v_heads, self.values)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        qkv, conv = call.convolved(self.conv, self.qkv_proj(x))
        q, k, v = self._heads_of(qkv)
        gv, beta = self._gates(x)
        short = self.recurrent(x, call.context)
        rule = fused_recurrent_gated_oja_rule if short else chunk_gated_oja_rule
        o, recurrent = rule(
            l2_norm(q), k, l2_norm(v), gv, beta,
            **call.sequence(call.past("recurrent")),
        )  # fmt: skip
        return self._output(o, self._gate_of(x)), call.new_state(recurrent=recurrent, conv=conv)

    def decode(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        qkv = decoding.convolution(self.conv, self.qkv_proj(x), state.get("conv"))
        q, k, v = self._heads_of(qkv)
        q, v = l2_norm(q), l2_norm(v)
        gv, beta = self._gates(x)
        q, k = for_value_heads(v, q, k)
        S = state["recurrent"]
        # KDA's step of the transposed state, with v for keys and k for values; its output, of rows
        # of S, is not what is wanted
        recurrent_step(v, v, k, state=S, g=gv, beta=beta, scale=1.0, state_v_first=True)
        o = (q[:, 0, :, None].to(S.dtype) @ S)[:, :, 0] * self.head_dim**-0.5
        return self._output(o.to(v.dtype)[:, None], self._gate_of(x))

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """gv [B, T, HV, V] and beta [B, T, HV]"""
        f = self.f_up(self.f_down(x)).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        beta = self.b_proj(x).sigmoid()
        gv = decoding.decay_gate(f, self.A_log, self.dt_bias)
        return gv, 2 * beta if self.allow_neg_eigval else beta
