"""Shared by the families of foreign models: reading their configs, and completing ours."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from slipstream import layers
from slipstream.models.config import MIXERS, SlipstreamConfig, mixer_options
from slipstream.models.convert.rules import Rule, renamed

# prefixes of ours and theirs, and the rules whose names lack these
Rules = tuple[str, str, Iterable[Rule]]

# what every config of transformers may have, and what says how it was stored
_GENERIC = {
    *PreTrainedConfig().to_dict(),
    *GenerationConfig().to_dict(),
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "is_decoder",
    "model_type",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


class ForeignConfig:
    """A config.json of another library: what is not asked for by name is refused.

    Args:
        given: its keys. defaults: of keys that it may lack; these are the keys that are known.
        without_effect: keys that change nothing in what a model computes.
    """

    def __init__(
        self, given: dict[str, Any], defaults: dict[str, Any], without_effect: Collection[str]
    ) -> None:
        self.model_type = given.get("model_type")
        known = {*defaults, *without_effect, *_GENERIC}
        for key, value in given.items():
            if key not in known and value is not None:
                raise ValueError(
                    f"{key}: no known key of {self.model_type}'s config, got {value!r}; if it "
                    f"changes nothing, ignore it (--ignore {key})"
                )
        self._values = defaults | {k: v for k, v in given.items() if k in defaults}
        self._given = given

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def expect(self, key: str, *allowed: Any) -> None:
        """
        Raises:
            ValueError: the value is another one, which Slipstream's model has no place for.
        """
        value = self[key]
        if value not in allowed:
            want = " or ".join(repr(x) for x in allowed)
            raise ValueError(
                f"{key}: Slipstream's model can be {want} there, and {self.model_type}'s config "
                f"has {value!r}"
            )

    def tokens(self) -> dict[str, Any]:
        """The keys of ours that have the same name and sense in all of theirs."""
        keys = ("vocab_size", "hidden_size", "initializer_range", "tie_word_embeddings")
        ids = ("pad_token_id", "bos_token_id", "eos_token_id", "use_cache")
        values = {key: self._given.get(key, self._values.get(key)) for key in (*keys, *ids)}
        return {k: v for k, v in values.items() if v is not None}


class Family:
    """One kind of foreign model: its config and its weights in the words of ours, and back.

    name: what `convert` calls it. architecture: the class in config.json's `architectures`.
    """

    name: ClassVar[str]
    model_type: ClassVar[str]
    architecture: ClassVar[str]
    # weights that do nothing in a causal language model, as regular expressions
    dropped: ClassVar[tuple[str, ...]] = ()
    # theirs of the model, the embedding and the last norm
    ends: ClassVar[tuple[str, str, str]] = ("model", "embeddings", "norm")
    # other names that weights of theirs may have, and those that `rules` has
    aliases: ClassVar[tuple[tuple[str, str], ...]] = ()

    def matches(self, given: dict[str, Any]) -> bool:
        return given.get("model_type") == self.model_type

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        """A foreign config as keys of SlipstreamConfig."""
        raise NotImplementedError

    def write(self, config: SlipstreamConfig) -> dict[str, Any]:
        """Our config -> theirs, so that `read` gives ours again; what does not fit may differ."""
        raise NotImplementedError

    def layer(self, config: SlipstreamConfig, i: int, block: Any) -> Iterable[Rules]:
        """Rules of a layer, and of which prefixes their names lack; `block` has the sizes."""
        raise NotImplementedError

    def rules(self, config: SlipstreamConfig, model: Any) -> Iterable[Rule]:
        """Every weight; `model` is ours on the meta device, for its sizes."""
        base, embedding, norm = self.ends
        yield from renamed(
            ("model.embed_tokens.weight", f"{base}.{embedding}.weight"),
            ("model.norm.weight", f"{base}.{norm}.weight"),
        )
        if not config.tie_word_embeddings:
            yield from renamed("lm_head.weight")
        for i, block in enumerate(model.model.layers):
            for ours, theirs, rules in self.layer(config, i, block):
                prefixes = f"model.layers.{i}.{ours}", f"{base}.layers.{i}.{theirs}"
                yield from (rule.prefixed(*prefixes) for rule in rules)


def whole(name: str, value: float) -> int:
    """A width that is given as a ratio."""
    if not math.isclose(value, round(value), rel_tol=1e-6):
        raise ValueError(f"{name}: want a whole number of features, got {value}")
    return round(value)


def read_names(names: Mapping[str, str], config: ForeignConfig) -> dict[str, Any]:
    """Options whose names of ours and theirs are these."""
    return {ours: config[theirs] for ours, theirs in names.items()}


def written_names(names: Mapping[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """The inverse of read_names."""
    return {theirs: options[ours] for ours, theirs in names.items()}


def tokens_of(config: SlipstreamConfig) -> dict[str, Any]:
    """The inverse of ForeignConfig.tokens."""
    keys = ("vocab_size", "hidden_size", "initializer_range", "tie_word_embeddings")
    ids = ("pad_token_id", "bos_token_id", "eos_token_id", "use_cache")
    return {key: getattr(config, key) for key in (*keys, *ids)}


def completed(config: SlipstreamConfig, layer: int) -> tuple[str, dict[str, Any]]:
    """Name and all options of a mixer, None replaced by what it stands for."""
    name, options = config.mixer(layer)
    defaults = mixer_options(getattr(layers, MIXERS[name]))
    for key in ("mode", "num_layers"):
        defaults.pop(key, None)
        options.pop(key, None)
    full = {**defaults, "num_heads": config.num_heads, **options}
    size = config.hidden_size
    if name in ("mamba2", "mamba3"):
        inner = full["expand"] * size
        full["num_heads"] = inner // full["head_dim"] if full["head_dim"] else full["num_heads"]
        full["head_dim"] = inner // full["num_heads"]
    elif "head_dim" in full and full["head_dim"] is None:
        full["head_dim"] = size // full["num_heads"]
    follows = {"head_v_dim": "head_dim", "num_v_heads": "num_heads", "num_kv_heads": "num_heads"}
    follows |= {"rotary_dim": "head_dim"}
    if name == "kda":
        follows |= {"gate_low_rank_dim": "head_dim"}
    for key, other in follows.items():
        if key in full and full[key] is None:
            full[key] = full[other]
    if name == "retention":
        full["expand_v"] = int(full["head_dim"] * full["expand_v"]) / full["head_dim"]
    if full.get("dt_limit") is not None:
        full["dt_limit"] = tuple(full["dt_limit"])
    return name, full


def completed_mlp(config: SlipstreamConfig, layer: int) -> tuple[str, dict[str, Any]]:
    name, options = config.mlp(layer)
    if name in ("swiglu", "rwkv7"):
        options.setdefault("intermediate_size", config.intermediate_size)
    return name, options


def of_all_layers(config: SlipstreamConfig, kind: str, family: str) -> dict[str, Any]:
    """The options of the mixers of one kind, which have to be the same in all layers.

    Raises:
        ValueError: there are none, or they differ; names the layer and the option.
    """
    found = equal_options("mixers", completed, config, kind, family)
    if found is None:
        raise ValueError(f"mixers: {family} has layers of {kind}, and this model has none")
    return found


def equal_options(
    place: str,
    complete: Callable[[SlipstreamConfig, int], tuple[str, dict[str, Any]]],
    config: SlipstreamConfig,
    kind: str,
    family: str,
) -> dict[str, Any] | None:
    """The options that all layers of a kind have; None if there is none of it.

    Raises:
        ValueError: they differ; names the layer and the option.
    """
    every = [complete(config, i) for i in range(config.num_hidden_layers)]
    of_kind = [(i, options) for i, (name, options) in enumerate(every) if name == kind]
    if not of_kind:
        return None
    _, first = of_kind[0]
    for i, options in of_kind[1:]:
        for key, value in options.items():
            if value != first.get(key):
                raise ValueError(
                    f"{place}[{i}].{key}: {family} has one value for all layers, and this model "
                    f"has {first.get(key)!r} and {value!r}"
                )
    return first


def expect_equal(ours: SlipstreamConfig, again: SlipstreamConfig, family: str) -> None:
    """That a config written in a family's words and read again is the same.

    Raises:
        ValueError: what differs has no place in the family's config; names it.
    """

    def refuse(place: str, value: Any) -> None:
        raise ValueError(f"{place}: {family} has no place for {value!r}")

    for i in range(ours.num_hidden_layers):
        for what, complete in (("mixers", completed), ("mlps", completed_mlp)):
            (name, options), (name_again, options_again) = complete(ours, i), complete(again, i)
            if name != name_again:
                refuse(f"{what}[{i}]", name)
            for key in {**options, **options_again}:
                value, other = options.get(key), options_again.get(key)
                near = isinstance(value, float) and other is not None and math.isclose(value, other)
                if value != other and not near:
                    refuse(f"{what}[{i}].{key}", value)
    plain = ("norm", "norm_eps", "embedding_norm", "residual_in_fp32", "tie_word_embeddings")
    for key in ("vocab_size", "hidden_size", "attention_residuals", *plain):
        if getattr(ours, key) != getattr(again, key):
            refuse(key, getattr(ours, key))
