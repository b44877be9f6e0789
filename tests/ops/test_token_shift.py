"""The token before, and what token_shift refuses."""

import torch

from slipstream.ops.token_shift import token_shift


def test_token_shift_across_calls_and_sequences() -> None:
    x = torch.arange(1.0, 7.0).view(1, 6, 1)
    assert token_shift(x)[0].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    offsets = torch.tensor([0, 2, 2, 6])
    state = torch.tensor([[10.0], [20.0], [30.0]])
    y, last = token_shift(x, initial_state=state, output_final_state=True, cu_seqlens=offsets)
    assert y.flatten().tolist() == [10, 1, 30, 3, 4, 5]
    assert last is not None
    assert last.flatten().tolist() == [2, 20, 6]
