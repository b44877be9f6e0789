"""The attention of LightNet."""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.layers.base import Mixer, ShortConvolution, XavierLinear, expect_divisor
from slipstream.layers.call import Mixed, MixerCall
from slipstream.ops.lightnet import chunk_lightnet, fused_recurrent_lightnet


class LightNetAttention(Mixer):
    """Linear attention whose state is a mean, weighted by the exponentials of the keys.

        y = (rms_norm(lightnet(silu(x W_q), x W_k, x W_v)) * silu(x W_g1 W_g2)) W_o

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K, of queries and keys; None is D / H. Values have D / H.
        gate_low_rank_dim: rank of the gate.
        norm_eps: of the norm, whose weight is [D].
        conv_size: taps of a convolution of q, k and v before the rest; None leaves it out.
        conv_bias: whether it has a bias.
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, D / H], weight [N, 2, H, K], 1 (0 where there is none) and the
    logarithm of the sum of the weights so far; and with a convolution conv [N, 2 H K + D, W].
    Source: Qin et al., You Only Scan Once, 2024, as fla has it.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        gate_low_rank_dim: int = 128,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        conv_size: int | None = None,
        conv_bias: bool = False,
    ) -> None:
        super().__init__(mode, layer_idx)
        expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
        head_dim = head_dim or hidden_size // num_heads
        self.num_heads, self.norm_eps = num_heads, norm_eps
        keys = num_heads * head_dim
        self.channels = [keys, keys, hidden_size]
        self.q_proj = XavierLinear(hidden_size, keys)
        self.k_proj = XavierLinear(hidden_size, keys)
        self.v_proj = XavierLinear(hidden_size, hidden_size)
        self.g_down = XavierLinear(hidden_size, gate_low_rank_dim)
        self.g_up = XavierLinear(gate_low_rank_dim, hidden_size)
        self.o_proj = XavierLinear(hidden_size, hidden_size)
        self.conv = None
        if conv_size:
            self.conv = ShortConvolution(sum(self.channels), conv_size, conv_bias, activation=None)
        self._add_norm(hidden_size)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        (q, k, v), conv = call.convolved_together(self.conv, q, k, v)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in (F.silu(q), k, v))
        short = self.recurrent(x, call.context)
        o, last = (fused_recurrent_lightnet if short else chunk_lightnet)(
            q, k, v, **call.sequence(_before(call))
        )
        gate = self.g_up(self.g_down(x))
        o = self._norm_of_all_heads(o.flatten(-2), gate)
        recurrent, weight = (None, None) if last is None else last
        if weight is not None:
            weight = torch.stack(some_or_none(weight), 1)
        return self.o_proj(o), call.new_state(recurrent=recurrent, weight=weight, conv=conv)


def _before(call: MixerCall) -> tuple[Tensor, Tensor] | None:
    """A state of zeros is that of no token."""
    recurrent, weight = call.past("recurrent"), call.past("weight")
    if recurrent is None or weight is None:
        return None
    some, z = weight.unbind(1)
    return recurrent, torch.where(some == 0, -torch.inf, z)


def some_or_none(z: Tensor) -> tuple[Tensor, Tensor]:
    """1 and z, or where z is -inf 0 and 0."""
    none = z == -torch.inf
    return (~none).to(z.dtype), torch.where(none, 0, z)
