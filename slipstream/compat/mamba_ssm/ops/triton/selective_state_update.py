"""mamba_ssm.ops.triton.selective_state_update: the next token of Mamba-1 and Mamba-2."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks
from slipstream.integrations import linear_mixers
from slipstream.runtime.token_ids import expect_below


@checks.operator
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One token of each sequence; its state moves on in place.

    Args:
        state: [B, D, N], or [B, H, P, N] with heads; with state_batch_indices a pool of them.
        x, dt, z: [B, D] or [B, H, P]. A: [D, N] or [H, P, N]. D, dt_bias: [D] or [H, P].
        B, C: [B, N] or [B, G, N]. dt, A and dt_bias that are one number a head, expanded, take
            Mamba-2's faster way.
        state_batch_indices: int32 or int64 [B], which state of the pool is each sequence's;
            negative where there is none: nothing is read or written, and y is 0.

    Returns:
        y in x's shape.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
    """
    names = "[B, D, N] or [B, H, P, N]"
    if state.dim() not in (3, 4):
        raise ValueError(f"state: want {names}, got shape {tuple(state.shape)}")
    checks.expect_shape("A", A, state.shape[1:])
    checks.expect_shape("x", x, (*x.shape[:1], *A.shape[:-1]))
    checks.expect_shape("dt", dt, x.shape)
    for name, given, wanted in (
        ("D", D, A.shape[:-1]), ("z", z, x.shape), ("dt_bias", dt_bias, A.shape[:-1])
    ):  # fmt: skip
        if given is not None:
            checks.expect_shape(name, given, wanted)
    for name, given in (("B", B), ("C", C)):
        if given.dim() not in (2, 3):
            raise ValueError(f"{name}: want [B, N] or [B, G, N], got shape {tuple(given.shape)}")
    indices = state_batch_indices
    if state.dim() == 4 and B.dim() == 2:
        B, C = B[:, None], C[:, None]
    options: dict[str, Any] = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    update = linear_mixers.selective_state_update
    if indices is None:
        checks.expect_shape("state", state, (x.shape[0], *A.shape))
        return update(state, x, dt, A, B, C, **options)
    checks.expect_shape("state_batch_indices", indices, x.shape[:1])
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"state_batch_indices: want int32 or int64, got {indices.dtype}")
    expect_below("state_batch_indices", indices, state.shape[0], "states")
    has_state = (indices >= 0) & (indices < state.shape[0])
    slot = indices.long().clamp(0, max(state.shape[0] - 1, 0))
    own = state[slot]
    y = update(own, x, dt, A, B, C, **options)
    # a sequence without a state writes what the first one with a state does, or what is there
    row = torch.where(
        has_state, torch.arange(x.shape[0], device=x.device), has_state.int().argmax()
    )
    slot = slot[row]
    state[slot] = torch.where(has_state.any(), own[row], state[slot])
    return y.masked_fill(~has_state.view(-1, *[1] * (y.dim() - 1)), 0)


def selective_state_update_ref(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """The formula in plain torch."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    if state.dim() == 4:  # a B and C for each head
        each = state.shape[1] // (1 if B.dim() == 2 else B.shape[1])
        B, C = ((t[:, None] if t.dim() == 2 else t).repeat_interleave(each, 1) for t in (B, C))
    B, C = B[..., None, :], C[..., None, :]
    state.copy_(state * (dt[..., None] * A).exp() + dt[..., None] * B * x[..., None])
    y = (state.to(C.dtype) * C).sum(-1)
    y = y if D is None else y + (x * D).to(y.dtype)
    return (y if z is None else y * F.silu(z)).to(x.dtype)
