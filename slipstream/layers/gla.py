"""Gated linear attention: GLA's layer, GSA's over slots, and HGRN's and HGRN-2's, whose input gate
is what the forget gate leaves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.layers import base
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.nn import decoding, linear, projections
from slipstream.ops._fp32 import widen
from slipstream.ops.gla import chunk_gla, chunk_hgrn, fused_recurrent_gla, fused_recurrent_hgrn
from slipstream.ops.gsa import chunk_gsa, fused_recurrent_gsa


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
    forms = chunk_gla, fused_recurrent_gla

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
        o, recurrent = self._scan(x, call, q, k, v, g)
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


class GatedSlotAttention(base.Mixer):
    """Attention over M slots that forget, as the input says.

        q, k, v = silu(x W_q), silu(x W_k), silu(x W_v)
        g = log sigmoid(x W_f) / 8;  o = gsa(q, k, v, 1 - exp(g), g)
        y = rms_norm(silu(o)) W_o

    Args:
        hidden_size: D.
        num_heads: HQ, heads of queries.
        num_kv_heads: H, heads of keys, values and slots, a divisor of HQ; None is HQ.
        num_slots: M; None is K = D / HQ.
        gate_logit_normalizer: the 8: the larger, the longer it remembers at first.
        norm_eps: of the norm, whose weight is [D].
        mode, layer_idx: as Mixer.

    State: keys [N, H, K, M] and values [N, H, M, K].
    Source: Zhang et al., Gated Slot Attention, 2024, section 3.
    """

    forms = chunk_gsa, fused_recurrent_gsa

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        num_slots: int | None = None,
        gate_logit_normalizer: float = 8.0,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        base.expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        base.expect_divisor("num_kv_heads", self.num_kv_heads, "num_heads", num_heads)
        head_dim = hidden_size // num_heads
        self.gate_logit_normalizer, self.norm_eps = gate_logit_normalizer, norm_eps
        self.q_proj = base.XavierLinear(hidden_size, hidden_size)
        self.k_proj = base.XavierLinear(hidden_size, self.num_kv_heads * head_dim)
        self.v_proj = base.XavierLinear(hidden_size, self.num_kv_heads * head_dim)
        self.f_proj = base.XavierLinear(hidden_size, self.num_kv_heads * (num_slots or head_dim))
        self.o_proj = base.XavierLinear(hidden_size, hidden_size)
        self._add_norm(hidden_size)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        heads = (self.num_kv_heads, -1)
        q = F.silu(self.q_proj(x)).unflatten(-1, (self.num_heads, -1))
        k, v = (F.silu(f(x)).unflatten(-1, heads) for f in (self.k_proj, self.v_proj))
        g = base.log_sigmoid_decay(self.f_proj, x, self.num_kv_heads, self.gate_logit_normalizer)
        options = {"scale": 1.0, "initial_state": call.pasts("keys", "values")}
        o, states = self._scan(x, call, q, k, v, -torch.expm1(g).to(k.dtype), g, **options)
        keys, values = (None, None) if states is None else states
        o = self._norm_of_all_heads(F.silu(o.flatten(-2)))
        return self.o_proj(o), call.new_state(keys=keys, values=values)


def _log_forget(f: Tensor, lower_bound: float) -> Tensor:
    """log(l + (1 - l) sigmoid(f)), in float32 at least."""
    f = widen(f)
    if lower_bound == 0:
        return F.logsigmoid(f)
    return torch.log(lower_bound + (1 - lower_bound) * torch.sigmoid(f))


def _expect_bound(lower_bound: float) -> None:
    if not 0 <= lower_bound < 1:
        raise ValueError(f"lower_bound: want a number in [0, 1), got {lower_bound}")


class HGRN(base.Mixer):
    """A gated recurrence of each channel.

        f = l + (1 - l) sigmoid(x W_f);  h_t = f_t h_{t-1} + (1 - f_t) silu(x W_i)_t
        y = (rms_norm(h) * silu(x W_g)) W_o

    Args:
        hidden_size: D.
        num_heads: no effect: there are none, but a model gives every layer how many.
        expand: channels of the recurrence by D.
        lower_bound: l, in [0, 1). The paper's grows from 0 in the first layer to near 1 in the
            last.
        norm_eps: of the norm.
        mode, layer_idx: as Mixer.

    State: recurrent [N, expand D].
    Source: Qin, Yang, Zhong, Hierarchically Gated Recurrent Neural Network, 2023, section 3.
    """

    forms = chunk_hgrn, fused_recurrent_hgrn

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        expand: float = 1.0,
        lower_bound: float = 0.0,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        _expect_bound(lower_bound)
        self.lower_bound, self.norm_eps = lower_bound, norm_eps
        channels = int(hidden_size * expand)
        self.i_proj = base.XavierLinear(hidden_size, channels)
        self.f_proj = base.XavierLinear(hidden_size, channels)
        self.g_proj = base.XavierLinear(hidden_size, channels)
        self.o_proj = base.XavierLinear(channels, hidden_size)
        self._add_norm(channels)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        i = self.i_proj(x)
        g = _log_forget(self.f_proj(x), self.lower_bound)
        h, recurrent = self._scan(x, call, (F.silu(i) * -torch.expm1(g)).to(i.dtype), g)
        h = self._norm_of_all_heads(h, self.g_proj(x))
        return self.o_proj(h), call.new_state(recurrent=recurrent)


class HGRN2(base.Mixer):
    """HGRN with a state for each pair of channels of a head: gla whose key is tied to its gate.

        f = l + (1 - l) sigmoid(x W_f)
        y = rms_norm(gla(silu(x W_q), 1 - f, x W_i, log f)) W_o

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K, of queries and gates; None is D / H. Values have D / H.
        lower_bound: l, as HGRN.
        norm_eps: of the norm, whose weight is [D].
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, D / H].
    Source: Qin et al., HGRN2: Gated Linear RNNs with State Expansion, 2024, section 3.
    """

    forms = chunk_gla, fused_recurrent_gla

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        lower_bound: float = 0.0,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        _expect_bound(lower_bound)
        base.expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
        head_dim = head_dim or hidden_size // num_heads
        self.num_heads, self.lower_bound, self.norm_eps = num_heads, lower_bound, norm_eps
        self.q_proj = base.XavierLinear(hidden_size, num_heads * head_dim)
        self.f_proj = base.XavierLinear(hidden_size, num_heads * head_dim)
        self.i_proj = base.XavierLinear(hidden_size, hidden_size)
        self.o_proj = base.XavierLinear(hidden_size, hidden_size)
        self._add_norm(hidden_size)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        heads = (self.num_heads, -1)
        q, v = F.silu(self.q_proj(x)).unflatten(-1, heads), self.i_proj(x).unflatten(-1, heads)
        g = _log_forget(self.f_proj(x), self.lower_bound).unflatten(-1, heads)
        o, recurrent = self._scan(x, call, q, -torch.expm1(g).to(q.dtype), v, g)
        o = self._norm_of_all_heads(o.flatten(-2))
        return self.o_proj(o), call.new_state(recurrent=recurrent)
