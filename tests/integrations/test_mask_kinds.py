"""attn_implementation="slipstream" in models that differ in what their attention asks for; the
masks of masks.py equal those of transformers' mask function."""

import copy
import importlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from transformers import masking_utils as hf

from slipstream.integrations import masks
from slipstream.integrations import transformers as ours
from slipstream.integrations.transformers import slipstream_mask

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": 0,
}  # fmt: skip
LLAMA4: dict[str, Any] = {
    **TEXT, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48,
    "layer_types": ["chunked_attention", "full_attention"],
}  # fmt: skip


def pair(name: str, config: Any) -> tuple[Any, Any]:
    """The same random model with "eager" and with ours."""
    cls = getattr(transformers, name)
    eager = cls._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for p in eager.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.25)
    slip = cls._from_config(copy.deepcopy(config), attn_implementation="slipstream").eval()
    slip.load_state_dict(eager.state_dict())
    return eager, slip


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(3, 61, (rows, tokens))


def first(output: Any) -> Tensor:
    return output.logits if "logits" in output else output.last_hidden_state


def assert_same(models: tuple[Any, Any], live: Tensor | None = None, **inputs: Any) -> None:
    want, got = (first(model(**inputs)) for model in models)
    if live is not None:
        want, got = want[live], got[live]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("source", "target"), [(13, 7), (9, 9), (5, 8)])
def test_cross_attention_sees_the_keys_of_the_encoder(source: int, target: int) -> None:
    models = pair("BartForConditionalGeneration", transformers.BartConfig(**BART))
    given = {"input_ids": ids(2, source), "decoder_input_ids": ids(2, target)}
    assert_same(models, **given)
    for side in (slice(0, 3), slice(-3, None)):
        mask = torch.ones(2, source, dtype=torch.int64)
        mask[1, side] = 0
        assert_same(models, attention_mask=mask, **given)
        assert_same(models, decoder_attention_mask=torch.ones(2, target), attention_mask=mask, **given)  # fmt: skip # noqa: E501


def test_bidirectional_windows_are_those_of_the_mask_function() -> None:
    config = transformers.ModernBertConfig(
        **{**TEXT, "local_attention": 8, "num_hidden_layers": 3, "cls_token_id": 1,
           "sep_token_id": 2, "global_attn_every_n_layers": 3}
    )  # fmt: skip
    models = pair("ModernBertModel", config)
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, -5:] = 0
    assert_same(models, input_ids=ids(2, 24))
    assert_same(models, live=mask.bool(), input_ids=ids(2, 24), attention_mask=mask)


@pytest.mark.skipif(
    not hasattr(hf, "remap_positions_for_packed_sequence"), reason="not in this transformers"
)
def test_chunks_stay_within_packed_sequences() -> None:
    """As DataCollatorWithFlattening returns them with return_flash_attn_kwargs."""
    models = pair("Llama4ForCausalLM", transformers.Llama4TextConfig(**LLAMA4))
    lengths, given = (3, 9, 6), ids(1, 18)
    assert_same(models, input_ids=given)
    at = torch.cat([torch.arange(n) for n in lengths])[None]
    offsets = torch.tensor([0, 3, 12, 18], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}  # fmt: skip # noqa: E501
    assert_same(models, input_ids=given, position_ids=at, use_cache=False, **packed)
    with pytest.raises(ValueError, match="cu_seq_lens_q: want position_ids"):
        models[1](given, use_cache=False, **packed)


def test_position_bias_matches_eager() -> None:
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    models = pair("T5ForConditionalGeneration", config)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, -3:] = 0
    for padding in (None, mask):
        assert_same(
            models, input_ids=ids(2, 9), attention_mask=padding, decoder_input_ids=ids(2, 9)
        )


def attend(**kwargs: Any) -> Tensor:
    q = torch.randn(1, 2, 4, 8)
    return ours.slipstream_attention(torch.nn.Identity(), q, q, q, None, **kwargs)[0]


def test_unknown_arguments_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"block_table: .* of Identity"):
        attend(block_table=torch.zeros(1, 4, dtype=torch.int64))
    attend(block_table=None, output_attentions=False)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("kind", ["none", "rule", "bool", "added"])
