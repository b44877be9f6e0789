"""States of recurrences in int8, with what rounding leaves over: a third of float32's memory."""

import torch
from torch import Tensor

from slipstream.common import checks, int8_states
from slipstream.common.int8_states import Int8State


@checks.operator
def quantize_state(state: Tensor, *, state_v_first: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """States in 11 bits a number, for recurrent_step and mixer_step to update in place.

    The K numbers behind a value channel share a scale. Each is an int8 and three bits more, the
    residual: what rounding to int8 leaves over, so that it is not lost from one step to the next.

        S = scale (codes + residual / 8), residual in 0 .. 7

    Args:
        state: [..., K, V], any floating dtype.
        state_v_first: state is [..., V, K].

    Returns:
        codes: int8, the shape of state.
        scale: bfloat16 [..., V].
        residual: uint8 [..., 3 R, V], or [..., V, 3 R] if state_v_first. R is an eighth of the
            next power of two from K on, at least 2; three rows R apart hold the residuals of eight
            rows of the state R apart.
        Together (11 + 16 / K) / 32 of the bytes of float32: 0.348 for K = 128.

    Raises:
        ValueError, TypeError: state has no two dimensions, or no floating dtype.

    A step on such a state has the error of one rounding to 11 bits, about 1 / 1300 of the size of
    the state. Roundings add up over as many tokens as the state remembers: to about 0.7% for
    gated_delta_rule with the gates of a fresh GatedDeltaNet, 1.1% for delta_rule with random keys
    of 128, at any length. A state that forgets nothing (linear_attn) has no such bound. A column
    with a number that is not finite becomes NaN.
    """
    checks.expect_floating({"state": state})
    _expect_matrix("state", state)
    codes, scale, residual = int8_states.encode(state.mT if state_v_first else state)
    if state_v_first:
        codes, residual = codes.mT.contiguous(), residual.mT.contiguous()
    return codes, scale, residual


@checks.operator
def dequantize_state(
    codes: Tensor,
    scale: Tensor,
    residual: Tensor,
    *,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The states that quantize_state or a step has rounded.

    Args:
        codes, scale, residual: as quantize_state returns them.
        state_v_first: codes are [..., V, K].
        dtype: of the result, a floating one.

    Returns:
        [..., K, V], or [..., V, K] if state_v_first.

    Raises:
        ValueError, TypeError: a tensor has another shape or dtype than quantize_state returns.
    """
    _expect_matrix("codes", codes)
    if not dtype.is_floating_point:
        raise TypeError(f"dtype: want a floating dtype, got {dtype}")
    checks.expect_one_device({"codes": codes, "scale": scale, "residual": residual})
    checks.expect_int8_state(codes, scale, residual, state_v_first, ("codes", "scale", "residual"))
    if state_v_first:
        codes, residual = codes.mT, residual.mT
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = int8_states.decode(Int8State(codes, scale, residual), wide).to(dtype)
    return state.mT.contiguous() if state_v_first else state


def _expect_matrix(name: str, x: Tensor) -> None:
    if x.dim() < 2:
        raise ValueError(f"{name}: want [..., K, V], got shape {tuple(x.shape)}")
