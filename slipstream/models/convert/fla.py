"""fla's models of version 0.6 with gated MLPs: GLA, RetNet, DeltaNet, GatedDeltaNet, KDA.

The defaults are those of fla's config classes, which need not be installed.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from slipstream.models.config import SlipstreamConfig
from slipstream.models.convert import families, rules

# keys of fla's configs that change no result here
WITHOUT_EFFECT = (
    "attn_mode",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "fuse_swiglu",
    "max_position_embeddings",
    "use_l2warp",
)
COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "norm_eps": 1e-6,
    "initializer_range": 0.02,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
    "fuse_norm": True,
}
GATED: dict[str, Any] = {
    **COMMON,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "intermediate_size": None,
    "attn": None,
    "attnres_block_size": None,
}
# fla's activations of that name -> names of layers.base.FEATURE_MAPS
GLA_FEATURE_MAPS = {
    None: None,
    "relu": "relu",
    "sqrelu": "relu2",
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
    "gelu": "gelu_tanh",
}
RETNET_FEATURE_MAPS = {
    None: None,
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
QK_ACTIVATIONS = {"silu": "silu", "relu": "relu", "elu": "elu_plus_one", "identity": None}


class Gated(families.Family):
    """Models of one mixer, attention in some layers, and gated MLPs."""

    kind: str
    defaults: ClassVar[dict[str, Any]]
    # options of the mixer of the same name and meaning
    equal: ClassVar[tuple[str, ...]]
    # options of the same meaning, and fla's names of them
    names: ClassVar[dict[str, str]] = {}
    # options of the same name, and what fla's values mean
    choices: ClassVar[dict[str, dict[Any, Any]]] = {}
    # whether the mixer may have a convolution
    convolved: ClassVar[bool] = True
    without_effect: ClassVar[tuple[str, ...]] = WITHOUT_EFFECT

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        """The other options of the mixer that the family can set."""
        return {}

    def options(self, mixer: dict[str, Any], config: SlipstreamConfig) -> dict[str, Any]:
        """The inverse of `mixer`."""
        return {}

    def weights(self, mixer: dict[str, Any], module: Any) -> list[rules.Rule]:
        """The weights of a mixer."""
        raise NotImplementedError

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        config = families.ForeignConfig(given, {**GATED, **self.defaults}, self.without_effect)
        config.expect("hidden_act", "swish", "silu")
        config.expect("attnres_block_size", None)
        inner = config["intermediate_size"]
        if inner is None:
            ratio = config["hidden_ratio"] or 4
            inner = int(config["hidden_size"] * ratio * 2 / 3)
            inner = (inner + 255) // 256 * 256
        mixer = {key: config[key] for key in (*self.equal, "norm_eps")}
        mixer |= families.read_names(self.names, config)
        for key, values in self.choices.items():
            config.expect(key, *values)
            mixer[key] = values[config[key]]
        if self.convolved:
            mixer["conv_size"] = config["conv_size"] if config["use_short_conv"] else None
        mixer |= self.mixer(config)
        mixers = [{"type": self.kind, **mixer} for _ in range(config["num_hidden_layers"])]
        for i, options in _attention(config).items():
            mixers[i] = {"type": "attention", **options}
        return {
            **config.tokens(),
            "num_heads": config["num_heads"],
            "mixers": mixers,
            "intermediate_size": inner,
            "norm_eps": config["norm_eps"],
        }

    def write(self, config: SlipstreamConfig) -> dict[str, Any]:
        mixer = families.of_all_layers(config, self.kind, self.name)
        conv = {}
        if self.convolved:
            size = mixer["conv_size"]
            conv = {"use_short_conv": size is not None, "conv_size": size or 4}
        return {
            **families.tokens_of(config),
            "num_hidden_layers": config.num_hidden_layers,
            "intermediate_size": config.intermediate_size,
            "norm_eps": config.norm_eps,
            "attn": attention_of(config),
            **{key: mixer[key] for key in self.equal},
            **families.written_names(self.names, mixer),
            **{key: _inverse(values, mixer[key]) for key, values in self.choices.items()},
            **conv,
            **self.options(mixer, config),
        }

    def layer(self, config: SlipstreamConfig, i: int, block: Any) -> Iterable[families.Rules]:
        name, options = families.completed(config, i)
        yield (
            "",
            "",
            rules.renamed(
                ("mixer_norm.weight", "attn_norm.weight"),
                "mlp_norm.weight",
                *(f"mlp.{x}.weight" for x in ("gate_proj", "up_proj", "down_proj")),
            ),
        )
        is_attention = name == "attention"
        mixer = attention_rules(options) if is_attention else self.weights(options, block.mixer)
        yield "mixer.", "attn.", mixer


class GLA(Gated):
    name = model_type = "gla"
    architecture, kind = "GLAForCausalLM", "gla"
    equal = ("expand_k", "expand_v", "num_heads", "num_kv_heads", "clamp_min")
    names: ClassVar = {"use_gate": "use_output_gate", "norm_affine": "elementwise_affine"}
    choices: ClassVar = {"feature_map": GLA_FEATURE_MAPS}
    defaults: ClassVar = {
        "expand_k": 0.5, "expand_v": 1.0, "num_heads": 4, "num_kv_heads": None, "feature_map": None,
        "use_short_conv": False, "conv_size": 4, "use_output_gate": True, "clamp_min": None,
        "elementwise_affine": True, "use_gk": True, "use_gv": False,
    }  # fmt: skip

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        config.expect("use_gk", True)
        config.expect("use_gv", False)
        return {"norm_affine": bool(config["elementwise_affine"])}

    def weights(self, mixer: dict[str, Any], module: Any) -> list[rules.Rule]:
        return [
            *projections(*"qkvo", *("g" if mixer["use_gate"] else "")),
            *rules.renamed(
                ("gk_down.weight", "gk_proj.0.weight"),
                ("gk_up.weight", "gk_proj.1.weight"),
                ("gk_up.bias", "gk_proj.1.bias"),
            ),
            *_gate_norm(mixer, module),
            *convolution(module.conv, module.channels),
        ]


class RetNet(Gated):
    name = model_type = "retnet"
    architecture, kind = "RetNetForCausalLM", "retention"
    equal = ("num_heads", "num_kv_heads")
    names = GLA.names
    choices: ClassVar = {"feature_map": RETNET_FEATURE_MAPS}
    convolved = False
    defaults: ClassVar = {
        "expand_k": 1.0, "expand_v": 2.0, "hidden_ratio": 2, "num_heads": 8, "num_kv_heads": None,
        "feature_map": None, "use_short_conv": False, "conv_size": 4, "use_output_gate": True,
        "elementwise_affine": True,
    }  # fmt: skip

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        config.expect("use_short_conv", False)  # fla's model does not hand it on to its layers
        head_dim = _head_dim(config, "expand_k")
        return {
            "head_dim": head_dim,
            "expand_v": _head_dim(config, "expand_v") / head_dim,
            "norm_affine": bool(config["elementwise_affine"]),
        }

    def options(self, mixer: dict[str, Any], config: SlipstreamConfig) -> dict[str, Any]:
        size, width = config.hidden_size, mixer["head_dim"] * mixer["num_heads"]
        return {"expand_k": width / size, "expand_v": width * mixer["expand_v"] / size}

    def weights(self, mixer: dict[str, Any], module: Any) -> list[rules.Rule]:
        found = projections(*"qkvo", *("g" if mixer["use_gate"] else ""))
        return [*found, *_gate_norm(mixer, module)]


class DeltaNet(Gated):
    name = model_type = "delta_net"
    architecture, kind = "DeltaNetForCausalLM", "delta_net"
    equal = ("num_heads", "use_gate", "allow_neg_eigval", "use_beta", "qk_norm")
    choices: ClassVar = {"qk_activation": QK_ACTIVATIONS}
    defaults: ClassVar = {
        "expand_k": 1.0, "expand_v": 1.0, "use_gate": False, "use_short_conv": True,
        "allow_neg_eigval": False, "conv_size": 4, "use_beta": True, "use_output_norm": True,
        "num_heads": 16, "qk_norm": "l2", "qk_activation": "silu",
    }  # fmt: skip

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        config.expect("qk_norm", "l2", "sum")
        config.expect("use_output_norm", True)
        return {
            "head_dim": _head_dim(config, "expand_k"),
            "head_v_dim": _head_dim(config, "expand_v"),
        }

    def options(self, mixer: dict[str, Any], config: SlipstreamConfig) -> dict[str, Any]:
        size = config.hidden_size / mixer["num_heads"]
        return {"expand_k": mixer["head_dim"] / size, "expand_v": mixer["head_v_dim"] / size}

    def weights(self, mixer: dict[str, Any], module: Any) -> list[rules.Rule]:
        keys, values = (mixer["num_heads"] * mixer[x] for x in ("head_dim", "head_v_dim"))
        others = "o" + "b" * mixer["use_beta"] + "g" * mixer["use_gate"]
        return [
            *_qkv(module.conv, [keys, keys, values]),
            *projections(*others),
            *rules.renamed(("norm_weight", "o_norm.weight")),
        ]


class GatedDeltaNet(Gated):
    name = model_type = "gated_deltanet"
    architecture, kind = "GatedDeltaNetForCausalLM", "gated_deltanet"
    equal = ("num_heads", "num_v_heads", "head_dim", "use_gate", "allow_neg_eigval")
    defaults: ClassVar = {
        "expand_v": 2.0, "use_gate": True, "use_short_conv": True, "allow_neg_eigval": False,
        "conv_size": 4, "head_dim": 256, "num_heads": 6, "num_v_heads": None,
        "num_hidden_layers": 21, "output_gate_activation": "swish",
    }  # fmt: skip

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        config.expect("output_gate_activation", "swish", "silu", "sigmoid")
        f = config["output_gate_activation"]
        return {
            "head_v_dim": families.whole("expand_v", config["head_dim"] * config["expand_v"]),
            "gate_activation": "sigmoid" if f == "sigmoid" else "silu",
        }

    def options(self, mixer: dict[str, Any], config: SlipstreamConfig) -> dict[str, Any]:
        return {
            "expand_v": mixer["head_v_dim"] / mixer["head_dim"],
            "output_gate_activation": mixer["gate_activation"],
        }

    def weights(self, mixer: dict[str, Any], module: Any) -> list[rules.Rule]:
        gate = [("z_proj.weight", "g_proj.weight")] if mixer["use_gate"] else []
        heads = [mixer["num_v_heads"]] * 2
        return [
            *_qkv(module.conv, [module.keys, module.keys, module.values]),
            *projections("o"),
            rules.joined("ab_proj.weight", ["a_proj.weight", "b_proj.weight"], heads),
            *rules.renamed(*gate, ("norm_weight", "o_norm.weight"), "A_log", "dt_bias"),
        ]


class KDA(Gated):
    name = model_type = "kda"
    architecture, kind = "KDAForCausalLM", "kda"
    equal = ("num_heads", "num_v_heads", "head_dim", "allow_neg_eigval", "lower_bound")
    defaults: ClassVar = {
        "expand_v": 1.0, "use_short_conv": True, "allow_neg_eigval": False, "safe_gate": False,
        "lower_bound": None, "conv_size": 4, "head_dim": 128, "num_heads": 16, "num_v_heads": None,
    }  # fmt: skip

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        values = families.whole("expand_v", config["head_dim"] * config["expand_v"])
        if config["safe_gate"] and config["lower_bound"] is None:
            raise ValueError("safe_gate: want a lower_bound beside it, got None")
        return {"head_v_dim": values, "gate_low_rank_dim": values, "gate_bias": True}

    def options(self, mixer: dict[str, Any], config: SlipstreamConfig) -> dict[str, Any]:
        return {
            "expand_v": mixer["head_v_dim"] / mixer["head_dim"],
            "safe_gate": mixer["lower_bound"] is not None,
        }

    def weights(self, mixer: dict[str, Any], module: Any) -> list[rules.Rule]:
        return [
            *_qkv(module.conv, [module.keys, module.keys, module.values]),
            *projections(*"bo"),
            *rules.renamed(
                ("f_down.weight", "f_proj.0.weight"),
                ("f_up.weight", "f_proj.1.weight"),
                ("g_down.weight", "g_proj.0.weight"),
                ("g_up.weight", "g_proj.1.weight"),
                ("g_up.bias", "g_proj.1.bias"),
                ("norm_weight", "o_norm.weight"),
                "A_log",
                "dt_bias",
            ),
        ]


class ForgettingTransformer(Gated):
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

    def weights(self, mixer: dict[str, Any], module: Any) -> list[rules.Rule]:
        gate = projections("g") if mixer["output_gate"] else []
        return [*attention_rules(mixer), *projections("f"), *rules.renamed("f_proj.bias"), *gate]


def _head_dim(config: families.ForeignConfig, ratio: str) -> int:
    return families.whole(ratio, config["hidden_size"] * config[ratio] / config["num_heads"])


def _inverse(names: dict[Any, Any], value: Any) -> Any:
    return next((theirs for theirs, ours in names.items() if ours == value), value)


def projections(*names: str) -> list[rules.Rule]:
    return rules.renamed(*(f"{x}_proj.weight" for x in names))


def _qkv(conv: Any, sizes: list[int]) -> list[rules.Rule]:
    return [
        rules.joined("qkv_proj.weight", [f"{x}_proj.weight" for x in "qkv"], sizes),
        *convolution(conv, sizes),
    ]


def convolution(conv: Any, sizes: list[int]) -> list[rules.Rule]:
    if conv is None:
        return []
    return [rules.convolutions("conv.weight", [f"{x}_conv1d.weight" for x in "qkv"], sizes)]


def _gate_norm(mixer: dict[str, Any], module: Any) -> list[rules.Rule]:
    """fla fuses the norm with its gate if there is one."""
    if module.norm_weight is None:
        return []
    name = "g_norm_swish_gate" if mixer["use_gate"] else "g_norm"
    return rules.renamed(("norm_weight", f"{name}.weight"))


def _attention(config: families.ForeignConfig) -> dict[int, dict[str, Any]]:
    """Layer -> options of its attention."""
    specs = config["attn"] or []
    found = {}
    for spec in [specs] if isinstance(specs, dict) else specs:
        known = ("layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta")
        for key in spec:
            if key not in known:
                raise ValueError(f"attn.{key}: no known key, got {spec[key]!r}")
        options = {
            "num_heads": spec["num_heads"],
            "num_kv_heads": spec.get("num_kv_heads"),
            "qkv_bias": spec.get("qkv_bias", False),
            "window_size": spec.get("window_size"),
            "rotary_base": spec.get("rope_theta", 10000.0),
        }
        found |= dict.fromkeys(spec["layers"], options)
    return found


def attention_of(config: SlipstreamConfig) -> list[dict[str, Any]] | None:
    specs = []
    for i in range(config.num_hidden_layers):
        name, options = families.completed(config, i)
        if name == "attention":
            keys = ("num_heads", "num_kv_heads", "qkv_bias", "window_size")
            spec = {"layers": [i], **{key: options[key] for key in keys}}
            specs.append({**spec, "rope_theta": options["rotary_base"]})
    return specs or None


def attention_rules(options: dict[str, Any]) -> list[rules.Rule]:
    queries, keys = (options["head_dim"] * options[x] for x in ("num_heads", "num_kv_heads"))
    parts = ("weight", "bias") if options["qkv_bias"] else ("weight",)
    sizes = [queries, keys, keys]
    return [
        *(rules.joined(f"qkv_proj.{x}", [f"{n}_proj.{x}" for n in "qkv"], sizes) for x in parts),
        *projections("o"),
    ]
