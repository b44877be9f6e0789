"""attention(dropout_p=...): the weights that are dropped are those of the formula."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.ops.attention import attention

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": 3, "causal": False, "softcap": 2.0},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 7])},
    "sinks": {"sinks": torch.tensor([0.3, -0.2], dtype=torch.float64)},
}


def inputs(tokens: int = 7, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, tokens, 2, 3, dtype=dtype, requires_grad=True) for _ in range(3)]


def dropped(seed: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    o = attention(q, k, v, **options)
    assert isinstance(o, Tensor)
    return o


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_the_same_mask(name: str) -> None:
    assert torch.autograd.gradcheck(
        lambda *x: dropped(3, *x, dropout_p=0.4, **OPTIONS[name]), inputs(), fast_mode=True
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_mean_over_seeds_is_attention_without_dropout(name: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    want = attention(q, k, v, **OPTIONS[name])
    draws = torch.stack([dropped(i, q, k, v, dropout_p=0.3, **OPTIONS[name]) for i in range(100)])
    error = (draws.mean(0) - want).abs()
    # 6 standard errors; the first query of a sequence has one weight, 0 or 1 / 0.7
    assert bool((error <= 6 * draws.std(0) / 100**0.5 + 1e-9).all())


def test_weights_are_dropped_at_the_rate_asked_for() -> None:
    """With v = 1, an output is the sum of the weights that are not dropped."""
    q = k = torch.zeros(2, 300, 2, 4)
    v = torch.eye(300)[None, :, None].expand(2, -1, 2, -1)
    p = dropped(0, q, k, v, dropout_p=0.25, causal=False)
    assert abs(float((p == 0).float().mean()) - 0.25) < 0.005
    torch.testing.assert_close(p[p != 0], torch.full_like(p[p != 0], 1 / 300 / 0.75))
    assert not torch.equal(p[0], p[1]) and not torch.equal(p[:, :128], p[:, 128:256])


def test_dropout_follows_the_seed() -> None:
    q, k, v = inputs(200)
    first = dropped(1, q, k, v, dropout_p=0.5)
    second = attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, dropped(1, q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)


def test_dropout_is_refused_where_it_cannot_be() -> None:
    q, k, v = inputs()
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="dropout_p: want a probability"):
            attention(q, k, v, dropout_p=p)
    with pytest.raises(TypeError, match="dropout_p: want a number"):
        attention(q, k, v, dropout_p="0.1")  # pyright: ignore
    with pytest.raises(NotImplementedError, match="dropout"):
        attention(q, k, v, dropout_p=0.1, impl="reference")
