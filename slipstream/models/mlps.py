"""What stands beside the mixers of a model: the MLPs that a config's `mlps` names, and residuals.

swiglu            intermediate_size
rwkv7             intermediate_size; sees the token before, so that it has a state
qwen3_next_moe    transformers' Qwen3NextSparseMoeBlock, its options the keys of Qwen3NextConfig
kimi_linear_moe   transformers' KimiLinearMoE, its options the keys of KimiLinearConfig
none              no MLP, and no norm for it

transformers' blocks are used as they are. Their routers' auxiliary loss is not part of the loss.

Of attention residuals between layers, what goes into one is mixed from all before it.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from slipstream.layers import RWKV7ChannelMix
from slipstream.models.config import SlipstreamConfig, expect_options
from slipstream.nn import SwiGLU
from slipstream.ops.attnres import attnres

MOE = {
    "qwen3_next_moe": ("qwen3_next", "Qwen3Next", "SparseMoeBlock"),
    "kimi_linear_moe": ("kimi_linear", "KimiLinear", "MoE"),
}
"""Name -> the model of transformers, the prefix of its classes, the class of the block."""


class Dense(nn.Linear):
    """A linear layer whose weight starts with the config's initializer_range."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)


class MoE(nn.Module):
    """A mixture-of-experts block of transformers.

    Args:
        name: of MOE. options: keys of the model's config in transformers.

    Raises:
        ValueError: the installed transformers has no such model, or its config no such key.
    """

    def __init__(self, name: str, hidden_size: int, std: float, options: dict[str, Any]) -> None:
        super().__init__()
        model, prefix, block = MOE[name]
        try:
            module = import_module(f"transformers.models.{model}.modeling_{model}")
        except ModuleNotFoundError as error:
            raise ValueError(f"mlps: want a transformers with {model} for {name}") from error
        config_class = getattr(module, f"{prefix}Config")
        names = config_class.attribute_map
        known = {*config_class.__dataclass_fields__, *names, *names.values()}
        # transformers itself keeps others without a word
        expect_options("mlps", f"{prefix}Config", options, known)
        config = config_class(hidden_size=hidden_size, **options)
        config._experts_implementation = "eager"
        self.std = std
        self.block = getattr(module, f"{prefix}{block}")(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.block.parameters():
            init.normal_(parameter, std=self.std)
        for buffer in self.block.buffers():  # the bias that balances Kimi Linear's experts
            init.zeros_(buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def make_mlp(config: SlipstreamConfig, layer_idx: int) -> nn.Module | None:
    """The MLP of a layer; None if it has none."""
    name, options = config.mlp(layer_idx)
    assert config.intermediate_size is not None
    place, size = f"mlps[{layer_idx}]", config.hidden_size
    inner = {"intermediate_size": config.intermediate_size}
    if name == "none":
        expect_options(place, name, options, ())
        return None
    if name in MOE:
        return MoE(name, size, config.initializer_range, options)
    expect_options(place, name, options, ("intermediate_size",))
    inner = (inner | options)["intermediate_size"]
    if name == "rwkv7":
        return RWKV7ChannelMix(size, inner, layer_idx, config.num_hidden_layers)
    return SwiGLU(size, inner, linear=Dense)


class AttentionResiduals(nn.Module):
    """Attention over depth: the input of each layer after the first, and of the last norm.

        v_0 is the embedding, v_1, v_2, ... what each `group` layers in a row have added
        h = sum_i p_i v_i,  p = softmax over i of query . rms_norm(v_i) * weight

    With queries of 0, as they begin, h is the mean of all v_i.

    Args:
        hidden_size: D. layers: of the model. group: how many layers add to one v_i.
        eps: inside the norm.

    Source: Kimi Team, "Attention Residuals" (arXiv 2603.15031), between whole layers: MLPs keep
    the residual connection to their layer's mixer.
    """

    def __init__(self, hidden_size: int, layers: int, group: int, eps: float) -> None:
        super().__init__()
        self.group, self.eps = group, eps
        self.query, self.weight = (nn.Parameter(torch.empty(layers, hidden_size)) for _ in "qw")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.ones_(self.weight)

    def forward(self, layer: int, sources: list[Tensor]) -> Tensor:
        """The input of a layer from 1 on, from all v_i so far, [B, T, D] each."""
        query, weight = self.query[layer - 1], self.weight[layer - 1]
        return attnres(query, sources, weight, rms_eps=self.eps)

    def with_added(self, layer: int, sources: list[Tensor], added: Tensor) -> list[Tensor]:
        """Returns all v_i after a layer has added to the last, or to a new one."""
        if layer % self.group == 0:
            return [*sources, added]
        return [*sources[:-1], sources[-1] + added]
