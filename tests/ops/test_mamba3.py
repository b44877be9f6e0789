"""mamba3 against its recurrence, token by token, and in two calls."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.mappings import both, near
from tests.support.recurrences import HV, B, K, T, V, beta, log_decay, randn

P = 2


def arguments(R: int, tokens: int = T) -> dict[str, Tensor]:
    return {
        "q": randn(B, tokens, HV, R, K), "k": randn(B, tokens, HV, R, K),
        "v": randn(B, tokens, HV, R, V), "g": log_decay(B, tokens, HV), "dt": beta(B, tokens, HV),
        "trap": beta(B, tokens, HV), "angles": randn(B, tokens, HV, P),
    }  # fmt: skip


def states(R: int) -> tuple[Tensor, ...]:
    return randn(B, HV, K, V), randn(B, HV, R, K), randn(B, HV, R, V), randn(B, HV, P)


def turned(x: Tensor, theta: Tensor) -> Tensor:
    """x [B, HV, R, K] as complex pairs, P of them by theta [B, HV, P]."""
    pairs = torch.view_as_complex(x[..., : 2 * P].unflatten(-1, (P, 2)).contiguous())
    pairs = pairs * torch.polar(torch.ones_like(theta), theta)[:, :, None]
    return torch.cat([torch.view_as_real(pairs).flatten(-2), x[..., 2 * P :]], -1)


def recurrence(
    given: dict[str, Tensor], S: Tensor, key: Tensor, value: Tensor, theta: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    outputs = []
    for t in range(given["q"].shape[1]):
        q, k, v, g, dt, trap, angles = (x[:, t] for x in given.values())
        theta = theta + angles
        q, k = turned(q, theta), turned(k, theta)
        alpha, step = g.exp()[..., None, None], dt[..., None, None]
        share = trap[..., None, None]
        S = alpha * S + alpha * step * (1 - share) * (key.mT @ value)
        S = S + step * share * (k.mT @ v)
        outputs.append(q @ S)
        key, value = k, v
    return torch.stack(outputs, 1), (S, key, value, theta)


@pytest.mark.parametrize("fn", both("mamba3"))
@pytest.mark.parametrize("R", [1, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_mamba3_is_its_recurrence(fn: Any, R: int, scale: float | None) -> None:
    given, start = arguments(R), states(R)
    want, ends = recurrence(given, *start)
    for impl in (None, "reference"):
        options = {"scale": scale, "impl": impl, "output_final_state": True}
        o, after = fn(**given, initial_state=start, **options)
        near(o, (scale or 1.0) * want)
        for x, y in zip(after, ends, strict=True):
            near(x, y)


@pytest.mark.parametrize("fn", both("mamba3"))
def test_mamba3_starts_from_nothing_and_goes_on(fn: Any) -> None:
    given = arguments(2)
    zeros = tuple(0 * x for x in states(2))
    o, end = fn(**given, output_final_state=True)
    near(o, recurrence(given, *zeros)[0])
    parts = [{n: x[:, a:b] for n, x in given.items()} for a, b in ((0, 9), (9, T))]
    first, state = fn(**parts[0], output_final_state=True)
    second, state = fn(**parts[1], initial_state=state, output_final_state=True)
    near(torch.cat([first, second], 1), o)
    for x, y in zip(state, end, strict=True):
        near(x, y)


@pytest.mark.parametrize("fn", both("mamba3"))
def test_mamba3_without_angles_is_that_of_zeros(fn: Any) -> None:
    """Keys of one column have no pair that an angle could turn."""
    given, (S, key, value, theta) = arguments(1), states(1)
    given["angles"].zero_()
    for name in "qk":
        given[name][..., 1:] = 0
    start = S, torch.cat([key[..., :1], 0 * key[..., 1:]], -1), value, 0 * theta
    S[:, :, 1:] = 0
    want, ends = fn(**given, initial_state=start, scale=1.0, output_final_state=True)
    for columns in (K, 1):
        given |= {n: given[n][..., :columns] for n in "qk"} | {"angles": randn(B, T, HV, 0)}
        narrow = S[:, :, :columns], start[1][..., :columns], value, theta[..., :0]
        o, after = fn(**given, initial_state=narrow, scale=1.0, output_final_state=True)
        near(o, want)
        near(after[0], ends[0][:, :, :columns])
        assert after[3].shape == (B, HV, 0)
