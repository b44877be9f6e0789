"""StateCache: fixed addresses, rows that are selected and repeated, gradients, rollback."""

import pickle
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.models import StateCache, rollback
from slipstream.models.cache import CACHE
from tests.support.language_models import (
    KINDS,
    MODELS,
    assert_same,
    every_kind,
    generate,
    model,
    tokens,
)

pytestmark = pytest.mark.usefixtures("graphs_on_a_cpu")


def addresses(cache: StateCache) -> list[int]:
    return [x.data_ptr() for layer in cache.layers for x in (layer.state or {}).values()]


@torch.no_grad()
def test_crop_says_what_was_asked_and_changes_nothing() -> None:
    m, ids = model("hybrid"), tokens(2, 6)
    cache = StateCache(len(m.model.layers))
    m(ids[:, :5], cache=cache, use_cache=True)
    with pytest.raises(ValueError, match=r"^crop: want at least -5, .* got -6$"):
        cache.crop(-6)
    with pytest.raises(RuntimeError, match=r"^crop: .* activate_past_recording\(\)"):
        cache.crop(-1)
    for count in (5, 9, 0):  # none of these takes a token away
        cache.crop(count)
    assert cache.get_seq_length() == 5
    assert_same(m(ids[:, 5:], cache=cache, use_cache=True).logits, m(ids).logits[:, 5:])


@every_kind
@torch.no_grad()
def test_cache_keeps_its_addresses(name: str) -> None:
    m, ids = model(name), tokens(2, 12)
    cache = StateCache(len(m.model.layers), max_length=40)
    want = m(ids).logits
    m(ids[:, :5], cache=cache, use_cache=True)
    at = addresses(cache)
    assert at
    for begin, end in ((5, 6), (6, 9), (9, 10)):
        m(ids[:, begin:end], cache=cache, use_cache=True)
    cache.reorder_cache(torch.tensor([1, 0]))
    got = m(ids[:, 10:].flip(0), cache=cache, use_cache=True).logits
    assert_same(got.flip(0), want[:, 10:])
    assert addresses(cache) == at
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_same(m(ids[:, :7], cache=cache, use_cache=True).logits, want[:, :7])
    assert_same(m(ids[:, 7:], cache=cache, use_cache=True).logits, want[:, 7:])
    assert addresses(cache) == at
    assert cache.is_compileable
    assert cache.get_max_length() == 40


@every_kind
@torch.no_grad()
def test_cache_selects_and_repeats_rows(name: str) -> None:
    m, ids = model(name), tokens(3, 8)
    cache = m(ids, use_cache=True)[CACHE]
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    assert cache.rows == 4
    more = tokens(4, 2, seed=5)
    whole = torch.cat([ids[[2, 2, 0, 0]], more], 1)
    assert_same(m(more, cache=cache, use_cache=True).logits, m(whole).logits[:, 8:])


def test_cache_of_gradients_stays() -> None:
    """A call without gradients that updates the cache changes no gradient of an earlier one."""
    m, ids = model("hybrid"), tokens(1, 9)
    out = m(ids[:, :6], use_cache=True)
    more = m(ids[:, 6:8], cache=out[CACHE], use_cache=True)
    assert_same(more.logits, m(ids[:, :8]).logits[:, 6:])
    with torch.no_grad():
        m(ids[:, 8:], cache=out[CACHE], use_cache=True)
    more.logits.sum().backward()
    assert m.get_parameter("model.layers.0.mixer.qkv_proj.weight").grad is not None


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_crop_forgets_tokens(name: str) -> None:
    m, ids = model(name), tokens(2, 30)
    cache = StateCache(len(m.model.layers))
    cache.activate_past_recording()
    assert cache.is_croppable or not any(layer.token_states for layer in cache.layers)
    m(ids[:, :9], cache=cache, use_cache=True)
    at = addresses(cache)
    m(tokens(2, 4, seed=3), cache=cache, use_cache=True)
    cache.crop(-3)
    kept = torch.cat([ids[:, :9], tokens(2, 4, seed=3)[:, :1]], 1)
    for i in range(3):
        m(tokens(2, 1, seed=20 + i), cache=cache, use_cache=True)
    cache.crop(-2)
    cache.crop(0)
    kept = torch.cat([kept, tokens(2, 1, seed=20)], 1)
    assert cache.get_seq_length() == 11
    cache.crop(-5)  # past what was cropped before, into the prompt
    whole = torch.cat([kept[:, :6], ids[:, 20:]], 1)
    got = m(ids[:, 20:], cache=cache, use_cache=True).logits
    assert_same(got, m(whole).logits[:, 6:])
    assert addresses(cache) == at


