"""transformers' Qwen3-Next and Kimi Linear.

Their names of weights are those of the checkpoints, which transformers renames as it loads them.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from slipstream.models.config import SlipstreamConfig
from slipstream.models.convert import families
from slipstream.models.convert.rules import (
    Rule,
    convolutions,
    experts,
    interleaved,
    joined,
    renamed,
    shaped,
    then,
)

INNER = ("gate_proj", "up_proj", "down_proj")
WITHOUT_EFFECT = ("attention_dropout", "max_position_embeddings", "output_router_logits")
COMMON: dict[str, Any] = {
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "layer_types": None,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": None,
}

# options of mixers, and transformers' names of them
GATED_DELTANET = {
    "num_heads": "linear_num_key_heads", "num_v_heads": "linear_num_value_heads",
    "head_dim": "linear_key_head_dim", "head_v_dim": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim",
}  # fmt: skip
ATTENTION = {
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}  # fmt: skip
MLA = {
    "num_heads": "num_attention_heads", "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank", "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim",
}  # fmt: skip


class Hybrid(families.Family):
    """Models of two mixers, with transformers' names of norms, MLPs and experts."""

    ends = ("model", "embed_tokens", "norm")
    # the MLP with experts, and the keys of its options
    mlp: ClassVar[str]
    moe: ClassVar[tuple[str, ...]]

    def mixer(self, name: str, options: dict[str, Any], module: Any) -> tuple[str, list[Rule]]:
        """What they call a layer's mixer, and its weights."""
        raise NotImplementedError

    def experts(self, n: int) -> list[Rule]:
        """Weights of an MLP with this number of experts."""
        raise NotImplementedError

    def layer(self, config: SlipstreamConfig, i: int, block: Any) -> Iterable[families.Rules]:
        yield (
            "",
            "",
            renamed(
                ("mixer_norm.weight", "input_layernorm.weight"),
                ("mlp_norm.weight", "post_attention_layernorm.weight"),
            ),
        )
        mlp, options = families.completed_mlp(config, i)
        is_dense = mlp == "swiglu"
        yield "", "", _shared("mlp", "mlp") if is_dense else self.experts(options["num_experts"])
        theirs, rules = self.mixer(*families.completed(config, i), block.mixer)
        yield "mixer.", theirs, rules

    def written(self, config: SlipstreamConfig, kinds: list[str]) -> dict[str, Any]:
        """The keys of both, for mixers of these kinds.

        Raises:
            ValueError: layers' experts differ; names the layer and the option.
        """
        moe = families.equal_options("mlps", families.completed_mlp, config, self.mlp, self.name)
        linear = [x not in ("attention", "mla") for x in kinds]
        return {
            **families.tokens_of(config),
            "num_hidden_layers": len(kinds),
            "intermediate_size": config.intermediate_size,
            "rms_norm_eps": config.norm_eps,
            "layer_types": ["linear_attention" if x else "full_attention" for x in linear],
            **({"num_experts": 0} if moe is None else {x: moe[x] for x in self.moe if x in moe}),
        }