def test_top_k_attention_sees_the_keys_selected(kind: str, blocks: bool) -> None:
    B, H, T, S, D = 2, 4, 3, 8, 8
    q, k, v = torch.randn(B, H, T, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)
    allowed = torch.ones(B, 1, T, S, dtype=torch.bool).tril(S - T)
    mask = {
        "none": None,
        "rule": ours.slipstream_mask(B, T, S, S - T, mask_function=hf.causal_mask_function),
        "bool": allowed,
        "added": torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min),
    }[kind]
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 3
    # -1 is none; 8 keys are three blocks, of which the last is shorter
    if blocks:
        given = {"block_indices": torch.tensor([[0, 1], [2, 0], [0, -1]]).expand(B, 2, T, 2)}
        keys = [[0, 1, 2, 3, 4, 5], [6, 7, 0, 1, 2], [0, 1, 2]]
    else:
        given = {"indices": torch.tensor([[0, 5], [3, 0], [0, -1]]).expand(B, T, 2)}
        keys = [[0, 5], [3, 0], [0]]
    seen = torch.zeros(T, S, dtype=torch.bool)
    for t, row in enumerate(keys):
        seen[t, row] = True
    got = ours.slipstream_attention(module, q, k, v, mask, **given)[0].transpose(1, 2)
    seen = seen if kind == "none" else seen & allowed
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(got, want)


