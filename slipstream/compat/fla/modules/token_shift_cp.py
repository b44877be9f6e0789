"""fla.modules.token_shift_cp: token_shift over several ranks."""

from typing import Any

from torch import Tensor

from slipstream.compat.fla.ops.cp.context import plan_of
from slipstream.ops.token_shift import token_shift as previous_token


def token_shift_cp(
    x: Tensor,
    cp_context: Any,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """x_{t-1} - x_t of this rank's tokens x [1, T, D]; the context has the offsets."""
    if cp_context is None:
        raise ValueError("cp_context: want a context, got None")
    plan = plan_of(cp_context)
    return previous_token(x, cu_seqlens=cu_seqlens if plan is None else None, context=plan)[0] - x
