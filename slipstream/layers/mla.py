"""Multi-head latent attention: keys and values of all heads are made of one short latent.

c_t = rms_norm(x_t W_a)  [R]        r_t = rotary(x_t W_r)  [P]       what the cache holds
k_h = [c W_k,h, r]   v_h = c W_v,h                                   prefill: written out
q_h . k_h = [q_nope,h W_k,h^T, q_rope,h] . [c, r]                    decoding: absorbed, so that
sum_s p_s v_h,s = (sum_s p_s c_s) W_v,h                              all heads read the latent
"""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.layers.attention import append, keys_to_attend
from slipstream.layers.base import Mixer, NormalLinear
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.nn import linear
from slipstream.ops import norm, rotary
from slipstream.ops.attention import attention, latent_attention


class MLA(Mixer):
    """Softmax attention with a compressed cache, as in DeepSeek V2 and V3.

        y = softmax(scale q k^T, causal) v W_o        q, k of width nope + rope, v of its own

    Args:
        hidden_size: D.
        num_heads: H.
        q_lora_rank: width of the queries' own latent; None is a matrix straight from x.
        kv_lora_rank: R, of the latent of keys and values.
        nope_head_dim: width of a head's part that does not turn with the position.
        rope_head_dim: P, of the part that does, whose key all heads share; even.
        v_head_dim: of a head's values.
        rotary_base: of the angles; None turns nothing, as Kimi Linear's.
        interleaved: features (2i, 2i+1) turn together, as DeepSeek's weights have it; else
            (i, i + P/2).
        scale: None is (nope + rope)^-0.5; a model stretched by YaRN has another.
        norm_eps: of the latents' rms norms.
        mode: "chunk" always writes keys and values out, "fused_recurrent" never does beside a
            state, None does so beyond a few tokens or if gradients are wanted. With an adapter,
            hook or wrapper on kv_b_proj every mode writes them out. layer_idx: as Mixer.

    State: latent [N, S, R + P], each sequence from index 0, and length [N] <= S.
    Cost: of a decoding step, 2 H S (2 R + P) flops, S (R + P) elements read.
    Source: DeepSeek-AI, DeepSeek-V2, 2024, section 2.1.
    """

    token_states = ("latent",)
    leaves_states = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        q_lora_rank: int | None = None,
        kv_lora_rank: int = 512,
        nope_head_dim: int = 128,
        rope_head_dim: int = 64,
        v_head_dim: int = 128,
        rotary_base: float | None = 10000.0,
        interleaved: bool = True,
        scale: float | None = None,
        norm_eps: float = 1e-6,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        if rope_head_dim < 2 or rope_head_dim % 2:
            raise ValueError(f"rope_head_dim: want an even number, got {rope_head_dim}")
        self.num_heads, self.rank = num_heads, kv_lora_rank
        self.nope, self.rope, self.v_head_dim = nope_head_dim, rope_head_dim, v_head_dim
        self.rotary_base, self.interleaved, self.norm_eps = rotary_base, interleaved, norm_eps
        self.scale = (nope_head_dim + rope_head_dim) ** -0.5 if scale is None else scale
        width = num_heads * (nope_head_dim + rope_head_dim)
        self.q_a_proj = self.q_norm = None
        if q_lora_rank is not None:
            self.q_a_proj = NormalLinear(hidden_size, q_lora_rank)
            self.q_norm = nn.Parameter(torch.empty(q_lora_rank))
        self.q_proj = NormalLinear(q_lora_rank or hidden_size, width)
        self.kv_a_proj = NormalLinear(hidden_size, kv_lora_rank + rope_head_dim)
        self.kv_norm = nn.Parameter(torch.empty(kv_lora_rank))
        heads = num_heads * (nope_head_dim + v_head_dim)
        self.kv_b_proj = NormalLinear(kv_lora_rank, heads)
        self.o_proj = NormalLinear(num_heads * v_head_dim, hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.q_norm, self.kv_norm):
            if weight is not None:
                nn.init.ones_(weight)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        q, latent = self._project(x, self._narrow(x), call)
        (latent,), masks, cache = keys_to_attend(call, latent=latent)
        if call.state is not None and call.cu_seqlens is None and self._absorbs(x):
            o = self._absorbed(q, latent, masks["key_lengths"])
        else:
            k, v = self._written_out(latent)
            o = attention(q, k, v, scale=self.scale, **masks)
        return self.o_proj(o.flatten(-2)), cache

    def _advance(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        call = MixerCall(positions=positions, state=state)
        q, latent = self._project(x, self._narrow(x), call)
        append({"latent": latent}, state)
        latent, lengths = state["latent"], state["length"]
        if self._absorbs(x):
            o = self._absorbed(q, latent, lengths)
        else:
            k, v = self._written_out(latent)
            o = attention(q, k, v, scale=self.scale, key_lengths=lengths)
        return self.o_proj(o.flatten(-2))

    def _narrow(self, x: Tensor) -> Tensor:
        """What queries are projected from: their latent, or x."""
        if self.q_a_proj is None:
            return x
        return norm.rms_norm(self.q_a_proj(x), self.q_norm, eps=self.norm_eps)

    def _project(self, x: Tensor, narrow: Tensor, call: MixerCall) -> tuple[Tensor, Tensor]:
        """q [B, T, H, nope + rope], latent [B, T, R + P]"""
        q = self.q_proj(narrow).unflatten(-1, (self.num_heads, -1))
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        c, r = self.kv_a_proj(x).split([self.rank, self.rope], -1)
        c = norm.rms_norm(c, self.kv_norm, eps=self.norm_eps)
        if self.rotary_base is None:
            return q, torch.cat([c, r], -1)
        cos, sin = call.tables(x, self.rope, self.rotary_base)
        both = torch.cat([q_rope, r[:, :, None]], 2)
        both = rotary.rotary_embedding(both, cos, sin, interleaved=self.interleaved)
        q_rope, r = both.split([self.num_heads, 1], 2)
        return torch.cat([q_nope, q_rope], -1), torch.cat([c, r[:, :, 0]], -1)

    def _written_out(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """k [N, S, H, nope + rope], v [N, S, H, DV]"""
        c, r = latent.split([self.rank, self.rope], -1)
        kv = self.kv_b_proj(c).unflatten(-1, (self.num_heads, -1))
        k, v = kv.split([self.nope, self.v_head_dim], -1)
        r = r[:, :, None].expand(-1, -1, self.num_heads, -1)
        return torch.cat([k, r], -1), v

    def _absorbs(self, x: Tensor) -> bool:
        """Whether to multiply by kv_b_proj's weight; an adapter or a hook needs its call."""
        return self.recurrent(x) and linear.plain_linear(self.kv_b_proj)

    def _absorbed(
        self, q: Tensor, latent: Tensor, lengths: Tensor, selected: Tensor | None = None
    ) -> Tensor:
        """q [N, T, H, nope + rope] -> [N, T, H, DV], the last query on token `lengths` of S."""
        sizes = {"width": self.rank, "scale": self.scale}
        q, w_v = absorbed(q, self.kv_b_proj.weight, self.nope, self.v_head_dim)
        o = latent_attention(q, latent, lengths, selected=selected, **sizes)
        return torch.einsum("nthr,hvr->nthv", o, w_v)


def absorbed(q: Tensor, weight: Tensor, nope: int, v: int) -> tuple[Tensor, Tensor]:
    """q [N, T, H, R + P] of q [N, T, H, nope + P], to be multiplied with latents instead of keys,
    and values' projection [H, V, R]. weight: [H (nope + V), R], of keys and values."""
    w_k, w_v = weight.unflatten(0, (-1, nope + v)).split([nope, v], 1)  # [H, nope | V, R]
    q_nope, q_rope = q.tensor_split([nope], -1)
    return torch.cat([torch.einsum("nthd,hdr->nthr", q_nope, w_k), q_rope], -1), w_v
