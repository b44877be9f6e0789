"""One layer of the model: mixer and MLP, each behind a norm and a residual connection.

h <- h + mixer(rms_norm(h))
h <- h + swiglu(rms_norm(h))        swiglu(x) = (silu(x W_gate) * x W_up) W_down
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream import layers
from slipstream.models.cache import LayerState
from slipstream.models.config import MIXERS, SlipstreamConfig
from slipstream.models.rollback import Record
from slipstream.nn import RMSNorm as RMSNorm
from slipstream.nn import SwiGLU
from slipstream.runtime.context_parallel import ContextParallel

State = dict[str, Tensor]


class Dense(nn.Linear):
    """A linear layer whose weight starts with the config's initializer_range."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)


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
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, linear=Dense)

    def forward(
        self,
        h: Tensor,
        first_value: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context: ContextParallel | None = None,
        positions: Tensor | None = None,
        state: State | None = None,
        use_cache: bool = False,
        layer: LayerState | None = None,
        whole: bool = False,
    ) -> tuple[Tensor, State | None, Tensor | None]:
        """Returns h, the mixer's next state and, if the mixer takes a first_value but there is
        none yet, that value for later blocks.

        With `layer`, whose tokens h follows, that is updated in place and no state returned;
        `whole` shows the mixer all of its room, so that every step has the same shapes.

        first_value is positional, since reentrant checkpointing gives gradients to nothing else.
        """
        if layer is not None:
            return self._advance(h, first_value, layer, positions, whole)
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "context": context}
        options |= {"positions": positions, "state": state, "use_cache": use_cache}
        x, value = self.mixer_norm(h), None
        if not self.mixer.takes_first_value:
            y, state = self.mixer(x, **options)
        elif first_value is not None:
            y, state = self.mixer(x, first_value=first_value, **options)
        else:
            y, state, value = self.mixer(x, output_value=True, **options)
        return self._mlp(h, y), state, value

    def _mlp(self, h: Tensor, y: Tensor) -> Tensor:
        x, h = self.mlp_norm(y, h, prenorm=True)  # h + y, and its norm, in one pass
        return h + self.mlp(x)

    def _advance(
        self,
        h: Tensor,
        first_value: Tensor | None,
        layer: LayerState,
        positions: Tensor | None,
        whole: bool,
    ) -> tuple[Tensor, None, Tensor | None]:
        x, value = self.mixer_norm(h), None
        options: dict[str, Any] = {}
        if self.mixer.takes_first_value:
            given = first_value is not None
            options = {"first_value": first_value} if given else {"output_value": True}
        if layer.rollback is not None:
            layer.record(Record(self.mixer, x, positions, options))
        y = self.mixer.step(x, layer.view(x.shape[1], whole), positions=positions, **options)
        if "output_value" in options:
            y, value = y
        return self._mlp(h, y), None, value
