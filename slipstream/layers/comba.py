"""Comba: a decay, and an erase under a key of its own, with a corrected read."""

import torch
from torch import Tensor, nn

from slipstream.layers import base, delta_heads
from slipstream.layers.call import Mixed, MixerCall
from slipstream.nn import decoding
from slipstream.ops.delta_rule import chunk_comba, fused_recurrent_comba
from slipstream.ops.norm import l2_norm


class Comba(delta_heads.DeltaHeads):
    """Comba behind short convolutions, with a gated norm after it.

        q, k, v = silu(conv(x W_qkv));  q, k = l2_norm(q), l2_norm(k)
        p = sigmoid(erase) k;  q = q - correction k
        g = -exp(A_log) softplus(x W_a + dt_bias);  beta = sigmoid(x W_b)
        y = (rms_norm_per_head(comba(q, k, v, p, g, beta)) * sigmoid(x W_z)) W_o

    Args:
        hidden_size: D.
        num_heads: H, heads of queries and keys.
        num_v_heads: HV, heads of values, a multiple of H; None is H.
        head_dim: K; None is D / H.
        head_v_dim: V; None is K.
        conv_size: taps of the convolution.
        correction: what the factor of each head begins with.
        norm_eps: of the norm, whose weight [V] the heads share.
        mode, layer_idx: as Mixer.

    State: recurrent [N, HV, K, V] and conv [N, 2 H K + HV V, W].
    Source: Hu et al., Comba, 2025. fla's layer normalises p, which takes out the factor of the
    erase, and corrects q before it is normalised.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_v_heads: int | None = None,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        correction: float = 1.0,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        heads = num_heads, head_dim, head_v_dim, num_v_heads
        super().__init__(hidden_size, *heads, norm_eps, mode, layer_idx)
        self.initial_correction = correction
        self.qkv_proj = base.NormalLinear(hidden_size, self.channels)
        self.z_proj = base.NormalLinear(hidden_size, self.values)
        self.ab_proj = base.NormalLinear(hidden_size, 2 * self.num_v_heads)
        self.o_proj = base.NormalLinear(self.values, hidden_size)
        self.conv = base.ShortConvolution(self.channels, conv_size)
        self.erase = nn.Parameter(torch.empty(num_heads))
        self.correction = nn.Parameter(torch.empty(num_heads))
        self._add_decay_and_norm(self.num_v_heads, self.num_v_heads)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.ones_(self.erase)
        nn.init.constant_(self.correction, self.initial_correction)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        qkv, conv = call.convolved(self.conv, self.qkv_proj(x))
        q, k, v = self._heads_of(qkv, l2_norm)
        a, b = self.ab_proj(x).chunk(2, dim=-1)  # [B, T, HV]
        comba = fused_recurrent_comba if self.recurrent(x, call.context) else chunk_comba
        o, recurrent = comba(
            q=q - self.correction.to(k.dtype)[:, None] * k,
            k=k,
            v=v,
            p=self.erase.sigmoid().to(k.dtype)[:, None] * k,
            g=decoding.decay_gate(a, self.A_log, self.dt_bias),
            beta=b.sigmoid(),
            **call.sequence(call.past("recurrent")),
        )
        after = call.new_state(recurrent=recurrent, conv=conv)
        return self._output(o, self.z_proj(x)), after
