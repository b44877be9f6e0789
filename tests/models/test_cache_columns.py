"""Methods of StateCache in pairs, where callers count positions themselves and where the batch was
padded: beside a list of what its rows hold."""

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.models import StateCache
from tests.support.language_models import assert_same, model, tokens

# a token and its position, None where the model counts; None of both is padding
Column = tuple[int, int | None] | None

# of three rows' five tokens
MASKS = {
    "before": [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]],
    "between": [[1, 0, 1, 0, 1], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]],
    "after": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
}


class Held(NamedTuple):
    """A cache, and the columns of each of its rows."""

    cache: StateCache
    rows: list[list[Column]]


def call(m: Any, held: Held, count: int, pad: str = "", told: str = "", seed: int = 0) -> Held:
    """More tokens in every row. pad: on which side row 1 has padding, or a name of MASKS. told:
    whose positions are given, of "all" or "each" row; they leave out numbers."""
    n = len(held.rows)
    ids = tokens(n, count, seed=seed) % 96 + 1
    mask = torch.ones(n, held.cache.get_seq_length() + count, dtype=torch.int64)
    for i, row in enumerate(held.rows):
        mask[i, : len(row)] = torch.tensor([x is not None for x in row], dtype=torch.int64)
    if pad in MASKS:
        mask[:, -count:] = torch.tensor(MASKS[pad])
    elif pad and n > 1:
        mask[1, -count : -count + 2 or None] = 0
        if pad == "right":
            mask[1, -count:] = mask[1, -count:].flip(0)
    options: dict[str, Any] = {"attention_mask": mask} if pad else {}
    positions = None
    if told:
        first = 20 + held.cache.get_seq_length() + 3 * torch.arange(n if told == "each" else 1)
        positions = options["position_ids"] = first[:, None] + torch.arange(count)
    m(ids, cache=held.cache, use_cache=True, **options)
    at = [[None] * count] * n if positions is None else positions.expand(n, -1).tolist()
    live = mask[:, -count:].tolist()
    rows = [
        [*row, *((t, p) if on else None for t, p, on in zip(ids[i].tolist(), at[i], live[i]))]
        for i, row in enumerate(held.rows)
    ]
    return Held(held.cache, rows)


def _changed(held: Held, change: Callable[[StateCache], Any], rows: list[int]) -> Held:
    change(held.cache)
    return Held(held.cache, [held.rows[i] for i in rows])


def _crop(held: Held, count: int) -> Held:
    held.cache.crop(-count)
    return Held(held.cache, [row[: len(row) - count] for row in held.rows])


def _turn(held: Held) -> list[int]:
    return [*range(1, len(held.rows)), 0]


# for caches of at least one row whose last call has 5 tokens; "call" is of a test's model
METHODS: dict[str, Callable[[Held], Held]] = {
    "crop": lambda h: _crop(h, 2),
    "crop a tensor": lambda h: _changed_crop(h),
    "reorder": lambda h: _changed(h, lambda c: c.reorder_cache(torch.tensor(_turn(h))), _turn(h)),
    "select": lambda h: _changed(
        h, lambda c: c.batch_select_indices(torch.tensor([0, *_turn(h)])), [0, *_turn(h)]
    ),
    "repeat": lambda h: _changed(
        h, lambda c: c.batch_repeat_interleave(2), [i for i in range(len(h.rows)) for _ in "12"]
    ),
    "copy": lambda h: Held(h.cache.copy(len(h.rows) - 1), h.rows[-1:]),
    "deepcopy": lambda h: Held(copy.deepcopy(h.cache), h.rows),
    "pickle": lambda h: Held(pickle.loads(pickle.dumps(h.cache)), h.rows),
    "reserve": lambda h: _changed(h, lambda c: c.reserve(70), [*range(len(h.rows))]),
}


def _changed_crop(held: Held) -> Held:
    count = torch.tensor(2)
    held.cache.crop(-count)
    count.zero_()  # the caller's
    return Held(held.cache, [row[:-2] for row in held.rows])


