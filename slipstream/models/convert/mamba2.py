"""Mamba-2, fla's and transformers'."""

from collections.abc import Iterable
from typing import Any, ClassVar

from slipstream.models.config import SlipstreamConfig
from slipstream.models.convert.families import (
    Family,
    ForeignConfig,
    of_all_layers,
    shared_ends,
    tokens_of,
    whole,
)
from slipstream.models.convert.fla import COMMON, WITHOUT_EFFECT
from slipstream.models.convert.rules import Rule, renamed, shaped


class FlaMamba2(Family):
    name, model_type = "fla_mamba2", "mamba2"
    architecture = "Mamba2ForCausalLM"
    defaults: ClassVar = {
        **COMMON, "head_dim": 64, "state_size": 128, "num_hidden_layers": 48, "norm_eps": 1e-5,
        "pad_token_id": 0, "expand": 2, "conv_kernel": 4, "n_groups": 1, "use_bias": False,
        "use_conv_bias": True, "D_has_hdim": False, "hidden_act": "silu", "residual_in_fp32": True,
        "dt_limit": (0.0, float("inf")), "rmsnorm": True, "norm_before_gate": False,
        "num_heads": None,
    }  # fmt: skip
    without_effect = (
        *WITHOUT_EFFECT, "conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor",
        "rescale_prenorm_residual", "chunk_size",
    )  # fmt: skip
    eps, limit = "norm_eps", "dt_limit"

    def matches(self, given: dict[str, Any]) -> bool:
        return super().matches(given) and "layer_norm_epsilon" not in given

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        config = ForeignConfig(given, self.defaults, self.without_effect)
        config.expect("hidden_act", "silu", "swish")
        low, high = config[self.limit]
        inner = whole("expand", config["expand"] * config["hidden_size"])
        mixer = {
            "type": "mamba2",
            "num_heads": inner // config["head_dim"],
            "head_dim": config["head_dim"],
            "state_size": config["state_size"],
            "n_groups": config["n_groups"],
            "expand": whole("expand", config["expand"]),
            "conv_size": config["conv_kernel"],
            "norm_eps": self.inner_eps(config),
            "use_bias": config["use_bias"],
            "dt_limit": None if (low, high) == (0, float("inf")) else (low, high),
            "conv_bias": config["use_conv_bias"],
            "D_per_channel": config["D_has_hdim"],
            "norm": config["rmsnorm"],
            "norm_before_gate": config["norm_before_gate"],
        }
        layers = config["num_hidden_layers"]
        return {
            **config.tokens(),
            "num_heads": mixer["num_heads"],
            "mixers": [mixer] * layers,
            "mlps": ["none"] * layers,
            "residual_in_fp32": config["residual_in_fp32"],
            "norm_eps": config[self.eps],
        }

    def inner_eps(self, config: ForeignConfig) -> float:
        """The eps of the gated norm."""
        return config[self.eps]

    def write(self, config: SlipstreamConfig) -> dict[str, Any]:
        mixer = of_all_layers(config, "mamba2", self.name)
        keys = ("head_dim", "num_heads", "state_size", "n_groups", "expand", "use_bias")
        return {
            **tokens_of(config),
            "num_hidden_layers": config.num_hidden_layers,
            **{key: mixer[key] for key in keys},
            "conv_kernel": mixer["conv_size"],
            "use_conv_bias": mixer["conv_bias"],
            "residual_in_fp32": config.residual_in_fp32,
            self.limit: list(mixer["dt_limit"] or (0.0, float("inf"))),
            self.eps: config.norm_eps,
            **self.options(mixer),
        }

    def options(self, mixer: dict[str, Any]) -> dict[str, Any]:
        """Options that transformers' Mamba-2 does not have."""
        names = {"D_has_hdim": "D_per_channel", "rmsnorm": "norm"}
        names |= {"norm_before_gate": "norm_before_gate"}
        return {theirs: mixer[ours] for theirs, ours in names.items()}

    def rules(self, config: SlipstreamConfig, model: Any) -> Iterable[Rule]:
        yield from shared_ends(config, "backbone", "embeddings", "norm_f")
        for i, block in enumerate(model.model.layers):
            ours, theirs = f"model.layers.{i}.", f"backbone.layers.{i}."
            channels, width = block.mixer.conv.weight.shape
            rules = renamed(
                ("mixer_norm.weight", "norm.weight"),
                "mixer.in_proj.weight",
                "mixer.out_proj.weight",
                *(f"mixer.{x}" for x in ("A_log", "D", "dt_bias")),
            )
            rules.append(
                shaped(
                    "mixer.conv.weight",
                    "mixer.conv1d.weight",
                    (channels, width),
                    (channels, 1, width),
                )
            )
            if block.mixer.norm_weight is not None:
                rules += renamed(("mixer.norm_weight", "mixer.norm.weight"))
            if block.mixer.conv.bias is not None:
                rules += renamed(("mixer.conv.bias", "mixer.conv1d.bias"))
            if block.mixer.in_proj.bias is not None:
                rules += renamed("mixer.in_proj.bias", "mixer.out_proj.bias")
            yield from (rule.prefixed(ours, theirs) for rule in rules)


class Mamba2(FlaMamba2):
    name = "mamba2"
    eps, limit = "layer_norm_epsilon", "time_step_limit"
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
        return Family.matches(self, given) and "layer_norm_epsilon" in given

    def options(self, mixer: dict[str, Any]) -> dict[str, Any]:
        return {}
