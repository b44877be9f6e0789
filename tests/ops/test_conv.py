"""The short convolution beside torch's, across calls, across sequences, and what it refuses."""

from typing import Any

import pytest
import torch

from slipstream.kernels.conv import eager
from slipstream.ops.conv import short_convolution, short_convolution_update


@pytest.mark.parametrize("cut", [0, 1, 3, 9])
def test_short_convolution_split_equals_whole(cut: int) -> None:
    x, weight = torch.randn(2, 9, 6), torch.randn(6, 4)
    whole, end = short_convolution(x, weight, output_final_state=True)
    first, state = short_convolution(x[:, :cut], weight, output_final_state=True)
    second, last = short_convolution(
        x[:, cut:], weight, initial_state=state, output_final_state=True
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    assert last is not None
    assert torch.equal(last, end)


def test_short_convolution_update_continues_a_sequence_in_place() -> None:
    x, weight, bias = torch.randn(2, 9, 6), torch.randn(6, 4), torch.randn(6)
    whole, end = short_convolution(x, weight, bias, activation="silu", output_final_state=True)
    _, state = short_convolution(x[:, :5], weight, output_final_state=True)
    assert state is not None
    for t in range(5, 9):
        token = x[:, t] if t % 2 else x[:, t : t + 1]
        y = short_convolution_update(token, state, weight, bias, activation="silu")
        assert y.shape == token.shape
        torch.testing.assert_close(y.view(2, 6), whole[:, t])
    assert torch.equal(state, end)


def test_short_convolution_keeps_packed_neighbours_apart() -> None:
    x, weight = torch.randn(1, 20, 6), torch.randn(6, 4)
    offsets = torch.tensor([0, 7, 12, 20])
    x[:, 7:12] = torch.nan
    x.requires_grad_()
    y, state = short_convolution(x, weight, cu_seqlens=offsets, output_final_state=True)
    assert state is not None
    assert y[:, :7].isfinite().all()
    assert y[:, 12:].isfinite().all()
    assert state[[0, 2]].isfinite().all()
    dy = torch.zeros_like(y)
    dy[:, 7:12] = torch.nan
    (dx,) = torch.autograd.grad(y, x, dy)
    assert dx[:, :7].isfinite().all()
    assert dx[:, 12:].isfinite().all()


@pytest.mark.parametrize("width", [1, 2, 8])
def test_packed_convolution_of_any_width_has_gradients(width: int) -> None:
    shapes = (1, 7, 3), (3, width), (3,), (3, 3, width)
    leaves = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]

    def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, state: torch.Tensor) -> Any:
        cu = torch.tensor([0, 2, 2, 7])
        return short_convolution(
            x, w, b, initial_state=state, output_final_state=True, cu_seqlens=cu
        )

    assert torch.autograd.gradcheck(call, tuple(leaves))


def test_short_convolution_ignores_autocast() -> None:
    x, weight = torch.randn(1, 20, 6), torch.randn(6, 4)
    want = short_convolution(x, weight)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(short_convolution(x, weight)[0], want)


def test_windows_past_the_pool_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the error comes with a later call."""
    monkeypatch.setattr(eager.token_ids, "expect_below", lambda *_: None)
    state, tokens = torch.randn(3, 2, 4), torch.randn(4, 2)
    before = state.clone()
    window, live = eager._move_on(tokens, state, torch.tensor([2, 3, -1, 0]))
    assert live is not None and live.tolist() == [True, False, False, True]
    for row, n in ((0, 2), (3, 0)):
        before[n] = torch.cat([before[n, :, 1:], tokens[row, :, None]], -1)
        torch.testing.assert_close(window[row], before[n])
    torch.testing.assert_close(state, before)
