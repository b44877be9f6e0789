"""Lists of an indexer: plain torch and kernels under the interpreter beside the formula."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.indexer import inputs, loss
from tests.support import formulas
from tests.support.interpreted import interpreted

# B, T, S, HI, groups, block, topk, local, activation, pool, weights, causal
CASES: list[tuple[Any, ...]] = [
    (2, 37, 37, 4, 1, 4, 5, 0, "relu", "none", False, True),
    (2, 37, 37, 4, 2, 4, 5, 2, "relu", "mean", True, True),
    (1, 70, 70, 4, 2, 16, 3, 1, "identity", "max", False, True),
    (2, 3, 41, 4, 4, 4, 3, 2, "identity", "max", False, True),
    (1, 33, 33, 6, 1, 1, 7, 0, "relu", "max", True, True),
    (1, 33, 33, 6, 3, 1, 7, 0, "identity", "max", True, False),
    (1, 9, 5, 2, 1, 1, 3, 0, "relu", "max", True, True),
    (1, 5, 150, 2, 1, 1, 30, 0, "relu", "none", False, True),
    (1, 3, 3, 2, 1, 4, 2, 1, "relu", "none", False, True),
    (1, 6, 6, 2, 1, 64, 2, 1, "relu", "max", False, True),
    (1, 6, 6, 2, 1, 1, 0, 0, "relu", "max", False, True),
]


def _given(case: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    B, T, S, HI, groups, block, topk, local, activation, pool, weighted, causal = case
    torch.manual_seed(0)
    rows = S // block if pool == "none" else S
    made = torch.randn(B, T, HI, 20), torch.randn(B, rows, 20)
    tensors = [x.to(dtype) for x in made]
    if weighted:
        tensors.append(torch.randn(B, T, HI))
    options = {"topk": topk, "block": block, "groups": groups, "local": local}
    return tensors, options | {"activation": activation, "pool": pool, "causal": causal}


def _wanted(tensors: list[Tensor], options: dict[str, Any]) -> Tensor:
    return formulas.index(*[x.double() for x in tensors], **options)


def _expect_formula(impl: str, dtype: torch.dtype = torch.float32) -> None:
    for case in CASES:
        tensors, options = _given(case, dtype)
        B, T, S, pool = *case[:3], options["pool"]
        ways: list[dict[str, Any]] = [{}]
        if B == 1 and T == S:
            ways.append({"cu_seqlens": torch.tensor([0, T // 3, T // 3, T - 1, T])})
        if pool != "none":
            ways.append({"key_lengths": torch.arange(B) * 3 + S - 2})
            ways.append({"key_lengths": -torch.arange(B)})
        elif B == 2:
            ways.append({"key_lengths": torch.tensor([S - 5, S])})
        if B == 2 and not options["topk"] % 5:  # packed queries behind caches of other lengths
            rows = [torch.cat([x[0], x[1, : T // 2]])[None] for x in (tensors[0], *tensors[2:])]
            way = {"cu_seqlens": torch.tensor([0, T, T + T // 2])}
            way["key_lengths"] = torch.tensor([S, S - 3])
            given = [rows[0], tensors[1], *rows[1:]]
            got = ops.index(*given, **options, **way, impl=impl)
            assert torch.equal(got, _wanted(given, options | way)), (case, way)
        for way in ways:
            got = ops.index(*tensors, **options, **way, impl=impl)
            assert got.dtype == torch.int32
            assert torch.equal(got, _wanted(tensors, options | way)), (case, way)


def test_lists_equal_formula() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        _expect_formula("eager", dtype)


@interpreted
def test_lists_of_kernels_equal_formula_interpreted() -> None:
    for dtype in (torch.float32, torch.float16):
        _expect_formula("triton", dtype)


@interpreted
def test_rows_of_many_columns_and_steps_interpreted() -> None:
    """Scores that do not fit in a program's registers, and tiles that do not fit in the buffer."""
    from slipstream.kernels.indexer import triton_kernels

    small = {"buffer_bytes": 1, "max_columns": 16}
    tensors, options = _given((1, 70, 70, 2, 2, 1, 20, 3, "relu", "max", True, True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "select", partial(triton_kernels.select, **small))
        for given in (tensors, [(x * 2).round().clamp(-1, 1) for x in tensors]):
            got = ops.index(*given, **options, impl="triton")
            assert torch.equal(got, _wanted(given, options))


def _expect_first_of_equal(impl: str) -> None:
    tensors, options = _given((1, 60, 60, 2, 1, 1, 6, 0, "relu", "max", True, True))
    for x in ([y.sign() for y in tensors], [0 * y for y in tensors], [-y.abs() for y in tensors]):
        got = ops.index(*x, **options, impl=impl)
        assert torch.equal(got, _wanted(x, options))
        numbers = torch.arange(6, dtype=torch.int32)
        if not x[0].any():
            assert torch.equal(got[0, 30, 0], numbers)
    # numbers beyond all floats, and no numbers, leave no place empty
    huge = tensors[0].clone()
    huge[0, 40], huge[0, 41], huge[0, 42] = 3e38, -3e38, torch.nan
    assert (ops.index(huge, tensors[1], **options, impl=impl)[0, 6:] >= 0).all()


def test_equal_scores_choose_earlier_blocks() -> None:
    _expect_first_of_equal("eager")


@interpreted
def test_equal_scores_choose_earlier_blocks_interpreted() -> None:
    _expect_first_of_equal("triton")


def _expect_causal(impl: str) -> None:
    for block, pool in ((1, "max"), (4, "max"), (4, "mean")):
        (q, k), options = _given((1, 40, 40, 2, 1, block, 3, 1, "relu", pool, False, True))
        before = ops.index(q, k, **options, impl=impl)
        k[:, 21:] = torch.inf
        assert torch.equal(ops.index(q, k, **options, impl=impl)[:, :21], before[:, :21])
        last = before.amax(-1)[0, :, 0]
        assert (last <= torch.arange(40) // block).all()


def test_lists_know_nothing_of_later_keys() -> None:
    _expect_causal("eager")


@interpreted
def test_lists_know_nothing_of_later_keys_interpreted() -> None:
    _expect_causal("triton")


@pytest.mark.parametrize("options", [{"topk": 4}, {"topk": 2, "block": 4, "pool": "mean"}], ids=str)
def test_index_compiles_and_exports(options: dict[str, Any]) -> None:
    q, k = torch.randn(1, 24, 2, 8), torch.randn(1, 24, 8)
    want = ops.index(q, k, **options)

    class Lists(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return ops.index(q, k, **options)

    compiled = torch.compile(Lists(), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k), want)
    assert torch.equal(torch.export.export(Lists(), (q, k)).module()(q, k), want)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topk": -1}, "topk: want 0 or more"),
        ({"topk": 2, "local": 3}, "local: want at most the 2"),
        ({"topk": 2, "block": 3}, "block: want one of .1, 4"),
        ({"topk": 2, "pool": "sum"}, "pool: want one of .*max"),
        ({"topk": 2, "activation": "silu"}, "activation: want one of"),
        ({"topk": 2, "groups": 3}, "q's heads: want a multiple of groups"),
        ({"topk": 2, "groups": 0}, "groups: want 1 or more"),
        ({"topk": 2, "pool": "none", "key_lengths": torch.ones(2)}, "key_lengths: want "),
        ({"topk": 2, "weights": torch.ones(1, 24, 3)}, "weights: want shape"),
    ],
    ids=str,
)
def test_index_refuses_what_does_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        ops.index(torch.randn(1, 24, 2, 8), torch.randn(1, 24, 8), **options)
    with pytest.raises(ValueError, match="k: want a row for each of 6 blocks"):
        ops.index(torch.randn(1, 24, 2, 8), torch.randn(1, 5, 8), topk=2, block=4, pool="none")
    q = torch.randn(1, 24, 2, 8)
    with pytest.raises(ValueError, match="k: want shape"):
        ops.index_loss(q, torch.randn(1, 25, 8), q, q, pool="none")


