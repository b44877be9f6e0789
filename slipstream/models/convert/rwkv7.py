"""fla's RWKV-7."""

from collections.abc import Iterable
from typing import Any, ClassVar

from slipstream.models.config import SlipstreamConfig
from slipstream.models.convert import families
from slipstream.models.convert.fla import COMMON, WITHOUT_EFFECT
from slipstream.models.convert.rules import Rule, renamed, stacked, transposed


class RWKV7(families.Family):
    name = model_type = "rwkv7"
    architecture = "RWKV7ForCausalLM"
    defaults: ClassVar = {
        **COMMON, "hidden_ratio": 4, "intermediate_size": None, "head_dim": 64, "num_heads": None,
        "decay_low_rank_dim": 64, "gate_low_rank_dim": 128, "a_low_rank_dim": 64,
        "v_low_rank_dim": 16, "hidden_act": "sqrelu", "norm_first": True, "norm_bias": True,
        "norm_eps": 1e-5, "attn": None, "value_dim": None,
    }  # fmt: skip

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        config = families.ForeignConfig(given, self.defaults, WITHOUT_EFFECT)
        size, layers = config["hidden_size"], config["num_hidden_layers"]
        config.expect("hidden_act", "sqrelu")
        config.expect("attn", None)
        config.expect("value_dim", None, size, [size] * layers)
        head_dim = config["head_dim"] or size // config["num_heads"]
        mixer = {
            "num_heads": size // head_dim,
            "num_layers": layers,
            "norm_eps": config["norm_eps"],
        }
        factor = head_dim / 64
        for key, default in (
            ("decay_low_rank_dim", 2.5 * factor),
            ("a_low_rank_dim", 2.5 * factor),
            ("v_low_rank_dim", 1.7 * factor),
            ("gate_low_rank_dim", 5),
        ):
            mixer[key] = config[key] or max(32, int(round(default * size**0.5 / 32) * 32))
        inner = config["intermediate_size"]
        if inner is None:
            inner = (int(size * (config["hidden_ratio"] or 4)) + 31) // 32 * 32
        return {
            **config.tokens(),
            "num_heads": mixer["num_heads"],
            "mixers": [{"type": "rwkv7", **mixer}] * layers,
            "mlps": ["rwkv7"] * layers,
            "intermediate_size": inner,
            "norm": "layer" if config["norm_bias"] else "layer_without_bias",
            "embedding_norm": config["norm_first"],
            "norm_eps": config["norm_eps"],
        }

    def write(self, config: SlipstreamConfig) -> dict[str, Any]:
        mixer = families.of_all_layers(config, "rwkv7", self.name)
        ranks = ("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim")
        return {
            **families.tokens_of(config),
            "num_hidden_layers": config.num_hidden_layers,
            "num_heads": mixer["num_heads"],
            "head_dim": config.hidden_size // mixer["num_heads"],
            **{key: mixer[key] for key in ranks},
            "intermediate_size": config.intermediate_size,
            "norm_first": config.embedding_norm,
            "norm_bias": config.norm != "layer_without_bias",
            "norm_eps": config.norm_eps,
        }

    def rules(self, config: SlipstreamConfig, model: Any) -> Iterable[Rule]:
        yield from super().rules(config, model)
        if config.norm == "layer":
            yield from renamed("model.norm.bias")
        if config.embedding_norm:
            yield from _norm(config, "model.embed_norm", "model.layers.0.pre_norm")

    def layer(self, config: SlipstreamConfig, i: int, block: Any) -> Iterable[families.Rules]:
        rest = renamed(
            ("mlp.mix", "ffn.x_k"),
            ("mlp.key.weight", "ffn.key.weight"),
            ("mlp.value.weight", "ffn.value.weight"),
        )
        for ours, theirs in (("mixer_norm", "attn_norm"), ("mlp_norm", "ffn_norm")):
            rest += _norm(config, ours, theirs)
        yield "", "", rest
        yield (
            "mixer.",
            "attn.",
            [
                stacked("mix", [f"x_{x}" for x in "rwkvag"], (1, 1, config.hidden_size)),
                *renamed(
                    *(f"{x}_proj.weight" for x in "rkvo"),
                    *("k_k", "k_a", "r_k"),
                    ("norm_weight", "g_norm.weight"),
                    ("norm_bias", "g_norm.bias"),
                ),
                *_lora("w"),
                *_lora("a"),
                *_lora("g", bias=False),
                *([] if block.mixer.v_lora is None else _lora("v")),
            ],
        )


def _norm(config: SlipstreamConfig, ours: str, theirs: str) -> list[Rule]:
    parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return renamed(*((f"{ours}.{x}", f"{theirs}.{x}") for x in parts))


def _lora(name: str, bias: bool = True) -> list[Rule]:
    ours, theirs = f"{name}_lora", f"{name}_lora.lora"
    rules = [
        transposed(f"{ours}.down", f"{theirs}.0.weight"),
        transposed(f"{ours}.up", f"{theirs}.2.weight"),
    ]
    return rules + (renamed((f"{ours}.bias", f"{theirs}.2.bias")) if bias else [])
