"""Configuration of the language model: its sizes and, per layer, a mixer and an MLP.

A saved configuration names the classes of a checkpoint in `auto_map`, and save_pretrained writes
the file that it refers to. With trust_remote_code=True, transformers' auto classes then load the
checkpoint in a process that has not imported slipstream.
"""

import difflib
import inspect
from collections.abc import Collection
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from slipstream.nn.norm import NORMS

MIXERS = {
    "retention": "MultiScaleRetention",
    "gla": "GatedLinearAttention",
    "gated_deltanet": "GatedDeltaNet",
    "kda": "KimiDeltaAttention",
    "gdn2": "GatedDeltaNet2",
    "rwkv7": "RWKV7",
    "mamba2": "Mamba2",
    "mamba3": "Mamba3",
    "delta_net": "DeltaNet",
    "gated_deltaproduct": "GatedDeltaProduct",
    "comba": "Comba",
    "hgrn": "HGRN",
    "hgrn2": "HGRN2",
    "gsa": "GatedSlotAttention",
    "rwkv6": "RWKV6",
    "lightning_attn": "LightningAttention",
    "attention": "Attention",
    "forgetting_attn": "ForgettingAttention",
    "dsa": "DSA",
    "mla": "MLA",
    "msa": "MSA",
    "qsa": "QSA",
}
"""Name in a config -> class in slipstream.layers."""

MLPS = ("swiglu", "rwkv7", "qwen3_next_moe", "kimi_linear_moe", "none")
"""Names in a config; slipstream/models/mlps.py makes them."""

# what the model itself gives a mixer
SET_BY_MODEL = ("hidden_size", "layer_idx")
CONSISTENT_MIXERS = (
    "attention",
    "delta_net",
    "gated_deltanet",
    "gla",
    "kda",
    "lightning_attn",
    "mamba2",
    "retention",
    "rwkv7",
)
"""With consistent=True: all of whose products round by no size (models/consistent.py)."""

CONSISTENT_MLPS = ("none", "rwkv7", "swiglu")
"""The same of MLPs."""

TP_STYLE = "slipstream_heads"
"""What transformers' plan of tensor parallelism calls ours (models/tensor_parallel.py)."""

REMOTE_CODE = "modeling_slipstream"
AUTO_MAP = {
    "AutoConfig": f"{REMOTE_CODE}.SlipstreamConfig",
    "AutoModel": f"{REMOTE_CODE}.SlipstreamModel",
    "AutoModelForCausalLM": f"{REMOTE_CODE}.SlipstreamForCausalLM",
}
REMOTE_CODE_TEXT = '''"""Lets transformers load this checkpoint with trust_remote_code=True.

The model itself is in the package slipstream, which has to be installed.
"""

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, SlipstreamModel

__all__ = ["SlipstreamConfig", "SlipstreamForCausalLM", "SlipstreamModel"]
'''

# Keys that transformers takes or writes beside the fields of PreTrainedConfig; it also drops, and
# saves no longer, parameters of generation.
_OF_TRANSFORMERS = (
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "is_decoder",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "tie_last_hidden_states",
    "tokenizer_class",
    "torch_dtype",
    "use_return_dict",
)


