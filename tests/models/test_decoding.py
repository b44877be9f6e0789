"""Decoding: steps and prompts as graphs, drafts, chunked prefill, inference mode. Caches are in
test_state_cache.py."""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

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
from slipstream.runtime import token_ids
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


def test_prompts_in_turns_are_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more lengths than there are graphs each is captured once; what is in use stays."""
    monkeypatch.setattr(graphs, "MAX_PROMPTS", 2)
    m, made = model("gla"), []
    captured = graphs.Decoding._captured

    def capture(step: Any, inputs: Any, device: Any) -> Any:
        if getattr(step, "func", None) is graphs._prompt_step:
            made.append(inputs[0].shape[1])
        return captured(step, inputs, device)

    monkeypatch.setattr(graphs.Decoding, "_captured", staticmethod(capture))
    generate(m, tokens(2, 9))  # whose steps make the buffers of a new cache
    for n in (6, 6, 5, 5, 6, 4, 4, 3, 6, 3, 6, *(7, 8, 3, 4, 5, 6) * 3):
        ids = tokens(2, n)
        assert torch.equal(generate(m, ids), without_graphs(m, ids))
    assert made == [6, 5, 4, 3, 7, 8]


def test_step_graph_is_of_one_room() -> None:
    decoding, cache = graphs.Decoding(), SimpleNamespace(graphs={})
    decoding.active = True
    ids = tokens(2, 1)
    given = [((ids,), 64), ((ids,), 128), ((ids[:1],), 64), ((ids.int(),), 64), ((ids, ids), 64)]
    steps = [lambda *inputs, n=n: inputs[0] + n for n in range(len(given))]
    for _ in range(3):
        for step, (inputs, room) in zip(steps, given):
            got = decoding.run(step, cast(Any, cache), inputs, room, ids.device)
            assert torch.equal(got, step(*inputs))
    assert decoding.captures == decoding.eager == len(given)


def test_wrong_ids_of_a_replayed_prompt_raise() -> None:
    """A replay has the kernel that reports them, as here a CPU does not, but asks for no report."""
    m, ids = model("gla"), tokens(2, 6)
    for _ in range(3):
        generate(m, ids)
    slots = token_ids.slots_for(ids)
    slots[:6] = torch.tensor([1, 3 + 1, 149, 50, 2, 0])
    with pytest.raises(token_ids.WrongId, match=r"input_ids: id 149 at position \(1, 1\)"):
        generate(m, ids)
    assert torch.equal(generate(m, ids), without_graphs(m, ids))


def test_prompt_of_a_foreign_table_refuses_ids() -> None:
    """Which on a device would end the process's use of it."""
    m: Any = model("gla")
    ids = tokens(2, 6)
    table = torch.nn.Embedding(*m.model.embed_tokens.weight.shape)
    table.weight = m.model.embed_tokens.weight
    m.model.embed_tokens = table
    wrong = ids.clone()
    wrong[1, 3] = table.num_embeddings
    want = without_graphs(m, ids)
    for n in range(4):
        # here the table itself looks at the ids, which no capture permits
        said = (
            pytest.warns(RuntimeWarning, match="prompt of 2 x 6 tokens")
            if n == 2
            else nullcontext()
        )
        with said:
            assert torch.equal(generate(m, ids), want)
    with pytest.raises(token_ids.WrongId, match="input_ids"):
        generate(m, wrong)


def test_prompts_with_tables_of_positions_have_a_graph() -> None:
    """As Qwen-VL's of text, [3, B, T]."""
    m, ids = model("attention"), tokens(2, 6)
    options = {"position_ids": torch.arange(6).expand(3, 2, 6)}
    want = without_graphs(m, ids, **options)
    for _ in range(3):
        assert torch.equal(generate(m, ids, **options), want)
    (cache,) = m.decoding.caches.values()
    assert [bool(x) for key, x in cache.graphs.items() if key[0] == graphs.PROMPT] == [True]


@pytest.mark.parametrize("short", [False, True], ids=["of any kind", "of memory"])
def test_failed_capture_of_a_prompt_is_said_once(
    short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tried again where memory was short, which an error of the capture's end may hide."""
    m, ids = model("hybrid"), tokens(2, 6)
    want = without_graphs(m, ids)
    captured, tries = graphs.Decoding._captured, []

    def capture(step: Any, inputs: Any, device: Any) -> Any:
        if getattr(step, "func", None) is graphs._prompt_step:
            tries.append(inputs[0].shape)
            if len(tries) < 3:
                step.func(*step.args, *inputs)  # which has written into the cache
                try:
                    raise torch.OutOfMemoryError("none left") if short else ValueError("no")
                finally:
                    raise RuntimeError("capture was invalidated")
        return captured(step, inputs, device)

    monkeypatch.setattr(graphs.Decoding, "_captured", staticmethod(capture))
    generate(m, tokens(2, 9))  # whose steps make the buffers of a new cache
    assert torch.equal(generate(m, ids), want)
    words = "prompt of 2 x 6 tokens runs without a graph, since .* capture was invalidated"
    with pytest.warns(RuntimeWarning, match=words):
        assert torch.equal(generate(m, ids), want)
    for _ in range(6):  # a warning would be an error
        assert torch.equal(generate(m, ids), want)
    assert len(tries) == (3 if short else 1) and m.decoding.reason is None
    (cache,) = m.decoding.caches.values()
    assert [bool(x) for key, x in cache.graphs.items() if key[0] == graphs.PROMPT] == [short]


def of_mixers(*mixers: str) -> SlipstreamForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    return SlipstreamForCausalLM(SlipstreamConfig(mixers=list(mixers), **sizes)).eval()


@pytest.mark.parametrize("mixers", [("rwkv7",), ("gla", "attention")], ids=str)
@pytest.mark.parametrize("modes", [(True, False, True), (False, True, False)], ids=str)
def test_generate_in_and_out_of_inference_mode(mixers: tuple, modes: tuple) -> None:
    m, ids = of_mixers(*mixers), torch.randint(3, 23, (3, 5))
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    found, captures = [], []
    for mode in modes:
        with torch.inference_mode(mode):
            found.append(m.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist())
        captures.append(m.decoding.captures)
    assert found[0] == found[1] == found[2] and m.decoding.reason is None
    if modes[0]:  # whose graphs are of no use to later calls
        assert captures[1] > captures[0]
