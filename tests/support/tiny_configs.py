"""Configurations of transformers' models with few and small layers, made from the defaults."""

import inspect
from typing import Any

from transformers import PreTrainedConfig

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
