"""Gated linear attention, the layer of GLA."""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.layers import base
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.nn import decoding, linear, projections
from slipstream.ops.gla import chunk_gla, fused_recurrent_gla


class GatedLinearAttention(base.Mixer):
    """Linear attention whose keys decay channel by channel, as the input says.

        g = log sigmoid(x W_1 W_2 + b) / 16;  o = gla(x W_q, x W_k, x W_v, g)
        y = (rms_norm_per_head(o) * silu(x W_g)) W_o

    Args:
        hidden_size: D.
        num_heads: H.
        expand_k, expand_v: widths of all keys and of all values by D, 0.5 and 1 in the paper.
        gate_low_rank_dim: columns of W_1.
        gate_logit_normalizer: the 16: the larger, the longer it remembers at first.
        norm_eps: of the norm, whose weight [V] the heads share.
        num_kv_heads: heads of keys, values and decays, a divisor of H; None is H.
        feature_map: of queries and keys, a name of layers.base.FEATURE_MAPS; None is none.
        conv_size: taps of a convolution with silu on queries, keys and values; None is none.
        conv_bias: whether it has a bias.
        use_gate: without, the norm is not multiplied by f(x W_g).
        gate_activation: f, "silu" or "sigmoid".
        clamp_min: least g; None is none.
        norm_affine: whether the norm has its weight.
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, V], and conv [N, channels, W] with a convolution.
    Source: Yang et al., Gated Linear Attention Transformers, 2024, section 4.4.
    """

    verifies_drafts = True
    leaves_states = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16.0,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        conv_size: int | None = None,
        conv_bias: bool = False,
        use_gate: bool = True,
        gate_activation: str = "silu",
        clamp_min: float | None = None,
        norm_affine: bool = True,
    ) -> None:
        super().__init__(mode, layer_idx)
        keys, values = int(hidden_size * expand_k), int(hidden_size * expand_v)
        base.expect_divisor("num_heads", num_heads, "hidden_size * expand_k", keys)
        base.expect_divisor("num_heads", num_heads, "hidden_size * expand_v", values)
        self.num_heads, self.norm_eps = num_heads, norm_eps
        self.num_kv_heads = num_kv_heads or num_heads
        base.expect_divisor("num_kv_heads", self.num_kv_heads, "num_heads", num_heads)
        base.expect_gate_activation(gate_activation)
        self.gate_activation, self.clamp_min = gate_activation, clamp_min
        self.gate_logit_normalizer = gate_logit_normalizer
        base.expect_feature_map(feature_map)
        self.feature_map = feature_map
        of_kv = self.num_kv_heads / num_heads
        kv_keys, kv_values = round(keys * of_kv), round(values * of_kv)
        self.channels = [keys, kv_keys, kv_values]
        self.q_proj = base.XavierLinear(hidden_size, keys)
        self.k_proj = base.XavierLinear(hidden_size, kv_keys)
        self.v_proj = base.XavierLinear(hidden_size, kv_values)
        self.g_proj = base.XavierLinear(hidden_size, values) if use_gate else None
        self.gk_down = base.XavierLinear(hidden_size, gate_low_rank_dim)
        self.gk_up = base.XavierLinear(gate_low_rank_dim, kv_keys, bias=True)
        self.o_proj = base.XavierLinear(values, hidden_size)
        self.conv = None
        if conv_size:
            self.conv = base.ShortConvolution(sum(self.channels), conv_size, conv_bias)
        self._add_norm(values // num_heads if norm_affine else None)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        layers = self.q_proj, self.k_proj, self.v_proj, self.gk_down, self.g_proj
        q, k, v, gk, gate = linear.linears(x, layers)
        (q, k, v), conv = call.convolved_together(self.conv, q, k, v)
        q, k, v, g = self._heads(q, k, v, self._log_decay(gk))
        gla = fused_recurrent_gla if self.recurrent(x, call.context) else chunk_gla
        o, recurrent = gla(q, k, v, g, **call.sequence(call.past("recurrent")))
        o = decoding.output_norm(o, gate, self.norm_weight, self.norm_eps, self.gate_activation)
        return self.o_proj(o.flatten(-2)), call.new_state(recurrent=recurrent, conv=conv)

    def decode(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        if self.has_fused_step():
            return self._fused_step(x, state, **options)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.conv is not None:
            qkv = decoding.convolution(self.conv, torch.cat([q, k, v], dim=-1), state["conv"])
            q, k, v = qkv.split(self.channels, dim=-1)
        q, k, v, g = self._heads(q, k, v, self._log_decay(self.gk_down(x)))
        o = decoding.recurrence(q, k, v, state, g=g)
        gate = None if self.g_proj is None else self.g_proj(x)
        o = decoding.output_norm(o, gate, self.norm_weight, self.norm_eps, self.gate_activation)
        return self.o_proj(o.flatten(-2))

    def has_fused_step(self) -> bool:
        usual = self.feature_map is None and self.clamp_min is None
        return usual and self.num_kv_heads == self.num_heads

    def _fused_step(
        self,
        x: Tensor,
        state: State,
        norm: nn.Module | None = None,
        residual: projections.Residual = None,
    ) -> Any:
        layers = self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.gk_down
        q, k, v, z, raw = projections.linears(x, layers, norm)
        raw = projections.by_rows(raw, self.gk_up)
        q, k, v, raw = (y.unflatten(-1, (self.num_heads, -1)) for y in (q, k, v, raw))
        y = decoding.mixer(
            q,
            k,
            v,
            state,
            self.conv,
            g=raw,
            gate_logit_normalizer=self.gate_logit_normalizer,
            z=None if z is None else z.view_as(v),
            z_activation=self.gate_activation,
            norm_weight=self.norm_weight,
            norm_eps=self.norm_eps,
        )
        return projections.projected(y, self.o_proj, residual)

    def _heads(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each [B, T, H, K or V]; keys, values and decays of a group repeated."""
        q = q.unflatten(-1, (self.num_heads, -1))
        k, v, g = (y.unflatten(-1, (self.num_kv_heads, -1)) for y in (k, v, g))
        groups = self.num_heads // self.num_kv_heads
        if groups > 1:
            k, v, g = (y.repeat_interleave(groups, dim=2) for y in (k, v, g))
        q, k = (base.FEATURE_MAPS[self.feature_map](y) for y in (q, k))
        return q, k, v, g

    def _log_decay(self, narrow: Tensor) -> Tensor:
        """[B, T, channels of the keys] of what gk_down makes."""
        g = base.log_sigmoid_decay(
            self.gk_up, narrow, self.num_kv_heads, self.gate_logit_normalizer
        )
        g = g.flatten(-2)
        return g if self.clamp_min is None else g.clamp_min(self.clamp_min)
