"""Gated linear attention, the layer of GLA."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.layers.base import (
    Mixed,
    Mixer,
    State,
    XavierLinear,
    expect_divisor,
    new_state,
    past,
)
from slipstream.nn import decoding
from slipstream.ops.gla import chunk_gla, fused_recurrent_gla
from slipstream.ops.norm import rms_norm_gated
from slipstream.runtime.context_parallel import ContextParallel


class GatedLinearAttention(Mixer):
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
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, V].
    Source: Yang et al., Gated Linear Attention Transformers, 2024, section 4.4.
    """

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
    ) -> None:
        super().__init__(mode, layer_idx)
        keys, values = int(hidden_size * expand_k), int(hidden_size * expand_v)
        expect_divisor("num_heads", num_heads, "hidden_size * expand_k", keys)
        expect_divisor("num_heads", num_heads, "hidden_size * expand_v", values)
        self.num_heads, self.norm_eps = num_heads, norm_eps
        self.gate_logit_normalizer = gate_logit_normalizer
        self.q_proj = XavierLinear(hidden_size, keys)
        self.k_proj = XavierLinear(hidden_size, keys)
        self.v_proj = XavierLinear(hidden_size, values)
        self.g_proj = XavierLinear(hidden_size, values)
        self.gk_down = XavierLinear(hidden_size, gate_low_rank_dim)
        self.gk_up = XavierLinear(gate_low_rank_dim, keys, bias=True)
        self.o_proj = XavierLinear(values, hidden_size)
        self.norm_weight = nn.Parameter(torch.empty(values // num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.norm_weight)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        context: ContextParallel | None = None,
        positions: Tensor | None = None,
        state: State | None = None,
        use_cache: bool = False,
    ) -> Mixed:
        heads = (self.num_heads, -1)
        q, k, v = (f(x).unflatten(-1, heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        gla = fused_recurrent_gla if self.recurrent(x, context) else chunk_gla
        o, recurrent = gla(
            q,
            k,
            v,
            self._log_decay(x),
            initial_state=past(state, "recurrent"),
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
            context=context,
        )
        gate = self.g_proj(x).view_as(o)
        o = rms_norm_gated(o, gate, self.norm_weight, eps=self.norm_eps)
        return self.o_proj(o.flatten(-2)), new_state(use_cache, recurrent=recurrent)

    def decode(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        heads = (self.num_heads, -1)
        q, k, v = (f(x).unflatten(-1, heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        o = decoding.recurrence(q, k, v, state["recurrent"], g=self._log_decay(x))
        gate = self.g_proj(x).view_as(o)
        o = decoding.gated_norm(o, gate, self.norm_weight, self.norm_eps)
        return self.o_proj(o.flatten(-2))

    def _log_decay(self, x: Tensor) -> Tensor:
        """[B, T, H, K]"""
        raw = self.gk_up(self.gk_down(x)).unflatten(-1, (self.num_heads, -1))
        raw = raw if raw.dtype.itemsize > 2 else raw.float()
        return F.logsigmoid(raw) / self.gate_logit_normalizer