@strict
class SlipstreamConfig(PreTrainedConfig):
    """A decoder-only language model whose layers each name their mixer.

    Args:
        mixers: one entry per layer, bottom first: a name of MIXERS, or a dict
            {"type": name, option: value, ...} whose options go to the layer's class.
        vocab_size: entries of the vocabulary.
        hidden_size: width D of the residual stream.
        num_heads: heads of every mixer whose dict does not say otherwise.
        intermediate_size: width of the MLPs that do not say otherwise; None is 8/3 D, rounded up
            to a multiple of 32.
        mlps: one entry per layer, a name of MLPS or a dict {"type": name, option: value, ...};
            None is "swiglu" everywhere. "none" leaves the MLP and its norm out, as Mamba-2 does;
            "rwkv7" is layers.RWKV7ChannelMix; "qwen3_next_moe" and "kimi_linear_moe" are
            transformers' blocks, whose options are keys of transformers' configs.
        norm: the norms of the residual stream, one of nn.norm.NORMS.
        embedding_norm: one of these norms comes right after the embedding, as in RWKV-7.
        attention_residuals: a layer's input is mixed by attention over what each group of this many
            earlier layers has added (models/mlps.py); None: it is their sum.
        residual_in_fp32: the residual stream is float32 whatever the weights are, as in Mamba-2.
        norm_eps: inside every norm of the residual stream.
        initializer_range: standard deviation of the embedding, MLP and head weights at the start.
        use_cache: forward returns a StateCache unless it is told otherwise, when not training.
        consistent: a token's logits have the same bits in training, in a prompt, in a piece of it
            and decoded, whatever the batch (docs/guides/consistent.md); slower. For mixers of
            CONSISTENT_MIXERS.
        tie_word_embeddings: the head is the embedding, transposed.
        pad_token_id: the token that generate pads with.
        bos_token_id: the token that generate begins with if there is no prompt.
        eos_token_id: the token, or tokens, that end generation.

    Raises:
        ValueError: `mixers` is empty, `mixers` or `mlps` names something unknown or has a dict
            without "type", or they are not as many as num_hidden_layers or as each other.
        TypeError: a key that is neither one of these nor one of transformers' PreTrainedConfig.
    """

    model_type = "slipstream"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    attribute_map: ClassVar[dict[str, str]] = {"num_attention_heads": "num_heads"}
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "embed_tokens": TP_STYLE,
        "layers.*.mixer": TP_STYLE,
        "layers.*.mlp": TP_STYLE,
    }

    vocab_size: int = 32000
    hidden_size: int = 512
    num_heads: int = 4
    mixers: list[str | dict[str, Any]] | None = None
    intermediate_size: int | None = None
    mlps: list[str | dict[str, Any]] | None = None
    norm: str = "rms"
    embedding_norm: bool = False
    attention_residuals: int | None = None
    residual_in_fp32: bool = False
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    consistent: bool = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.mixers is None:
            self.mixers = ["gated_deltanet", "gated_deltanet", "gated_deltanet", "attention"]
        if self.intermediate_size is None:
            self.intermediate_size = (self.hidden_size * 8 // 3 + 31) // 32 * 32
        # an older checkpoint has its own copy of what is derived from `mixers`
        layers = kwargs.pop("num_hidden_layers", None)
        kwargs.pop("auto_map", None)
        self.auto_map = dict(AUTO_MAP)  # TRL looks at it
        self._refuse_unknown(kwargs)
        super().__post_init__(**kwargs)
        least = {"vocab_size": 1, "hidden_size": 1, "num_heads": 1, "intermediate_size": 0}
        for name, n in least.items():
            if getattr(self, name) < n:
                raise ValueError(f"{name}: want {n} or more, got {getattr(self, name)}")
        if not self.mixers:
            raise ValueError("mixers: want one entry per layer, got an empty list")
        if layers not in (None, len(self.mixers)):
            raise ValueError(
                f"num_hidden_layers: want the {len(self.mixers)} entries of mixers, got {layers}"
            )
        if self.mlps is not None and len(self.mlps) != len(self.mixers):
            raise ValueError(
                f"mlps: want the {len(self.mixers)} entries that mixers has, got {len(self.mlps)}"
            )
        if self.norm not in NORMS:
            raise ValueError(f"norm: want one of {', '.join(NORMS)}, got {self.norm!r}")
        if self.attention_residuals is not None and self.attention_residuals < 1:
            raise ValueError(
                f"attention_residuals: want at least 1 layer, got {self.attention_residuals}"
            )
        for i in range(len(self.mixers)):
            (mixer, _), (mlp, _) = self.mixer(i), self.mlp(i)
            if self.consistent:
                self._expect_consistent(i, mixer, mlp)

    @staticmethod
    def _expect_consistent(layer: int, mixer: str, mlp: str) -> None:
        if mixer not in CONSISTENT_MIXERS:
            known = ", ".join(CONSISTENT_MIXERS)
            raise ValueError(f"mixers[{layer}]: want one of {known} with consistent, got {mixer!r}")
        if mlp not in CONSISTENT_MLPS:
            known = ", ".join(CONSISTENT_MLPS)
            raise ValueError(f"mlps[{layer}]: want one of {known} with consistent, got {mlp!r}")

    @classmethod
    def _refuse_unknown(cls, given: dict[str, Any]) -> None:
        own = [f.name for f in fields(cls)] + [*cls.attribute_map, "num_hidden_layers"]
        generation = vars(GenerationConfig())
        for name in given:
            if name.startswith("_") or name in (*own, *_OF_TRANSFORMERS, *generation):
                continue
            raise TypeError(f"{name}: no such key of SlipstreamConfig; {_hint(name, own)}")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: save_pretrained would copy this file, and AUTO_MAP names the classes."""

    def to_diff_dict(self) -> dict[str, Any]:
        """The dictionary that save_pretrained writes."""
        return {**super().to_diff_dict(), "auto_map": dict(AUTO_MAP)}

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, **kwargs)
        Path(save_directory, f"{REMOTE_CODE}.py").write_text(REMOTE_CODE_TEXT, encoding="utf-8")

    @property
    def num_hidden_layers(self) -> int:
        return len(self.mixers or [])

    def mixer(self, layer: int) -> tuple[str, dict[str, Any]]:
        """Name and options of a layer's mixer."""
        assert self.mixers is not None
        return _entry(f"mixers[{layer}]", self.mixers[layer], MIXERS)

    def mlp(self, layer: int) -> tuple[str, dict[str, Any]]:
        """Name and options of a layer's MLP."""
        entry = "swiglu" if self.mlps is None else self.mlps[layer]
        return _entry(f"mlps[{layer}]", entry, MLPS)


def _entry(
    place: str, entry: str | dict[str, Any], known: Collection[str]
) -> tuple[str, dict[str, Any]]:
    options = {} if isinstance(entry, str) else dict(entry)
    name = entry if isinstance(entry, str) else options.pop("type", None)
    if name not in known:
        close = difflib.get_close_matches(str(name), known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{place}: want one of {', '.join(known)}, got {entry!r}{hint}")
    return name, options


def mixer_options(cls: type) -> dict[str, Any]:
    """The defaults of a layer's options, and of those that it passes to the class that it
    extends."""
    found: dict[str, Any] = {}
    for owner in (x for x in cls.__mro__ if "__init__" in vars(x)):
        parameters = inspect.signature(owner).parameters.values()
        named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        found = {p.name: p.default for p in named} | found
        if all(p.kind != p.VAR_KEYWORD for p in parameters):
            break
    return {name: value for name, value in found.items() if name not in SET_BY_MODEL}


def expect_options(place: str, name: str, options: Collection[str], known: Collection[str]) -> None:
    """Refuses an option that the entry `name` at `place` of a config does not have."""
    for key in options:
        if key not in known:
            raise ValueError(f"{place}.{key}: no such option of {name}; {_hint(key, known)}")


def _hint(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"want one of {', '.join(known) or 'none'}"
