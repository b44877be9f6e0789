"""Configuration of the language model: its sizes and one mixer per layer."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

MIXERS = {
    "retention": "MultiScaleRetention",
    "gla": "GatedLinearAttention",
    "gated_deltanet": "GatedDeltaNet",
    "kda": "KimiDeltaAttention",
    "rwkv7": "RWKV7",
    "mamba2": "Mamba2",
    "attention": "Attention",
    "mla": "MLA",
}
"""Name in a config -> class in slipstream.layers."""


@strict
class SlipstreamConfig(PreTrainedConfig):
    """A decoder-only language model whose layers each name their mixer.

    Args:
        mixers: one entry per layer, bottom first: a name of MIXERS, or a dict
            {"type": name, option: value, ...} whose options go to the layer's class.
        hidden_size: width D of the residual stream.
        num_heads: heads of every mixer whose dict does not say otherwise.
        intermediate_size: width of the SwiGLU MLP; None is 8/3 D, rounded up to a multiple of 32.
        norm_eps: added to the mean square inside every RMSNorm of the residual stream.
        initializer_range: standard deviation of the embedding, MLP and head weights at the start.
        tie_word_embeddings: the head is the embedding, transposed.

    Raises:
        ValueError: `mixers` is empty, names an unknown mixer or has a dict without "type".
    """

    model_type = "slipstream"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    attribute_map: ClassVar[dict[str, str]] = {"num_attention_heads": "num_heads"}

    vocab_size: int = 32000
    hidden_size: int = 512
    num_heads: int = 4
    mixers: list[str | dict[str, Any]] | None = None
    intermediate_size: int | None = None
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.mixers is None:
            self.mixers = ["gated_deltanet", "gated_deltanet", "gated_deltanet", "attention"]
        if self.intermediate_size is None:
            self.intermediate_size = (self.hidden_size * 8 // 3 + 31) // 32 * 32
        # an older checkpoint's own copy is derived from `mixers`, never set
        kwargs.pop("num_hidden_layers", None)
        super().__post_init__(**kwargs)
        if not self.mixers:
            raise ValueError("mixers: want one entry per layer, got an empty list")
        for i in range(len(self.mixers)):
            self.mixer(i)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.mixers or [])

    def mixer(self, layer: int) -> tuple[str, dict[str, Any]]:
        """Name and options of a layer's mixer."""
        assert self.mixers is not None
        entry = self.mixers[layer]
        options = {} if isinstance(entry, str) else dict(entry)
        name = entry if isinstance(entry, str) else options.pop("type", None)
        if name not in MIXERS:
            known = ", ".join(MIXERS)
            raise ValueError(f"mixers[{layer}]: want a mixer of {known}, got {entry!r}")
        return name, options
