"""Softmax attention with a forgetting gate, the Forgetting Transformer's."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from slipstream.layers.attention import Attention, append, keys_to_attend
from slipstream.layers.base import NormalLinear
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.ops._fp32 import widen
from slipstream.ops.attention import attention


class ForgettingAttention(Attention):
    """Attention whose scores fall by how much the tokens between have forgotten.

        f = logsigmoid(x W_f + b_f);  scores q_t . k_s / sqrt(K) + f_{s+1} + ... + f_t

    Args:
        rotary_dim: features of a head that are rotated: none, as the paper has it.
        the others: as Attention.

    State: that of Attention and f [N, S, H], float32.
    Source: Lin et al., Forgetting Transformer: Softmax Attention with a Forget Gate, 2025.
    """

    token_states = ("k", "v", "f")
    rounded_keys = ()

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary_dim: int | None = 0,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, rotary_dim, **options)
        self.f_proj = NormalLinear(hidden_size, num_heads, bias=True)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        at = call.token_positions(x)
        q, k, v = self._heads(self.qkv_proj(x), at)
        f = F.logsigmoid(widen(self.f_proj(x)))
        (k, v, f), masks, cache = keys_to_attend(call, k=k, v=v, f=f)
        o = attention(q, k, v, g=f, window_size=self.window_size, **masks)
        return self._joined(x, o), cache

    def has_fused_step(self) -> bool:
        return False

    def _advance(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        at = MixerCall(positions=positions, state=state).token_positions(x)
        q, k, v = self._heads(self.qkv_proj(x), at)
        append({"k": k, "v": v, "f": F.logsigmoid(widen(self.f_proj(x)))}, state)
        o = attention(
            q,
            state["k"],
            state["v"],
            g=state["f"],
            window_size=self.window_size,
            key_lengths=state["length"],
        )
        return self._joined(x, o)

    def _joined(self, x: Tensor, o: Tensor) -> Tensor:
        return self.o_proj(self._gated(o, None if self.g_proj is None else self.g_proj(x)))
