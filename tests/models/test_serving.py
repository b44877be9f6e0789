"""A pool of sequences that come and go: the tokens of each are those of decoding it alone."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.models import PrefixCache, StateCache
from slipstream.models.cache import CACHE
from tests.support.language_models import MODELS, assert_same, model, tokens

SLOTS = 3


class Request:
    """A prompt [1, T], what greedy decoding alone makes of it, and the tokens so far."""

    def __init__(self, m, prompt: Tensor, count: int) -> None:
        self.prompt, self.made = prompt, []
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        whole = m.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        self.want = whole[0, prompt.shape[1] :].tolist()
        self.cache: StateCache | None = None

    @property
    def done(self) -> bool:
        return len(self.made) >= len(self.want)

    @property
    def ids(self) -> Tensor:
        return torch.cat([self.prompt, torch.tensor([self.made], dtype=torch.long)], 1)


def likeliest(logits: Tensor) -> int:
    return int(logits[0, -1].argmax())


@pytest.mark.parametrize("name", ["hybrid", "mamba2"])
@pytest.mark.parametrize(
    "steps", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
@torch.no_grad()
def test_lifecycle_gives_tokens_of_sequential_decoding(name: str, steps: int) -> None:
    m, draw = model(name), random.Random(4)
    prefixes = PrefixCache(m)
    shared = tokens(1, 130, seed=7)
    example = m(shared[:, :2], use_cache=True)[CACHE]
    pool = example.pool(SLOTS, max_length=256)
    at = [x.data_ptr() for layer in pool.layers for x in (layer.state or {}).values()]
    slots: list[Request | None] = [None] * SLOTS
    waiting: list[Request] = []
    finished: list[Request] = []

    def start(slot: int) -> None:
        """A request that was preempted, or a new one: from a prefix, or in chunks of any size."""
        request = waiting.pop() if waiting else None
        if request is None:
            own = tokens(1, draw.randint(1, 30), seed=draw.randrange(1 << 20))
            kept = draw.choice((0, 64, 100, 130))
            request = Request(m, torch.cat([shared[:, :kept], own], 1), draw.randint(2, 12))
        if request.cache is None:
            ids = request.ids
            cache = prefixes.prefill(ids) if draw.random() < 0.7 else StateCache(len(pool.layers))
            while cache.get_seq_length() < ids.shape[1]:
                begin = cache.get_seq_length()
                out = m(ids[:, begin : begin + draw.randint(1, 50)], cache=cache, use_cache=True)
            request.made.append(likeliest(out.logits))
            request.cache = cache
        pool.put(slot, request.cache)
        request.cache, slots[slot] = None, request

    def verify(slot: int, request: Request) -> None:
        """Some drafts, right ones and a wrong one, of which the wrong are forgotten."""
        cache = pool.copy(slot)
        cache.activate_past_recording()
        done = len(request.made)
        drafts = [*request.want[done : done + draw.randint(0, 2)], draw.randrange(97)]
        out = m(torch.tensor([[request.made[-1], *drafts]]), cache=cache, use_cache=True)
        found = out.logits[0].argmax(-1).tolist()
        right = next(i for i in range(len(found)) if i == len(drafts) or drafts[i] != found[i])
        request.made += found[: right + 1]
        cache.crop(right - len(drafts))
        pool.put(slot, cache)

    for _ in range(steps):
        slot = draw.randrange(SLOTS)
        request = slots[slot]
        what = draw.random()
        if request is None:
            start(slot)
        elif what < 0.1:  # preempted: with its state, or to be run again from its tokens
            request.cache = pool.copy(slot) if what < 0.05 else None
            waiting.append(request)
            slots[slot] = None
            pool.put(slot, None)
        elif what < 0.3:
            verify(slot, request)
        else:  # all slots step; an empty one is padding
            last = [0 if r is None else r.made[-1] for r in slots]
            logits = m(torch.tensor(last)[:, None], cache=pool, use_cache=True).logits
            for r, row in zip(slots, logits):
                if r is not None:
                    r.made.append(likeliest(row[None]))
        for i, r in enumerate(slots):
            if r is not None and r.done:
                finished.append(r)
                slots[i] = None
                pool.put(i, None)
    assert len(finished) > steps // 10
    assert prefixes.reused > 64
    for request in finished:
        assert request.made[: len(request.want)] == request.want
    assert at == [x.data_ptr() for layer in pool.layers for x in (layer.state or {}).values()]


@torch.no_grad()
def test_prefixes_are_reused_and_forgotten() -> None:
    m, ids = model("hybrid"), tokens(1, 200)
    prefixes = PrefixCache(m)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    want = m.generate(ids, **options)
    for reused in (0, 192):
        cache = prefixes.prefill(ids)
        assert cache.get_seq_length() == 192
        assert prefixes.reused == reused
        assert torch.equal(m.generate(ids, **{CACHE: cache}, **options), want)
    assert prefixes.prefill(ids[:, :64]).get_seq_length() == 0
    assert len(prefixes.caches) == 3
    prefixes.max_bytes = max(x.bytes() for x in prefixes.caches.values())
    prefixes.prefill(ids)
    assert len(prefixes.caches) == 1
    with pytest.raises(ValueError, match="input_ids"):
        prefixes.prefill(tokens(2, 70))
    with pytest.raises(ValueError, match="multiple of 64"):
        PrefixCache(m, every=100)


AT_ONCE = (
    "attention", "delta_net", "dsa", "forgetting_attn", "gated_deltanet", "gla", "hybrid", "kda",
    "mamba2", "mla", "msa", "qsa", "retention", "rwkv7",
)  # fmt: skip


def prefixes_of(m, ids: Tensor, first: int, at_once: bool, **options) -> PrefixCache:
    """Prefixes of a prompt, once its first tokens have been there."""
    made = PrefixCache(m, **options)
    if not at_once:
        made._leaves_states = lambda: False
    made.prefill(ids[:, :first])
    made.prefill(ids)
    return made


@pytest.mark.parametrize("name", sorted(MODELS))
@torch.no_grad()
def test_one_call_leaves_all_prefixes(name: str) -> None:
    """Where it does, and otherwise a call for each."""
    mlps = ["rwkv7", "rwkv7"] if name == "rwkv7" else None
    m, ids, calls = model(name, mlps=mlps), tokens(1, 300), []
    m.model.register_forward_pre_hook(lambda *_: calls.append(1))
    found = prefixes_of(m, ids, 100, True)
    # 64 tokens first, then the other 192
    assert len(calls) == (2 if name in AT_ONCE else 4)
    want = prefixes_of(m, ids, 100, False)
    assert [len(x) for x in found.caches] == [64, 128, 192, 256]
    for prefix, cache in found.caches.items():
        assert cache.get_seq_length() == len(prefix)
        for layer, other in zip(cache.layers, want.caches[prefix].layers, strict=True):
            assert layer.seen == other.seen and layer.token_states == other.token_states
            mine, its = layer.state or {}, other.state or {}
            assert mine.keys() == its.keys()
            for key, x in mine.items():
                assert x.dtype == its[key].dtype and x.is_contiguous()
                assert_same(x, its[key])


@torch.no_grad()
def test_prefixes_in_8_bits() -> None:
    m, ids = model("hybrid"), tokens(1, 300)
    found, want = (prefixes_of(m, ids, 100, x, key_dtype=torch.int8) for x in (True, False))
    for prefix, cache in found.caches.items():
        for layer, other in zip(cache.layers, want.caches[prefix].layers, strict=True):
            mine, its = (x.wide(torch.float32) for x in (layer, other))
            assert (layer.state or {}).keys() == (other.state or {}).keys()
            torch.testing.assert_close(mine, its, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_pool_refuses_what_is_none() -> None:
    m, ids = model("gla"), tokens(2, 5)
    cache = m(ids, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="pool"):
        cache.put(0, None)
    with pytest.raises(ValueError, match="one row, got 2"):
        cache.pool(3).put(0, cache)
    with pytest.raises(ValueError, match="rows: want 0 or more, got -1"):
        cache.pool(-1)
    for row in (3, -1):
        with pytest.raises(ValueError, match=f"row: want one of 3, got {row}"):
            cache.pool(3).put(row, None)
    rounded = StateCache(len(m.model.layers), key_dtype=torch.int8)
    m(ids[:1], cache=rounded)
    for pool, other in ((cache.pool(3), rounded), (rounded.pool(3), cache.copy())):
        with pytest.raises(ValueError, match="key_dtype"):
            pool.put(0, other)


def test_continuous_batching_is_refused_by_name() -> None:
    """transformers' would take most of the memory for pages, and the process with it."""
    m: Any = model("rwkv7")
    calls = [m.generate_batch, m.init_continuous_batching]
    calls += [lambda _: m.continuous_batching_context_manager().__enter__()]
    for call in calls:
        with pytest.raises(NotImplementedError, match="continuous batching: is not implemented"):
            call([[1, 2, 3]])


