"""The kernels of attention to selected keys under Triton's interpreter, beside plain torch."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.selected_attention import launch
from slipstream.kernels.selected_attention.inputs import SelectedInputs, SelectedOptions
from tests.support.interpreted import error, interpreted

# B, T, S, H, HKV, widths of q and v, heads of lists, block, window, tail, causal
CASES = [
    (2, 37, 37, 4, 2, 16, 16, 1, 4, None, True, True),
    (1, 33, 33, 6, 2, 24, 16, 2, 16, 3, True, True),
    (1, 19, 60, 4, 4, 16, 20, 4, 1, (2, -1), False, False),
    (1, 70, 70, 4, 2, 16, 16, 4, 64, 5, False, True),
    (1, 9, 140, 8, 1, 16, 16, 1, 128, None, False, True),
    (2, 20, 20, 2, 1, 16, 16, 2, 4, None, True, False),
]


def differences(impl: Any, tensors: dict[str, Tensor], **options: Any) -> list[Tensor]:
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    o, lse = ops.attention(**leaves, **options, return_lse=True, impl=impl)
    seen = lse.masked_fill(lse == -torch.inf, 0)
    loss = (o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() + seen.cos().sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    assert torch.equal(lse == -torch.inf, (o == 0).all(-1).transpose(1, 2) & (lse < -1e30))
    return [o.detach(), seen.detach(), *grads]


def expect_plain(tensors: dict[str, Tensor], **options: Any) -> None:
    wide = {n: x.double() for n, x in tensors.items()}
    got = differences("triton", tensors, **options)
    for x, y in zip(got, differences("eager", wide, **options), strict=True):
        assert error(x, y) < 2e-6


def made(case: tuple[Any, ...], sinks: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    B, T, S, H, HKV, D, DV, G, block, window, tail, causal = case
    torch.manual_seed(T)
    tensors = {"q": torch.randn(B, T, H, D), "k": torch.randn(B, S, HKV, D)}
    tensors |= {"v": torch.randn(B, S, HKV, DV)} | ({"sinks": torch.randn(H)} if sinks else {})
    lists = torch.randint(-1, -(-S // block), (B, T, G, 5)).int()
    options = {"block": block, "window_size": window, "tail": tail, "causal": causal}
    return tensors, {"selected": lists, **options}


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_selected_kernels_equal_plain_torch(case: tuple[Any, ...]) -> None:
    tensors, options = made(case, sinks=case[7] == 1)
    expect_plain(tensors, **options)


@interpreted
def test_selected_kernels_take_packed_sequences_and_lengths() -> None:
    for G, block in ((1, 4), (2, 16), (4, 64)):
        tensors, options = made((1, 70, 70, 4, 2, 16, 16, G, block, 3, True, True), True)
        expect_plain(tensors, **options, cu_seqlens=torch.tensor([0, 0, 1, 34, 34, 35, 70]))
    tensors, options = made((2, 9, 70, 4, 2, 16, 16, 2, 4, None, True, True), False)
    tensors["k"][1, 41:] = tensors["v"][1, 41:] = torch.nan
    expect_plain(tensors, **options, key_lengths=torch.tensor([70, 41]))


@interpreted
def test_unions_of_lists_have_each_entry_once() -> None:
    """More entries than a merge goes through at a time, with repeats, past the end, and none."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 11, 4, 16), torch.randn(1, 1100, 2, 16)
    lists = torch.randint(-3, 1200, (1, 11, 1, 300)).int()
    lists[0, 3] = 5
    inputs = SelectedInputs(q, k, k, lists)
    merged, rows = launch._merged(inputs, SelectedOptions(1.0, -1, 0, False, 1, False), 4, None)
    assert rows == 3
    for tile in range(rows):
        found: dict[int, int] = {}
        for query in range(4 * tile, min(4 * tile + 4, 11)):
            for entry in {x for x in lists[0, query, 0].tolist() if 0 <= x < 1100}:
                found[entry] = found.get(entry, 0) | 1 << query % 4
        count = int(merged.counts[tile, 0])
        bits = merged.bits[tile, 0, :count].tolist()
        assert bits == [found[x] for x in sorted(found)]


@interpreted
def test_lists_by_keys_have_a_bit_a_block() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 5, 4, 16), torch.randn(1, 300, 2, 16)
    for block, SB in ((1, 64), (1, 32), (4, 128), (16, 16)):
        lists = torch.randint(-1, -(-300 // block), (1, 5, 2, 40)).int()
        inputs = SelectedInputs(q, k, k, lists)
        options = SelectedOptions(1.0, -1, 0, False, block, False)
        merged, _ = launch._merged(inputs, options, 1, SB)
        for t, g in product(range(5), range(2)):
            found: dict[int, int] = {}
            for entry in {x for x in lists[0, t, g].tolist() if x >= 0}:
                tile, bit = divmod(entry, SB // block)
                found[tile] = found.get(tile, 0) | 1 << bit
            count = int(merged.counts[t, g])
            first = g * -(-300 // SB)
            entries, bits = merged.entries[t, g], merged.bits[t, g, :count]
            assert entries[:count].tolist() == [first + x for x in sorted(found)]
            assert [x % 2**64 for x in bits.tolist()] == [found[x] for x in sorted(found)]
            assert (entries[count:] == 2**31 - 1).all()
