"""Each method of a StateCache before and after each other: what comes of both is what the tokens
that are left give, wherever the batch was padded."""

import itertools
import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from slipstream.models import SlipstreamForCausalLM, StateCache
from tests.support.language_models import assert_same, model, tokens

COLUMNS, CALLS = 12, ((0, 5), (5, 6), (6, 12))
MASKS = {
    "before": [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]],
    "between": [[1, 0, 1, 0, 1], [0, 1, 1, 0, 1]],
    "after": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]],
}


class Tokens:
    """A cache, and what it should know: the tokens of each row by column, and which are padding."""

    def __init__(self, m: SlipstreamForCausalLM, mask: Tensor) -> None:
        self.m, self.ids, self.mask = m, tokens(2, COLUMNS), mask
        self.cache = StateCache(len(self.m.model.layers))
        self.cache.activate_past_recording()
        for begin, end in CALLS:
            self.m(
                self.ids[:, begin:end],
                cache=self.cache,
                use_cache=True,
                attention_mask=mask[:, :end],
            )

    def choose(self, rows: list[int]) -> None:
        self.ids, self.mask = self.ids[rows], self.mask[rows]

    def copy(self) -> None:
        self.cache = self.cache.copy(len(self.ids) - 1)
        self.choose([len(self.ids) - 1])

    def deepcopy(self) -> None:
        self.cache = deepcopy(self.cache)

    def pickle(self) -> None:
        self.cache = pickle.loads(pickle.dumps(self.cache))

    def crop(self) -> None:
        self.cache.crop(-2)
        self.ids, self.mask = self.ids[:, :-2], self.mask[:, :-2]

    def reorder(self) -> None:
        rows = [*range(len(self.ids))][::-1]
        self.cache.reorder_cache(torch.tensor(rows))
        self.choose(rows)

    def select(self) -> None:
        self.cache.batch_select_indices(torch.tensor([0]))
        self.choose([0])

    def repeat(self) -> None:
        self.cache.batch_repeat_interleave(2)
        self.choose([n for n in range(len(self.ids)) for _ in range(2)])

    def reserve(self) -> None:
        self.cache.reserve(3)

    def call(self) -> None:
        self.step(tokens(len(self.ids), 2, seed=7))

    def step(self, more: Tensor) -> Tensor:
        got = self.m(more, cache=self.cache, use_cache=True).logits
        self.ids = torch.cat([self.ids, more], 1)
        self.mask = torch.cat([self.mask, torch.ones_like(more)], 1)
        return got

    def check(self) -> None:
        assert self.cache.get_seq_length() == self.ids.shape[1]
        got = self.step(tokens(len(self.ids), 2, seed=4))
        for row, ids, mask in zip(got, self.ids, self.mask, strict=True):
            assert_same(row[None], self.m(ids[mask == 1][None]).logits[:, -2:])


METHODS: tuple[Callable[[Tokens], None], ...] = (
    Tokens.copy, Tokens.deepcopy, Tokens.pickle, Tokens.crop, Tokens.reorder, Tokens.select,
    Tokens.repeat, Tokens.reserve, Tokens.call,
)  # fmt: skip


def wrong_pairs(name: str, mask: Tensor) -> list[str]:
    m, found = model(name), []
    for first, second in itertools.product(METHODS, METHODS):
        state = Tokens(m, mask)
        try:
            first(state)
            second(state)
            state.check()
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            found.append(f"{first.__name__}, {second.__name__}: {error!r:.200}")
    return found


@pytest.mark.parametrize("name", ["attention", "mla"])
@pytest.mark.parametrize("side", MASKS)
@pytest.mark.sample(which=lambda name, side: name == "attention" and side != "before")
@torch.no_grad()
def test_methods_agree_where_the_last_columns_are_padded(name: str, side: str) -> None:
    """Keys are forgotten a column at a time."""
    mask = torch.ones(2, COLUMNS, dtype=torch.int64)
    mask[:, :5] = torch.tensor(MASKS[side])
    mask[:, 7:] = torch.tensor(MASKS[side])
    assert not wrong_pairs(name, mask)


@pytest.mark.parametrize("name", ["hybrid", "rwkv7"])
@pytest.mark.parametrize("side", MASKS)
@pytest.mark.sample(which=lambda name, side: name == "hybrid" and side == "before")
@torch.no_grad()
def test_methods_agree_after_a_padded_prompt(name: str, side: str) -> None:
    """Recurrent states are computed again from the tokens that came after, of a copy as well."""
    mask = torch.ones(2, COLUMNS, dtype=torch.int64)
    mask[:, :5] = torch.tensor(MASKS[side])
    assert not wrong_pairs(name, mask)
