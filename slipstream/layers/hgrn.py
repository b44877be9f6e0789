"""HGRN and HGRN-2: gated recurrences whose input gate is what the forget gate leaves."""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.layers.base import Mixer, XavierLinear, expect_divisor
from slipstream.layers.call import Mixed, MixerCall
from slipstream.ops._fp32 import widen
from slipstream.ops.gla import chunk_gla, fused_recurrent_gla
from slipstream.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn


def _log_forget(f: Tensor, lower_bound: float) -> Tensor:
    """log(l + (1 - l) sigmoid(f)), in float32 at least."""
    f = widen(f)
    if lower_bound == 0:
        return F.logsigmoid(f)
    return torch.log(lower_bound + (1 - lower_bound) * torch.sigmoid(f))


def _expect_bound(lower_bound: float) -> None:
    if not 0 <= lower_bound < 1:
        raise ValueError(f"lower_bound: want a number in [0, 1), got {lower_bound}")


class HGRN(Mixer):
    """A gated recurrence of each channel.

        f = l + (1 - l) sigmoid(x W_f);  h_t = f_t h_{t-1} + (1 - f_t) silu(x W_i)_t
        y = (rms_norm(h) * silu(x W_g)) W_o

    Args:
        hidden_size: D.
        num_heads: no effect: there are none, but a model gives every layer how many.
        expand: channels of the recurrence by D.
        lower_bound: l, in [0, 1). The paper's grows from 0 in the first layer to near 1 in the
            last.
        norm_eps: of the norm.
        mode, layer_idx: as Mixer.

    State: recurrent [N, expand D].
    Source: Qin, Yang, Zhong, Hierarchically Gated Recurrent Neural Network, 2023, section 3.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        expand: float = 1.0,
        lower_bound: float = 0.0,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        _expect_bound(lower_bound)
        self.lower_bound, self.norm_eps = lower_bound, norm_eps
        channels = int(hidden_size * expand)
        self.i_proj = XavierLinear(hidden_size, channels)
        self.f_proj = XavierLinear(hidden_size, channels)
        self.g_proj = XavierLinear(hidden_size, channels)
        self.o_proj = XavierLinear(channels, hidden_size)
        self._add_norm(channels)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        i = self.i_proj(x)
        g = _log_forget(self.f_proj(x), self.lower_bound)
        hgrn = fused_recurrent_hgrn if self.recurrent(x, call.context) else chunk_hgrn
        h, recurrent = hgrn(
            (F.silu(i) * -torch.expm1(g)).to(i.dtype), g, **call.sequence(call.past("recurrent"))
        )
        h = self._norm_of_all_heads(h, self.g_proj(x))
        return self.o_proj(h), call.new_state(recurrent=recurrent)


class HGRN2(Mixer):
    """HGRN with a state for each pair of channels of a head: gla whose key is tied to its gate.

        f = l + (1 - l) sigmoid(x W_f)
        y = rms_norm(gla(silu(x W_q), 1 - f, x W_i, log f)) W_o

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K, of queries and gates; None is D / H. Values have D / H.
        lower_bound: l, as HGRN.
        norm_eps: of the norm, whose weight is [D].
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, D / H].
    Source: Qin et al., HGRN2: Gated Linear RNNs with State Expansion, 2024, section 3.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        lower_bound: float = 0.0,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        _expect_bound(lower_bound)
        expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
        head_dim = head_dim or hidden_size // num_heads
        self.num_heads, self.lower_bound, self.norm_eps = num_heads, lower_bound, norm_eps
        self.q_proj = XavierLinear(hidden_size, num_heads * head_dim)
        self.f_proj = XavierLinear(hidden_size, num_heads * head_dim)
        self.i_proj = XavierLinear(hidden_size, hidden_size)
        self.o_proj = XavierLinear(hidden_size, hidden_size)
        self._add_norm(hidden_size)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        heads = (self.num_heads, -1)
        q, v = F.silu(self.q_proj(x)).unflatten(-1, heads), self.i_proj(x).unflatten(-1, heads)
        g = _log_forget(self.f_proj(x), self.lower_bound).unflatten(-1, heads)
        gla = fused_recurrent_gla if self.recurrent(x, call.context) else chunk_gla
        o, recurrent = gla(
            q, -torch.expm1(g).to(q.dtype), v, g, **call.sequence(call.past("recurrent"))
        )
        o = self._norm_of_all_heads(o.flatten(-2))
        return self.o_proj(o), call.new_state(recurrent=recurrent)
