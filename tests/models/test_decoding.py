"""Decoding: steps as graphs, drafts, chunked prefill. Caches are in test_state_cache.py."""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import LogitsProcessor, LogitsProcessorList

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, StateCache, graphs, greedy
from slipstream.models.cache import CACHE
from slipstream.nn import decoding
from slipstream.ops import rotary_tables
from tests.support import language_models
from tests.support.language_models import (
    assert_same,
    every_kind,
    generate,
    model,
    tokens,
    without_graphs,
)

pytestmark = pytest.mark.usefixtures("graphs_on_a_cpu")

# steps as graphs


@every_kind
def test_prompts_by_graphs_give_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of two lengths in turns, of which the third of a length is replayed; one with padding
    and one too long have no graph."""
    monkeypatch.setattr(graphs, "MAX_PROMPT_TOKENS", 24)
    m, prompts = model(name), [tokens(2, n) for n in (6, 11)]
    few = {"max_new_tokens": 5}
    want = [without_graphs(m, ids, **few) for ids in prompts]
    for ids, found in [*zip(prompts, want)] * 4:
        assert torch.equal(generate(m, ids, **few), found)
    (cache,) = m.decoding.caches.values()
    made = [key for key, x in cache.graphs.items() if key[0] == graphs.PROMPT and x]
    assert len(made) == 2 and m.decoding.captures == 1
    mask = torch.ones_like(prompts[0])
    mask[0, :2] = 0
    padded, long = {"attention_mask": mask, **few}, tokens(2, 13)
    assert torch.equal(generate(m, prompts[0], **padded), without_graphs(m, prompts[0], **padded))
    found = without_graphs(m, long, **few)
    for _ in range(3):
        assert torch.equal(generate(m, long, **few), found)
    assert made == [key for key, x in cache.graphs.items() if key[0] == graphs.PROMPT and x]


# on a CPU selected attention asks which keys any query sees, which no graph holds
@pytest.mark.parametrize("name", sorted({*language_models.MODELS} - {*language_models.INDEXED}))
def test_generate_captures_once_per_batch_size(name: str) -> None:
    m, ids = model(name), tokens(3, 6)
    want = without_graphs(m, ids)
    assert (m.decoding.captures, m.decoding.replays, m.decoding.eager) == (0, 0, 0)
    for _ in range(2):
        assert torch.equal(generate(m, ids), want)
        assert torch.equal(generate(m, ids[:1]), want[:1])
    # of 8 steps after the prompt the first of each batch size runs as it is written
    assert m.decoding.captures == 2
    assert (m.decoding.eager, m.decoding.replays) == (2, 4 * 8 - 2)
    assert m.decoding.reason is None


@pytest.mark.parametrize(
    "options",
    [{"embedding_norm": True}, {"residual_in_fp32": True}, {"attention_residuals": 1}],
    ids=lambda options: next(iter(options)),
)
@torch.no_grad()
def test_step_is_a_call_of_the_model(options: dict[str, Any]) -> None:
    """Whatever stands around the layers is in a step too."""
    config = SlipstreamConfig(
        vocab_size=97, hidden_size=32, num_heads=2, mixers=["rwkv7", "gla"], **options
    )
    m, ids = SlipstreamForCausalLM(config).eval().model, tokens(2, 7)
    for norm in (m.embed_norm, m.norm):
        if norm is not None:
            norm.weight.uniform_(0.5, 2)
    cache = StateCache(2)
    m(ids[:, :6], cache=cache)
    assert_same(m.step(ids[:, 6:], cache), m(ids).last_hidden_state[:, 6:])


def test_generate_goes_on_where_a_capture_failed_halfway(monkeypatch: pytest.MonkeyPatch) -> None:
    m, ids = model("hybrid"), tokens(1, 6)
    want, step = step_logits(model("hybrid"), ids), m.model.step

    def refusing(*args: Any) -> Tensor:
        h = step(*args)
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("no mode")
        return h

    monkeypatch.setattr(m.model, "step", refusing)
    with pytest.warns(RuntimeWarning, match="no mode"):
        torch.testing.assert_close(step_logits(m, ids), want)


def test_generate_by_graphs_with_padding_and_eos() -> None:
    class Never(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.index_fill(1, torch.tensor([4]), -torch.inf)

    m, ids = model("hybrid"), tokens(3, 7)
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    eos = int(generate(m, ids, attention_mask=mask)[1, 10])
    options = {
        "attention_mask": mask,
        "max_new_tokens": 20,
        "eos_token_id": eos,
        "logits_processor": LogitsProcessorList([Never()]),
    }
    sampled = {**options, "do_sample": True, "top_k": 20, "temperature": 0.7}

    def outputs() -> list[Tensor]:
        torch.manual_seed(2)
        return [generate(m, ids, **options), generate(m, ids, **sampled)]

    before = m.decoding.captures  # of greedy steps, which choose their tokens themselves
    m.decoding.enabled = False
    want = outputs()
    m.decoding.enabled = True
    torch.testing.assert_close(outputs(), want, rtol=0, atol=0)
    assert m.decoding.captures == before + 1
    beams = {"attention_mask": mask, "num_beams": 2, "max_new_tokens": 6}
    assert torch.equal(generate(m, ids, **beams), without_graphs(m, ids, **beams))
    assert m.decoding.captures == before + 2


@pytest.mark.parametrize("name", ["attention", "mla", "retention", "hybrid"])
@torch.no_grad()
def test_step_makes_rotary_tables_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m, ids = model(name), tokens(2, 9)
    made = []

    def counted(positions: Tensor, *args: Any, **options: Any) -> Any:
        made.append(positions)
        return rotary_tables(positions, *args, **options)

    monkeypatch.setattr(decoding, "rotary_tables", counted)
    cache = m(ids[:, :7], use_cache=True)[CACHE]
    cache.reserve(2)
    for t in (7, 8):
        made.clear()
        got = m.lm_head(m.model.step(ids[:, t : t + 1], cache))
        cache.step_on(1)
        assert [x.tolist() for x in made] == [[[t], [t]]]
    assert_same(got, m(ids).logits[:, 8:])


def test_tables_of_first_positions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One table of 4,096 positions serves all shorter prompts; longer ones share a larger one."""
    made = []

    def counted(positions: Tensor, *args: Any, **options: Any) -> Any:
        made.append(positions.shape[1])
        return rotary_tables(positions, *args, **options)

    monkeypatch.setattr(decoding, "rotary_tables", counted)
    decoding._lasting_tables.cache_clear()
    for n in (3, 4096, 4097, 16384, 16385, 5):
        got = decoding.first_tables(torch.empty(2, n, 8), 6, 100.0)
        want = rotary_tables(torch.arange(n)[None], 6, base=100.0)
        assert all(map(torch.equal, got, want))
    assert made == [4096, 16384, 16385]