class Qwen3Next(Hybrid):
    name, model_type, mlp = "qwen3_next", "qwen3_next", "qwen3_next_moe"
    architecture = "Qwen3NextForCausalLM"
    dropped = (r"mtp\.",)  # predicts further tokens, which transformers does not load either
    without_effect = (*WITHOUT_EFFECT, "router_aux_loss_coef")
    defaults: ClassVar = {
        **COMMON, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "decoder_sparse_step": 1, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512,
        "norm_topk_prob": True, "mlp_only_layers": None, "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
    }  # fmt: skip
    moe = (
        "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok",
        "num_experts", "norm_topk_prob",
    )  # fmt: skip

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        config = families.ForeignConfig(given, self.defaults, self.without_effect)
        config.expect("hidden_act", "silu")
        config.expect("attention_bias", False)
        norm, eps, layers = "zero_centered_rms", config["rms_norm_eps"], config["num_hidden_layers"]
        base, factor = _rotary(config, config["partial_rotary_factor"])
        linear = {
            "type": "gated_deltanet",
            **families.read_names(GATED_DELTANET, config),
            "norm_eps": eps,
        }
        attention = {
            "type": "attention",
            **families.read_names(ATTENTION, config),
            "rotary_dim": int(config["head_dim"] * factor),
            "rotary_base": base,
            "qk_norm": norm,
            "output_gate": True,
            "norm_eps": eps,
        }
        every = config["full_attention_interval"]
        kinds = config["layer_types"] or [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)
        ]
        moe = {"type": "qwen3_next_moe", **{key: config[key] for key in self.moe}}
        step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or []
        sparse = [
            config["num_experts"] > 0 and (i + 1) % step == 0 and i not in dense
            for i in range(layers)
        ]
        return {
            **config.tokens(),
            "num_heads": config["num_attention_heads"],
            "mixers": [attention if x == "full_attention" else linear for x in kinds],
            "mlps": [moe if x else "swiglu" for x in sparse],
            "intermediate_size": config["intermediate_size"],
            "norm": norm,
            "norm_eps": eps,
        }

    def write(self, config: SlipstreamConfig) -> dict[str, Any]:
        linear = families.of_all_layers(config, "gated_deltanet", self.name)
        layers = range(config.num_hidden_layers)
        kinds = [families.completed(config, i)[0] for i in layers]
        written = self.written(config, kinds) | families.written_names(GATED_DELTANET, linear)
        sparse = [families.completed_mlp(config, i)[0] != "swiglu" for i in layers]
        written["mlp_only_layers"] = [i for i in layers if not sparse[i]]
        if "attention" in kinds:
            x = families.of_all_layers(config, "attention", self.name)
            written |= families.written_names(ATTENTION, x)
            written["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": x["rotary_base"],
                "partial_rotary_factor": x["rotary_dim"] / x["head_dim"],
            }
        return written

    def mixer(self, name: str, options: dict[str, Any], module: Any) -> tuple[str, list[Rule]]:
        if name == "attention":
            return "self_attn.", self._attention(options)
        return "linear_attn.", self._linear(options, module)

    def experts(self, n: int) -> list[Rule]:
        names = [[f"mlp.experts.{e}.{x}.weight" for e in range(n)] for x in INNER]
        return [
            *experts("mlp.block.experts", *names),
            *_shared("mlp.block.shared_expert", "mlp.shared_expert"),
            *renamed(
                ("mlp.block.gate.weight", "mlp.gate.weight"),
                ("mlp.block.shared_expert_gate.weight", "mlp.shared_expert_gate.weight"),
            ),
        ]

    def _attention(self, options: dict[str, Any]) -> list[Rule]:
        heads, width = options["num_heads"], options["head_dim"]
        keys = options["num_kv_heads"] * width
        # a head's queries and its gates lie one after the other
        gated = interleaved(["q", "gate"], "q_proj.weight", heads, [width, width])
        whole = Rule(
            ("q", "gate", "k", "v"),
            ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
            lambda given: [*gated.load(given[:1]), *given[1:]],
            lambda given: [*gated.save(given[:2]), *given[2:]],
        )
        qkv = joined("qkv", ["q", "k", "v"], [heads * width, keys, keys])
        return [
            then(
                whole,
                ["qkv_proj.weight", "g_proj.weight"],
                lambda x: [*qkv.load([x[0], *x[2:]]), x[1]],
                lambda x: [*qkv.save(x[:1])[:1], x[1], *qkv.save(x[:1])[1:]],
            ),
            *renamed("o_proj.weight", ("q_norm", "q_norm.weight"), ("k_norm", "k_norm.weight")),
        ]

    def _linear(self, options: dict[str, Any], module: Any) -> list[Rule]:
        groups = options["num_heads"]
        per = options["num_v_heads"] // groups  # value heads of a group
        key, value = options["head_dim"], per * options["head_v_dim"]
        qkvz = interleaved(
            ["q", "k", "v", "z"], "in_proj_qkvz.weight", groups, [key] * 2 + [value] * 2
        )
        qkv = joined("qkv", ["q", "k", "v"], [groups * key] * 2 + [groups * value])
        ba = interleaved(["b", "a"], "in_proj_ba.weight", groups, [per, per])
        ab = joined("ab", ["a", "b"], [groups * per] * 2)
        channels, width = module.conv.weight.shape
        return [
            then(
                qkvz,
                ["qkv_proj.weight", "z_proj.weight"],
                lambda x: [*qkv.load(x[:3]), x[3]],
                lambda x: [*qkv.save(x[:1]), x[1]],
            ),
            then(ba, ["ab_proj.weight"], lambda x: ab.load(x[::-1]), lambda x: ab.save(x)[::-1]),
            shaped("conv.weight", "conv1d.weight", (channels, width), (channels, 1, width)),
            *renamed(
                "A_log",
                "dt_bias",
                ("norm_weight", "norm.weight"),
                ("o_proj.weight", "out_proj.weight"),
            ),
        ]


