"""States in int8 with their residual: what is rounded, how much memory, how far o is off."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops import dequantize_state, quantize_state, recurrent_step
from tests.support.operators import relative_error


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (16, 3), (20, 33), (1, 1), (130, 64)])
def test_quantize_state_keeps_11_bits(K: int, V: int, v_first: bool) -> None:
    state = torch.randn(2, 3, K, V)
    given = state.mT.contiguous() if v_first else state
    codes, scale, residual = quantize_state(given, state_v_first=v_first)
    assert codes.shape == given.shape
    got = dequantize_state(codes, scale, residual, state_v_first=v_first)
    assert got.is_contiguous()
    got = got.mT if v_first else got
    largest = state.abs().amax(-2, keepdim=True)
    assert ((got - state).abs() <= largest * (1.02 / 2046)).all()
    # the codes alone are int8's rounding, towards less
    rows = codes.mT if v_first else codes
    off = got - rows.float() * scale.float()[..., None, :]
    assert (off >= 0).all() and (off < scale.float()[..., None, :]).all()
    # the same bits in either order
    again = quantize_state(state if v_first else state.mT.contiguous(), state_v_first=not v_first)
    assert all(torch.equal(x, y) for x, y in zip(again, (codes.mT, scale, residual.mT)))


@pytest.mark.parametrize("K", [128, 256])
def test_quantized_state_is_a_third_of_float32(K: int) -> None:
    state = torch.zeros(1, 2, K, 64)
    count = sum(x.numel() * x.element_size() for x in quantize_state(state))
    assert count <= 0.35 * state.numel() * 4


def test_quantize_state_of_extremes() -> None:
    """Zeros stay, tiny columns become 0, and what is not finite makes its column NaN."""
    state = torch.randn(16, 6)
    state[:, 1] = 0
    state[3, 2], state[5, 3] = torch.nan, torch.inf
    state[:, 4] *= 1e-35
    state[:, 5] *= 1e30
    got = dequantize_state(*quantize_state(state))
    assert not got[:, [1, 4]].any()
    assert got[:, [2, 3]].isnan().all()
    assert relative_error(got[:, [0, 5]], state[:, [0, 5]]) <= 1e-3


def test_quantize_state_takes_other_dtypes() -> None:
    state = torch.randn(20, 5, dtype=torch.float64)
    parts = quantize_state(state)
    assert dequantize_state(*parts, dtype=torch.float64).dtype == torch.float64
    assert dequantize_state(*parts, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert relative_error(dequantize_state(*quantize_state(state.bfloat16())), state) <= 5e-3


def test_quantized_states_are_checked() -> None:
    codes, scale, residual = quantize_state(torch.randn(2, 1, 16, 8))
    with pytest.raises(TypeError, match="state: want a floating dtype"):
        quantize_state(codes)
    with pytest.raises(ValueError, match=r"state: want \[..., K, V\]"):
        quantize_state(torch.zeros(3))
    with pytest.raises(ValueError, match=r"scale: want shape \(2, 1, 8\)"):
        dequantize_state(codes, scale[:1], residual)
    with pytest.raises(ValueError, match=r"residual: want shape \(2, 1, 6, 8\)"):
        dequantize_state(codes, scale, residual.mT)
    with pytest.raises(TypeError, match=r"codes: want torch\.int8"):
        dequantize_state(codes.int(), scale, residual)
    with pytest.raises(TypeError, match="dtype: want a floating dtype"):
        dequantize_state(codes, scale, residual, dtype=torch.int8)
    q, v = torch.randn(2, 1, 1, 16), torch.randn(2, 1, 1, 8)
    with pytest.raises(ValueError, match="state: in int8 it wants state_scale and state_residual"):
        recurrent_step(q, q, v, state=codes)
    rest: dict[str, Any] = {"state_scale": scale, "state_residual": residual}
    with pytest.raises(ValueError, match="state_scale: wants state in int8"):
        recurrent_step(q, q, v, state=codes.float(), **rest)
    with pytest.raises(TypeError, match=r"state_residual: want torch\.uint8"):
        recurrent_step(q, q, v, state=codes, **{**rest, "state_residual": residual.int()})
    with pytest.raises(ValueError, match="state_residual: want shape"):
        recurrent_step(q, q, v, state=codes.mT, **rest, state_v_first=True)


@pytest.mark.parametrize("tokens", [1200, pytest.param(16000, marks=pytest.mark.slow)])
def test_error_of_int8_steps_is_flat(tokens: int) -> None:
    """Token by token with the gates of a fresh GatedDeltaNet, beside float64: the error of o after
    many times the tokens that a state remembers is that after a few hundred."""
    torch.manual_seed(0)
    heads, K, V = 4, 128, 8
    rate = torch.linspace(1, 16, heads)
    step = torch.logspace(-3, -1, heads).flip(0)
    g = -rate * step * torch.exp(0.3 * torch.randn(tokens, heads))
    beta = torch.randn(tokens, heads).sigmoid()
    q, k = (F.normalize(torch.randn(tokens, heads, K), dim=-1) for _ in range(2))
    v = torch.randn(tokens, heads, V)
    parts = quantize_state(torch.zeros(1, heads, K, V))
    names = "state", "state_scale", "state_residual"
    rounded: dict[str, Any] = dict(zip(names, parts))
    wide: dict[str, Any] = {"state": torch.zeros(1, heads, K, V, dtype=torch.float64)}
    outputs: list[list[torch.Tensor]] = [[], []]
    for t in range(tokens):
        given = [x[t][None, None] for x in (q, k, v, g, beta)]
        for pool, outs, dtype in zip((rounded, wide), outputs, (torch.float32, torch.float64)):
            a, b, c, d, e = (x.to(dtype) for x in given)
            outs.append(recurrent_step(a, b, c, **pool, g=d, beta=e))
    got, want = (torch.cat(x, 1) for x in outputs)
    windows = slice(300, 700), slice(tokens - 400, tokens)
    errors = [relative_error(got[:, at], want[:, at]) for at in windows]
    assert max(errors) <= 1e-2, errors
    assert math.isclose(*errors, rel_tol=0.25), errors
