"""causal_conv1d.causal_conv1d_varlen: the states that packed sequences leave."""

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.runtime.token_ids import expect_offsets


@checks.operator
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last inputs of packed sequences.

    Args:
        x: [T, D]. cu_seqlens: offsets [N+1], int32 or int64. state_len: how many inputs.

    Returns:
        [N, D, state_len], oldest first, 0 before a sequence's first token. No gradients.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
    """
    checks.expect_rank("x", x, 2, "[T, D]")
    checks.expect_cu_seqlens(cu_seqlens, 1, x.shape[0])
    checks.expect_one_device({"x": x, "cu_seqlens": cu_seqlens})
    expect_offsets("cu_seqlens", cu_seqlens, x.shape[0])
    checks.expect_not_negative("state_len", state_len)
    begin, end = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    token = end + torch.arange(-state_len, 0, device=x.device)
    states = x.detach()[token.clamp(min=0)].masked_fill((token < begin)[..., None], 0)
    return states.mT


def causal_conv1d_varlen_states_ref(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The same, sequence by sequence."""
    states = x.new_zeros(cu_seqlens.shape[0] - 1, state_len, x.shape[1])
    for n, (begin, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist())):
        last = x[max(begin, end - state_len) : end]
        states[n, state_len - last.shape[0] :] = last
    return states.mT
