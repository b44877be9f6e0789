"""slipstream.compat.causal_conv1d beside torch's own convolution."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compat import install
from slipstream.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from slipstream.compat.causal_conv1d.causal_conv1d_varlen import (
    causal_conv1d_varlen_states,
    causal_conv1d_varlen_states_ref,
)


def weights(D: int, W: int) -> tuple[Tensor, Tensor]:
    return torch.randn(D, W, dtype=torch.float64), torch.randn(D, dtype=torch.float64)


def formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
) -> Any:
    """The convolution by torch's own or, with seq_idx, by sums of a sequence's taps."""
    dtype, (D, W) = x.dtype, weight.shape
    before = x.new_zeros(x.shape[0], D, W - 1) if initial_states is None else initial_states
    inputs = torch.cat([before, x], -1)
    if seq_idx is None:
        y = F.conv1d(inputs.to(weight.dtype), weight[:, None], bias, groups=D)
    else:
        index = torch.cat([seq_idx[:, :1].expand(-1, W - 1), seq_idx], -1)
        is_own = index.unfold(-1, W, 1) == seq_idx[..., None]
        taps = inputs.unfold(-1, W, 1) * is_own[:, None] * weight[:, None]
        y = taps.sum(-1) if bias is None else taps.sum(-1) + bias[:, None]
        y = y.masked_fill(seq_idx[:, None] < 0, 0)
    y = (y if activation is None else F.silu(y)).to(dtype)
    if not return_final_states:
        return y
    final = inputs[..., inputs.shape[-1] - (W - 1) :].to(dtype)
    return y, final if final_states_out is None else final_states_out.copy_(final)


def step_formula(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The next tokens by torch's own convolution; conv_state is updated in place."""
    dtype, D, S = x.dtype, weight.shape[0], conv_state.shape[2]
    tokens = x if x.dim() == 3 else x[..., None]
    T = tokens.shape[2]
    inputs = torch.cat([conv_state, tokens], -1)
    conv_state.copy_(inputs[..., -S:])
    y = F.conv1d(inputs.to(weight.dtype), weight[:, None], bias, groups=D)[..., -T:]
    return (y if activation is None else F.silu(y)).to(dtype).view(x.shape)


def test_installs() -> None:
    with install("causal_conv1d"):
        import causal_conv1d  # pyright: ignore[reportMissingImports]

        assert causal_conv1d.causal_conv1d_fn is causal_conv1d_fn


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("T", [1, 2, 9])
def test_fn_with_states_matches_torch(T: int, activation: str | None) -> None:
    weight, bias = weights(6, 4)
    x = torch.randn(2, 6, T, dtype=torch.float64)
    before = torch.randn(2, 6, 3, dtype=torch.float64)
    given = (weight, bias, before, True, None, activation)
    want, end = formula(x, *given)
    place = torch.empty(2, 6, 3, dtype=torch.float64)
    got, final = causal_conv1d_fn(
        x, weight, bias, initial_states=before, return_final_states=True,
        final_states_out=place, activation=activation,
    )  # fmt: skip
    torch.testing.assert_close((got, final), (want, end))
    assert final is place


@pytest.mark.parametrize("state_dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 3, 9])
def test_states_of_packed_rows_are_the_first_sequences(
    T: int, W: int, state_dtype: torch.dtype
) -> None:
    """One that ends within the taps, one that goes on, padding first; and their gradients."""
    weight, bias = (x.requires_grad_() for x in weights(6, W))
    x = torch.randn(3, 6, T, dtype=torch.float64, requires_grad=True)
    before = torch.randn(3, 6, W - 1, dtype=state_dtype, requires_grad=True)
    rows = ([3, 3] + [5] * 4 + [4] * 3, [7] * 9, [-1] + [0] * 8)
    seq_idx = torch.tensor(rows, dtype=torch.int32)[:, :T]
    leaves = (x, weight, bias, before)
    y = causal_conv1d_fn(x, weight, bias, seq_idx, before, activation="silu")
    want = formula(x, weight, bias, before.double(), activation="silu", seq_idx=seq_idx)
    torch.testing.assert_close(y, want)
    for row, index in enumerate(seq_idx):
        length = int((index == index[0]).sum())
        if index[0] < 0:
            continue
        alone = formula(
            x[row : row + 1, :, :length], weight, bias, before[row : row + 1].double(),
            activation="silu",
        )  # fmt: skip
        torch.testing.assert_close(y[row : row + 1, :, :length], alone)
    dout = torch.randn_like(y)
    got, grads = (torch.autograd.grad(out, leaves, dout) for out in (y, want))
    torch.testing.assert_close(got, grads)


@pytest.mark.parametrize("T", [1, 3, 6])
@pytest.mark.parametrize("S", [3, 4, 5])
def test_update_matches_formula(S: int, T: int) -> None:
    weight, bias = weights(5, 4)
    x, state = (torch.randn(3, 5, n, dtype=torch.float64) for n in (T, S))
    ours, theirs = state.clone(), state.clone()
    want = step_formula(x, theirs, weight, bias, "silu")
    got = causal_conv1d_update(x, ours, weight, bias, "silu")
    torch.testing.assert_close((got, ours), (want, theirs))


def test_circular_states_are_refused() -> None:
    weight, bias = weights(5, 3)
    x, state = torch.randn(2, 5).double(), torch.randn(2, 5, 3).double()
    with pytest.raises(NotImplementedError, match="cache_seqlens: causal_conv1d_update does not"):
        causal_conv1d_update(x, state, weight, bias, None, torch.zeros(2).int())


@pytest.mark.parametrize("state_len", [1, 3, 9])
def test_varlen_states(state_len: int) -> None:
    x, cu_seqlens = torch.randn(14, 3), torch.tensor([0, 5, 5, 7, 14], dtype=torch.int32)
    got = causal_conv1d_varlen_states(x, cu_seqlens, state_len)
    assert torch.equal(got, causal_conv1d_varlen_states_ref(x, cu_seqlens, state_len))
    assert got.shape == (4, 3, state_len)
    with pytest.raises(ValueError, match="cu_seqlens"):
        causal_conv1d_varlen_states(x, cu_seqlens + 1, state_len)
