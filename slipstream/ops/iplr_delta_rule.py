"""The generalised delta rule: a transition of identity plus low rank (IPLR)."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime.context_parallel import ContextParallel


@checks.operator
def chunk_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Generalised delta rule, chunkwise: the transition is the identity plus any rank-one matrix.

        S_t = (I + b_t a_t^T) S_{t-1} + k_t v_t^T
        o_t = scale * S_t^T q_t

    The delta rule is a = k, b = -beta k with beta v for v.

    Args:
        q, k: queries and keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k, a, b of head
            hv // (HV // H).
        a: what the transition reads [B, T, H, K].
        b: where it adds what it read [B, T, H, K]; b = -r a with |a| = 1 and r in (0, 2) keeps
            the recurrence stable.
        the others: as chunk_dplr_delta_rule.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: for chunks of C, about 2 T HV (4 K V + 2 C (K + V)) flops; state HV K V floats.
    Source: Yang and others, "Parallelizing Linear Transformers with the Delta Rule over Sequence
    Length" (2024).
    """
    return run(
        LinearInputs(q, k, v, a=a, b=b, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, chunk_size, impl, context),
        recurrent=False,
    )


@checks.operator
def fused_recurrent_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Generalised delta rule, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_iplr_delta_rule. Cost: 8 T HV K V flops, one after the
    other.
    """
    return run(
        LinearInputs(q, k, v, a=a, b=b, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
    )
