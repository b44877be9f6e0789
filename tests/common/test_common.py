"""Offsets, rows of a pool or of a classifier, and variables that turn something on or off."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream import ops
from slipstream.common import varlen
from slipstream.common.checks import is_on
from slipstream.common.linear_rows import LinearRows
from slipstream.common.pool_rows import PoolRows
from slipstream.common.varlen import check_cu_seqlens_values, chunk_map
from slipstream.kernels.conv import eager as conv
from slipstream.layers import attention
from slipstream.layers.call import MixerCall
from slipstream.ops import rotary


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.sampled_from([1, 4, 16]))
@settings(deadline=None, max_examples=60)
def test_chunk_map_covers_each_sequence_in_chunks(lengths: list[int], chunk: int) -> None:
    cu = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(cu[-1])
    m = chunk_map(cu, tokens, chunk)
    assert m.token[m.live].tolist() == list(range(tokens))
    assert m.token.shape[0] == sum(-(-n // chunk) for n in lengths)
    slots = torch.zeros(m.token.numel(), dtype=torch.long)
    slots[m.slot] = torch.arange(tokens)
    assert torch.equal(slots[m.live.flatten()], torch.arange(tokens))
    for row in range(m.token.shape[0]):
        n = int(m.sequence[row])
        inside = m.token[row][m.live[row]]
        assert cu[n] <= inside.min() <= inside.max() < cu[n + 1]
        assert bool(m.first[row]) == (int(inside.min()) == int(cu[n]))
        assert bool(m.last[row]) == (int(inside.max()) == int(cu[n + 1]) - 1)


def test_chunk_map_without_sync() -> None:
    """On a device the number of chunks is an upper bound known without reading the offsets."""
    cu = torch.tensor([0, 5, 5, 12], device="meta")
    m = chunk_map(cu, 12, 4)
    assert m.token.shape == (12 // 4 + 3, 4)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([1, 5], "want offsets from 0"), ([0, 4], "got 0 to 4"), ([0, 6, 3, 5], "never fall")],
)
def test_check_cu_seqlens_values_rejects(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cu_seqlens_values(torch.tensor(offsets), 5)


T = 5
RIGHT = [[0, 5], [0, 2, 2, 5], [0, 0, 5, 5]]
WRONG = [[2, 5], [0, 4], [0, 6], [0, 4, 3, 5], [7, 9], [-3, 5], [0, 9, 5], [0, 0, 0], [5, 0]]


class OnDevice(Tensor):
    """Offsets whose values are not looked at."""

    is_cpu = False  # type: ignore[assignment]


def on_device(offsets: list[int]) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32).as_subclass(OnDevice)


def chunks(cu: Tensor) -> None:
    m, x = varlen.chunk_map(cu, T, 2), torch.arange(T)
    assert len(x[m.token].flatten()[m.slot]) == T


def windows(cu: Tensor) -> None:
    where = conv.positions(cu, T, 4)
    assert len(torch.arange(T)[where.source][where.token]) == T
    assert torch.arange(len(where.source))[where.past].shape == where.past.shape


def grown_cache(cu: Tensor) -> None:
    x = torch.randn(1, T, 2, 3)
    made = attention.extended({"k": x}, MixerCall(cu, use_cache=True))
    assert made["k"].shape[0] == len(cu) - 1


def positions(cu: Tensor) -> None:
    with mock.patch.object(rotary.token_ids, "expect_offsets"):
        assert rotary.packed_positions(cu, T).shape == (1, T)


@pytest.mark.parametrize("offsets", WRONG, ids=str)
@pytest.mark.parametrize("use", [chunks, windows, grown_cache, positions])
def test_wrong_offsets_index_no_other_memory(use: Callable, offsets: list[int]) -> None:
    use(on_device(offsets))


@pytest.mark.parametrize("offsets", [*RIGHT, *WRONG], ids=str)
def test_bounded_offsets_fit_the_tokens(offsets: list[int]) -> None:
    found = varlen.bounded_offsets(on_device(offsets), T).tolist()
    assert found == sorted(found) and (found[0], found[-1]) == (0, T)
    assert offsets not in RIGHT or found == offsets


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("indices", [(3, -1, 0), (-1, 0, 5), (-1, -1, -1), (7, 5, -2), (5, 5, 5)])
def test_pool_rows_are_those_with_a_slot(indices: tuple[int, ...], dtype: torch.dtype) -> None:
    """An index past the pool is none, also where no sequence has a row."""
    pool, new = torch.randn(5, 2), torch.randn(3, 2)
    rows, want = PoolRows(torch.tensor(indices, dtype=dtype), 5), pool.clone()
    live = [n for n, slot in enumerate(indices) if 0 <= slot < 5]
    read = rows.read(pool)
    rows.write(pool, new)
    for n in live:
        assert torch.equal(read[n], want[indices[n]])
        want[indices[n]] = new[n]
    assert torch.equal(pool, want)
    zeroed = rows.or_zero(new)
    assert torch.equal(zeroed[live], new[live])
    assert not zeroed[[n for n in range(3) if n not in live]].any()


@pytest.mark.parametrize(("sequences", "slots"), [(0, 3), (2, 0), (0, 0)])
def test_steps_of_no_sequences_or_slots(sequences: int, slots: int) -> None:
    """y is 0, and the pool stays as it is, of every operator of a decoding step on a pool."""
    N, H, K = sequences, 2, 4
    at = torch.full((N,), -1)
    x, heads, last = torch.randn(N, H * K), torch.randn(N, 1, H, K), torch.randn(slots, H * K)
    given: dict[str, Any] = {"state": torch.randn(slots, H, K, K), "state_indices": at}
    pools = [last, given["state"]]
    before = [pool.clone() for pool in pools]
    D, r_k = torch.randn(H * K), torch.randn(H, K)
    given_norm: dict[str, Any] = {"norm_weight": D, "norm_bias": D}
    found = [
        ops.token_mix_step(x, torch.randn(6, H * K), state=last, state_indices=at),
        ops.rwkv7_step(x, x, x, x, x, x, **given, k_k=D, k_a=D, r_k=r_k, **given_norm),
        ops.mixer_step(heads, heads, heads, **given),
        ops.recurrent_step(heads, heads, heads, **given),
    ]
    for y in found:
        assert y.shape[-1] > 0 and not y.any()
    assert all(map(torch.equal, pools, before))


@pytest.mark.parametrize("sum_dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_rows_add_up(sum_dtype: torch.dtype) -> None:
    hidden, weight, d = (torch.randint(-2, 3, x).bfloat16() for x in ((6, 4), (5, 4), (6, 5)))
    layer = LinearRows(hidden, weight, None, True, sum_dtype)
    for rows in (slice(0, 2), slice(2, 6)):
        layer.add(rows, d[rows].float())
    assert layer.dweight.dtype == sum_dtype
    assert torch.equal(layer.dweight, (d.T @ hidden).to(sum_dtype))
    assert torch.equal(layer.dhidden, d @ weight)


STATES = """
from slipstream.runtime import call_replay, compile_ahead
print(call_replay.ENABLED, compile_ahead.ENABLED)
"""


@pytest.mark.parametrize(("value", "on"), [(None, True), ("1", True), ("off", False), ("0", False)])
def test_is_on_takes_words_and_digits(
    value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIPSTREAM_AHEAD", raising=False)
    if value is not None:
        monkeypatch.setenv("SLIPSTREAM_AHEAD", value)
    assert is_on("SLIPSTREAM_AHEAD") is on


def test_is_on_refuses_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_REPLAY", "false")
    with pytest.raises(ValueError, match="SLIPSTREAM_REPLAY: want on or off, got 'false'"):
        is_on("SLIPSTREAM_REPLAY")


def test_switches_turn_replay_and_compilation_ahead_off() -> None:
    env = {**os.environ, "SLIPSTREAM_AHEAD": "0", "SLIPSTREAM_REPLAY": "0"}
    command = [sys.executable, "-c", STATES]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr
