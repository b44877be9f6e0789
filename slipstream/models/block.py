"""One layer of the model: mixer and MLP, each behind a norm and a residual connection.

h <- h + mixer(rms_norm(h))
h <- h + swiglu(rms_norm(h))        swiglu(x) = (silu(x W_gate) * x W_up) W_down
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream import layers
from slipstream.models.config import MIXERS, SlipstreamConfig
from slipstream.ops.activation import swiglu
from slipstream.ops.norm import rms_norm

State = dict[str, Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)


class Dense(nn.Linear):
    """A matrix that the model initialises; a mixer's own nn.Linear it leaves as they are made."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


class SwiGLU(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Dense(size, inner)
        self.up_proj = Dense(size, inner)
        self.down_proj = Dense(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(GradientCheckpointingLayer):
    def __init__(self, config: SlipstreamConfig, layer_idx: int) -> None:
        super().__init__()
        name, options = config.mixer(layer_idx)
        options = {"num_heads": config.num_heads, **options}
        assert config.intermediate_size is not None
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = getattr(layers, MIXERS[name])(
            hidden_size=config.hidden_size, layer_idx=layer_idx, **options
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        h: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        state: State | None = None,
        use_cache: bool = False,
        shared: dict[str, Any] | None = None,
    ) -> tuple[Tensor, State | None]:
        y, state = self.mixer(
            self.mixer_norm(h),
            cu_seqlens=cu_seqlens,
            state=state,
            use_cache=use_cache,
            shared=shared,
        )
        h = h + y
        return h + self.mlp(self.mlp_norm(h)), state