def assert_holds(m: Any, held: Held, found: dict[Any, Tensor]) -> None:
    """The next token's logits are those after the row's tokens, one call each; found: by those.
    Whether a mask says again what is padding, or not."""
    assert held.cache.get_seq_length() == len(held.rows[0])
    ids = tokens(len(held.rows), 1, seed=9) % 96 + 1
    live = torch.tensor([[*(x is not None for x in row), True] for row in held.rows])
    if not live.all():
        untold = m(ids, cache=copy.deepcopy(held.cache), use_cache=True).logits
    got = m(ids, cache=held.cache, use_cache=True, attention_mask=live.long()).logits
    if not live.all():
        assert_same(untold, got)
    for row, token, logits in zip(held.rows, ids.tolist(), got):
        key = *(x for x in row if x is not None), token[0]
        if key not in found:
            cache = StateCache(len(m.model.layers))
            for one, position in (*key[:-1], (key[-1], None)):
                at = None if position is None else torch.tensor([[position]])
                given = {"cache": cache, "use_cache": True, "position_ids": at}
                found[key] = m(torch.tensor([[one]]), **given).logits[0]
        assert_same(logits, found[key])


# for each of three calls before a method, on which side it is padded, and whose positions it has
LAYOUTS: dict[str, tuple[tuple[str, str], ...]] = {
    "plain": (("", ""), ("", ""), ("", "")),
    "positions, then none": (("", "all"), ("", ""), ("", "")),
    "none, then positions": (("", ""), ("", ""), ("", "all")),
    "positions of one row, then of each": (("", ""), ("", "all"), ("", "each")),
    "positions between": (("", ""), ("", "each"), ("", "")),
}
# recurrent states are computed again from the tokens that came after a padded prompt
PADDED = {side: ((side, ""), ("", ""), ("", "")) for side in MASKS}
# keys are forgotten a column at a time
PADDED |= {f"{side}, the last too": ((side, ""), ("", ""), (side, "")) for side in MASKS}


def _held(m: Any, layout: str) -> Held:
    cache = StateCache(len(m.model.layers))
    cache.activate_past_recording()
    held = Held(cache, [[], [], []])
    for i, (pad, told) in enumerate((LAYOUTS | PADDED)[layout]):
        held = call(m, held, 5, pad, told, seed=i)
    return held


def _pairs(layout: str, every: bool) -> list[tuple[str, str]]:
    """Pairs of methods: all, or each in one layout; a layout has each method first and second."""
    methods, turn = [*METHODS], [*LAYOUTS].index(layout)
    return [
        (first, second)
        for (i, first), (j, second) in product(enumerate(methods), enumerate(methods))
        if every or (i + j) % len(LAYOUTS) == turn
    ]


def _models(quick: str, *slow: str) -> Any:
    """Names of models, and whether all pairs go through all layouts."""
    cases = [pytest.param(x, True, marks=pytest.mark.slow) for x in (quick, *slow)]
    return pytest.mark.parametrize(("name", "every"), [(quick, False), *cases])


@pytest.mark.parametrize("layout", LAYOUTS)
@_models("hybrid", "gla", "retention", "rwkv7", "mla")
@torch.no_grad()
def test_methods_after_methods(name: str, every: bool, layout: str) -> None:
    m, found = model(name), {}
    start = _held(m, layout)
    for first, second in _pairs(layout, every):
        held = METHODS[second](METHODS[first](copy.deepcopy(start)))
        assert_holds(m, held, found)


@pytest.mark.parametrize("layout", LAYOUTS)
@_models("gla", "attention")
@torch.no_grad()
def test_calls_between_methods(name: str, every: bool, layout: str) -> None:
    m, found = model(name), {}
    start = _held(m, layout)
    for first, second in _pairs(layout, every):
        held = call(m, METHODS[first](copy.deepcopy(start)), 4, told="all", seed=7)
        assert_holds(m, METHODS[second](held), found)


@pytest.mark.parametrize(
    ("name", "layout"),
    [(m, x) for m in ("hybrid", "rwkv7") for x in MASKS]
    + [(m, f"{x}, the last too") for m in ("attention", "mla") for x in MASKS],
)
@pytest.mark.sample(
    which=lambda name, layout: (
        layout == "before" if name == "hybrid" else name == "attention" and "before" not in layout
    )
)
@torch.no_grad()
def test_methods_agree_where_rows_are_padded(name: str, layout: str) -> None:
    m, found = model(name), {}
    start = _held(m, layout)
    methods = {**METHODS, "call": lambda h: call(m, h, 2, seed=7)}
    for first, second in product(methods, methods):
        assert_holds(m, methods[second](methods[first](copy.deepcopy(start))), found)
