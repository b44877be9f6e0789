"""Gated slot attention, the layer of GSA."""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.layers.base import Mixer, XavierLinear, expect_divisor, log_sigmoid_decay
from slipstream.layers.call import Mixed, MixerCall
from slipstream.ops.gsa import chunk_gsa, fused_recurrent_gsa


class GatedSlotAttention(Mixer):
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
        expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        expect_divisor("num_kv_heads", self.num_kv_heads, "num_heads", num_heads)
        head_dim = hidden_size // num_heads
        self.gate_logit_normalizer, self.norm_eps = gate_logit_normalizer, norm_eps
        self.q_proj = XavierLinear(hidden_size, hidden_size)
        self.k_proj = XavierLinear(hidden_size, self.num_kv_heads * head_dim)
        self.v_proj = XavierLinear(hidden_size, self.num_kv_heads * head_dim)
        self.f_proj = XavierLinear(hidden_size, self.num_kv_heads * (num_slots or head_dim))
        self.o_proj = XavierLinear(hidden_size, hidden_size)
        self._add_norm(hidden_size)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        heads = (self.num_kv_heads, -1)
        q = F.silu(self.q_proj(x)).unflatten(-1, (self.num_heads, -1))
        k, v = (F.silu(f(x)).unflatten(-1, heads) for f in (self.k_proj, self.v_proj))
        g = log_sigmoid_decay(self.f_proj, x, self.num_kv_heads, self.gate_logit_normalizer)
        gsa = fused_recurrent_gsa if self.recurrent(x, call.context) else chunk_gsa
        o, states = gsa(
            q, k, v, -torch.expm1(g).to(k.dtype), g,
            scale=1.0, **call.sequence(call.pasts("keys", "values")),
        )  # fmt: skip
        keys, values = (None, None) if states is None else states
        o = self._norm_of_all_heads(F.silu(o.flatten(-2)))
        return self.o_proj(o), call.new_state(keys=keys, values=values)