# T, HI, groups, H, HKV, block, topk (None: all), activation, pool, weights, causal
LOSSES: list[tuple[Any, ...]] = [
    (13, 4, 1, 4, 2, 4, None, "relu", "none", False, True),
    (13, 4, 1, 4, 2, 4, 2, "relu", "mean", True, True),
    (19, 2, 2, 4, 2, 4, 2, "identity", "max", False, True),
    (19, 2, 2, 4, 2, 4, None, "identity", "max", True, True),
    (11, 4, 1, 6, 3, 1, 4, "relu", "max", True, True),
    (11, 4, 1, 6, 3, 1, None, "relu", "max", True, False),
    (2, 4, 1, 4, 2, 4, 1, "relu", "none", False, True),
]


@pytest.mark.parametrize("case", LOSSES, ids=str)
@pytest.mark.parametrize("rows", [None, 3], ids=["one tile", "tiles"])
def test_index_loss_and_gradients_equal_formula(
    case: tuple[Any, ...], rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    T, HI, groups, H, HKV, block, topk, activation, pool, weighted, causal = case
    if rows:
        from slipstream.kernels.indexer import loss as indexer

        for tiles in (indexer.in_tiles, indexer._slices):
            monkeypatch.setattr(indexer, tiles.__name__, partial(tiles, most=400))
    torch.manual_seed(0)
    sizes = (T, HI, 6), (T // block if pool == "none" else T, 6), (T, H, 5), (T, HKV, 5), (T, HI)
    rows_of = [torch.randn(2, *n, dtype=torch.float64) for n in sizes[: 4 + weighted]]
    options = {"block": block, "groups": groups, "activation": activation, "pool": pool}
    options |= {"causal": causal}
    for offsets in (None, torch.tensor([0, min(2, T - 1), min(2, T - 1), T - 1, T])):
        made = rows_of if offsets is None else [x[:1] for x in rows_of]
        way = options if offsets is None else options | {"cu_seqlens": offsets}
        lists = None
        if topk is not None:
            lists = ops.index(*made[:2], *made[4:], topk=topk, **way)
            lists = torch.cat([lists.flip(-1), lists[..., :1]], -1)  # in any order, with repeats
        found = []
        for run in (ops.index_loss, formulas.index_loss):
            leaves = [x.clone().requires_grad_() for x in (*made[:2], *made[4:])]
            loss = run(*leaves[:2], *made[2:4], *leaves[2:], selected=lists, scale=0.7, **way)
            found.append([loss.detach(), *torch.autograd.grad(3 * loss, leaves)])
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("way", ["compiled", "exported"])
def test_index_loss_has_gradients_by_the_dispatcher(way: str) -> None:
    torch.manual_seed(0)
    sizes = (1, 9, 2, 4), (1, 9, 4), (1, 9, 2, 3), (1, 9, 2, 3), (1, 9, 2)
    given = [torch.randn(*n, requires_grad=n[-1] != 3) for n in sizes]
    leaves = [x for x in given if x.requires_grad]

    class Loss(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return ops.index_loss(*tensors)

    want = torch.autograd.grad(ops.index_loss(*given), leaves)
    if way == "compiled":
        run: Any = torch.compile(Loss(), backend="aot_eager", fullgraph=True)
    else:
        run = torch.export.export(Loss(), tuple(given)).module()
    got = torch.autograd.grad(run(*given), leaves)
    assert all(x.abs().max() > 0 for x in want)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("B", "way"), [(2, "all"), (2, "listed"), (1, "packed")])
@pytest.mark.parametrize("pooled", [True, False])
def test_loss_asks_no_tensor_for_a_number(pooled: bool, B: int, way: str) -> None:
    """On a GPU that would wait for it; a tensor without memory has none."""
    q, k = torch.empty(B, 9, 2, 4, device="meta"), torch.empty(B, 9, 4, device="meta")
    lists = torch.empty(B, 9, 2, 3, device="meta", dtype=torch.int32)
    selected = None if way == "all" else lists
    offsets = torch.empty(4, device="meta", dtype=torch.int32) if way == "packed" else None
    x = inputs.Indexing(q, k, None, offsets, None, 4, 2, True, pooled, True)
    found = loss._forward(*x, q, q, selected, 1.0, 1.0, True)
    assert [y.shape for y in found[:3]] == [(), q.shape, k.shape]
