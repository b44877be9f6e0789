"""A call that is like one that has passed, and one that only seems so."""

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.runtime import call_replay, dispatch, launch_cache
from slipstream.runtime.custom_op import DirectCall
from slipstream.runtime.dispatch import ValidationCache, signature


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a result followed from is remembered as on a GPU."""
    monkeypatch.setattr(call_replay, "is_enabled", lambda x: True)


def test_equal_numbers_of_other_types_are_other_calls() -> None:
    x = torch.randn(2, 3)
    assert signature((x, None), 64, "eager") == signature((torch.zeros(2, 3), None), 64, "eager")
    keys = {signature((x, None), each, "eager") for each in (64, 64.0, 1, 1.0, True)}
    assert len(keys) == 5


def test_plans_follow_sizes_not_seen_before() -> None:
    """A result is remembered by what it followed from: asked again where that is otherwise."""
    cache, asked, random = ValidationCache(), 0, Random(0)

    def get(x: Tensor, y: Tensor | None) -> tuple[str, int]:
        def make() -> tuple[str, int]:
            nonlocal asked
            asked += 1
            if x.shape[-1] != 8:
                raise ValueError(f"x: want 8 columns, got {x.shape[-1]}")
            rows = x.shape[0] if y is None else y.shape[0]
            return ("long" if rows * x.shape[1] > 40 else "short", x.shape[-1] // 2)

        tensors = x, y
        return cache.get(signature(tensors, "impl"), make, tensors)

    for _ in range(200):
        rows, tokens = random.randint(1, 9), random.randint(1, 9)
        x = torch.zeros(rows, tokens, 8)
        y = random.choice([None, torch.zeros(random.randint(1, 9), 2), x])
        count = rows if y is None else len(y)
        found = get(x, y)
        assert found == ("long" if count * tokens > 40 else "short", 4)
        assert type(found[1]) is int
    assert asked < 100  # one tensor given twice is asked for each size
    with pytest.raises(ValueError, match="want 8 columns, got 7"):
        get(torch.zeros(3, 3, 7), None)
    before = asked
    for rows in range(20, 60):
        get(torch.zeros(rows, 30, 8), None)
    assert asked == before


def test_tensors_given_twice_leave_room_for_others() -> None:
    """No record is made of such a call; those of calls that differ are."""
    asked, cache = 0, ValidationCache()

    def get(x: Tensor, y: Tensor) -> int:
        def make() -> int:
            nonlocal asked
            asked += 1
            return x.shape[1] + y.shape[1]

        return cache.get(signature((x, y)), make, (x, y))

    for rows in range(1, 3 * call_replay.MAX_RECORDS):
        x = torch.zeros(rows, 4)
        assert get(x, x) == 8
    asked = 0
    for rows in range(1, 40):
        assert get(torch.zeros(rows, 4), torch.zeros(rows, 5)) == 9
    assert asked == 1


def test_operators_of_sizes_not_seen_before_are_checked() -> None:
    """A wrong argument is refused after many right ones of other sizes."""
    for T in range(5, 25):
        q, k, v = torch.randn(3, 1, T, 2, 16)
        ops.chunk_simple_gla(q, k, v, g=-torch.rand(1, T, 2))
        with pytest.raises(ValueError, match="g: want"):
            ops.chunk_simple_gla(q, k, v, g=-torch.rand(1, T + 1, 2))
        with pytest.raises(ValueError, match="k: want"):
            ops.chunk_simple_gla(q, k[:, 1:], v, g=-torch.rand(1, T, 2))


def _plans(monkeypatch: pytest.MonkeyPatch, most: int) -> tuple[dict, Callable[[int], Any]]:
    monkeypatch.setattr(dispatch, "_MAX_ENTRIES", most)
    monkeypatch.setattr(call_replay, "is_enabled", lambda x: False)
    cache = ValidationCache()
    cache.get((-1,), lambda: 0)
    known = cache._by_kind[()].by_shapes
    known.clear()
    return known, lambda i: cache.get((i,), lambda: i + 1, (torch.ones(1),))


def _kinds(monkeypatch: pytest.MonkeyPatch, most: int) -> tuple[dict, Callable[[int], Any]]:
    monkeypatch.setattr(call_replay, "MAX_KEYS", most)
    cache = ValidationCache()
    return cache._by_kind, lambda i: cache.get(((), i), lambda: i + 1)


def _sizes(monkeypatch: pytest.MonkeyPatch, most: int) -> tuple[dict, Callable[[int], Any]]:
    known: dict = {}
    return known, lambda i: call_replay.remember(known, (i,), i + 1, most)


def _records(monkeypatch: pytest.MonkeyPatch, most: int) -> tuple[dict, Callable[[int], Any]]:
    monkeypatch.setattr(call_replay, "MAX_KEYS", most)
    call = DirectCall(lambda x: x)
    return call._known, lambda i: call._known_of((i,)) and i + 1


def _maps(monkeypatch: pytest.MonkeyPatch, most: int) -> tuple[dict, Callable[[int], Any]]:
    monkeypatch.setattr(launch_cache, "MAX_MAPS", most)
    maps: Any = launch_cache.TensorMapCache.__new__(launch_cache.TensorMapCache)
    maps.known, maps._tile, maps._rest = {}, launch_cache._Tile, ()
    maps._make = lambda tile: [tile.base.data_ptr() + 1]
    return maps.known, lambda i: maps(i, (1,), (1,))


@pytest.mark.parametrize("of", [_plans, _kinds, _sizes, _records, _maps])
def test_entries_are_as_many_as_their_bound(of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory is full at its bound: all of it goes, and the next entry comes."""
    known, remember = of(monkeypatch, 4)
    for i in range(9):
        assert remember(i) == i + 1
        assert len(known) == i % 4 + 1


def test_records_of_calls_are_as_many_as_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_replay, "MAX_RECORDS", 3)
    made = SimpleNamespace(is_late=False)
    monkeypatch.setattr(call_replay, "record", lambda fn, args, *options: (fn(*args), made))
    call = DirectCall(lambda x: x)
    known = call._known_of((1,))
    for count in (1, 2, 3):
        assert not known.closed
        call._record(known, (torch.ones(1),))
        assert len(known.records) == count
    assert known.closed
