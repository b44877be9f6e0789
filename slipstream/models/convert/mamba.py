"""Mamba-2, fla's and transformers', and Mamba-3, fla's."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream.layers.mamba import mimo_order
from slipstream.models.config import SlipstreamConfig
from slipstream.models.convert import families, fla, rules

# options of the mixer and both libraries' names of them; and fla's of its own
NAMES = {key: key for key in ("head_dim", "state_size", "n_groups", "use_bias")}
NAMES |= {"conv_size": "conv_kernel", "conv_bias": "use_conv_bias"}
OF_FLA = {
    "D_per_channel": "D_has_hdim", "norm": "rmsnorm", "norm_before_gate": "norm_before_gate",
}  # fmt: skip


class Mamba(families.Family):
    """Models of one mixer of Mamba, without MLPs."""

    kind: ClassVar[str]
    ends = ("backbone", "embeddings", "norm_f")
    defaults: ClassVar[dict[str, Any]]
    without_effect: ClassVar[tuple[str, ...]]
    # options of the mixer, and theirs of them
    names: ClassVar[dict[str, str]]
    eps = "norm_eps"

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        """The other options of the mixer."""
        raise NotImplementedError

    def options(self, mixer: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `mixer`."""
        raise NotImplementedError

    def weights(self, m: Any) -> Iterable[rules.Rule]:
        """The weights of a mixer."""
        raise NotImplementedError

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        config = families.ForeignConfig(given, self.defaults, self.without_effect)
        inner = families.whole("expand", config["expand"] * config["hidden_size"])
        heads = inner // config["head_dim"]
        mixer = {
            "type": self.kind,
            "num_heads": heads,
            "expand": families.whole("expand", config["expand"]),
            **families.read_names(self.names, config),
            **self.mixer(config),
        }
        layers = config["num_hidden_layers"]
        return {
            **config.tokens(),
            "num_heads": heads,
            "mixers": [mixer] * layers,
            "mlps": ["none"] * layers,
            "residual_in_fp32": config["residual_in_fp32"],
            "norm_eps": config[self.eps],
        }

    def write(self, config: SlipstreamConfig) -> dict[str, Any]:
        mixer = families.of_all_layers(config, self.kind, self.name)
        return {
            **families.tokens_of(config),
            "num_hidden_layers": config.num_hidden_layers,
            "expand": mixer["expand"],
            **families.written_names(self.names, mixer),
            **self.options(mixer),
            "residual_in_fp32": config.residual_in_fp32,
            self.eps: config.norm_eps,
        }

    def layer(self, config: SlipstreamConfig, i: int, block: Any) -> Iterable[families.Rules]:
        yield "", "", rules.renamed(("mixer_norm.weight", "norm.weight"))
        yield "mixer.", "mixer.", self.weights(block.mixer)


class FlaMamba2(Mamba):
    name, model_type, kind = "fla_mamba2", "mamba2", "mamba2"
    architecture = "Mamba2ForCausalLM"
    defaults: ClassVar = {
        **fla.COMMON, "head_dim": 64, "state_size": 128, "num_hidden_layers": 48, "norm_eps": 1e-5,
        "pad_token_id": 0, "expand": 2, "conv_kernel": 4, "n_groups": 1, "use_bias": False,
        "use_conv_bias": True, "D_has_hdim": False, "hidden_act": "silu", "residual_in_fp32": True,
        "dt_limit": (0.0, float("inf")), "rmsnorm": True, "norm_before_gate": False,
        "num_heads": None,
    }  # fmt: skip
    without_effect = (
        *fla.WITHOUT_EFFECT, "conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor",
        "rescale_prenorm_residual", "chunk_size",
    )  # fmt: skip
    names, limit = NAMES | OF_FLA, "dt_limit"

    def matches(self, given: dict[str, Any]) -> bool:
        return super().matches(given) and "layer_norm_epsilon" not in given

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        config.expect("hidden_act", "silu", "swish")
        low, high = config[self.limit]
        limit = None if (low, high) == (0, float("inf")) else (low, high)
        return {"norm_eps": config[self.eps], "dt_limit": limit}

    def options(self, mixer: dict[str, Any]) -> dict[str, Any]:
        limit = list(mixer["dt_limit"] or (0.0, float("inf")))
        return {"num_heads": mixer["num_heads"], self.limit: limit}

    def weights(self, m: Any) -> Iterable[rules.Rule]:
        channels, width = m.conv.weight.shape
        yield from rules.renamed("in_proj.weight", "out_proj.weight", "A_log", "D", "dt_bias")
        yield rules.shaped("conv.weight", "conv1d.weight", (channels, width), (channels, 1, width))
        if m.norm_weight is not None:
            yield from rules.renamed(("norm_weight", "norm.weight"))
        if m.conv.bias is not None:
            yield from rules.renamed(("conv.bias", "conv1d.bias"))
        if m.in_proj.bias is not None:
            yield from rules.renamed("in_proj.bias", "out_proj.bias")


