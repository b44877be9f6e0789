"""A constant decay for each head: multi-scale retention (RetNet), and lightning attention, which
has one for each layer too (MiniMax-01).
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.layers import base, call
from slipstream.nn import decoding, linear
from slipstream.ops import _preprocess, rotary, simple_gla


class MultiScaleRetention(base.Mixer):
    """Retention with rotary positions, a norm per head and an output gate.

        q, k = rotary(x W_q), rotary(x W_k);  o = retention(q, k, x W_v)
        y = (rms_norm_per_head(o) * silu(x W_g)) W_o

    Args:
        hidden_size: D.
        num_heads: H; head h decays by 1 - 2^(-5-h) a token.
        head_dim: K, of queries and keys; None is D / H.
        expand_v: V / K, 2 in the paper.
        rotary_base: of the angles; None leaves them out.
        norm_eps: of the norm.
        norm_affine: whether the norm has a weight [V], which the heads share, as fla's has.
        num_kv_heads: heads of keys and values, a divisor of H; None is H.
        feature_map: of queries and keys, a name of layers.base.FEATURE_MAPS; None is none.
        conv_size: taps of a convolution with silu on queries, keys and values; None is none.
        conv_bias: whether it has a bias.
        use_gate: without, the norm is not multiplied by f(x W_g).
        gate_activation: f, "silu" or "sigmoid".
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, V], length [N], and conv [N, channels, W] with a convolution.
    Source: Sun et al., Retentive Network, 2023, section 2.
    """

    leaves_states = True
    forms = simple_gla.chunk_simple_gla, simple_gla.fused_recurrent_simple_gla

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        rotary_base: float | None = 10000.0,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        norm_affine: bool = False,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        conv_size: int | None = None,
        conv_bias: bool = False,
        use_gate: bool = True,
        gate_activation: str = "silu",
    ) -> None:
        super().__init__(mode, layer_idx)
        if head_dim is None:
            base.expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
            head_dim = hidden_size // num_heads
        self.num_heads, self.head_dim = num_heads, head_dim
        self.value_dim = int(head_dim * expand_v)
        self.rotary_base, self.norm_eps = rotary_base, norm_eps
        self.num_kv_heads = num_kv_heads or num_heads
        base.expect_divisor("num_kv_heads", self.num_kv_heads, "num_heads", num_heads)
        base.expect_gate_activation(gate_activation)
        self.gate_activation = gate_activation
        base.expect_feature_map(feature_map)
        self.feature_map = feature_map
        keys, values = num_heads * head_dim, num_heads * self.value_dim
        kv_keys, kv_values = self.num_kv_heads * head_dim, self.num_kv_heads * self.value_dim
        self.channels = [keys, kv_keys, kv_values]
        self.q_proj = base.XavierLinear(hidden_size, keys)
        self.k_proj = base.XavierLinear(hidden_size, kv_keys)
        self.v_proj = base.XavierLinear(hidden_size, kv_values)
        self.g_proj = base.XavierLinear(hidden_size, values) if use_gate else None
        self.o_proj = base.XavierLinear(values, hidden_size, gain=0.5)
        self.conv = None
        if conv_size:
            self.conv = base.ShortConvolution(sum(self.channels), conv_size, conv_bias)
        self._add_norm(self.value_dim if norm_affine else None)

    def _mix_tokens(self, x: Tensor, call: call.MixerCall) -> call.Mixed:
        q, k, v, gate = linear.linears(x, (self.q_proj, self.k_proj, self.v_proj, self.g_proj))
        (q, k, v), conv = call.convolved_together(self.conv, q, k, v)
        f = base.FEATURE_MAPS[self.feature_map]
        q, k = (f(y.unflatten(-1, (-1, self.head_dim))) for y in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))
        if self.rotary_base is not None:
            tables = call.tables(x, self.head_dim, self.rotary_base)
            q, k = rotary.rotary_embedding(q, *tables), rotary.rotary_embedding(k, *tables)
        k, v = self._repeated(k, v)
        decay = _preprocess.per_head(v, simple_gla.log_decay, self.first_head)
        o, recurrent = self._scan(x, call, q, k, v, g_gamma=decay)
        o = decoding.output_norm(o, gate, self.norm_weight, self.norm_eps, self.gate_activation)
        length = call.next_lengths(x) if call.use_cache else None
        after = call.new_state(recurrent=recurrent, length=length, conv=conv)
        return self.o_proj(o.flatten(-2)), after

    def decode(
        self, x: Tensor, state: call.State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.conv is not None:
            qkv = decoding.convolution(self.conv, torch.cat([q, k, v], dim=-1), state["conv"])
            q, k, v = qkv.split(self.channels, dim=-1)
        qk = torch.cat([q, k], -1).unflatten(-1, (-1, self.head_dim))
        qk = base.FEATURE_MAPS[self.feature_map](qk)
        length = state["length"]
        if self.rotary_base is not None:
            at = length[:, None] if positions is None else positions
            qk = decoding.rotary(qk, at, self.head_dim, self.rotary_base)
        length.add_(1)
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=2)
        k, v = self._repeated(k, v.unflatten(-1, (-1, self.value_dim)))
        g = _preprocess.per_head(v, simple_gla.log_decay).expand(x.shape[0], 1, -1)
        gate = None if self.g_proj is None else self.g_proj(x)
        o = decoding.mixer(
            q,
            k,
            v,
            state,
            None,
            g=g,
            z=None if gate is None else gate.view_as(v),
            z_activation=self.gate_activation,
            norm_weight=self.norm_weight,
            norm_eps=self.norm_eps,
        )
        return self.o_proj(o)

    def _repeated(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a group for each of its heads."""
        groups = self.num_heads // self.num_kv_heads
        if groups == 1:
            return k, v
        return k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)