@pytest.mark.parametrize("padding", [0, 3])
@every_kind
@torch.no_grad()
def test_crop_forgets_all_tokens(name: str, padding: int) -> None:
    """Of a prompt of any length: what came before its first token is known."""
    m, ids = model(name), tokens(1, 80)
    want = m(ids[:, 75:]).logits
    for count in (1, 5, 70):
        cache = StateCache(len(m.model.layers))
        cache.activate_past_recording()
        padded = torch.cat([ids.new_zeros(1, padding), ids[:, :count]], 1)
        mask = torch.ones_like(padded)
        mask[:, :padding] = 0
        m(padded, cache=cache, use_cache=True, attention_mask=mask)
        cache.crop(-count)
        assert cache.get_seq_length() == padding
        for _ in range(2):
            assert_same(m(ids[:, 75:], cache=cache, use_cache=True).logits, want)
            cache.crop(-5)


@torch.no_grad()
def test_crop_remembers_a_window_and_no_more() -> None:
    m, ids = model("gated_deltanet"), tokens(1, 400)
    cache = StateCache(len(m.model.layers))
    cache.activate_past_recording()
    m(ids[:, :200], cache=cache, use_cache=True)
    for begin in range(200, 400, 10):
        m(ids[:, begin : begin + 10], cache=cache, use_cache=True)
    rollback = cache.layers[0].rollback
    assert rollback is not None
    assert len(rollback.segments) <= 3
    assert sum(segment.tokens for segment in rollback.segments) <= 3 * 64
    with pytest.raises(ValueError, match="is gone"):
        cache.crop(-200)
    cache.crop(-64)
    got = m(ids[:, 336:], cache=cache, use_cache=True).logits
    assert_same(got, m(ids).logits[:, 336:])


@torch.no_grad()
def test_crop_without_recording_says_what_is_missing() -> None:
    m, ids = model("hybrid"), tokens(1, 9)
    cache = m(ids, use_cache=True)[CACHE]
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
    cache = model("attention")(ids, use_cache=True)[CACHE]
    assert cache.is_croppable
    cache.crop(-2)
    cache.crop(3)  # as transformers once called it: how many to keep
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("length", [0, -1])
def test_cache_refuses_lengths(length: int) -> None:
    with pytest.raises(ValueError, match=f"max_length: want 1 or more, or None, got {length}"):
        StateCache(2, max_length=length)


@pytest.mark.parametrize("rows", [1, 2])
@torch.no_grad()
def test_crop_takes_a_call_with_padding_as_a_whole(rows: int) -> None:
    m, ids = model("gla"), tokens(rows, 8)
    mask = torch.ones(rows, 3, dtype=torch.int64)
    mask[-1, :2] = 0
    for back, kept in ((1, 7), (2, 7), (3, 7), (4, 6)):
        cache = StateCache(len(m.model.layers))
        cache.activate_past_recording()
        m(ids[:, :7], cache=cache, use_cache=True)
        m(ids[:, 1:4], cache=cache, use_cache=True, attention_mask=mask)
        if back == 2 or (back == 1 and rows == 2):
            with pytest.raises(ValueError, match="crop: a call with padding"):
                cache.crop(-back)
            continue
        cache.crop(-back)
        got = m(ids[:, 7:], cache=cache, use_cache=True).logits
        want = m(torch.cat([ids[:, :kept], ids[:, 7:]], 1)).logits[:, -1:]
        assert_same(got, want)


def test_cache_refuses_rows_that_are_not_there() -> None:
    m, ids = model("hybrid"), tokens(2, 5)
    cache = m(ids, use_cache=True)[CACHE]
    for row in (2, -1):
        wrong = torch.tensor([0, row])
        with pytest.raises(ValueError, match=f"beam_idx: id {row} .* outside the rows of 2"):
            cache.reorder_cache(wrong)
        with pytest.raises(ValueError, match=f"batch_select_indices: id {row} "):
            cache.batch_select_indices(wrong)
        with pytest.raises(ValueError, match=f"row: want one of 2, got {row}"):
            cache.copy(row)
    with pytest.raises(TypeError, match=r"batch_select_indices: .* torch.float32"):
        cache.batch_select_indices(torch.zeros(1))
    with pytest.raises(ValueError, match="repeats: want 0 or more, got -1"):
        cache.batch_repeat_interleave(-1)
    with pytest.raises(ValueError, match="num_layers: want 0 or more, got -1"):
        StateCache(-1)


