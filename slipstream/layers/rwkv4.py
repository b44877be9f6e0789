"""Time mixing of RWKV-4."""

import math

import torch
from torch import Tensor, nn

from slipstream.common.checks import expect_shape
from slipstream.layers import base, rwkv7
from slipstream.layers.call import Mixed, MixerCall
from slipstream.ops._fp32 import widen
from slipstream.ops.rwkv4 import chunk_rwkv4
from slipstream.ops.token_shift import token_shift


class RWKV4(base.Mixer):
    """RWKV-4's time mixing: of every channel a decayed mean of values, weighted by exp(k).

        x_c = mu_c x + (1 - mu_c) shift(x), for c = k, v, r
        y = (sigmoid(x_r W_r) * rwkv4(-exp(decay), bonus, x_k W_k, x_v W_v)) W_o

    Args:
        hidden_size: D.
        num_heads: no effect: there are none, but a model gives every layer how many.
        num_layers: of the model, for how the mixes and decays start; later layers are as its last.
        mode, layer_idx: as Mixer.

    State: recurrent [N, 3, D], the mean, 1 (0 where there is none) and the logarithm of the sum of
    its weights; and shift [N, D].
    Source: Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023, section 3.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        num_layers: int = 12,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        if num_layers < 1:
            raise ValueError(f"num_layers: want at least 1, got {num_layers}")
        self.num_layers = num_layers
        self.k_proj = rwkv7.UniformLinear(hidden_size, hidden_size, 0.05)
        self.v_proj = rwkv7.UniformLinear(hidden_size, hidden_size, 0.5)
        self.r_proj = rwkv7.UniformLinear(hidden_size, hidden_size, 0.5)
        self.o_proj = rwkv7.UniformLinear(hidden_size, hidden_size, 0.5)
        self.mix_k, self.mix_v, self.mix_r, self.decay, self.bonus = (
            nn.Parameter(torch.empty(hidden_size)) for _ in range(5)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        size, device = self.decay.shape[0], self.decay.device
        at = torch.arange(size, dtype=torch.float32, device=device)
        layer = min(self.layer_idx, self.num_layers - 1)
        depth, power = layer / max(self.num_layers - 1, 1), 1 - layer / self.num_layers
        mix = (at / size) ** power
        base.assign(self.mix_k, mix)
        base.assign(self.mix_v, mix + 0.3 * depth)
        base.assign(self.mix_r, (at / size) ** (0.5 * power))
        # channels of different reach, from hundreds of tokens to one
        base.assign(self.decay, -5 + 8 * (at / max(size - 1, 1)) ** (0.7 + 1.3 * depth))
        base.assign(self.bonus, math.log(0.3) + 0.5 * ((at + 1) % 3 - 1))

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        # one channel would broadcast to all of the mixes
        expect_shape("x", x, (*x.shape[:2], self.bonus.shape[0]))
        before, shift = token_shift(x, **call.sequence(call.past("shift")))
        xk, xv, xr = (torch.lerp(before, x, m.to(x.dtype)) for m in self._mixes())
        o, last = chunk_rwkv4(
            -widen(self.decay).exp(),
            self.bonus,
            self.k_proj(xk),
            self.v_proj(xv),
            **call.sequence(mean_and_log(call.past("recurrent"))),
        )
        y = self.o_proj(torch.sigmoid(self.r_proj(xr)) * o)
        recurrent = None if last is None else torch.stack([last[0], *some_or_none(last[1])], 1)
        return y, call.new_state(recurrent=recurrent, shift=shift)

    def _mixes(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.mix_k, self.mix_v, self.mix_r


def mean_and_log(state: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """M and log Z [N, D] of a state [N, 3, D]; one of zeros is that of no token."""
    if state is None:
        return None
    mean, some, z = state.unbind(1)
    return mean, torch.where(some == 0, -torch.inf, z)


def some_or_none(z: Tensor) -> tuple[Tensor, Tensor]:
    """1 and z, or where z is -inf 0 and 0."""
    none = z == -torch.inf
    return (~none).to(z.dtype), torch.where(none, 0, z)