@pytest.mark.parametrize("name", ["hybrid", "rwkv7"])
def test_greedy_steps_end_where_generate_does(name: str) -> None:
    """Whatever ends the sequences, at whatever step; with more tokens than the last time, too."""
    m, ids = model(name), tokens(3, 7)
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    options: dict[str, Any] = {"attention_mask": mask, "eos_token_id": None}
    whole = generate(m, ids, max_new_tokens=40, **options)
    assert whole.shape[1] == 47
    ends = [None, [int(whole[0, 7]), 5], [int(x) for x in whole[:, 12]], int(whole[2, 20]), 98]
    for eos, count in itertools.product(ends, (1, 2, 40)):
        options |= {"eos_token_id": eos, "max_new_tokens": count}
        got, want = generate(m, ids, **options), without_graphs(m, ids, **options)
        assert torch.equal(got, want), (eos, count)
    length = m.decoding.caches[3].max_length or 0
    generate(m, ids, max_new_tokens=300, attention_mask=mask)
    assert (m.decoding.caches[3].max_length or 0) > length and m.decoding.reason is None
    assert torch.equal(generate(m, ids, max_new_tokens=40, attention_mask=mask), whole)


def test_generate_captures_anew_where_weights_moved() -> None:
    m, ids = model("hybrid"), tokens(1, 6)
    generate(m, ids)
    other = model("hybrid", initializer_range=0.3)
    m.load_state_dict(other.state_dict())  # in place: the graph reads the new weights
    assert torch.equal(generate(m, ids), generate(other, ids))
    assert m.decoding.captures == 1
    m.load_state_dict(model("hybrid").state_dict(), assign=True)
    m.tie_weights()
    assert torch.equal(generate(m, ids), generate(model("hybrid"), ids))
    assert m.decoding.captures == 2
    m.double()
    assert generate(m, ids).shape == (1, 15)
    assert m.decoding.captures == 3
    m.decoding.free()
    generate(m, ids)
    assert m.decoding.captures == 4