MASKS = {"left": [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]], "right": [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]}
MASKS["between"] = [[1, 0, 1, 0, 1], [0, 1, 1, 0, 1]]


@pytest.mark.parametrize("name", ["attention", "mla"])
@pytest.mark.parametrize("side", MASKS)
@pytest.mark.parametrize("back", range(1, 12))
@torch.no_grad()
def test_crop_of_keys_forgets_columns_as_transformers_does(name: str, side: str, back: int) -> None:
    """Padding is none of a row's tokens: after a padded prompt, two tokens and padded ones."""
    m, ids, more = model(name), tokens(2, 12), tokens(2, 2, seed=4)
    mask = torch.tensor(MASKS[side])
    mask = torch.cat([mask, torch.ones(2, 2, dtype=torch.int64), mask.flip(0)], 1)
    cache = StateCache(len(m.model.layers))
    for begin, end in ((0, 5), (5, 6), (6, 7), (7, 12)):
        given = {"attention_mask": mask[:, :end]} if end - begin > 1 else {}
        m(ids[:, begin:end], cache=cache, use_cache=True, **given)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-back)
    kept = 12 - back
    cache.batch_select_indices(torch.tensor([1, 0, 1], dtype=torch.uint8))
    cache.crop(kept)  # as transformers once called it: nothing
    cache.crop(-1 if kept > 1 else 0)
    kept -= kept > 1
    order = [0, 1, 0]
    got = m(more[order], cache=cache, use_cache=True).logits
    for row, source in zip(got, order):
        own = ids[source : source + 1, :kept][:, mask[source, :kept] == 1]
        whole = torch.cat([own, more[source : source + 1]], 1)
        assert_same(row[None], m(whole).logits[:, -2:])


@torch.no_grad()
def test_crop_takes_packed_sequences_as_a_whole() -> None:
    m, ids = model("attention"), tokens(1, 9)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    cache = StateCache(len(m.model.layers))
    m(ids[:, :6], cache=cache, use_cache=True, cu_seqlens=offsets)
    m(tokens(2, 2), cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="crop: packed sequences, which begin after 0 columns"):
        cache.crop(-3)
    cache.crop(-2)
    got = m(tokens(2, 1), cache=cache, use_cache=True).logits
    for n, own in enumerate((ids[:, :2], ids[:, 2:6])):
        whole = torch.cat([own, tokens(2, 1)[n : n + 1]], 1)
        assert_same(got[n : n + 1], m(whole).logits[:, -1:])


