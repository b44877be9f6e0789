"""Tiny random models of transformers' classes under "slipstream" and "sdpa" beside "eager"."""

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

import slipstream
from slipstream.integrations.transformers import NAME

OURS = Path(slipstream.__file__).parent
LARGEST = 40_000_000  # parameters
TOLERANCE = 2e-3  # of the largest entry of eager's result


class Comparison(NamedTuple):
    """outcome: "matches", "own attention", "refused", "differs" or "not run"."""

    outcome: str
    why: str = ""


def classes() -> dict[str, tuple[str, str]]:
    """Name of a class -> its model type and the mapping that lists it, in the order of use."""
    found: dict[str, tuple[str, str]] = {}
    names = [n for n in dir(modeling_auto) if n.startswith("MODEL") and n.endswith("MAPPING_NAMES")]
    first = ["MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_MAPPING_NAMES"]
    names.sort(key=lambda n: next((i for i, x in enumerate(first) if n.startswith(x)), len(first)))
    for mapping in names:
        for model_type, listed in getattr(modeling_auto, mapping).items():
            for name in (listed,) if isinstance(listed, str) else listed:
                found.setdefault(name, (model_type, mapping))
    return found


def first_of_each_type(mapping: str = "") -> list[str]:
    """One class of each model type that mappings of a name with `mapping` in it list."""
    first: dict[str, str] = {}
    for name, (model_type, listed) in classes().items():
        if mapping in listed:
            first.setdefault(model_type, name)
    return list(first.values())