def test_sinks_take_part_in_softmax() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    sinks = torch.randn(2, 4, 5, 1)
    got = ours.slipstream_attention(torch.nn.Identity(), q, k, v, None, sinks=sinks)[0]
    scores = torch.cat([q @ k.mT * 8**-0.5, sinks], -1)
    want = (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("told", ["cu_seq_lens_q", "seq_idx"])
def test_told_sequences_stay_apart(told: str, bias: bool) -> None:
    B, H, T, D = 2, 4, 6, 8
    q, k, v = torch.randn(3, B, H, T, D)
    ids = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2]])
    given = {"seq_idx": ids, "cu_seq_lens_q": torch.tensor([0, 2, 6, 7, 10, 12], dtype=torch.int32)}
    added = torch.randn(1, H, T, T)
    mask = ours.slipstream_mask(B, T, T, mask_function=hf.causal_mask_function)
    got = ours.slipstream_attention(
        torch.nn.Identity(), q, k, v, mask, position_bias=added if bias else None,
        **{told: given[told]},
    )[0].transpose(1, 2)  # fmt: skip
    seen = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
    entries = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    entries = entries + added if bias else entries
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=entries)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 61}),
        ("FalconForCausalLM", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 61}),  # noqa: E501
        ("GPTNeoForCausalLM", {"hidden_size": 32, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4, "vocab_size": 61}),  # noqa: E501
    ],
)  # fmt: skip
def test_models_without_the_interface_keep_their_attention(
    name: str, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ours._say_own.cache_clear()
    made = getattr(transformers, name).config_class(**config)
    with caplog.at_level(logging.WARNING):
        models = pair(name, made)
    assert models[1].config._attn_implementation in ("eager", "sdpa")
    assert sum(name in record.getMessage() for record in caplog.records) == 1
    assert_same(models, input_ids=ids(2, 9))


def test_models_within_a_model_are_asked_by_themselves() -> None:
    """SAM's images keep attention of their own, what decodes their masks does not."""
    sam = importlib.import_module("transformers.models.sam.modeling_sam")
    # it had SAM's configuration in older releases of transformers
    apart = sam.SamVisionEncoder.config_class is not sam.SamModel.config_class
    assert ours.uses_interface(sam.SamModel) == apart
    assert not ours.uses_interface(sam.SamVisionModel)


def test_masks_of_another_shape_or_dtype_are_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    for mask, error in (
        (torch.ones(1, 1, 4, 3, dtype=torch.bool), ValueError),
        (torch.ones(1, 3, 4, 4), ValueError),
        (torch.ones(1, 1, 4, 4, dtype=torch.int64), TypeError),
    ):
        with pytest.raises(error, match="attention_mask: want"):
            ours.slipstream_attention(torch.nn.Identity(), q, q, q, mask)


ROWS = 3
FUNCTIONS: dict[str, Callable] = {
    "causal": hf.causal_mask_function,
    "bidirectional": hf.bidirectional_mask_function,
    "causal window": hf.sliding_window_causal_mask_function(4),
    "causal window of one": hf.sliding_window_causal_mask_function(1),
    "bidirectional window": hf.sliding_window_bidirectional_mask_function(3),
    "chunks": hf.chunked_causal_mask_function(4, torch.zeros(ROWS, dtype=torch.int64)),
    "left window": hf.sliding_window_overlay(3),
}
# queries, keys, position of query 0, of key 0
SHAPES = ((9, 9, 0, 0), (5, 9, 4, 0), (5, 9, 0, 0), (1, 9, 8, 0), (9, 5, 0, 0), (4, 7, 8, 5))
PADDINGS = ("none", "nothing padded", "left", "right", "both", "hole", "a row")


def padding_of(kind: str, tokens: int) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.ones(ROWS, tokens, dtype=torch.bool)
    cuts = {"left": [slice(0, 2)], "right": [slice(-2, None)], "hole": [slice(2, 3)]}
    cuts |= {"both": [slice(0, 1), slice(-1, None)], "a row": [slice(None)]}
    for cut in cuts.get(kind, []):
        mask[1, cut] = False
    return mask


def dense(mask: Tensor | None, queries: int, keys: int) -> Tensor:
    if mask is None:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    elif masks.is_rule_mask(mask):
        mask = masks.visible(mask, ROWS, queries, keys)
    return mask.expand(ROWS, 1, queries, keys)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("static", [False, True])
def test_mask_equals_mask_function(name: str, static: bool) -> None:
    causal = "bidirectional" not in name
    for (T, S, q0, k0), kind in itertools.product(SHAPES, PADDINGS):
        padding = padding_of(kind, k0 + S)
        call = (ROWS, T, S, torch.tensor(q0) if static else q0, k0, FUNCTIONS[name], padding)
        got = slipstream_mask(
            *call, allow_is_causal_skip=causal, allow_is_bidirectional_skip=not causal
        )
        want = hf.sdpa_mask(*call, allow_is_causal_skip=False).expand(ROWS, 1, T, S)
        live = torch.ones(ROWS, T, dtype=torch.bool)
        if (padding is not None and causal) or "window" in name:
            # what a query on padding sees does not matter where positions do
            place = torch.arange(T) + q0
            at = torch.ones(ROWS, q0 + T + k0 + S, dtype=torch.bool)
            if padding is not None:
                at[:, : k0 + S] = padding
            live = at[:, place]
        live &= want[:, 0].any(-1)
        same = (dense(got, T, S) == want)[:, 0].all(-1)
        assert bool(same[live].all()), (name, T, S, q0, k0, kind)


@pytest.mark.skipif(
    not hasattr(hf, "remap_positions_for_packed_sequence"), reason="not in this transformers"
)
@pytest.mark.parametrize("name", ["causal", "causal window", "bidirectional window"])
def test_packed_mask_equals_mask_function(name: str) -> None:
    at = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0]]).expand(ROWS, -1)
    function = hf.and_masks(
        hf.remap_positions_for_packed_sequence(FUNCTIONS[name], at),
        hf.packed_sequence_mask_function(hf.find_packed_sequence_indices(at)),
    )
    got = slipstream_mask(ROWS, 9, 9, mask_function=function, allow_is_causal_skip=False)
    assert got is not None and masks.is_rule_mask(got)
    want = hf.sdpa_mask(ROWS, 9, 9, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(dense(got, 9, 9), want)


@pytest.mark.parametrize("name", [*FUNCTIONS, "packed"])
def test_padding_of_ones_keeps_the_mask(name: str) -> None:
    """So that a batch without padding needs neither its bounds nor a dense mask."""
    function = FUNCTIONS.get(name) or hf.and_masks(
        FUNCTIONS["causal"],
        hf.packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 4]).expand(ROWS, -1)),
    )
    for T, S, q0, k0 in SHAPES if name in FUNCTIONS else SHAPES[:1]:
        padding = padding_of("nothing padded", k0 + S)
        want, got = (
            slipstream_mask(ROWS, T, S, q0, k0, function, x, allow_is_causal_skip=False)
            for x in (None, padding)
        )
        assert (got is None) == (want is None)
        assert got is None or want is None or torch.equal(got, want), (T, S, q0, k0)
