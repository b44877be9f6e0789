"""The causal_conv1d package's calls, against torch's convolution."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

B, D, T, W = 3, 6, 11, 4


def whole(x: Tensor, weight: Tensor, bias: Any, before: Tensor | None = None) -> Tensor:
    before = x.new_zeros(*x.shape[:2], W - 1) if before is None else before
    padded = torch.cat([before, x], -1)
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=x.shape[1]))


@pytest.mark.parametrize("first", [0, 2])
def test_causal_conv1d_update_takes_tokens_of_its_state(first: int) -> None:
    """They are read as they were, before any is overwritten."""
    weight, state = torch.randn(D, W), torch.randn(B, D, W + 2)
    mine = state.clone()
    got = causal_conv1d_update(mine[..., first : first + 3], mine, weight)
    want = causal_conv1d_update(state[..., first : first + 3].clone(), state, weight)
    assert torch.equal(got, want) and torch.equal(mine, state)


@pytest.mark.parametrize("name", ["query_start_loc", "cu_seqlens"])
@pytest.mark.parametrize("flat", [False, True])
def test_causal_conv1d_fn_takes_offsets(name: str, flat: bool) -> None:
    x, weight, bias = torch.randn(1, D, T), torch.randn(D, W), torch.randn(D)
    before = torch.randn(3, D, W - 1)
    given: dict[str, Any] = {name: torch.tensor([0, 4, 5, T]), "initial_states": before}
    y, final = causal_conv1d_fn(
        x[0] if flat else x, weight, bias, activation="silu", return_final_states=True, **given
    )
    want = [whole(p, weight, bias, before[n : n + 1]) for n, p in enumerate(x.split((4, 1, 6), -1))]
    torch.testing.assert_close(y if flat else y[0], torch.cat(want, -1)[0])
    ends = [torch.cat([before[n], p[0]], -1) for n, p in enumerate(x.split((4, 1, 6), -1))]
    torch.testing.assert_close(final, torch.stack([end[:, -W + 1 :] for end in ends]))


@pytest.mark.parametrize("S", [W - 1, W, W + 3])
@pytest.mark.parametrize("pad_slot_id", [None, 0, 3])
def test_causal_conv1d_update_leaves_missing_states_alone(S: int, pad_slot_id: int | None) -> None:
    x, weight, pool = torch.randn(B, D, 2), torch.randn(D, W), torch.randn(5, D, S)
    index = torch.tensor([4, -1 if pad_slot_id is None else pad_slot_id, 2])
    state, want = pool.clone(), pool.clone()
    y = causal_conv1d_update(x, state, weight, conv_state_indices=index, pad_slot_id=pad_slot_id)
    alive = torch.tensor([0, 2])
    expected = causal_conv1d_update(x[alive], want, weight, conv_state_indices=index[alive])
    assert torch.equal(y[alive], expected) and not y[1].any()
    assert torch.equal(state, want)


@pytest.mark.parametrize("function", [causal_conv1d_fn, causal_conv1d_update])
def test_causal_conv1d_refuses_arguments_that_it_would_ignore(function: Any) -> None:
    x = torch.randn(B, D, T) if function is causal_conv1d_fn else torch.randn(B, D)
    args = (x, torch.randn(D, W)) if function is causal_conv1d_fn else (
        x, torch.randn(B, D, W), torch.randn(D, W)
    )  # fmt: skip
    want = function(*(y.clone() for y in args))
    got = function(*(y.clone() for y in args), num_accepted_tokens=None, use_cache=None)
    assert torch.equal(got, want)
    with pytest.raises(NotImplementedError, match=r"^num_accepted_tokens: "):
        function(*args, num_accepted_tokens=torch.ones(B))
    with pytest.raises(TypeError, match=r"^use_cache: .* has no such argument"):
        function(*args, use_cache=False)
    if function is causal_conv1d_update:
        with pytest.raises(NotImplementedError, match=r"^query_start_loc: "):
            function(*args, query_start_loc=torch.arange(B + 1))


def test_causal_conv1d_rejects_what_does_not_fit() -> None:
    x, weight, state = torch.randn(B, D, T), torch.randn(D, W), torch.randn(B, D, W)
    with pytest.raises(ValueError, match="seq_idx"):
        causal_conv1d_fn(x, weight, seq_idx=torch.zeros(B, T).int(), return_final_states=True)
    with pytest.raises(ValueError, match="initial_states: want shape"):
        causal_conv1d_fn(x, weight, initial_states=state)
    with pytest.raises(ValueError, match="conv_state: want at least 3"):
        causal_conv1d_update(x[..., 0], state[..., :2], weight)
