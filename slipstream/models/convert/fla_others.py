"""fla's models of version 0.6 with gated MLPs that came later: LightNet, the Forgetting
Transformer, and the preconditioned GatedDeltaNet and KDA."""

from typing import Any, ClassVar

from slipstream.models.config import SlipstreamConfig
from slipstream.models.convert import families, fla
from slipstream.models.convert.rules import Rule, joined, renamed


class LightNet(fla.Gated):
    name = model_type = "lightnet"
    architecture, kind = "LightNetForCausalLM", "lightnet"
    equal = ("num_heads", "gate_low_rank_dim")
    names: ClassVar = {"head_dim": "expand_ratio"}
    defaults: ClassVar = {
        "num_heads": None, "expand_ratio": 128, "use_short_conv": False, "conv_size": 4,
        "gate_low_rank_dim": 128, "elementwise_affine": True,
    }  # fmt: skip

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        size, ratio = given.get("hidden_size", 2048), given.get("expand_ratio", 128)
        if given.get("num_heads") is None:  # heads of the keys' width
            if not isinstance(ratio, int) or ratio < 1:
                raise ValueError(f"expand_ratio: want it or num_heads, got {ratio!r} and None")
            given = {**given, "num_heads": size // ratio}
        found = super().read(given)
        for mixer in found["mixers"]:
            if mixer["type"] == "attention":  # fla's model does not hand rope_theta on
                mixer["rotary_base"] = 10000.0
        return found

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        config.expect("elementwise_affine", True)
        return {}

    def weights(self, mixer: dict[str, Any], module: Any) -> list[Rule]:
        return [
            *fla.projections(*"qkvo"),
            *renamed(
                ("g_down.weight", "g_proj.0.weight"),
                ("g_up.weight", "g_proj.1.weight"),
                ("norm_weight", "g_norm.weight"),
            ),
            *fla.convolution(module.conv, module.channels),
        ]


class ForgettingTransformer(fla.Gated):
    name = model_type = "forgetting_transformer"
    architecture, kind = "ForgettingTransformerForCausalLM", "forgetting_attn"
    equal = ("num_heads", "num_kv_heads", "qkv_bias", "window_size")
    names: ClassVar = {"output_gate": "use_output_gate"}
    convolved = False
    defaults: ClassVar = {
        "num_heads": 32, "num_kv_heads": None, "qkv_bias": False, "qk_norm": False,
        "window_size": None, "use_output_gate": False, "elementwise_affine": True,
    }  # fmt: skip

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        found = super().read(given)
        for mixer in found["mixers"]:
            del mixer["norm_eps"]  # of queries and keys
        return found

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        config.expect("qk_norm", False)  # its weights are of all heads, ours of one
        config.expect("attn", None)
        return {}

    def weights(self, mixer: dict[str, Any], module: Any) -> list[Rule]:
        gate = fla.projections("g") if mixer["output_gate"] else []
        return [*fla.attention_rules(mixer), *fla.projections("f"), *renamed("f_proj.bias"), *gate]


class PrecondGatedDeltaNet(fla.GatedDeltaNet):
    name = model_type = "precond_gated_deltanet"
    architecture, kind = "PrecondGatedDeltaNetForCausalLM", "precond_gated_deltanet"
    equal = (*fla.GatedDeltaNet.equal, "squash_x", "squash_eps")
    defaults: ClassVar = {**fla.GatedDeltaNet.defaults, "squash_x": 1.5, "squash_eps": 1e-6}
    without_effect = (*fla.Gated.without_effect, "log_atk_scale_init", "a_log_init_lower")

    def options(self, mixer: dict[str, Any], config: SlipstreamConfig) -> dict[str, Any]:
        found = super().options(mixer, config)
        del found["output_gate_activation"]  # fla's is swish
        return found | _one_attention(config)

    def weights(self, mixer: dict[str, Any], module: Any) -> list[Rule]:
        return [*super().weights(mixer, module), *_preconditioner("a_atk_proj", mixer)]


class PrecondKDA(fla.KDA):
    name = model_type = "precond_kda"
    architecture, kind = "PrecondKDAForCausalLM", "precond_kda"
    equal = (*fla.KDA.equal, "squash_x", "squash_eps")
    defaults: ClassVar = {**fla.KDA.defaults, "squash_x": 1.5, "squash_eps": 1e-6}
    without_effect = PrecondGatedDeltaNet.without_effect

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        # fla's has a preconditioner for each head of values
        config.expect("num_v_heads", None, config["num_heads"])
        return super().mixer(config)

    def options(self, mixer: dict[str, Any], config: SlipstreamConfig) -> dict[str, Any]:
        return super().options(mixer, config) | _one_attention(config)

    def weights(self, mixer: dict[str, Any], module: Any) -> list[Rule]:
        return [*super().weights(mixer, module), *_preconditioner("a_proj", mixer)]


def _one_attention(config: SlipstreamConfig) -> dict[str, Any]:
    """These models have one kind of attention, a dict of `attn`.

    Raises:
        ValueError: layers of attention have other options than the first.
    """
    specs = fla.attention_of(config) or []
    layers = [spec.pop("layers")[0] for spec in specs]
    for i, spec in zip(layers, specs):
        if spec != specs[0]:
            raise ValueError(f"mixers[{i}]: want the options of mixers[{layers[0]}]")
    return {"attn": {**specs[0], "layers": layers} if specs else None}


def _preconditioner(a: str, mixer: dict[str, Any]) -> list[Rule]:
    heads = [mixer["num_heads"]] * 2
    rules = [
        joined("ab_proj.weight", [f"{a}.weight", "b_atk_proj.weight"], heads),
        *renamed(
            ("A_log", "A_log_atk"), ("dt_bias", "dt_bias_atk"), ("centre", "log_atk_scale")
        ),
    ]  # fmt: skip
    return [rule.prefixed("preconditioner.", "") for rule in rules]