def step_logits(m: Any, ids: Tensor, **options) -> Tensor:
    """[steps, N, V] of generate."""
    seen: list[Tensor] = []

    class Seen(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(scores.clone())
            return scores

    generate(m, ids, logits_processor=LogitsProcessorList([Seen()]), **options)
    return torch.stack(seen)


def test_generate_captures_anew_for_the_callers_cache() -> None:
    m, ids = model("hybrid"), tokens(1, 6)
    other = model("hybrid", initializer_range=0.3)
    cache = StateCache(len(m.model.layers), max_length=64)
    for _ in range(2):
        generate(m, ids, **{CACHE: cache})
        cache.reset()
    assert m.decoding.captures == 1
    m.load_state_dict(other.state_dict(), assign=True)
    m.tie_weights()
    assert torch.equal(step_logits(m, ids, **{CACHE: cache}), step_logits(other, ids))
    cache.reset()  # and with another model's
    m = model("hybrid")
    assert torch.equal(step_logits(m, ids, **{CACHE: cache}), step_logits(m, ids))


def test_generate_in_several_threads() -> None:
    """One of them has the graphs, and none another's cache."""
    m, inputs = model("hybrid"), [tokens(1, 6, seed=i) for i in range(4)]
    want = [generate(m, ids) for ids in inputs]

    def run(first: int) -> None:
        for i in range(8):
            at = (first + i) % 4
            got = generate(m, inputs[at], **({"prompt_lookup_num_tokens": 2} if i % 3 == 2 else {}))
            assert torch.equal(got, want[at])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(run, range(4)))
    finally:
        sys.setswitchinterval(before)
    replays = m.decoding.replays
    assert torch.equal(generate(m, inputs[0]), want[0])
    assert m.decoding.replays > replays


def test_generate_without_graphs_beside_hooks() -> None:
    m, ids, seen = model("gla"), tokens(1, 6), []
    handle = m.get_submodule("model.layers.1.mixer.q_proj").register_forward_hook(
        lambda *_: seen.append(1)
    )
    generate(m, ids)
    assert len(seen) == 9
    assert m.decoding.captures == 0
    assert "model.layers.1.mixer.q_proj has a hook" in (m.decoding.reason or "")
    handle.remove()
    seen.clear()
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    generate(m, ids)
    assert seen.count(m.get_submodule("model.layers.1.mixer")) == 9
    assert "a hook of all modules" in (m.decoding.reason or "")
    handle.remove()
    generate(m, ids)
    assert m.decoding.captures == 1


# what transformers does with a cache that can forget


@pytest.mark.parametrize("name", ["gated_deltanet", "rwkv7", "mamba2", "attention", "hybrid"])
def test_assisted_generation_gives_greedy_tokens(name: str) -> None:
    m, ids = model(name), tokens(1, 12)
    ids = torch.cat([ids, ids], 1)
    options = {"max_new_tokens": 24}
    want = generate(m, ids, **options)
    assert torch.equal(generate(m, ids, prompt_lookup_num_tokens=4, **options), want)
    # a draft that agrees often, and one that never does
    near, far = model(name), model("gla", initializer_range=0.5)
    with torch.no_grad():
        for p in near.parameters():
            p.add_(torch.randn_like(p), alpha=2e-3)
    for draft in (near, far):
        assert torch.equal(generate(m, ids, assistant_model=draft, **options), want)
    # of a model whose steps take drafts, graphs verify them
    assert ("drafts" in (m.decoding.reason or "")) != greedy.verifies(m)
    replays = m.decoding.replays
    assert torch.equal(generate(m, ids, **options), want)
    # graphs that verify drafts take the place of the step's, which is captured once more
    assert m.decoding.replays >= replays + 22
    assert m.decoding.reason is None


@every_kind
def test_chunked_prefill_gives_the_same_tokens(name: str) -> None:
    m, ids = model(name), tokens(2, 23)
    want = generate(m, ids)
    for size in (1, 8, 64):
        assert torch.equal(generate(m, ids, prefill_chunk_size=size), want)
    mask = torch.ones_like(ids)
    ids[0, :9], mask[0, :9] = 0, 0
    want = generate(m, ids, attention_mask=mask)
    for size in (1, 6):
        assert torch.equal(generate(m, ids, attention_mask=mask, prefill_chunk_size=size), want)


@pytest.mark.parametrize("name", ["gla", "hybrid"])
@pytest.mark.parametrize("records", [False, True])
@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_call_without_tokens_leaves_a_cache_as_it_is(
    name: str, records: bool, padded: bool
) -> None:
    m, ids, more = model(name), tokens(2, 8), tokens(2, 2, seed=4)
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, : 3 * padded] = 0
    cache = StateCache(len(m.model.layers))
    if records:
        cache.activate_past_recording()
    for part in (ids[:, :0], ids, ids[:, :0]):
        seen = mask[:, : cache.get_seq_length() + part.shape[1]]
        got = m(part, cache=cache, use_cache=True, attention_mask=seen).logits
        assert got.shape[1] == part.shape[1]
    got = m(more, cache=cache, use_cache=True, attention_mask=mask).logits
    assert_same(got, m(torch.cat([ids, more], 1), attention_mask=mask).logits[:, -2:])