class LightningAttention(base.Mixer):
    """Linear attention that decays by exp(-(8 / H) (1 - layer_idx / num_layers) h) in head h.

        q, k, v = silu(x W_qkv)
        y = (rms_norm(lightning_attn(q, k, v)) * sigmoid(x W_g)) W_o

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K = V; None is D / H.
        num_layers: of the model; None makes every layer decay as the first.
        norm_eps: of the norm, whose weight is [H V].
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, V].
    Source: Qin et al., Lightning Attention-2, 2024; MiniMax-01, 2025, section 2.
    """

    depends_on_layer = True
    forms = simple_gla.chunk_simple_gla, simple_gla.fused_recurrent_simple_gla

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        num_layers: int | None = None,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        if head_dim is None:
            base.expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
            head_dim = hidden_size // num_heads
        if num_layers is not None and not layer_idx < num_layers:
            raise ValueError(
                f"num_layers: want more than layer_idx = {layer_idx}, got {num_layers}"
            )
        self.num_heads, self.num_layers, self.norm_eps = num_heads, num_layers, norm_eps
        channels = num_heads * head_dim
        self.qkv_proj = base.NormalLinear(hidden_size, 3 * channels)
        self.g_proj = base.NormalLinear(hidden_size, channels)
        self.o_proj = base.NormalLinear(channels, hidden_size)
        self._add_norm(channels)

    def _mix_tokens(self, x: Tensor, call: call.MixerCall) -> call.Mixed:
        qkv = torch.nn.functional.silu(self.qkv_proj(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.unbind(2)
        share = 1 - self.layer_idx / self.num_layers if self.num_layers else 1
        heads = self.num_heads * (1 if self.head_shard is None else self.head_shard.size)
        decay = _preprocess.per_head(v, simple_gla.decay_of_heads, share, self.first_head, heads)
        o, recurrent = self._scan(x, call, q, k, v, g_gamma=decay)
        o = self._norm_of_all_heads(o.flatten(-2))
        return self.o_proj(o * self.g_proj(x).sigmoid()), call.new_state(recurrent=recurrent)
