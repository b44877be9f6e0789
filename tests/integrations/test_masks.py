"""The masks of masks.py equal those of transformers' mask function."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import masking_utils as hf

from slipstream.integrations import masks
from slipstream.integrations.transformers import slipstream_mask

ROWS = 3
FUNCTIONS: dict[str, Callable] = {
    "causal": hf.causal_mask_function,
    "bidirectional": hf.bidirectional_mask_function,
    "causal window": hf.sliding_window_causal_mask_function(4),
    "causal window of one": hf.sliding_window_causal_mask_function(1),
    "bidirectional window": hf.sliding_window_bidirectional_mask_function(3),
    "chunks": hf.chunked_causal_mask_function(4, torch.zeros(ROWS, dtype=torch.int64)),
    "left window": hf.sliding_window_overlay(3),
}
# queries, keys, position of query 0, of key 0
SHAPES = ((9, 9, 0, 0), (5, 9, 4, 0), (5, 9, 0, 0), (1, 9, 8, 0), (9, 5, 0, 0), (4, 7, 8, 5))
PADDINGS = ("none", "nothing padded", "left", "right", "both", "hole", "a row")


def padding_of(kind: str, tokens: int) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.ones(ROWS, tokens, dtype=torch.bool)
    cuts = {"left": [slice(0, 2)], "right": [slice(-2, None)], "hole": [slice(2, 3)]}
    cuts |= {"both": [slice(0, 1), slice(-1, None)], "a row": [slice(None)]}
    for cut in cuts.get(kind, []):
        mask[1, cut] = False
    return mask


def dense(mask: Tensor | None, queries: int, keys: int) -> Tensor:
    if mask is None:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    elif masks.is_rule_mask(mask):
        mask = masks.visible(mask, ROWS, queries, keys)
    return mask.expand(ROWS, 1, queries, keys)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("static", [False, True])
def test_mask_equals_mask_function(name: str, static: bool) -> None:
    causal = "bidirectional" not in name
    for (T, S, q0, k0), kind in itertools.product(SHAPES, PADDINGS):
        padding = padding_of(kind, k0 + S)
        call = (ROWS, T, S, torch.tensor(q0) if static else q0, k0, FUNCTIONS[name], padding)
        got = slipstream_mask(
            *call, allow_is_causal_skip=causal, allow_is_bidirectional_skip=not causal
        )
        want = hf.sdpa_mask(*call, allow_is_causal_skip=False).expand(ROWS, 1, T, S)
        live = torch.ones(ROWS, T, dtype=torch.bool)
        if (padding is not None and causal) or "window" in name:
            # what a query on padding sees does not matter where positions do
            place = torch.arange(T) + q0
            at = torch.ones(ROWS, q0 + T + k0 + S, dtype=torch.bool)
            if padding is not None:
                at[:, : k0 + S] = padding
            live = at[:, place]
        live &= want[:, 0].any(-1)
        same = (dense(got, T, S) == want)[:, 0].all(-1)
        assert bool(same[live].all()), (name, T, S, q0, k0, kind)


@pytest.mark.skipif(
    not hasattr(hf, "remap_positions_for_packed_sequence"), reason="not in this transformers"
)
@pytest.mark.parametrize("name", ["causal", "causal window", "bidirectional window"])
def test_packed_mask_equals_mask_function(name: str) -> None:
    at = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0]]).expand(ROWS, -1)
    function = hf.and_masks(
        hf.remap_positions_for_packed_sequence(FUNCTIONS[name], at),
        hf.packed_sequence_mask_function(hf.find_packed_sequence_indices(at)),
    )
    got = slipstream_mask(ROWS, 9, 9, mask_function=function, allow_is_causal_skip=False)
    assert got is not None and masks.is_rule_mask(got)
    want = hf.sdpa_mask(ROWS, 9, 9, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(dense(got, 9, 9), want)


@pytest.mark.parametrize("name", [*FUNCTIONS, "packed"])
def test_padding_of_ones_keeps_the_mask(name: str) -> None:
    """So that a batch without padding needs neither its bounds nor a dense mask."""
    function = FUNCTIONS.get(name) or hf.and_masks(
        FUNCTIONS["causal"],
        hf.packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 4]).expand(ROWS, -1)),
    )
    for T, S, q0, k0 in SHAPES if name in FUNCTIONS else SHAPES[:1]:
        padding = padding_of("nothing padded", k0 + S)
        want, got = (
            slipstream_mask(ROWS, T, S, q0, k0, function, x, allow_is_causal_skip=False)
            for x in (None, padding)
        )
        assert (got is None) == (want is None)
        assert got is None or want is None or torch.equal(got, want), (T, S, q0, k0)
