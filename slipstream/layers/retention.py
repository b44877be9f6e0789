"""Multi-scale retention, the layer of RetNet."""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.layers.base import (
    Mixed,
    Mixer,
    State,
    XavierLinear,
    expect_divisor,
    new_state,
    next_lengths,
    past,
    token_positions,
)
from slipstream.nn import decoding
from slipstream.ops._decay_tables import per_head
from slipstream.ops.norm import rms_norm_gated
from slipstream.ops.retention import chunk_retention, fused_recurrent_retention, log_decay
from slipstream.ops.rotary import rotary_embedding, rotary_tables
from slipstream.runtime.context_parallel import ContextParallel


class MultiScaleRetention(Mixer):
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
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, V] and length [N].
    Source: Sun et al., Retentive Network, 2023, section 2.
    """

    norm_weight: nn.Parameter | None

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
    ) -> None:
        super().__init__(mode, layer_idx)
        if head_dim is None:
            expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
            head_dim = hidden_size // num_heads
        self.num_heads, self.head_dim, self.value_dim = (
            num_heads,
            head_dim,
            int(head_dim * expand_v),
        )
        self.rotary_base, self.norm_eps = rotary_base, norm_eps
        keys, values = num_heads * head_dim, num_heads * self.value_dim
        self.q_proj = XavierLinear(hidden_size, keys)
        self.k_proj = XavierLinear(hidden_size, keys)
        self.v_proj = XavierLinear(hidden_size, values)
        self.g_proj = XavierLinear(hidden_size, values)
        self.o_proj = XavierLinear(values, hidden_size, gain=0.5)
        weight = nn.Parameter(torch.empty(self.value_dim)) if norm_affine else None
        self.register_parameter("norm_weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.norm_weight is not None:
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
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_heads, self.value_dim))
        if self.rotary_base is not None:
            at = token_positions(x, cu_seqlens, positions, state, context)
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            cos, sin = rotary_tables(at, self.head_dim, base=self.rotary_base, dtype=wide)
            q, k = rotary_embedding(q, cos, sin), rotary_embedding(k, cos, sin)
        retention = fused_recurrent_retention if self.recurrent(x, context) else chunk_retention
        o, recurrent = retention(
            q,
            k,
            v,
            initial_state=past(state, "recurrent"),
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
            context=context,
        )
        o = rms_norm_gated(o, self.g_proj(x).view_as(o), self.norm_weight, eps=self.norm_eps)
        length = next_lengths(x, cu_seqlens, state) if use_cache else None
        return self.o_proj(o.flatten(-2)), new_state(use_cache, recurrent=recurrent, length=length)

    def decode(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        qk = torch.cat([self.q_proj(x), self.k_proj(x)], -1)
        qk = qk.unflatten(-1, (2 * self.num_heads, self.head_dim))
        length = state["length"]
        if self.rotary_base is not None:
            at = length[:, None] if positions is None else positions
            qk = decoding.rotary(qk, at, self.head_dim, self.rotary_base)
        length.add_(1)
        q, k = qk.chunk(2, dim=2)
        v = self.v_proj(x).unflatten(-1, (self.num_heads, self.value_dim))
        g = per_head(v, log_decay).expand(x.shape[0], 1, -1)
        o = decoding.recurrence(q, k, v, state["recurrent"], g=g)
        o = decoding.gated_norm(o, self.g_proj(x).view_as(o), self.norm_weight, self.norm_eps)
        return self.o_proj(o.flatten(-2))
