"""rwkv4 against sums over all earlier tokens, and where exponents are extreme."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.running_mean.eager import running_max
from tests.support.mappings import both, same
from tests.support.recurrences import B, T, randn

D = 5


def rwkv4_in_full(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, mean: Tensor, z: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The state before the first token is one more token, of weight exp(z) and value mean."""
    k, v = torch.cat([z[:, None], k], 1), torch.cat([mean[:, None], v], 1)
    outputs, n = [], k.shape[1]
    for t in range(1, n):
        past = k[:, :t] + torch.arange(t - 1, -1, -1, dtype=k.dtype)[:, None] * w
        weights = torch.cat([past, (u + k[:, t])[:, None]], 1).softmax(1)
        outputs.append((weights * v[:, : t + 1]).sum(1))
    weights = k + torch.arange(n - 1, -1, -1, dtype=k.dtype)[:, None] * w
    return torch.stack(outputs, 1), ((weights.softmax(1) * v).sum(1), weights.logsumexp(1))


def rwkv4_arguments() -> dict[str, Tensor]:
    return {"w": -randn(D).exp(), "u": randn(D), "k": randn(B, T, D), "v": randn(B, T, D)}


@pytest.mark.parametrize("fn", both("rwkv4"))
@pytest.mark.parametrize("impl", [None, "reference"])
def test_rwkv4_is_its_weighted_mean(fn: Any, impl: str | None) -> None:
    given, state = rwkv4_arguments(), (randn(B, D), randn(B, D))
    want = rwkv4_in_full(**given, mean=state[0], z=state[1])
    same(fn(**given, initial_state=state, output_final_state=True, impl=impl), want, 1e-10)
    nothing = (randn(B, D), torch.full((B, D), -torch.inf).double())
    o, _ = fn(**given, initial_state=nothing)
    torch.testing.assert_close(o, fn(**given)[0], rtol=0, atol=0)
    torch.testing.assert_close(o[:, 0], given["v"][:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rwkv4_of_weights_that_would_overflow(dtype: torch.dtype) -> None:
    given = rwkv4_arguments()
    given["k"] = 300 * given["k"]
    w = given["w"] = -torch.tensor([0.0, 1e-3, 1.0, 40.0, 1000.0]).double()
    given = {n: x.to(dtype) for n, x in given.items()}
    want, _ = rwkv4_in_full(
        **{n: x.double() for n, x in given.items()},
        mean=torch.zeros(B, D).double(),
        z=torch.full((B, D), -1e30).double(),
    )
    assert (w == given["w"].double()).sum() >= 3
    leaves = {n: x.requires_grad_() for n, x in given.items()}
    o, state = ops.chunk_rwkv4(**leaves, output_final_state=True)
    torch.testing.assert_close(o.double(), want, rtol=2e-2, atol=2e-3)
    grads = torch.autograd.grad(o.float().sum() + sum(x.sum() for x in state), [*leaves.values()])
    assert all(x.isfinite().all() for x in grads)


def test_rwkv4_rejects_what_does_not_fit() -> None:
    given = rwkv4_arguments()
    with pytest.raises(TypeError, match="initial_state: want a tuple"):
        ops.chunk_rwkv4(**given, initial_state=randn(B, D))
    with pytest.raises(ValueError, match=r"initial_state\[1\]: want"):
        ops.chunk_rwkv4(**given, initial_state=(randn(B, D), randn(1)))


@pytest.mark.parametrize("lengths", [None, (1, 0, 7, 4, 9)])
def test_running_max_is_that_of_a_loop(lengths: tuple[int, ...] | None) -> None:
    """Which sums are relative to: of the tokens so far, decayed, and of what was before."""
    rows = 2 if lengths is None else 1
    sequences = [(b, 0, 21) for b in range(rows)]
    cuts = None if lengths is None else torch.tensor([0, *accumulate(lengths)])
    if cuts is not None:
        sequences = [(0, int(x), int(y)) for x, y in pairwise(cuts)]
    k, start = torch.randn(rows, 21, D), torch.randn(len(sequences), D)
    w = -torch.rand(D)
    found = running_max(k, w, start, cuts)
    for n, (row, begin, end) in enumerate(sequences):
        m = start[n]
        for t in range(begin, end):
            m = torch.maximum(k[row, t], m + w)
            torch.testing.assert_close(found[row, t], m)