class KimiLinear(Hybrid):
    name, model_type, mlp = "kimi_linear", "kimi_linear", "kimi_linear_moe"
    architecture = "KimiLinearForCausalLM"
    without_effect = (
        *WITHOUT_EFFECT, "model_max_length", "pretraining_tp", "head_dim", "qk_head_dim",
        "router_aux_loss_coef", "rope_theta", "routed_scaling_factor",
    )  # fmt: skip
    # transformers saves the first layers' MLP so; published checkpoints have it as `rules`
    aliases = ((r"\.block_sparse_moe\.(gate|up|down)_proj", r".mlp.\1_proj"),)
    # transformers' names of keys and those in a saved config
    key_names: ClassVar = {
        "n_group": "num_expert_group", "num_experts_per_tok": "num_experts_per_token",
        "num_local_experts": "num_experts", "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
    }  # fmt: skip
    defaults: ClassVar = {
        **COMMON, "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
        "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32,
        "num_key_value_heads": None, "num_shared_experts": 1, "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "qk_nope_head_dim": 128, "num_expert_group": 1, "topk_group": 1,
        "num_experts_per_token": 8, "moe_renormalize": True, "rms_norm_eps": 1e-5,
        "num_experts": 256, "mlp_layer_types": None, "linear_head_dim": 128,
        "linear_num_heads": 32, "linear_conv_kernel_dim": 4, "linear_attn_config": None,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid", "use_grouped_topk": True,
        "num_nextn_predict_layers": 0, "pad_token_id": 163839, "bos_token_id": 163584,
        "eos_token_id": 163586,
    }  # fmt: skip
    moe = (
        "moe_intermediate_size", "num_shared_experts", "routed_scaling_factor", "num_expert_group",
        "topk_group", "num_experts_per_token", "moe_renormalize", "num_experts",
    )  # fmt: skip

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        given = {self.key_names.get(key, key): value for key, value in given.items()}
        config = families.ForeignConfig(given, self.defaults, self.without_effect)
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        for key, value in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("moe_layer_freq", 1),
            ("mla_use_nope", True),
            ("use_grouped_topk", True),
            ("moe_router_activation_func", "sigmoid"),
            ("num_nextn_predict_layers", 0),
        ):
            config.expect(key, value)
        config.expect("num_key_value_heads", None, heads)
        eps, linear = config["rms_norm_eps"], config["linear_attn_config"] or {}
        kda = {
            "type": "kda",
            "num_heads": linear.get("num_heads", config["linear_num_heads"]),
            "head_dim": linear.get("head_dim", config["linear_head_dim"]),
            "conv_size": linear.get("short_conv_kernel_size", config["linear_conv_kernel_dim"]),
            "norm_eps": eps,
        }
        mla = {"type": "mla", **families.read_names(MLA, config), "rotary_base": None}
        full = {i - 1 for i in linear.get("full_attn_layers", ())}
        kinds = config["layer_types"] or [
            i in full if "full_attn_layers" in linear else i > 0 and i % 4 == 0
            for i in range(layers)
        ]
        first = config["first_k_dense_replace"]
        sparse = config["mlp_layer_types"] or [i >= first for i in range(layers)]
        moe = {"type": "kimi_linear_moe", **{key: config[key] for key in self.moe}}
        return {
            **config.tokens(),
            "num_heads": heads,
            "mixers": [mla if x in (True, "full_attention") else kda for x in kinds],
            "mlps": [moe if x in (True, "sparse") else "swiglu" for x in sparse],
            "intermediate_size": config["intermediate_size"],
            "norm_eps": eps,
        }

    def write(self, config: SlipstreamConfig) -> dict[str, Any]:
        kda = families.of_all_layers(config, "kda", self.name)
        layers = range(config.num_hidden_layers)
        kinds = [families.completed(config, i)[0] for i in layers]
        mlps = [families.completed_mlp(config, i)[0] for i in layers]
        written = {
            **self.written(config, kinds),
            "linear_num_heads": kda["num_heads"],
            "linear_head_dim": kda["head_dim"],
            "linear_conv_kernel_dim": kda["conv_size"],
            "mlp_layer_types": ["dense" if x == "swiglu" else "sparse" for x in mlps],
        }
        if "mla" in kinds:
            x = families.of_all_layers(config, "mla", self.name)
            written |= {**families.written_names(MLA, x), "num_key_value_heads": x["num_heads"]}
        return written

    def mixer(self, name: str, options: dict[str, Any], module: Any) -> tuple[str, list[Rule]]:
        return "self_attn.", self._mla(options) if name == "mla" else self._kda(options, module)

    def experts(self, n: int) -> list[Rule]:
        at = "block_sparse_moe"
        names = [[f"{at}.experts.{e}.{x}.weight" for e in range(n)] for x in ("w1", "w3", "w2")]
        bias = "gate.e_score_correction_bias"
        return [
            *experts("mlp.block.experts", *names),
            *_shared("mlp.block.shared_experts", f"{at}.shared_experts"),
            *renamed(*((f"mlp.block.{x}", f"{at}.{x}") for x in ("gate.weight", bias))),
        ]

    def _kda(self, options: dict[str, Any], module: Any) -> list[Rule]:
        sizes, heads = [module.keys, module.keys, module.values], options["num_heads"]
        return [
            joined("qkv_proj.weight", [f"{x}_proj.weight" for x in "qkv"], sizes),
            convolutions("conv.weight", [f"{x}_conv1d.weight" for x in "qkv"], sizes),
            shaped("A_log", "A_log", (heads,), (1, 1, heads, 1)),
            *renamed(
                "dt_bias",
                "b_proj.weight",
                "o_proj.weight",
                ("f_down.weight", "f_a_proj.weight"),
                ("f_up.weight", "f_b_proj.weight"),
                ("g_down.weight", "g_a_proj.weight"),
                ("g_up.weight", "g_b_proj.weight"),
                ("norm_weight", "o_norm.weight"),
            ),
        ]

    def _mla(self, options: dict[str, Any]) -> list[Rule]:
        pairs: list[str | tuple[str, str]] = [
            ("kv_a_proj.weight", "kv_a_proj_with_mqa.weight"),
            ("kv_norm", "kv_a_layernorm.weight"),
            "kv_b_proj.weight",
            "o_proj.weight",
        ]
        if options["q_lora_rank"] is None:
            return renamed(*pairs, "q_proj.weight")
        return renamed(
            *pairs,
            "q_a_proj.weight",
            ("q_norm", "q_a_layernorm.weight"),
            ("q_proj.weight", "q_b_proj.weight"),
        )


def _rotary(config: families.ForeignConfig, factor: float) -> tuple[float, float]:
    """Base and share of rotated features, from either of transformers' ways to write them."""
    given = config["rope_parameters"] or config["rope_scaling"] or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_parameters: Slipstream's attention has rope_type 'default', got {kind!r}"
        )
    base = given.get("rope_theta", config["rope_theta"] or 10000.0)
    return float(base), given.get("partial_rotary_factor", factor)


def _shared(ours: str, theirs: str) -> list[Rule]:
    return renamed(*((f"{ours}.{x}.weight", f"{theirs}.{x}.weight") for x in INNER))
