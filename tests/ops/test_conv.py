"""The short convolution beside torch's, across calls, across sequences, and what it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels.conv import eager
from slipstream.ops.conv import short_convolution, short_convolution_update


@pytest.mark.parametrize("width", range(1, 9))
def test_short_convolution_matches_conv1d(width: int) -> None:
    x, weight, bias = torch.randn(2, 70, 6), torch.randn(6, width), torch.randn(6)
    want = F.conv1d(F.pad(x.mT, (width - 1, 0)), weight[:, None], bias, groups=6).mT
    torch.testing.assert_close(short_convolution(x, weight, bias)[0], want)
    want = F.silu(want) + x
    got, state = short_convolution(x, weight, bias, activation="silu", residual=x)
    assert state is None
    torch.testing.assert_close(got, want)


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("slots", [None, [2, -1, 0]])
def test_short_convolution_update_compiles_fullgraph(slots: list[int] | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        short_convolution_update, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    indices = None if slots is None else torch.tensor(slots)
    weight = torch.randn(6, 4)
    pools = [torch.ones(3, 6, 4), torch.ones(3, 6, 4)]
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 6)
            y, want = (f(x, s, weight, activation="silu", state_indices=indices)
                       for f, s in zip((compiled, short_convolution_update), pools))  # fmt: skip
            torch.testing.assert_close(y, want)
    torch.testing.assert_close(*pools)


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


def test_short_convolution_rejects_faults_by_name() -> None:
    x, weight = torch.randn(2, 9, 6), torch.randn(6, 4)
    offsets = torch.tensor([0, 9])
    for call, error, word in [
        (lambda: short_convolution(x, weight, cu_seqlens=offsets), ValueError, "batch size 1"),
        (
            lambda: short_convolution(x[:1], weight, cu_seqlens=torch.tensor([0, 8])),
            ValueError,
            "cu_seqlens: want offsets from 0 to the 9 tokens",
        ),
        (lambda: short_convolution_update(x, torch.zeros(2, 6, 4), weight), ValueError, "x: want"),
    ]:
        with pytest.raises(error, match=word):
            call()


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
