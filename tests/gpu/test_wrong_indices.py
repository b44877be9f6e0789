"""Indices that name nothing, or nothing that is there, on a GPU."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream import ops
from slipstream.integrations.serving import prefill
from slipstream.layers import MLA, Attention, ForgettingAttention, Mixer
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.models.cache import CACHE
from slipstream.runtime import token_ids
from slipstream.runtime.token_ids import raise_pending, synchronize
from tests.gpu.waiting import graph_of, waiting_is_an_error

# ---- Indices that are negative or too large, on a GPU: no foreign memory is read or written.


D, PAGE, N = 64, 16, 8
MISSING = [-1, N, 1 << 20, -(1 << 20)]


def expect_flag(name: str, index: int) -> None:
    """A negative index is none; one that is too large is what the next call raises."""
    if index < 0:
        slipstream.synchronize()
    else:
        with pytest.raises(ValueError, match=rf"^{name}: want less than \d+, got {index} at"):
            slipstream.synchronize()


def unread() -> AbstractContextManager[Any]:
    """A call to the end, also where a later launch of it could raise what an earlier one found."""
    return mock.patch.object(token_ids._Watch, "read")


@pytest.fixture(autouse=True)
def _nothing_pending() -> Iterator[None]:
    yield
    slipstream.synchronize()


def surrounded(n: int) -> tuple[Tensor, Tensor]:
    """A cache [n, PAGE, 2, D] and the memory around it, of which all the rest is 7."""
    around = torch.full((3 * n, PAGE, 2, D), 7.0, device="cuda", dtype=torch.bfloat16)
    cache = around[n : 2 * n]
    cache.normal_()
    return cache, around


@pytest.mark.parametrize(
    ("named", "missing"),
    [
        *((name, x) for name in ("cache_batch_idx", "block_table") for x in MISSING),
        ("cache_seqlens", -1),
        ("cache_seqlens", -(1 << 20)),
    ],
)
def test_cache_leaves_what_is_missing_alone(named: str, missing: int) -> None:
    (k_cache, k_around), (v_cache, v_around) = surrounded(N), surrounded(N)
    q = torch.randn(2, 1, 4, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 1, 2, D, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    given: dict[str, Any] = {"cache_seqlens": torch.tensor([5, 9]).int().cuda()}
    if named == "block_table":
        given[named] = torch.tensor([[2], [0]]).int().cuda()
    else:
        given["cache_batch_idx"] = torch.tensor([2, 0]).int().cuda()
    given[named][1] = missing
    before = k_around.clone(), v_around.clone()
    with unread():
        o = ops.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, causal=True, impl="triton", **given
        )
    expect_flag(named, missing)
    for x, y, new in zip((k_around, v_around), before, (k, v)):
        y[N + 2, 5] = new[0, 0]
        assert torch.equal(x, y)
    assert not o[1].any()
    keys, values = k_cache[2:3, :6], v_cache[2:3, :6]
    want = ops.attention(q[:1], keys, values, impl="eager")
    torch.testing.assert_close(o[:1], want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("page", [16, 64])
def test_latent_attention_reads_no_missing_page(page: int, missing: int) -> None:
    latent = torch.randn(N, page, 576, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(2, 1, 16, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.tensor([[3, 1, 5], [7, 0, 2]]).int().cuda()
    table[1] = missing
    lengths = torch.tensor([2 * page + 3, 2 * page]).int().cuda()
    call = {"width": 512, "scale": 0.05, "table": table}
    with unread():
        o = ops.latent_attention(q, latent, lengths, impl="triton", **call)
    expect_flag("table", missing)
    assert not o[1].any()
    with unread():
        want = ops.latent_attention(q, latent, lengths, impl="eager", **call)
    expect_flag("table", missing)
    torch.testing.assert_close(o, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("calls", [1, 4])
def test_rotary_position_outside_of_the_table_is_reported(calls: int) -> None:
    """Also where a recorded call is replayed."""
    cos, sin = (x.cuda() for x in ops.rotary_tables(torch.arange(20), D))
    x = torch.randn(2, 5, 3, D, device="cuda")
    positions = torch.arange(5, device="cuda").repeat(2, 1)
    for _ in range(calls - 1):
        ops.rotary_embedding(x, cos, sin, positions=positions)
    positions[1, 2] = 20
    y = ops.rotary_embedding(x, cos, sin, positions=positions)
    with pytest.raises(ValueError, match=r"positions: id 20 at position \(1, 2\) is outside the"):
        slipstream.synchronize()
    want = ops.rotary_embedding(x, cos, sin, positions=positions.clamp(max=19))
    assert torch.equal(y, want)


OFFSETS = {"beyond": (0, 3, 9), "short": (0, 3, 7), "falling": (0, 5, 3, 8), "late": (2, 8)}


@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
def test_offsets_that_do_not_fit_are_reported(offsets: tuple[int, ...]) -> None:
    cu = torch.tensor(offsets, device="cuda", dtype=torch.int32)
    x = torch.randn(1, 8, 2, D, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "attention": lambda: ops.attention(x, x, x, cu_seqlens=cu),
        "retention": lambda: ops.chunk_retention(x, x, x, cu_seqlens=cu),
        "hgrn": lambda: ops.chunk_hgrn(x[:, :, 0], -x[:, :, 0].abs(), cu_seqlens=cu),
        "gsa": lambda: ops.chunk_gsa(x, x, x, x, -x.abs(), cu_seqlens=cu),
        "conv": lambda: ops.short_convolution(x[:, :, 0], x[0, 0].mT.repeat(1, 2), cu_seqlens=cu),
        "shift": lambda: ops.token_shift(x[:, :, 0], cu_seqlens=cu),
    }

    def look(call: Callable[[], Any]) -> None:
        call()  # whose later launches may find it already
        slipstream.synchronize()

    for call in calls.values():
        with pytest.raises(ValueError, match="cu_seqlens: want offsets from 0 to the 8 tokens"):
            look(call)
        raise_pending()
        cu.add_(0)  # nobody knows that nothing changed: it is looked at again


@pytest.mark.parametrize("index", [4, 1 << 20])
def test_slots_past_the_pool_are_reported(index: int) -> None:
    x, pool = torch.randn(2, 1, 2, D, device="cuda"), torch.zeros(4, 2, D, D, device="cuda")
    indices = torch.tensor([1, index], device="cuda", dtype=torch.int32)
    with unread():
        ops.recurrent_step(x, x, x, state=pool, state_indices=indices)
    expect_flag("state_indices", index)
    assert pool[1].any() and not pool[[0, 2, 3]].any()
    token, states = torch.randn(2, D, device="cuda"), torch.zeros(4, D, 4, device="cuda")
    weight = torch.randn(D, 4, device="cuda")
    with unread():
        ops.short_convolution_update(token, states, weight, state_indices=indices)
    expect_flag("state_indices", index)
    assert states[1].any() and not states[[0, 2, 3]].any()


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("kind", [Attention, ForgettingAttention, MLA])
@torch.no_grad()
def test_step_without_room_is_reported(kind: type[Mixer], tokens: int) -> None:
    """By name, where torch's own check of an index would end the process; a step with room runs."""
    layer = kind(64, 2).to("cuda", torch.bfloat16)  # which wide heads want
    x = torch.randn(2, 5, 64, device="cuda", dtype=torch.bfloat16)
    _, state = layer(x[:, :3], use_cache=True)
    with unread():
        layer.step(x[:, :tokens], state)
    with pytest.raises(
        ValueError, match=r"^(state\['length'\]|cache_seqlens): want less than \d, got \d at"
    ):
        slipstream.synchronize()
    with pytest.raises(ValueError, match=r"^state\['\w+'\]: want room for 4 more tokens, got 3"):
        layer.step(x[:, :1].expand(-1, 4, -1), state)
    want, after = layer(x, use_cache=True)
    for name in layer.token_states:
        after[name][:, 3:] = 0
    after["length"].fill_(3)
    y = layer.step(x[:, 3:], after)
    assert (y - want[:, 3:]).norm() < 0.05 * want[:, 3:].norm()


