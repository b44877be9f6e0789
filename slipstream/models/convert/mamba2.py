"""Mamba-2, fla's and transformers'."""

from collections.abc import Iterable
from typing import Any, ClassVar

from slipstream.models.config import SlipstreamConfig
from slipstream.models.convert import families, fla
from slipstream.models.convert.rules import Rule, renamed, shaped

# options of the mixer and both libraries' names of them; and fla's of its own
NAMES = {key: key for key in ("head_dim", "state_size", "n_groups", "use_bias")}
NAMES |= {"conv_size": "conv_kernel", "conv_bias": "use_conv_bias"}
OF_FLA = {
    "D_per_channel": "D_has_hdim", "norm": "rmsnorm", "norm_before_gate": "norm_before_gate",
}  # fmt: skip


class FlaMamba2(families.Family):
    name, model_type = "fla_mamba2", "mamba2"
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
    eps, limit, written = "norm_eps", "dt_limit", {**NAMES, **OF_FLA}

    def matches(self, given: dict[str, Any]) -> bool:
        return super().matches(given) and "layer_norm_epsilon" not in given

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        config = families.ForeignConfig(given, self.defaults, self.without_effect)
        config.expect("hidden_act", "silu", "swish")
        low, high = config[self.limit]
        inner = families.whole("expand", config["expand"] * config["hidden_size"])
        mixer = {
            "type": "mamba2",
            "num_heads": inner // config["head_dim"],
            "expand": families.whole("expand", config["expand"]),
            "norm_eps": config[self.eps],
            "dt_limit": None if (low, high) == (0, float("inf")) else (low, high),
            **families.read_names(NAMES | OF_FLA, config),
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

    def write(self, config: SlipstreamConfig) -> dict[str, Any]:
        mixer = families.of_all_layers(config, "mamba2", self.name)
        return {
            **families.tokens_of(config),
            "num_hidden_layers": config.num_hidden_layers,
            "num_heads": mixer["num_heads"],
            "expand": mixer["expand"],
            **families.written_names(self.written, mixer),
            "residual_in_fp32": config.residual_in_fp32,
            self.limit: list(mixer["dt_limit"] or (0.0, float("inf"))),
            self.eps: config.norm_eps,
        }

    def rules(self, config: SlipstreamConfig, model: Any) -> Iterable[Rule]:
        yield from families.shared_ends(config, "backbone", "embeddings", "norm_f")
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
    eps, limit, written = "layer_norm_epsilon", "time_step_limit", NAMES
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