class Mamba2(FlaMamba2):
    name = "mamba2"
    eps, limit, names = "layer_norm_epsilon", "time_step_limit", NAMES
    defaults: ClassVar = {
        **{k: v for k, v in FlaMamba2.defaults.items() if k not in ("norm_eps", "dt_limit")},
        "layer_norm_epsilon": 1e-5, "time_step_limit": (0.0, float("inf")), "vocab_size": 32768,
        "hidden_size": 4096, "num_hidden_layers": 64, "n_groups": 8, "pad_token_id": 1,
        "bos_token_id": 0, "initializer_range": 0.1,
    }  # fmt: skip
    without_effect = (
        "time_step_rank", "time_step_min", "time_step_max", "time_step_floor",
        "rescale_prenorm_residual", "chunk_size",
    )  # fmt: skip

    def matches(self, given: dict[str, Any]) -> bool:
        return families.Family.matches(self, given) and "layer_norm_epsilon" in given


class Mamba3(Mamba):
    name = model_type = kind = "mamba3"
    architecture = "Mamba3ForCausalLM"
    defaults: ClassVar = {
        **fla.COMMON, "head_dim": 64, "state_size": 128, "num_hidden_layers": 48, "norm_eps": 1e-5,
        "pad_token_id": 0, "expand": 2, "n_groups": 1, "use_bias": False, "rope_fraction": 0.5,
        "A_floor": 1e-4, "is_outproj_norm": False, "is_mimo": False, "mimo_rank": 4,
        "residual_in_fp32": True,
    }  # fmt: skip
    without_effect = (*FlaMamba2.without_effect, "hidden_act", "num_heads")
    # options of the mixer, and fla's names of them
    names: ClassVar = {
        **{x: x for x in ("head_dim", "state_size", "n_groups", "A_floor", "norm_eps", "use_bias")},
        "rotary_fraction": "rope_fraction", "output_norm": "is_outproj_norm",
    }  # fmt: skip

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        if config["is_mimo"] and config["mimo_rank"] < 2:
            raise ValueError(f"mimo_rank: want 2 or more, got {config['mimo_rank']}")
        return {"mimo_rank": config["mimo_rank"] if config["is_mimo"] else 1}

    def options(self, mixer: dict[str, Any]) -> dict[str, Any]:
        if mixer["rotary_fraction"] not in (0.5, 1.0):
            raise ValueError(f"rotary_fraction: fla has 0.5 or 1, got {mixer['rotary_fraction']}")
        return {"is_mimo": mixer["mimo_rank"] > 1, "mimo_rank": mixer["mimo_rank"]}

    def weights(self, m: Any) -> Iterable[rules.Rule]:
        N = m.state_size
        order = torch.arange(N, device="cpu") if m.mimo_rank == 1 else mimo_order(N)
        rows = _rows(m.sizes, order)
        yield rules.reordered("in_proj.weight", rows, 0)
        for name in ("B_bias", "C_bias"):
            yield rules.reordered(name, order, 2)
        for name in ("B_norm", "C_norm"):
            yield rules.reordered(name, order, 0)._replace(theirs=(f"{name}.weight",))
        yield from rules.renamed("out_proj.weight", "dt_bias", "D")
        if m.mimo_rank > 1:
            yield from rules.renamed("mimo_x", "mimo_z", "mimo_o")
        if m.in_proj.bias is not None:
            yield rules.reordered("in_proj.bias", rows, 0)
            yield from rules.renamed("out_proj.bias")
        if m.norm_weight is not None:
            shape = m.norm_weight.shape
            yield rules.shaped("norm_weight", "norm.weight", shape, (shape.numel(),))


def _rows(sizes: list[int], order: Tensor) -> Tensor:
    """The rows of in_proj, whose third and fourth blocks have these channels, of each rank and
    group."""
    rows = list(torch.arange(sum(sizes), device="cpu").split(sizes))
    rows[2:4] = [x.view(-1, len(order))[:, order].flatten() for x in rows[2:4]]
    return torch.cat(rows)
