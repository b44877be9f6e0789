"""RWKV-6 (Finch): a decay for every channel, and a bonus for the current token."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime.context_parallel import ContextParallel

_NAMES = {"q": "r", "g": "w"}


@checks.operator
def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-6, chunkwise: the state is read before the token is written into it.

        o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T r_t
        S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T

    By place the order is r, k, v, w, u, not that of chunk_rwkv7: better name them, since mixing
    them up goes unnoticed.

    Args:
        r, k: receptances and keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H: head hv reads r, k of head hv // (HV // H).
        w: log decay [B, T, HV, K], at most 0, float32; RWKV's own w is this before -exp.
        u: bonus of the current token [HV, K].
        scale: factor on the output; K^-0.5 if None.
        initial_state: state before the first token [N, HV, K, V], float32; zeros if None.
        output_final_state: return the state after the last token too.
        state_v_first: states are [N, HV, V, K] instead.
        reverse: run time backwards; the final state is then that before the first token.
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        chunk_size: a hint, tokens a chunk in plain torch, a power of two from 16 to 256; Triton's
            kernels have their own. Chosen if None.
        impl: None chooses; "sm90", "triton", "eager" or "reference" is used or refused.

    Returns:
        o [B, T, HV, V] in r's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: for chunks of C, 2 T HV (2 K V + C (K + V) / 2) flops; state HV K V floats.
    Source: Peng and others, "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic
    Recurrence" (2024).
    """
    checks.expect_rank("w", w, 4, "[B, T, HV, K]")
    return run(
        LinearInputs(r, k, v, g=w, u=u, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, chunk_size, impl, context),
        recurrent=False,
        names=_NAMES,
    )


@checks.operator
def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-6, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_rwkv6. Cost: 4 T HV K V flops, one after the other.
    """
    checks.expect_rank("w", w, 4, "[B, T, HV, K]")
    return run(
        LinearInputs(r, k, v, g=w, u=u, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
        names=_NAMES,
    )
