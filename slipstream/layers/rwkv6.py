"""Time mixing of RWKV-6 (Finch)."""

import torch
from torch import Tensor, nn

from slipstream.common.checks import expect_shape
from slipstream.layers import base, call, rwkv7
from slipstream.ops import _fp32, rwkv
from slipstream.ops.norm import group_norm
from slipstream.ops.token_shift import token_shift

# what is mixed with the token before
MIXED = ("r", "w", "k", "v", "g")


class RWKV6(base.Mixer):
    """RWKV-6's time mixing: a decay per channel, and how much of the token before, by the input.

        d = shift(x) - x;  m_c = mu_c + tanh((x + d mu) A_c) B_c;  x_c = x + d m_c
        w = -exp(w0 + lora_w(x_w));  o = rwkv6(x_r W_r, x_k W_k, x_v W_v, w, u)
        y = (group_norm_per_head(o) * silu(x_g W_g)) W_o

    Args:
        hidden_size: D.
        num_heads: H; K = V = D / H.
        mix_low_rank_dim: columns of each A.
        decay_low_rank_dim: rank of lora_w.
        norm_eps: of the norm.
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, K] and shift [N, D].
    Source: Peng et al., Eagle and Finch, 2024, section 4.
    """

    forms = rwkv.chunk_rwkv6, rwkv.fused_recurrent_rwkv6

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        mix_low_rank_dim: int = 32,
        decay_low_rank_dim: int = 64,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        base.expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
        self.num_heads, self.head_dim, self.norm_eps = num_heads, hidden_size // num_heads, norm_eps
        self.r_proj = rwkv7.UniformLinear(hidden_size, hidden_size, 0.5)
        self.k_proj = rwkv7.UniformLinear(hidden_size, hidden_size, 0.05)
        self.v_proj = rwkv7.UniformLinear(hidden_size, hidden_size, 0.5)
        self.g_proj = rwkv7.UniformLinear(hidden_size, hidden_size, 0.5)
        self.o_proj = rwkv7.UniformLinear(hidden_size, hidden_size, 0.5)
        self.w_lora = rwkv7.Lora(hidden_size, decay_low_rank_dim, torch.tanh, _slow_to_fast)
        self.mix_base = nn.Parameter(torch.empty(hidden_size))
        self.mix = nn.Parameter(torch.empty(len(MIXED), hidden_size))
        self.mix_down = nn.Parameter(torch.empty(hidden_size, len(MIXED) * mix_low_rank_dim))
        self.mix_up = nn.Parameter(torch.empty(len(MIXED), mix_low_rank_dim, hidden_size))
        self.bonus = nn.Parameter(torch.empty(num_heads, self.head_dim))
        self.norm_weight = nn.Parameter(torch.empty(hidden_size))
        self.norm_bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        size = self.mix_base.shape[0]
        channel = torch.arange(size, dtype=torch.float32, device=self.mix_base.device) / size
        base.assign(self.mix_base, 1 - channel)
        base.assign(self.mix, (1 - channel).expand_as(self.mix))
        # at first no token says how it is mixed
        nn.init.zeros_(self.mix_down)
        nn.init.uniform_(self.mix_up, -0.01, 0.01)
        nn.init.zeros_(self.bonus)
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)

    def _mix_tokens(self, x: Tensor, call: call.MixerCall) -> call.Mixed:
        # one channel would broadcast to all of the mixes
        expect_shape("x", x, (*x.shape[:2], self.mix_base.shape[0]))
        before, shift = token_shift(x, **call.sequence(call.past("shift")))
        delta = before - x
        inner = torch.addcmul(x, delta, self.mix_base).to(x.dtype) @ self.mix_down.to(x.dtype)
        inner = torch.tanh(inner).unflatten(-1, (len(MIXED), -1)).movedim(-2, 0)  # [5, B, T, rank]
        mixes = inner @ self.mix_up[:, None].to(x.dtype) + self.mix[:, None, None]
        xr, xw, xk, xv, xg = (torch.addcmul(x, delta, m.to(x.dtype)) for m in mixes)
        heads = (self.num_heads, self.head_dim)
        w = -torch.exp(_fp32.widen(self.w_lora(xw)))
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)
        r, k, v, w = (y.unflatten(-1, heads) for y in (r, k, v, w))
        o, recurrent = self._scan(x, call, r=r, k=k, v=v, w=w, u=self.bonus, scale=1.0)
        norm = self.norm_weight, self.norm_bias
        o = group_norm(o.flatten(-2), self.num_heads, *norm, eps=self.norm_eps)
        y = self.o_proj(o * nn.functional.silu(self.g_proj(xg)))
        return y, call.new_state(recurrent=recurrent, shift=shift)


def _slow_to_fast(channel: Tensor) -> Tensor:
    """w0: from a decay over hundreds of tokens in channel 0 to a fast one in channel 1."""
    return -6 + 5 * channel**0.7
