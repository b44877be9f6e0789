"""Attention to selected keys in plain torch, beside the formula in float64, and what it refuses;
the kernels under Triton's interpreter, beside plain torch."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.selected_attention import eager, launch
from slipstream.kernels.selected_attention.inputs import SelectedInputs, SelectedOptions
from tests.support import formulas
from tests.support.interpreted import error, interpreted

H, HKV = 4, 2


def given(B: int, T: int, G: int, block: int, D: int = 8, entries: int = 5) -> dict[str, Any]:
    """Lists of random blocks with repeats, holes, and blocks that no query has come to yet."""
    torch.manual_seed(T + G)
    shapes = {"q": (B, T, H, D), "k": (B, T, HKV, D), "v": (B, T, HKV, D + 3)}
    args = {name: torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    lists = torch.randint(-1, max(-(-T // block), 1), (B, T, G, entries)).int()
    return args | {"selected": lists}


def results(run: Any, args: dict[str, Any], **options: Any) -> list[Tensor]:
    leaves = {n: x.clone().requires_grad_() if n in "qkv" else x for n, x in args.items()}
    o = run(**leaves, **options)
    loss = (o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)).sum()
    return [o.detach(), *torch.autograd.grad(loss, [leaves[x] for x in "qkv"])]


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("block", [1, 4, 16, 64, 128])
def test_selected_keys_equal_the_formula(block: int, impl: str) -> None:
    for G, tail, causal, window in product((1, HKV, H), (True, False), (True, False), (None, 3)):
        args = given(2, 37, G, block)
        options: dict[str, Any] = {"block": block, "tail": tail, "causal": causal}
        options["window_size"] = window
        got = results(ops.attention, args, **options, impl=impl)
        for x, y in zip(got, results(formulas.attention, args, **options), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_packed_sequences_see_their_own_keys(impl: str) -> None:
    """Among them empty ones and ones of a token, whose lists name blocks past their end."""
    for G, block in product((1, HKV), (1, 4, 16)):
        args = given(1, 70, G, block)
        options: dict[str, Any] = {
            "block": block,
            "tail": G == 1,
            "window_size": 2 if G == 1 else None,
        }
        options["cu_seqlens"] = torch.tensor([0, 0, 1, 34, 34, 35, 70])
        got = results(ops.attention, args, **options, impl=impl)
        for x, y in zip(got, results(formulas.attention, args, **options), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def test_lists_of_everything_are_dense_attention() -> None:
    args = given(2, 40, 1, 4)
    args["selected"] = torch.arange(10).int().expand(2, 40, 1, 10)
    sinks = torch.randn(H, dtype=torch.float64)
    more: Any
    for more in ({}, {"sinks": sinks}, {"window_size": 7}, {"scale": -0.3}, {"causal": False}):
        dense = {n: args[n] for n in "qkv"}
        window = {"window_size": None} if "window_size" in more else {}
        got = ops.attention(**args, block=4, return_lse=True, **more)
        want = ops.attention(**dense, **{**more, **window, "return_lse": True})
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for n in (1, 3):  # lists of nothing: the window alone
        none = args | {"selected": args["selected"][..., :n] * 0 - 1}
        got = ops.attention(**none, block=4, window_size=7)
        torch.testing.assert_close(got, ops.attention(**dense, window_size=7))


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_queries_that_see_nothing_are_zero(impl: str) -> None:
    args = given(1, 9, 1, 1)
    args["selected"][0, 4] = -1
    args["selected"][0, 2] = 8  # not yet there
    o, lse = ops.attention(**args, return_lse=True, impl=impl)
    for t in (2, 4):
        assert (o[0, t] == 0).all() and (lse[0, :, t] == -torch.inf).all()
    args["selected"] = args["selected"][..., :0]
    o, lse = ops.attention(**args, window_size=0, return_lse=True, impl=impl)
    assert (o == 0).all() and (lse == -torch.inf).all()
    grads = results(ops.attention, args, impl=impl)
    assert all((x == 0).all() for x in grads)
    sinks = torch.randn(H, dtype=torch.float64)
    o, lse = ops.attention(**args, sinks=sinks, return_lse=True, impl=impl)
    assert (o == 0).all()
    torch.testing.assert_close(lse, sinks[:, None].expand(1, H, 9))


def test_order_and_repeats_of_a_list_count_for_nothing() -> None:
    args = given(2, 33, HKV, 4)
    twice = torch.cat([args["selected"].flip(-1), args["selected"], args["selected"] * 0 - 7], -1)
    want = ops.attention(**args, block=4, tail=True)
    got = ops.attention(**args | {"selected": twice}, block=4, tail=True)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_later_keys_change_no_bit() -> None:
    args = given(1, 40, 1, 4)
    for t in (0, 5, 31, 38):
        changed = {n: x.clone() for n, x in args.items()}
        for n in "kv":
            changed[n][:, t + 1 :] = 7 * torch.randn_like(changed[n][:, t + 1 :])
        options: dict[str, Any] = {"block": 4, "tail": True, "window_size": 3}
        got, want = (ops.attention(**x, **options)[:, : t + 1] for x in (changed, args))
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_gradients_of_all_there_is_pass_gradcheck() -> None:
    args = given(1, 7, 1, 4, D=4)
    sinks = torch.randn(H, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (args["q"], args["k"], args["v"], sinks)]

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        more: dict[str, Any] = {"selected": args["selected"], "block": 4, "window_size": 2}
        return ops.attention(q, k, v, sinks=sinks, **more, return_lse=True, impl="eager")

    assert torch.autograd.gradcheck(run, leaves)


def test_cached_keys_are_before_the_queries() -> None:
    """More keys than queries, the last query on the last key in use; what is not is never read."""
    args = given(2, 50, HKV, 4)
    lengths = torch.tensor([50, 41])
    args["q"], args["selected"] = (args[n][:, -6:].contiguous() for n in ("q", "selected"))
    args["k"][1, 41:] = args["v"][1, 41:] = torch.nan
    for impl in ("eager", "eager elsewhere"):
        with pytest.MonkeyPatch.context() as patch:
            if impl != "eager":  # all keys under a mask, as on a device
                patch.setattr(Tensor, "is_cpu", False)
                got = eager.forward(*_terms(args, lengths))[0]
            else:
                got = ops.attention(**args, block=4, tail=True, key_lengths=lengths, impl=impl)
        want = formulas.attention(**args, block=4, tail=True, key_lengths=lengths)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _terms(args: dict[str, Any], lengths: Tensor) -> tuple[Any, Any]:
    options = SelectedOptions(args["q"].shape[-1] ** -0.5, -1, 0, True, 4, True)
    return SelectedInputs(**args, lengths=lengths), options


def test_wrong_lists_are_refused() -> None:
    args = given(1, 33, 1, 4)
    lists = args["selected"]
    for wrong in (
        lists.long(),
        lists.double(),
        lists[:, :5],
        lists[..., 0],
        lists.expand(1, 33, 3, 5),
    ):
        with pytest.raises(ValueError, match="selected"):
            ops.attention(**args | {"selected": wrong}, block=4)
    for block, largest in ((1, 33), (4, 9), (16, 3), (64, 1), (128, 1)):
        right = lists.clamp(max=largest - 1)
        ops.attention(**args | {"selected": right}, block=block)
        with pytest.raises(ValueError, match=f"selected: want less than the {largest} blocks"):
            ops.attention(**args | {"selected": right + largest}, block=block)
    for block in (0, 2, 256, -4):
        with pytest.raises(ValueError, match="block: want one of"):
            ops.attention(**args, block=block)
    dense = {n: args[n] for n in "qkv"}
    alone: Any
    for alone in ({"tail": True}, {"block": 4}):
        with pytest.raises(ValueError, match="selected: want lists"):
            ops.attention(**dense, **alone)
    lacking = {
        "softcap": 2.0,
        "dropout_p": 0.5,
        "consistent": True,
        "g": -torch.rand(1, 33, H).double(),
    }
    for name, x in {**lacking, "alibi_slopes": torch.rand(H)}.items():
        with pytest.raises(NotImplementedError, match=name):
            ops.attention(**args, block=4, **{name: x})


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