def test_indices_that_layers_share_are_looked_at_once() -> None:
    indices = torch.tensor([1, 0], device="cuda", dtype=torch.int32)
    x, pool = torch.randn(2, 1, 2, D, device="cuda"), torch.zeros(4, 2, D, D, device="cuda")
    ops.recurrent_step(x, x, x, state=pool, state_indices=indices)
    indices[1] = 9
    for _ in range(2):
        with unread():
            ops.recurrent_step(x, x, x, state=pool, state_indices=indices)
        expect_flag("state_indices", 9)
        indices[1] = 9


@pytest.mark.parametrize("wrong", [2, 1 << 20, -1])
def test_rows_and_places_of_a_model(wrong: int) -> None:
    """Rows of a cache, places of the logits wanted: torch's own indexing would end the process."""
    config = {"vocab_size": 31, "hidden_size": 32, "num_heads": 2, "mixers": ["gla", "attention"]}
    model = SlipstreamForCausalLM(SlipstreamConfig(**config)).cuda().eval()
    ids, rows = torch.ones(2, 5, dtype=torch.int64, device="cuda"), torch.tensor([0, wrong]).cuda()
    with torch.no_grad():
        cache = model(ids, use_cache=True)[CACHE]
        for name, run in (
            ("beam_idx", cache.reorder_cache),
            ("batch_select_indices", cache.batch_select_indices),
        ):
            with unread():
                run(rows)
            with pytest.raises(ValueError, match=f"{name}: id {wrong} at position"):
                slipstream.synchronize()
        with unread():
            model(ids, logits_to_keep=rows * 100)
        with pytest.raises(ValueError, match=r"logits_to_keep: id -?\d+ at position"):
            slipstream.synchronize()


