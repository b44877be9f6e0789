"""DeltaNet: the delta rule behind short convolutions."""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.layers.base import (
    Mixed,
    Mixer,
    NormalLinear,
    ShortConvolution,
    State,
    expect_divisor,
    new_state,
    past,
)
from slipstream.nn import decoding
from slipstream.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from slipstream.ops.norm import l2_norm, rms_norm, rms_norm_gated
from slipstream.runtime.context_parallel import ContextParallel


class DeltaNet(Mixer):
    """The delta rule, with a norm after it.

        q, k, v = silu(conv(x W_qkv));  q, k = l2_norm(q), l2_norm(k);  beta = sigmoid(x W_b)
        y = rms_norm_per_head(delta_rule(q, k, v, beta)) W_o

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K; None is D / H.
        head_v_dim: V; None is K.
        conv_size: taps of the convolution.
        use_gate: multiplies the norm by silu(x W_g).
        allow_neg_eigval: beta in (0, 2).
        norm_eps: of the norm, whose weight [V] the heads share.
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, V] and conv [N, H (2 K + V), W].
    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, section 3.3.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        use_gate: bool = False,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        if head_dim is None:
            expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
            head_dim = hidden_size // num_heads
        self.num_heads, self.head_dim, self.head_v_dim = num_heads, head_dim, head_v_dim or head_dim
        self.allow_neg_eigval, self.norm_eps = allow_neg_eigval, norm_eps
        keys, values = num_heads * head_dim, num_heads * self.head_v_dim
        self.qkv_proj = NormalLinear(hidden_size, 2 * keys + values)
        self.b_proj = NormalLinear(hidden_size, num_heads)
        self.g_proj = NormalLinear(hidden_size, values) if use_gate else None
        self.o_proj = NormalLinear(values, hidden_size)
        self.conv = ShortConvolution(2 * keys + values, conv_size)
        self.norm_weight = nn.Parameter(torch.empty(self.head_v_dim))
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
        qkv, conv = self.conv(self.qkv_proj(x), past(state, "conv"), use_cache, cu_seqlens, context)
        keys = self.num_heads * self.head_dim
        qk, v = qkv.split([2 * keys, self.num_heads * self.head_v_dim], dim=-1)
        q, k = l2_norm(qk.unflatten(-1, (2 * self.num_heads, self.head_dim))).chunk(2, dim=2)
        v = v.unflatten(-1, (self.num_heads, self.head_v_dim))
        beta = self.b_proj(x).sigmoid()  # [B, T, H]
        rule = fused_recurrent_delta_rule if self.recurrent(x, context) else chunk_delta_rule
        o, recurrent = rule(
            q,
            k,
            v,
            2 * beta if self.allow_neg_eigval else beta,
            initial_state=past(state, "recurrent"),
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
            context=context,
        )
        if self.g_proj is None:
            o = rms_norm(o, self.norm_weight, eps=self.norm_eps)
        else:
            gate = self.g_proj(x).view_as(o)
            o = rms_norm_gated(o, gate, self.norm_weight, eps=self.norm_eps)
        return self.o_proj(o.flatten(-2)), new_state(use_cache, recurrent=recurrent, conv=conv)

    def decode(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        qkv = decoding.convolution(self.conv, self.qkv_proj(x), state["conv"])
        keys = self.num_heads * self.head_dim
        qk, v = qkv.split([2 * keys, self.num_heads * self.head_v_dim], dim=-1)
        qk = decoding.unit(qk.unflatten(-1, (2 * self.num_heads, self.head_dim)))
        q, k = qk.chunk(2, dim=2)
        v = v.unflatten(-1, (self.num_heads, self.head_v_dim))
        beta = self.b_proj(x).sigmoid()
        beta = 2 * beta if self.allow_neg_eigval else beta
        o = decoding.recurrence(q, k, v, state["recurrent"], beta=beta)
        if self.g_proj is None:
            o = decoding.norm(o, self.norm_weight, self.norm_eps)
        else:
            gate = self.g_proj(x).view_as(o)
            o = decoding.gated_norm(o, gate, self.norm_weight, self.norm_eps)
        return self.o_proj(o.flatten(-2))