def tensors_of(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors of a model's output; not caches and attention weights."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output
    elif hasattr(output, "items"):
        for key, value in output.items():
            if "attention" not in key and "past" not in key and "cache" not in key:
                yield from tensors_of(value, f"{name}.{key}" if name else key)
    elif isinstance(output, list | tuple):
        for i, value in enumerate(output):
            yield from tensors_of(value, f"{name}[{i}]")


def runs_of(model: Any, inputs: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Results by name of a forward and backward pass, a padded one, and of generation."""
    found: dict[str, dict[str, Tensor]] = {}
    torch.manual_seed(1)
    outputs = dict(tensors_of(model(**inputs)))
    found["forward"] = {name: x.detach() for name, x in outputs.items()}
    differentiable = [x for x in outputs.values() if x.requires_grad]
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if differentiable:
        torch.manual_seed(2)
        total = sum((x.float() * torch.randn(x.shape)).sum() for x in differentiable)
        grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        found["backward"] = {n: g for n, g in zip(parameters, grads) if g is not None}
    if "input_ids" in inputs and "attention_mask" in inspect.signature(model.forward).parameters:
        for side in ("left", "right"):
            mask = torch.ones_like(inputs["input_ids"])
            mask[1, ..., slice(0, 4) if side == "left" else slice(-4, None)] = 0
            torch.manual_seed(3)
            with torch.no_grad():
                output = dict(tensors_of(model(**inputs, attention_mask=mask)))
            live = mask.bool()
            # a decoder's tokens are not padded, only what it reads
            found[f"{side} padding"] = {
                name: x[live] if x.shape[:2] == live.shape else x
                for name, x in output.items()
                if x.shape[:1] == live.shape[:1]
                and (x.shape[1:2] == live.shape[1:] or "decoder_input_ids" in inputs)
            }
    if model.can_generate() and "input_ids" in inputs and len(inputs) == 1:
        torch.manual_seed(4)
        result = model.generate(
            inputs["input_ids"], max_new_tokens=3, min_new_tokens=3, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
            attention_mask=torch.ones_like(inputs["input_ids"]), disable_compile=True,
        )  # fmt: skip
        found["generate"] = {f"logits[{i}]": x for i, x in enumerate(result.logits)}
    return found


def difference(got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]]) -> str:
    """The difference, or ""."""
    for run, results in want.items():
        # gradients of single weights may be nothing but rounding
        top = max((float(x.abs().max()) for x in results.values() if x.numel()), default=0.0)
        for name, x in results.items():
            y = got[run].get(name)
            if y is None or y.shape != x.shape:
                return f"{run}: {name} has another shape"
            if not x.numel():
                continue
            both = torch.isfinite(x) & (x.abs() < 1e30)
            if bool((torch.isfinite(y) & (y.abs() < 1e30) != both).any()):
                return f"{run}: {name} is not finite where eager's is, or the reverse"
            error = float((x - y)[both].abs().max()) if bool(both.any()) else 0.0
            scale = top if run == "backward" else float(x[both].abs().max()) if both.any() else 1.0
            if error > TOLERANCE * max(scale, 1e-3):
                return f"{run}: {name} off by {error:.2g} of {scale:.2g}"
    return ""


def build(cls: Any, config: PreTrainedConfig, impl: str, weights: Any) -> Any:
    torch.manual_seed(0)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=impl).eval().float()
    if weights is not None:
        model.load_state_dict(weights)
    return model


def reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:150] if lines else ''}"


def frames_of_ours(error: BaseException) -> bool:
    """Whether it was raised by slipstream, or by what slipstream called."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(x.filename).is_relative_to(OURS) for x in frames)


def counted(impl: str, calls: list[int]) -> tuple[Callable, Callable]:
    """The registered function, and the same counting its calls."""
    function = AttentionInterface._global_mapping[impl]

    def count(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return function(*args, **kwargs)

    return function, count


def compare(name: str, impls: tuple[str, ...] = (NAME, "sdpa")) -> dict[str, Comparison]:
    """By implementation: does a class of models give what it gives with "eager"?"""
    errors = []
    for other in OTHERS:
        try:
            made = eager_runs(name, other)
        except Exception as error:  # transformers' own, of any kind
            if frames_of_ours(error):
                raise
            errors.append(reason(error))
            continue
        return {impl: compared(*made, impl) for impl in impls}
    return dict.fromkeys(impls, Comparison("not run", errors[0]))


def config_class(cls: Any) -> Any:
    kind = configuration_auto.CONFIG_MAPPING_NAMES[classes()[cls.__name__][0]]
    return cls.config_class or getattr(transformers, kind)


def eager_runs(name: str, other: dict[str, Any]) -> tuple[Any, PreTrainedConfig, Any, Any, Any]:
    """The class, its configuration, weights, inputs, and results with "eager"."""
    cls = getattr(transformers, name)
    config = tiny_config(config_class(cls), other)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise NotImplementedError(f"{size / 1e6:.0f} million parameters")
    eager = build(cls, config, "eager", None)
    with torch.no_grad():
        for p in eager.parameters():
            if p.dim() >= 2 and p.is_floating_point():
                p.normal_(0, min(0.25, 1.5 * p.shape[-1] ** -0.5))
    inputs = inputs_of(eager, config)
    try:
        want = runs_of(eager, inputs)
    except (ValueError, AttributeError, TypeError):
        inputs = with_images(inputs, config)
        want = runs_of(eager, inputs)
    torch.manual_seed(1)
    with torch.no_grad():
        again = dict(tensors_of(eager(**inputs)))
    if different := difference({"forward": again}, {"forward": want["forward"]}):
        raise NotImplementedError(f"two runs of it differ: {different}")
    return cls, config, eager.state_dict(), inputs, want


def compared(
    cls: Any, config: PreTrainedConfig, weights: Any, inputs: Any, want: Any, impl: str
) -> Comparison:
    calls = [0]
    function, count = counted(impl, calls)
    AttentionInterface._global_mapping[impl] = count
    try:
        got = runs_of(build(cls, config, impl, weights), inputs)
    except (NotImplementedError, ValueError) as error:
        if not frames_of_ours(error):
            raise
        return Comparison("refused", reason(error))
    finally:
        AttentionInterface._global_mapping[impl] = function
    if different := difference(got, want):
        return Comparison("differs", different)
    return Comparison("matches" if calls[0] else "own attention")


TOKENS, ROWS = 12, 2
# images of a vision tower as numbers of patches: frames, rows, columns
GRID = ((1, 4, 4), (1, 4, 8))


def inputs_of(model: Any, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Random inputs for forward."""
    accepted = inspect.signature(model.forward).parameters
    required = {
        name for name, p in accepted.items()
        if p.default is inspect.Parameter.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }  # fmt: skip
    main = getattr(model, "main_input_name", "input_ids")
    given: dict[str, Tensor] = {}
    if "grid_thw" in required or "image_grid_thw" in required:
        return _patches(config, required)
    if "input_ids" in accepted:
        # rows of 3 answers each
        choices = (3,) if "MultipleChoice" in type(model).__name__ else ()
        given["input_ids"] = torch.randint(10, 50, (ROWS, *choices, TOKENS))
    elif "pixel_values" in accepted:
        given["pixel_values"] = _images(config)
    elif main in ("input_values", "input_features"):
        given[main] = _sound(main, config)
    elif main in required and len(required) == 1 and "hidden" in main:
        given[main] = torch.randn(ROWS, TOKENS, config.hidden_size)
    else:
        raise NotImplementedError(f"no inputs are made for {main}")
    if "pixel_values" in required and "pixel_values" not in given:
        given["pixel_values"] = _images(config)
    if "bbox" in accepted:
        given["bbox"] = torch.zeros(ROWS, TOKENS, 4, dtype=torch.int64)
    if "ForSequenceClassification" in type(model).__name__ and config.is_encoder_decoder:
        # a class of what is decoded at the last token, which is the same text
        given["input_ids"][:, -1] = config.eos_token_id
    elif "decoder_input_ids" in accepted and config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(10, 50, (ROWS, TOKENS - 3))
    return given


def with_images(inputs: dict[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    """The same for models that read images beside text, although their signature does not say."""
    return inputs | {"pixel_values": _images(config)}


def _images(config: PreTrainedConfig) -> Tensor:
    config = getattr(config, "vision_config", None) or config
    size, channels = getattr(config, "image_size", 64), getattr(config, "num_channels", None) or 3
    height, width = size if isinstance(size, list | tuple) else (size or 64,) * 2
    frames = getattr(config, "num_frames", None)
    shape = (ROWS, frames) if isinstance(frames, int) else (ROWS,)
    return torch.randn(*shape, channels, height, width)


def _patches(config: PreTrainedConfig, required: set[str]) -> dict[str, Tensor]:
    """A vision tower that takes patches of several images, one behind the other."""
    grid = next(name for name in ("grid_thw", "image_grid_thw") if name in required)
    main = next(n for n in ("hidden_states", "pixel_values") if n in required)
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
    frames = getattr(config, "temporal_patch_size", 1)
    patches = sum(t * h * w for t, h, w in GRID)
    width = channels * frames * config.patch_size**2
    return {main: torch.randn(patches, width), grid: torch.tensor(GRID)}


def _sound(main: str, config: PreTrainedConfig) -> Tensor:
    config = getattr(config, "encoder_config", None) or getattr(config, "audio_config", config)
    mels = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    if main == "input_values":
        if hasattr(config, "time_stride"):  # the spectrogram itself
            return torch.randn(ROWS, config.max_length, config.num_mel_bins)
        return torch.randn(ROWS, 2000)
    positions = 2 * getattr(config, "max_source_positions", 50)
    return torch.randn(ROWS, mels, min(positions, 256))


VOCABULARY, WINDOW = 64, 5

# fields of configurations by what they count
SIZES: dict[int, str] = {
    VOCABULARY: "vocab_size decoder_vocab_size text_vocab_size num_embeddings n_tokens "
    "vocab_size_per_layer_input src_vocab_size tgt_vocab_size unpadded_vocab_size "
    "image_size img_size attention_hidden_size",
    128: "max_position_embeddings n_positions max_target_positions max_source_positions n_ctx "
    "max_seq_len max_sequence_length seq_length original_max_position_embeddings",
    32: "hidden_size d_model n_embd dim embed_dim embedding_size decoder_hidden_size "
    "hidden_dim projection_dim embedding_dim word_embed_proj_dim encoder_hidden_size "
    "hidden_size_per_layer_input text_hidden_size proj_dim dim_model model_dim d_embed "
    "cross_attention_hidden_size decoder_dim hidden_units out_hidden_size encoder_dim",
    48: "intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim mlp_dim "
    "moe_intermediate_size shared_expert_intermediate_size encoder_intermediate_size "
    "decoder_intermediate_size hidden_mlp ffn_hidden_size shared_intermediate_size "
    "decoder_ffn_dim dim_ff expert_ffn_hidden_size hidden_dim_ffn intermediate_dim "
    "dense_intermediate_size intermediate_size_mlp d_inner moe_shared_expert_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads decoder_num_attention_heads encoder_num_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_local_experts num_experts "
    "n_routed_experts moe_num_experts attention_heads mamba_n_heads mamba_num_heads "
    "linear_num_value_heads linear_num_heads n_mamba_heads lm_head_num compress_ratio "
    "attention_chunk_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_decoder_layers num_encoder_layers num_key_value_heads num_kv_heads "
    "num_experts_per_tok num_experts_per_token moe_k top_k num_selected_experts "
    "encoder_num_hidden_layers decoder_num_hidden_layers vision_layers linear_num_key_heads "
    "n_group topk_group n_groups decoder_num_key_value_heads encoder_num_key_value_heads "
    "num_global_key_value_heads depth num_expert_group",
    1: "first_k_dense_replace n_shared_experts num_nextn_predict_layers mamba_n_groups "
    "num_shared_experts moe_layer_start_index num_codebooks_to_predict expand mamba_expand",
    8: "head_dim kv_channels d_kv qk_nope_head_dim v_head_dim attention_head_dim index_head_dim "
    "linear_key_head_dim linear_value_head_dim linear_head_dim state_size mamba_d_state "
    "global_head_dim ssm_state_size mamba_d_head mamba_head_dim mamba_headdim attention_head_size",
    16: "q_lora_rank kv_lora_rank index_topk qk_head_dim rank mamba_dt_rank",
    WINDOW: "sliding_window attention_window local_attention window_size_text sliding_window_size",
}  # fmt: skip
FIXED: dict[str, Any] = {
    **{name: size for size, names in SIZES.items() for name in names.split()},
    "use_sliding_window": True, "max_window_layers": 0, "qk_rope_head_dim": 8, "index_n_heads": 4,
    "hidden_dropout_prob": 0.0, "mask_time_prob": 0.0, "layerdrop": 0.0, "use_mamba_kernels": False,
    "mamba_d_ssm": 32, "index_kpool": 4,
}  # fmt: skip
# what the tables above do not say, by model type
OF_TYPE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": {"num_key_value_heads": 4},
    "cosmos3_edge_text": {"num_key_value_heads": 4},
    "deepseek_v2": {"num_key_value_heads": 4},
    "donut-swin": {"embed_dim": 48, "window_size": 2},
    "dots1": {"num_key_value_heads": 4},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 1},
    "flaubert": {"emb_dim": 32},
    "glm5_next_text": {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
                       "qk_rope_head_dim": 0, "head_dim": 0, "qk_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"num_key_value_heads": 4, "num_expert_group": 1, "topk_group": 1},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "led": {"attention_window": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "longformer": {"attention_window": [4, 4]},
    "luke": {"entity_vocab_size": VOCABULARY, "entity_emb_size": 32},
    "maskformer-swin": {"embed_dim": 48, "window_size": 2},
    "nemotron_h": {"n_group": 1, "topk_group": 1},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 8, "indexer_compress_ratio": 4, "hc_lowrank": 8},
    "mistral4": {"num_key_value_heads": 4},
    "mt5": {"decoder_start_token_id": 0},
    # whose gradients its own cache breaks, and weights that train() scales
    "rwkv": {"attention_hidden_size": 32, "use_cache": False, "rescale_every": 0},
    "sam_hq_vision_model": {"output_channels": 32, "num_pos_feats": 16},
    "sam_vision_model": {"output_channels": 32, "num_pos_feats": 16},
    "swin": {"embed_dim": 48, "window_size": 2},
    "swinv2": {"embed_dim": 48, "window_size": 2},
    "t5": {"decoder_start_token_id": 0},
    "umt5": {"decoder_start_token_id": 0},
    "xlm": {"emb_dim": 32},
    # whose cache counts 64 channels of keys at least
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2, "chunk_size": 4,
              "use_cache": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_key_value_heads": 4, "attention_head_dim": 16, "n_mamba_heads": 2,
              "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"num_key_value_heads": 4, "num_query_groups": 4, "attention_head_dim": 16,
               "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3],
               "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# tried in turn where a configuration or a model of the sizes above is refused
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "qk_head_dim": 16, "rotary_dim": 8},
    {"layer_types": None, "num_hidden_layers": 4, "num_key_value_heads": 4},
    {"rope_parameters": {"mrope_section": [2, 1, 1]}},
    {"rope_parameters": {"mrope_section": [1, 1, 0]}},
    {"pad_token_id": 0, "head_dim": 8},
    {"pad_token_id": 0, "num_key_value_heads": 4, "qk_head_dim": 16, "rotary_dim": 8},
)
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")


def _layers(fields: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind that the default has, at most four and at least two of them."""
    lists = {n: fields[n] for n in _KINDS if isinstance(fields.get(n), list)}
    if not lists or not all(lists.values()):
        return {}
    length = len(next(iter(lists.values())))
    lists = {n: x for n, x in lists.items() if len(x) == length}
    first = {combination: i for i, combination in reversed(list(enumerate(zip(*lists.values()))))}
    chosen = sorted(first.values())
    each = {n: {x: i for i, x in reversed(list(enumerate(v)))} for n, v in lists.items()}
    if len(chosen) > 4:
        chosen = sorted({i for found in each.values() for i in found.values()})
    chosen = chosen if len(chosen) > 1 else chosen * 2
    found = {n: [x[i] for i in chosen] for n, x in lists.items()}
    return found | {"num_hidden_layers": len(chosen)}


def _rope(parameters: Any, fields: dict[str, Any]) -> Any:
    """Sections of multimodal rotary embeddings that fit the head."""
    if not isinstance(parameters, dict):
        return parameters
    if "mrope_section" in parameters:
        rotary = fields.get("qk_rope_head_dim") or fields.get("head_dim") or 8
        half = int(rotary * parameters.get("partial_rotary_factor", 1)) // 2
        third = half // 3 or half // 2
        sections = [half - 2 * third, third, third]
        return parameters | {"mrope_section": sections}
    return {n: _rope(x, fields) for n, x in parameters.items()}


def tiny_config(cls: type[PreTrainedConfig], other: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of few and small layers, with every kind of layer that the default has."""
    default = cls()
    fields = default.to_dict()
    given: dict[str, Any] = {}
    for name, value in fields.items():
        if name in FIXED and value is not None and isinstance(value, int | type(FIXED[name])):
            given[name] = FIXED[name]
        elif name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            given[name] = VOCABULARY - 1 - sum(map(ord, name)) % 8
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if name in fields and fields[name] is not None:
            given[name] = {"pad_token_id": 0, "eos_token_id": 2}.get(name, 1)
    given |= _layers(fields)
    if isinstance(fields.get("rope_parameters"), dict):
        given["rope_parameters"] = _rope(fields["rope_parameters"], fields | given)
    given |= OF_TYPE.get(cls.model_type, {})
    for name, value in other.items():
        if name in fields and isinstance(value, dict) and isinstance(fields[name], dict):
            given[name] = given.get(name, fields[name]) | value
        elif name in fields:
            given[name] = value
    for name, sub in (cls.sub_configs or {}).items():
        inner = getattr(default, name, None)
        if isinstance(inner, PreTrainedConfig):
            given[name] = tiny_config(type(inner), other)
        elif inner is not None and sub is not None and inspect.isclass(sub):
            given[name] = tiny_config(sub, other)
    return cls(**given)
