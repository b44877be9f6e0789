"""One layer of the model: mixer and MLP, each behind a norm and a residual connection.

h <- h + mixer(norm(h))
h <- h + mlp(norm(h))        swiglu(x) = (silu(x W_gate) * x W_up) W_down, if config says no other
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream import layers
from slipstream.layers import RWKV7ChannelMix
from slipstream.models import cache, mlps, played, rollback
from slipstream.models.config import MIXERS, SlipstreamConfig, expect_options, mixer_options
from slipstream.nn import LayerNorm, SwiGLU, norm, projections
from slipstream.nn import RMSNorm as RMSNorm
from slipstream.nn.linear import GatedMLP, is_hooked
from slipstream.ops._fp32 import widen
from slipstream.runtime.consistent import consistent
from slipstream.runtime.context_parallel import ContextParallel

State = dict[str, Tensor]


def make_norm(config: SlipstreamConfig) -> Any:
    return norm.named_norm(config.norm, config.hidden_size, config.norm_eps)


def apply_norm(h: Tensor, norm: nn.Module, around: nn.Module) -> Tensor:
    """norm(h) of a residual in float32: h in the dtype of the norm's weights, or of what is in its
    place. A result in float32 is rounded to 16 bits where the linear layers around it have these.
    """
    both = (p for module in (norm, around) for p in module.parameters())
    y = norm(h.to(next((p.dtype for p in both if p.is_floating_point()), h.dtype)))
    if y.dtype != torch.float32:
        return y
    # not of other matrices, such as a table or gates, which may be in float32
    layers = (module for module in around.modules() if isinstance(module, nn.Linear))
    dtypes = (p.dtype for layer in layers for p in layer.parameters() if p.is_floating_point())
    dtype = next((dtype for dtype in dtypes if dtype.itemsize > 1), y.dtype)
    return y.to(dtype) if dtype.itemsize < y.itemsize else y


def with_norms_behind(model: Any, h: Tensor) -> list[tuple[Any, nn.Module | None]]:
    """Each block, and the norm that reads what it returns, where a launch of a step of h may make
    that too; None where something comes between, such as a hook or a module around a block."""
    blocks = [*model.layers]
    if model.depth is not None or not projections.makes_norms(h):
        return [(block, None) for block in blocks]
    is_plain = [type(x).forward is Block.forward and not is_hooked(x) for x in blocks]
    norms = [x.mixer_norm if own else None for x, own in zip(blocks, is_plain)]
    behind = zip(blocks, is_plain, [*norms[1:], model.norm])
    return [(block, norm if own else None) for block, own, norm in behind]


class Block(GradientCheckpointingLayer):
    def __init__(self, config: SlipstreamConfig, layer_idx: int) -> None:
        super().__init__()
        name, options = config.mixer(layer_idx)
        options = {"num_heads": config.num_heads, **options}
        self.residual_in_fp32, self.consistent = config.residual_in_fp32, config.consistent
        self.mixer_norm = make_norm(config)
        mixer = getattr(layers, MIXERS[name])
        expect_options(f"mixers[{layer_idx}]", name, options, mixer_options(mixer))
        self.mixer = mixer(hidden_size=config.hidden_size, layer_idx=layer_idx, **options)
        earlier = (config.mixer(i)[0] for i in range(layer_idx))
        if isinstance(self.mixer, layers.RWKV7) and "rwkv7" not in earlier:
            # it gives the first value; DDP refuses parameters that get no gradient
            self.mixer.v_lora = None
        has_mlp = config.mlp(layer_idx)[0] != "none"
        self.mlp_norm = make_norm(config) if has_mlp else None
        self.mlp = mlps.make_mlp(config, layer_idx)

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
        layer: cache.LayerState | None = None,
        fixed: bool = False,
        next_norm: nn.Module | None = None,
        normed: Tensor | None = None,
    ) -> tuple[Tensor, Any, Tensor | None]:
        """Returns h, the next state and, if the mixer takes a first_value but there is none yet,
        that value for later blocks. Called again for its gradients, it is as consistent.

        With `layer`, whose tokens h follows, that is updated in place and no state returned. The
        mixer sees the places in use, or if `fixed` all, whose sizes are those of every step. Then
        `normed` may be mixer_norm(h), and the second result is next_norm of the first, where a
        launch has made that too.

        first_value is positional, since reentrant checkpointing gives gradients to nothing else.
        """
        if layer is not None:
            return self._advance(h, first_value, layer, positions, fixed, next_norm, normed)
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "context": context}
        mixing = options | {"positions": positions, "state": state, "use_cache": use_cache}
        plain = cu_seqlens is None and context is None and positions is None and state is None
        if plain and not self.consistent:
            found = played.play(self, h, first_value, use_cache)
            if found is not played.MISS:
                return found
        if not self.consistent:
            return self._mix(h, first_value, mixing, options)
        with consistent():
            return self._mix(h, first_value, mixing, options)

    def from_start(
        self, h: Tensor, first_value: Tensor | None, use_cache: bool
    ) -> tuple[Tensor, State | None, Tensor | None]:
        """Does `forward` for sequences from their first token on, not packed."""
        options: dict[str, Any] = {"cu_seqlens": None, "context": None}
        mixing = {**options, "positions": None, "state": None, "use_cache": use_cache}
        return self._mix(h, first_value, mixing, options)

    def _mix(
        self, h: Tensor, first_value: Tensor | None, mixing: dict[str, Any], options: dict[str, Any]
    ) -> tuple[Tensor, State | None, Tensor | None]:
        """options: those of mixer and MLP; mixing: the mixer's."""
        state, use_cache = mixing["state"], mixing["use_cache"]
        if self.residual_in_fp32:
            x, h = apply_norm(h, self.mixer_norm, self), widen(h)
        elif isinstance(self.mixer_norm, (RMSNorm, LayerNorm)) and not is_hooked(self.mixer_norm):
            # h by way of the norm, whose backward adds up its gradients
            x, h = self.mixer_norm(h, prenorm=True)
        else:
            x = self.mixer_norm(h)
        value = None
        if not self.mixer.takes_first_value:
            y, after = self.mixer(x, **mixing)
        elif first_value is not None:
            y, after = self.mixer(x, first_value=first_value, **mixing)
        else:
            y, after, value = self.mixer(x, output_value=True, **mixing)
        shift = None if state is None or not self.shifts else state[rollback.MLP_SHIFT]
        h, shift = self._mlp(h, y, shift, use_cache, **options)
        if after is not None and shift is not None:
            after[rollback.MLP_SHIFT] = shift
        return h, after, value

    @property
    def shifts(self) -> bool:
        """Whether the MLP has a state of its own."""
        return isinstance(self.mlp, RWKV7ChannelMix)

    def _mlp(
        self,
        h: Tensor,
        y: Tensor,
        shift: Tensor | None,
        use_cache: bool,
        layer: cache.LayerState | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """h + y + mlp(norm(h + y)), and the MLP's next state if it has one."""
        if self.mlp is None or self.mlp_norm is None:
            return h + y, None
        if layer is not None and type(self.mlp) is SwiGLU and projections.fuses(h):
            h = h + y
            return projections.gated_mlp(self.mlp, h, self.mlp_norm, h, None)[0], None
        if is_hooked(self.mlp_norm):  # a hook sees the sum alone, as in a fused step
            h = h + y
            x = apply_norm(h, self.mlp_norm, self) if self.residual_in_fp32 else self.mlp_norm(h)
        else:  # h + y, and its norm, in one pass
            x, h = self.mlp_norm(y, h, prenorm=True, residual_in_fp32=self.residual_in_fp32)
        if not self.shifts:
            if isinstance(self.mlp, GatedMLP):
                return projections.consistent_mlp(self.mlp, x, h), None
            return h + self.mlp(x), None
        if layer is not None:
            layer.record_mlp(x)
            if (
                isinstance(self.mlp, RWKV7ChannelMix)
                and shift is not None
                and not is_hooked(self.mlp)
            ):
                return h + self.mlp.step(x, shift), None
        y, shift = self.mlp(x, shift, use_cache, **options)
        return h + y, shift

    def _advance(
        self,
        h: Tensor,
        first_value: Tensor | None,
        layer: cache.LayerState,
        positions: Tensor | None,
        fixed: bool,
        next_norm: nn.Module | None,
        normed: Tensor | None,
    ) -> tuple[Tensor, Any, Tensor | None]:
        if self._fuses(h, layer):
            return *self._fused(h, layer, positions, fixed, next_norm, normed), None
        if self.residual_in_fp32:
            x, h = apply_norm(h, self.mixer_norm, self), widen(h)
        else:
            x = self.mixer_norm(h)
        value = None
        options: dict[str, Any] = {}
        if self.mixer.takes_first_value:
            given = first_value is not None
            options = {"first_value": first_value} if given else {"output_value": True}
        if layer.rollback is not None:
            layer.record(rollback.Record(self.mixer, x, positions, options))
        state = layer.view(None if fixed else x.shape[1])
        y = self.mixer.step(x, state, positions=positions, **options)
        if "output_value" in options:
            y, value = y
        h, shift = self._mlp(h, y, state.get(rollback.MLP_SHIFT), True, layer)
        if shift is not None:
            state[rollback.MLP_SHIFT].copy_(shift)
        return h, None, value

    def _fuses(self, h: Tensor, layer: cache.LayerState) -> bool:
        """Whether a step's norms and residual connections can be parts of other launches."""
        return (
            layer.rollback is None
            and not self.mixer.takes_first_value
            and (self.mlp is None or type(self.mlp) is SwiGLU)
            and self.mixer.fuses(h)
        )

    def _fused(
        self,
        h: Tensor,
        layer: cache.LayerState,
        positions: Tensor | None,
        fixed: bool,
        next_norm: nn.Module | None,
        normed: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        h = widen(h) if self.residual_in_fp32 else h
        x, norm = (h, self.mixer_norm) if normed is None else (normed, None)
        mlp_norm = self.mlp_norm if isinstance(self.mlp, SwiGLU) else None
        behind = next_norm if mlp_norm is None else mlp_norm
        around = {"norm": norm, "residual": projections.normed_next(h, behind)}
        y = self.mixer.step(x, layer.view(None if fixed else 1), positions=positions, **around)
        h, normed = y if isinstance(y, tuple) else (y, None)
        if mlp_norm is None or not isinstance(self.mlp, SwiGLU):
            return h, normed
        x, norm = (h, mlp_norm) if normed is None else (normed, None)
        return projections.gated_mlp(self.mlp, x, norm, h, next_norm)