@pytest.mark.parametrize("name", ["attention", "hybrid"])
@torch.no_grad()
def test_lengths_of_a_pool_go_with_its_rows(name: str) -> None:
    m, ids = model(name), tokens(1, 71)
    pool = m(ids[:, :2], use_cache=True)[CACHE].pool(3)
    for row, count in ((0, 70), (1, 3)):
        pool.put(row, m(ids[:, :count], use_cache=True)[CACHE])
    pool.reorder_cache(torch.tensor([1, 2, 2]))
    assert pool.lengths == [3, 0, 0] and pool.get_seq_length() == 3
    pool.put(1, m(ids[:, :70], use_cache=True)[CACHE])
    pool.batch_select_indices(torch.tensor([1, 0, 1]))
    pool.batch_select_indices(torch.tensor([True, True, False]))
    pool.batch_repeat_interleave(2)
    assert pool.lengths == [70, 70, 3, 3] and pool.get_seq_length() == 70
    of_short_rows = pool.copy(0).pool(2)
    of_short_rows.put(0, pool.copy(0))
    of_short_rows.batch_select_indices(torch.tensor([1]))
    assert of_short_rows.lengths == [0] and of_short_rows.get_seq_length() == 0
    of_short_rows.batch_select_indices(torch.tensor([], dtype=torch.int64))
    assert of_short_rows.lengths == [] and of_short_rows.get_seq_length() == 0
    more = tokens(4, 1, seed=4)
    got = m(more, cache=pool, use_cache=True).logits
    for row, count in enumerate((70, 70, 3, 3)):
        whole = torch.cat([ids[:, :count], more[row : row + 1]], 1)
        assert_same(got[row : row + 1], m(whole).logits[:, -1:])
        last = m(ids[:, :1], cache=pool.copy(row), use_cache=True).logits
        assert_same(last, m(torch.cat([whole, ids[:, :1]], 1)).logits[:, -1:])
    with pytest.raises(NotImplementedError, match="crop: want no pool"):
        pool.crop(-1)
    pool.reset()
    assert pool.lengths == [0, 0, 0, 0]
    assert_same(m(more, cache=pool, use_cache=True).logits, m(more).logits)
    pool.reset()
    pool.put(1, m(ids[:, :3], use_cache=True)[CACHE])
    got = m(more, cache=pool, use_cache=True).logits
    assert_same(got[1:2], m(torch.cat([ids[:, :3], more[1:2]], 1)).logits[:, -1:])
    assert_same(got[2:], m(more[2:]).logits)
