"""Patched models in calls on a cache, beside one call of all tokens."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from slipstream.integrations.patching import CACHES
from slipstream.integrations.transformers import NAME, patch
from tests.support.linear_models import linear_classes, next_cache, own_cache, tiny
from tests.support.tiny_models import build

pytestmark = pytest.mark.filterwarnings("ignore")
# Mamba-1 with one scan, with norms, in a hybrid, and with a scan for each head; Mamba-2 whose
# limits of dt have either name
SAMPLE = (
    "FalconMambaForCausalLM", "JambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM",
    "NemotronHForCausalLM", "ZambaForCausalLM", "Zamba2ForCausalLM",
)  # fmt: skip
# of which the indexer of transformers' own chooses other keys
NOT_ALIKE = ("Qwen4ExpForCausalLM",)


def _limited(config: Any) -> Any:
    """dt is clamped at most tokens."""
    for each in (config, config.get_text_config()):
        if hasattr(each, "time_step_limit"):
            each.time_step_limit = (0.5, 0.7)
        if hasattr(each, "time_step_min"):
            each.time_step_min = 0.6
    return config


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *SAMPLE,
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in linear_classes()
            if x not in (*SAMPLE, *NOT_ALIKE)
        ),
    ],
)
@torch.no_grad()
def test_calls_on_a_cache_equal_one(name: str, masked: bool) -> None:
    """Of several tokens and of one; masked: with a mask as long as the text, padded on the left."""
    cls, config, weights, inputs, _ = tiny(name)
    patch()
    model = build(cls, _limited(config), NAME, weights)
    ids = inputs["input_ids"]
    mask = torch.ones_like(ids)
    if masked:
        mask[1, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def run(begin: int, end: int, cache: dict[str, Any]) -> Any:
        options: dict[str, Any] = {"position_ids": positions[:, begin:end], **cache}
        if masked:
            options["attention_mask"] = mask[:, :end]
        return model(ids[:, begin:end], use_cache=True, **options)

    want = run(0, ids.shape[1], {}).logits[mask.bool()]
    parts, cache = [], own_cache(model)
    for begin, end in ((0, 4), (4, 7), (7, 8), (8, 9), (9, ids.shape[1])):
        out = run(begin, end, cache)
        cache = next_cache(out, cache)
        parts.append(out.logits)
    got = torch.cat(parts, 1)[mask.bool()]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("patched", [False, True])
@torch.no_grad()
def test_one_row_caches_are_expanded_first(patched: bool) -> None:
    """transformers' models refuse two prompts behind a cache of one row, patched or not, and take
    them once batch_repeat_interleave has repeated it. Its layers for states have no such method."""
    cls, config, weights, inputs, _ = tiny("Lfm2ForCausalLM")
    if patched:
        patch()
    model = build(cls, config, NAME if patched else "sdpa", weights)
    ids = inputs["input_ids"].clone()
    ids[:, :5] = ids[:1, :5]
    prefix = model(ids[:1, :5], use_cache=True)
    word = next(x for x in CACHES if x in prefix)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        model(ids[:, 5:], **{word: prefix[word]})
    cache = model(ids[:1, :5], use_cache=True)[word]
    cache.batch_repeat_interleave(2)
    got, want = model(ids[:, 5:], **{word: cache}).logits, model(ids).logits[:, 5:]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
