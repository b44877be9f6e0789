"""fla.modules.token_shift: the step from each token to the one before."""

from typing import Any

from torch import Tensor

from slipstream.ops.token_shift import token_shift as previous_token


def token_shift(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: Tensor | None = None,
) -> Any:
    """x_{t-1} - x_t of x [B, T, D], where x_0 is cache [N, D], or 0.

    Returns:
        That, or with output_cache it and the last tokens [N, D].
    """
    state = None if cache is None else cache.reshape(-1, x.shape[-1]).to(x.dtype)
    before, last = previous_token(
        x, initial_state=state, output_final_state=output_cache, cu_seqlens=cu_seqlens
    )
    return (before - x, last) if output_cache else before - x


class TokenShift:
    """fla's autograd.Function; here autograd sees the operator that it calls."""

    @classmethod
    def apply(cls, *args: Any) -> tuple[Tensor, Tensor | None]:
        return cls.forward(None, *args)

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        cache: Tensor | None = None,
        output_cache: bool = False,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """token_shift, and the last tokens or None."""
        result = token_shift(x, cu_seqlens, cache, output_cache)
        return result if output_cache else (result, None)
