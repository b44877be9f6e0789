"""Time mixing of RWKV-7 (Goose)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.layers.base import Mixed, Mixer, State, expect_divisor, kept, past
from slipstream.ops.norm import group_norm, l2_norm
from slipstream.ops.rwkv7 import chunk_rwkv7, fused_recurrent_rwkv7
from slipstream.ops.token_shift import token_shift

SLOWEST_LOG_DECAY = -math.exp(-0.5)
MIX_POWERS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
"""How unevenly each mix begins over the channels."""


class RWKV7(Mixer):
    """RWKV-7's time mixing: a generalised delta rule with a decay and a learning rate per channel.

        x_c = x + (shift(x) - x) mu_c                                     c in r, w, k, v, a, g
        r, k, v = x_r W_r, x_k W_k, x_v W_v
        w = -exp(-1/2) sigmoid(w0 + lora_w(x_w));  a = sigmoid(a0 + lora_a(x_a))
        v = v + (v_first - v) sigmoid(v0 + lora_v(x_v))                   but in the first layer
        kk = l2_norm_per_head(k k_k);  k = k (1 + (a - 1) k_a)
        o = rwkv7(r, w, k, v, a=-kk, b=kk a)
        y = (group_norm_per_head(o) + sum(r k r_k) v) lora_g(x_g) W_o

    v_first is the v of the first such layer, which leaves it in `shared`; without `shared` the
    layer takes itself for the first.

    Args:
        hidden_size: D.
        num_heads: H; None is D / head_dim.
        head_dim: K = V, 64 in the paper; None is D / H.
        decay_low_rank_dim, a_low_rank_dim, v_low_rank_dim, gate_low_rank_dim: ranks of the four
            lora; None is the paper's rule for this D.
        num_layers: of the model, for the initial mixes; None begins all layers as the first.
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, K] and shift [N, D].
    Source: Peng et al., RWKV-7 Goose, 2025, section 4 and appendix.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        decay_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        num_layers: int | None = None,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        if num_heads is None:
            head_dim = head_dim or 64
            expect_divisor("head_dim", head_dim, "hidden_size", hidden_size)
            num_heads = hidden_size // head_dim
        expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
        if head_dim is not None and num_heads * head_dim != hidden_size:
            raise ValueError(
                f"head_dim: want hidden_size / num_heads = {hidden_size // num_heads}, "
                f"got {head_dim}"
            )
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        root = hidden_size**0.5
        self.w_lora = Lora(hidden_size, decay_low_rank_dim or _rank(1.8 * root), torch.tanh)
        self.a_lora = Lora(hidden_size, a_low_rank_dim or _rank(1.8 * root), None)
        self.g_lora = Lora(hidden_size, gate_low_rank_dim or _rank(0.6 * root**1.6), torch.sigmoid)
        self.v_lora = None
        if layer_idx > 0:
            self.v_lora = Lora(hidden_size, v_low_rank_dim or _rank(1.3 * root), None)
            self.v_lora.begin_at(torch.ones(hidden_size))
        self.r_proj = _uniform(nn.Linear(hidden_size, hidden_size, bias=False), 0.5)
        self.k_proj = _uniform(nn.Linear(hidden_size, hidden_size, bias=False), 0.05)
        self.v_proj = _uniform(nn.Linear(hidden_size, hidden_size, bias=False), 0.5)
        self.o_proj = _uniform(nn.Linear(hidden_size, hidden_size, bias=False), 0.0)
        self._begin(hidden_size, num_layers)

    def _begin(self, size: int, num_layers: int | None) -> None:
        """The vectors; mixes and decays begin different for every channel and depth."""
        self.k_k = nn.Parameter(torch.full((size,), 0.85))
        self.k_a = nn.Parameter(torch.ones(size))
        self.r_k = nn.Parameter(torch.zeros(self.num_heads, self.head_dim))
        self.norm_weight = nn.Parameter(torch.ones(size))
        self.norm_bias = nn.Parameter(torch.zeros(size))
        depth = self.layer_idx / num_layers if num_layers else 0.0
        ratio = self.layer_idx / (num_layers - 1) if num_layers and num_layers > 1 else 0.0
        channel = torch.arange(size)
        mixes = [1 - (channel / size) ** (power * (1 - depth)) for power in MIX_POWERS.values()]
        self.mix = nn.Parameter(torch.stack(mixes))  # [6, D], in the order of MIX_POWERS
        share = channel / max(size - 1, 1)
        # the half undoes the softplus of the paper's w; small ones remember for thousands of tokens
        self.w_lora.begin_at(-6.5 + 5 * share ** (0.85 + ratio**0.5))
        self.a_lora.begin_at(torch.zeros(size))

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        state: State | None = None,
        use_cache: bool = False,
        shared: dict[str, Any] | None = None,
    ) -> Mixed:
        before, shift = token_shift(
            x,
            initial_state=past(state, "shift"),
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
        )
        delta = before - x
        xr, xw, xk, xv, xa, xg = (torch.addcmul(x, delta, mu) for mu in self.mix)
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)
        v = self._with_first_value(v, xv, shared)
        w = SLOWEST_LOG_DECAY * torch.sigmoid(_wide(self.w_lora(xw)))
        a = torch.sigmoid(self.a_lora(xa))
        heads = (self.num_heads, self.head_dim)
        kk = l2_norm((k * self.k_k).unflatten(-1, heads), eps=1e-12)
        k = k * torch.addcmul(1 - self.k_a, a, self.k_a)
        r, k, v, w, a = (y.unflatten(-1, heads) for y in (r, k, v, w, a))
        rwkv7 = fused_recurrent_rwkv7 if self.recurrent(x) else chunk_rwkv7
        o, recurrent = rwkv7(
            r=r,
            w=w,
            k=k,
            v=v,
            a=-kk,
            b=kk * a,
            initial_state=past(state, "recurrent"),
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
        )
        bonus = (r * k * self.r_k).sum(-1, keepdim=True) * v  # [B, T, H, K]
        y = self.o_proj((self._norm(o.flatten(-2)) + bonus.flatten(-2)) * self.g_lora(xg))
        return y, kept(use_cache, recurrent=recurrent, shift=shift)

    def _norm(self, o: Tensor) -> Tensor:
        eps = self.head_dim * 1e-5
        return group_norm(o, self.num_heads, self.norm_weight, self.norm_bias, eps=eps)

    def _with_first_value(self, v: Tensor, xv: Tensor, shared: dict[str, Any] | None) -> Tensor:
        if shared is None:
            return v
        # the first is named, not found by absence: a checkpointed layer runs again in the backward
        if shared.setdefault("rwkv7_first_layer", self.layer_idx) == self.layer_idx:
            shared["rwkv7_first_value"] = v
            return v
        if self.v_lora is None:
            raise ValueError("layer_idx: only the first RWKV7 layer of a model can be layer 0")
        first = shared["rwkv7_first_value"].to(v.dtype)
        return torch.lerp(v, first, torch.sigmoid(self.v_lora(xv)).to(v.dtype))


class Lora(nn.Module):
    """f(x W_down) W_up + bias; W_down begins at 0, so that the bias is all there is at first."""

    def __init__(self, size: int, rank: int, f: Any) -> None:
        super().__init__()
        self.f = f
        self.down = nn.Parameter(torch.zeros(size, rank))
        self.up = nn.Parameter(nn.init.orthogonal_(torch.empty(rank, size), gain=0.1))
        self.bias = None

    def begin_at(self, bias: Tensor) -> None:
        self.bias = nn.Parameter(bias.float())

    def forward(self, x: Tensor) -> Tensor:
        inner = x @ self.down
        inner = inner if self.f is None else self.f(inner)
        return inner @ self.up if self.bias is None else F.linear(inner, self.up.t(), self.bias)


def _uniform(linear: nn.Linear, bound: float) -> nn.Linear:
    bound *= linear.in_features**-0.5
    nn.init.uniform_(linear.weight, -bound, bound)
    return linear


def _rank(size: float) -> int:
    """The multiple of 32 next to `size`, at least 32."""
    return max(32, round(size / 32) * 32)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