@pytest.mark.parametrize("missing", MISSING)
def test_prefill_of_an_engine_stays_in_its_pool(missing: int) -> None:
    around = torch.full((3 * N, 2, 16, 16), 7.0, device="cuda")
    states = around[N : 2 * N].normal_()
    before, slots = around.clone(), torch.tensor([1, missing], device="cuda")
    q, k, v = torch.randn(3, 1, 70, 2, 16, device="cuda").unbind()
    terms = q, k, v, -torch.rand(1, 70, 2, device="cuda"), torch.rand(1, 70, 2, device="cuda")
    cu = torch.tensor([0, 30, 70], device="cuda")
    with unread():
        prefill(ops.chunk_gated_delta_rule, *terms, states=states, slots=slots, cu_seqlens=cu)
    expect_flag("slots", missing)
    assert not torch.equal(states[1], before[N + 1])
    around[N + 1] = before[N + 1]
    assert torch.equal(around, before)


# ---- Ids beyond the vocabulary: no device-side assert, the device goes on.


def test_token_ids_beyond_the_vocabulary() -> None:
    """Three times the vocabulary through RMSNorms: no device-side assert, the device goes on."""
    config = {"vocab_size": 50, "hidden_size": 64, "num_heads": 2}
    mixers = ["gated_deltanet", "attention"]
    model = SlipstreamForCausalLM(SlipstreamConfig(mixers=mixers, **config)).cuda()
    ids = torch.randint(0, 50, (2, 40), device="cuda")
    want = model(ids).logits
    ids[1, 17] = 149
    message = r"input_ids: id 149 at position \(1, 17\) .* vocabulary of 50"

    def look() -> None:
        model(ids)  # its norms and mixers ask, too: they may be late enough to know
        synchronize()

    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            look()
        raise_pending()
    y = ops.embedding(ids, model.get_input_embeddings().weight)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=message):
        ops.rms_norm(y.detach(), torch.ones(64, device="cuda"))
    assert y.isfinite().all()
    ids[1, 17] = 0
    assert model(ids).logits.shape == want.shape
    slipstream.synchronize()


def test_token_ids_are_looked_at_without_a_sync() -> None:
    weight = torch.randn(50, 64, device="cuda", requires_grad=True)
    ids = torch.randint(0, 50, (2, 40), device="cuda")

    def look() -> torch.Tensor:
        y = ops.embedding(ids, weight)
        ops.cross_entropy(y, ids).backward()
        return y

    look()  # a kernel's first call in a process may compare it with plain torch, and waits for that
    with waiting_is_an_error():
        y = look()
        raise_pending()
    assert torch.equal(y, weight[ids])


def test_targets_beyond_the_vocabulary() -> None:
    logits = torch.randn(300, 50, device="cuda", requires_grad=True)
    target = torch.randint(0, 50, (300,), device="cuda")
    target[7], target[9], target[100] = -100, 50, -3

    def train() -> None:
        ops.cross_entropy(logits, target).backward()  # whose later launches may find it already
        synchronize()

    with pytest.raises(ValueError, match=r"target: id 50 at position \(9,\) .* vocabulary of 50"):
        train()


def test_token_ids_in_a_graph_and_compiled() -> None:
    weight = torch.randn(50, 64, device="cuda")
    ids = torch.randint(0, 50, (2, 40), device="cuda")
    want = ops.embedding(ids, weight)
    graph, y = graph_of(lambda: ops.embedding(ids, weight))
    graph.replay()
    slipstream.synchronize()
    assert torch.equal(y, want)
    ids[0, 3] = 150
    graph.replay()
    with pytest.raises(ValueError, match=r"id 150 at position \(0, 3\)"):
        synchronize()
    compiled = torch.compile(ops.embedding, fullgraph=True)
    compiled(ids, weight)
    with pytest.raises(ValueError, match=r"id 150 at position \(0, 3\)"):
        synchronize()


def test_check_sync_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_ids, "SYNC", True)
    with pytest.raises(ValueError, match=r"id 9 at position \(1,\)"):
        ops.embedding(torch.tensor([0, 9], device="cuda"), torch.randn(5, 4, device="cuda"))


def test_process_survives() -> None:
    """And so does one that never looks."""
    code = """
import torch
from slipstream import ops
y = ops.embedding(torch.tensor([1 << 40, -7], device="cuda"), torch.ones(5, 4, device="cuda"))
torch.cuda.synchronize()
assert (y == 1).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