@pytest.mark.parametrize("name", ["gla", "attention"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@torch.no_grad()
def test_rows_are_numbers_of_any_integers(name: str, dtype: torch.dtype) -> None:
    m, ids, more = model(name), tokens(3, 7), tokens(3, 2, seed=4)
    for take, rows in (("reorder_cache", [1, 0, 1]), ("batch_select_indices", [2, 1])):
        for order in (rows, rows[:2]):
            cache = m(ids, use_cache=True)[CACHE]
            getattr(cache, take)(torch.tensor(order, dtype=dtype))
            got = m(more[: len(order)], cache=cache, use_cache=True).logits
            whole = torch.cat([ids[order], more[: len(order)]], 1)
            assert_same(got, m(whole).logits[:, 7:])


@torch.no_grad()
def test_rows_that_cannot_be_are_named() -> None:
    cache = model("gla")(tokens(3, 7), use_cache=True)[CACHE]
    for take, name in (("reorder_cache", "beam_idx"), ("batch_select_indices",) * 2):
        for rows in (torch.tensor(1), torch.tensor([[1, 0, 2]])):
            with pytest.raises(ValueError, match=f"{name}: want shape"):
                getattr(cache, take)(rows)
        for rows in ([1, 0, 2], torch.tensor([1.0, 0.0, 2.0]), None):
            with pytest.raises(TypeError, match=f"{name}: want a tensor of integers"):
                getattr(cache, take)(rows)
        with pytest.raises(ValueError, match=f"{name}: id 3"):
            getattr(cache, take)(torch.tensor([0, 1, 3], dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"beam_idx: want a tensor of integers, got torch\.bool"):
        cache.reorder_cache(torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match="batch_select_indices: want 3 bools, got 2"):
        cache.batch_select_indices(torch.tensor([True, False]))
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert cache.rows == 2


def test_graphs_go_with_what_inference_mode_made() -> None:
    """Where gradients may be wanted of frozen weights, the call copies the states."""
    m, ids = model("hybrid").requires_grad_(False), tokens(1, 9)
    with torch.inference_mode():
        cache = m(ids[:, :7], use_cache=True)[CACHE]
    at, cache.graphs["step"] = addresses(cache), None
    m(ids[:, 7:8], cache=cache, use_cache=True)
    assert addresses(cache) != at and not cache.graphs
    at, cache.graphs["step"] = addresses(cache), None
    m(ids[:, 8:], cache=cache, use_cache=True)
    assert addresses(cache) == at and cache.graphs


@every_kind
@pytest.mark.parametrize("change", ["crop", "reorder", "reset", "gradients"])
def test_cache_of_inference_mode_is_changed_outside_of_it(name: str, change: str) -> None:
    m, ids, more = model(name), tokens(2, 8), tokens(2, 2, seed=4)
    cache = StateCache(len(m.model.layers))
    cache.activate_past_recording()
    with torch.inference_mode():
        m(ids, cache=cache, use_cache=True)
    before = ids
    if change == "crop":
        cache.crop(-3)
        before = ids[:, :5]
    elif change == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
        before = ids.flip(0)
    elif change == "reset":
        cache.reset()
        before = ids[:, :0]
    with torch.set_grad_enabled(change == "gradients"):
        got = m(more, cache=cache, use_cache=True).logits
    assert_same(got, m(torch.cat([before, more], 1)).logits[:, -2:])
    if change == "gradients":
        got.sum().backward()
        assert m.get_parameter("model.embed_tokens.weight").grad is not None


# on a CPU a consistent model indexes by values, which a graph does not
@pytest.mark.filterwarnings("ignore:generate runs without graphs")
@pytest.mark.parametrize("name", [*KINDS, "consistent"])
def test_copy_of_a_generated_cache_goes_on(name: str) -> None:
    """A prompt's cache is copied for each of its continuations: its graphs are not."""
    m = model("gla", consistent=True) if name == "consistent" else model(name)
    out = generate(m, tokens(2, 7), return_dict_in_generate=True)
    ids, cache = out.sequences, out[CACHE]
    assert name == "consistent" or cache.graphs
    want = generate(m, ids, **{CACHE: deepcopy(cache)})
    assert torch.equal(want, generate(m, tokens(2, 7), max_new_tokens=18))
    copies = [deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    assert not any(copy.graphs for copy in copies)
    for given in (*copies, cache):
        assert torch.equal(generate(m, ids, **{CACHE: given}), want)


@every_kind
@torch.no_grad()
def test_pool_is_as_before_a_refused_put(name: str) -> None:
    m, ids = model(name), tokens(1, 5)

    def cache(of: Any, rows: int = 1) -> StateCache:
        made = StateCache(len(of.model.layers))
        of(ids.expand(rows, -1), cache=made, use_cache=True)
        return made

    pool = cache(m).pool(3, 64)
    pool.put(1, cache(m))
    before = [x.clone() for layer in pool.layers for x in (layer.state or {}).values()]
    away = cache(m)
    for layer in away.layers:
        layer._tensors = {n: x.to("meta") for n, x in layer.state.items()}
    others = [cache(model("hgrn")), away, "x", StateCache(2), cache(m, 2)]
    # latents are as wide with other heads
    others += [] if name == "mla" else [cache(model(name, hidden_size=64, num_heads=4))]
    for other in others:
        with pytest.raises((ValueError, TypeError), match=r"^put: want"):
            pool.put(0, other)
    with pytest.raises(TypeError, match=r"^row: want an int, got float"):
        pool.put(1.0, None)  # pyright: ignore[reportArgumentType]
    assert pool.lengths == [0, 5, 0]
    after = [x for layer in pool.layers for x in (layer.state or {}).values()]
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))


def test_counts_are_refused_by_name() -> None:
    m, cache = model("attention"), StateCache(2)
    m(tokens(1, 5), cache=cache, use_cache=True)
    calls: list[Any] = [cache.crop, cache.reserve, cache.batch_repeat_interleave, StateCache]
    calls += [cache.copy, cache.pool]
    for call in calls:
        for given in (1.5, "1", [1], True):
            with pytest.raises(TypeError, match=r"^\w+: want an int, got"):
                call(given)


def test_repeated_call_leaves_the_last_input_of_an_mlp() -> None:
    mixer: Any = SimpleNamespace(step=lambda *_, **__: None)
    x, state = torch.randn(2, 3, 4), {rollback.MLP_SHIFT: torch.zeros(2, 4)}
    rollback.Record(mixer, x, mlp_x=x + 1).run(state)
    assert torch.equal(state[rollback.MLP_SHIFT], x[:, -1] + 1)
