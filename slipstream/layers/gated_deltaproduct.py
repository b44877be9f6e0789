"""Gated DeltaProduct: several steps of the delta rule for each token."""

from torch import Tensor

from slipstream.layers import base, delta_heads
from slipstream.layers.call import Mixed, MixerCall
from slipstream.nn import decoding
from slipstream.ops.gated_delta_product import (
    chunk_gated_delta_product,
    fused_recurrent_gated_delta_product,
)
from slipstream.ops.norm import l2_norm


class GatedDeltaProduct(delta_heads.DeltaHeads):
    """Gated DeltaNet with n keys, values and steps a token, of which the first decays.

        q, k_1 .. k_n, v_1 .. v_n = silu(conv(x W_qkv));  beta = 2 sigmoid(x W_b)
        g = -exp(A_log) softplus(x W_a + dt_bias)
        y = (rms_norm_per_head(gated_delta_product(q, k, v, g, beta)) * silu(x W_z)) W_o

    Args:
        hidden_size: D.
        num_heads: H, heads of queries and keys.
        num_v_heads: HV, heads of values, a multiple of H; None is H.
        head_dim: K; None is D / H.
        head_v_dim: V; None is K.
        num_householder: n.
        conv_size: taps of the convolution.
        allow_neg_eigval: beta in (0, 2), else (0, 1).
        norm_eps: of the norm, whose weight [V] the heads share.
        mode, layer_idx: as Mixer.

    State: recurrent [N, HV, K, V] and conv [N, H K + n (H K + HV V), W].
    Source: Siems et al., DeltaProduct, 2025, section 3.
    """

    gate_activation = "silu"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_v_heads: int | None = None,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        num_householder: int = 2,
        conv_size: int = 4,
        allow_neg_eigval: bool = True,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        if num_householder < 1:
            raise ValueError(f"num_householder: want at least 1, got {num_householder}")
        heads = num_heads, head_dim, head_v_dim, num_v_heads
        super().__init__(hidden_size, *heads, norm_eps, mode, layer_idx)
        self.num_householder, self.allow_neg_eigval = num_householder, allow_neg_eigval
        n = num_householder
        self.sizes = [self.keys, n * self.keys, n * self.values]
        self.qkv_proj = base.NormalLinear(hidden_size, sum(self.sizes))
        self.a_proj = base.NormalLinear(hidden_size, self.num_v_heads)
        self.b_proj = base.NormalLinear(hidden_size, n * self.num_v_heads)
        self.z_proj = base.NormalLinear(hidden_size, self.values)
        self.o_proj = base.NormalLinear(self.values, hidden_size)
        self.conv = base.ShortConvolution(sum(self.sizes), conv_size)
        self._add_decay_and_norm(self.num_v_heads, self.num_v_heads)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        qkv, conv = call.convolved(self.conv, self.qkv_proj(x))
        q, k, v = qkv.split(self.sizes, dim=-1)
        q = l2_norm(q.unflatten(-1, (self.num_heads, self.head_dim)))
        k = l2_norm(self._steps(k, (self.num_heads, self.head_dim)))  # [B, T n, H, K]
        v = self._steps(v, (self.num_v_heads, self.head_v_dim))
        beta = self._steps(self.b_proj(x), (self.num_v_heads,)).sigmoid()
        g = decoding.decay_gate(self.a_proj(x), self.A_log, self.dt_bias)
        is_recurrent = self.recurrent(x, call.context)
        product = fused_recurrent_gated_delta_product if is_recurrent else chunk_gated_delta_product
        o, recurrent = product(
            q,
            k,
            v,
            g,
            2 * beta if self.allow_neg_eigval else beta,
            self.num_householder,
            **call.sequence(call.past("recurrent")),
        )
        after = call.new_state(recurrent=recurrent, conv=conv)
        return self._output(o, self.z_proj(x)), after

    def _steps(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """[B, T, n * ...] -> [B, T n, ...]"""
        return x.unflatten(-1, (self.num_householder, *sizes)).flatten(1, 2)
