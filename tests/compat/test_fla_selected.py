"""NSA and DSA under fla's names, beside loops over queries in float64."""

import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.compat.fla.selected import naive_dsa, parallel_nsa

T, H, HKV, BLOCK = 37, 4, 2, 4


def draw(*shape: int) -> Tensor:
    return torch.randn(1, T, *shape, dtype=torch.float64, requires_grad=True)


def looped(q: Tensor, k: Tensor, v: Tensor, sees: Any, scale: float) -> Tensor:
    """sees(t, head of keys): the keys of a query."""
    rows = []
    for t in range(T):
        for h in range(H):
            g = h * HKV // H
            keys = sorted(sees(t, g))
            p = (k[0, keys, g] @ q[0, t, h] * scale).softmax(0)
            rows.append(p @ v[0, keys, g])
    return torch.stack(rows).view(1, T, H, -1)


@pytest.mark.parametrize("cuts", [(0, T), (0, 9, 21, T)])
@pytest.mark.parametrize("counted", [False, True])
def test_parallel_nsa_matches_loop(cuts: tuple[int, ...], counted: bool) -> None:
    q, k, v, g_slc, g_swa = draw(H, 8), draw(HKV, 8), draw(HKV, 5), draw(H), draw(H)
    begin = {t: a for a, b in pairwise(cuts) for t in range(a, b)}
    lists = torch.randint(-1, 10, (1, T, HKV, 4))
    lists[..., 0] = torch.tensor([(t - begin[t]) // BLOCK for t in range(T)])[:, None]
    counts: Any = torch.randint(1, 5, (1, T, HKV)) if counted else 4

    def selected(t: int, g: int) -> set[int]:
        n = int(counts[0, t, g]) if isinstance(counts, Tensor) else 4
        blocks = [i for i in lists[0, t, g, :n].tolist() if i >= 0]
        keys = {begin[t] + i * BLOCK + j for i in blocks for j in range(BLOCK)}
        return {s for s in keys if s <= t}

    want = looped(q, k, v, selected, 0.4) * g_slc[..., None]
    near = looped(q, k, v, lambda t, g: range(max(begin[t], t - 5), t + 1), 8**-0.5)
    want = want + near * g_swa[..., None]
    offsets = torch.tensor(cuts) if len(cuts) > 2 else None
    got = parallel_nsa(
        q, k, v, None, g_slc, g_swa, lists, counts, BLOCK, 6, scale=0.4, cu_seqlens=offsets
    )
    torch.testing.assert_close(got, want)
    leaves = q, k, v, g_slc, g_swa
    grads = [torch.autograd.grad(y.sin().sum(), leaves) for y in (got, want)]
    torch.testing.assert_close(*grads)


def test_parallel_nsa_refuses_by_name() -> None:
    of = importlib.import_module("slipstream.compat.fla.ops")
    assert (of.nsa.parallel_nsa, of.dsa.naive_dsa) == (parallel_nsa, naive_dsa)
    q, k, v, gate = draw(H, 8), draw(HKV, 8), draw(HKV, 5), draw(H)
    lists = torch.zeros(1, T, HKV, 2, dtype=torch.long)
    cases: tuple[tuple[Any, str, dict[str, Any]], ...] = (
        (NotImplementedError, "g_cmp", {"g_cmp": gate, "block_indices": lists}),
        (NotImplementedError, "block_size", {"block_size": 32, "block_indices": lists}),
        (ValueError, "block_indices", {}),
        (ValueError, "g_swa", {"window_size": 4, "block_indices": lists}),
    )
    for error, name, given in cases:
        with pytest.raises(error, match=f"^{name}: "):
            parallel_nsa(q, k, v, **given)


@pytest.mark.parametrize("cuts", [(0, T), (0, 9, 21, T)])
def test_naive_dsa_matches_loop(cuts: tuple[int, ...]) -> None:
    q, k, v = draw(H, 8), draw(HKV, 8), draw(HKV, 5)
    q_idx, k_idx, w_idx = draw(3, 6), draw(6), draw(3)
    begin = {t: a for a, b in pairwise(cuts) for t in range(a, b)}
    scores = torch.einsum("thd,sd->ths", q_idx[0], k_idx[0]).relu()
    scores = torch.einsum("ths,th->ts", scores, w_idx[0])

    def best(t: int, g: int) -> list[int]:
        own = scores[t, begin[t] : t + 1]
        return (begin[t] + own.sort(descending=True, stable=True).indices[:6]).tolist()

    want = looped(q, k, v, best, 8**-0.5)
    given: dict[str, Any] = {"cu_seqlens": torch.tensor(cuts) if len(cuts) > 2 else None}
    got, lists = naive_dsa(q, k, v, q_idx, k_idx, w_idx, None, 6, return_indices=True, **given)
    torch.testing.assert_close(got, want)
    assert lists.dtype == torch.int64
    assert sorted(x + begin[30] for x in lists[0, 30].tolist()) == sorted(best(30, 0))
    again = naive_dsa(q, k, v, q_idx, k_idx, w_idx, lists, **given)
    torch.testing.assert_close(again, got, rtol=0, atol=0)
