"""Linear attention with one decay a token and head: simple GLA, which is Mamba-2's SSD."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.prefix_states import PrefixStates
from slipstream.ops import _blocks, _fp32
from slipstream.runtime.context_parallel import ContextParallel


@checks.operator
@_blocks.by_blocks
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
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
    consistent: bool = False,
    prefix_states: PrefixStates | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA, chunkwise: a scalar decay for each token and head.

        S_t = exp(g_t) S_{t-1} + k_t v_t^T
        o_t = scale * S_t^T q_t

    Mamba-2's state space duality (SSD) is this with q = C, k = B, v = dt x and g = dt A.

    Args:
        q, k: queries and keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        g: log decay [B, T, HV], at most 0, float32; none if None.
        g_gamma: one log decay [HV] for all tokens of a head, added to g; has a gradient too.
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
        consistent: the same bits wherever a sequence is cut at a multiple of 64 tokens, with or
            without gradients, and whatever else there is in the batch. In plain torch slow: it goes
            64 tokens of one sequence at a time. Not with reverse or context.
        prefix_states: states to leave on the way, for requests with the same prefix: a PrefixStates
            lists multiples of 64 tokens and rows of a pool. Not with gradients, reverse or context.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: for chunks of C, 2 T HV (2 K V + C (K + V) / 2) flops; state HV K V floats.
    Source: Dao, Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality" (2024).
    """
    return run(
        LinearInputs(
            q, k, v, g=_decay(v, g, g_gamma), initial_state=initial_state, cu_seqlens=cu_seqlens
        ),
        LinearOptions(
            scale,
            output_final_state,
            state_v_first,
            reverse,
            chunk_size,
            impl,
            context,
            consistent,
            prefix_states,
        ),
        recurrent=False,
    )


@checks.operator
def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
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
    """Simple GLA, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_simple_gla. Cost: 4 T HV K V flops, one after the other.
    """
    return run(
        LinearInputs(
            q, k, v, g=_decay(v, g, g_gamma), initial_state=initial_state, cu_seqlens=cu_seqlens
        ),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
    )


def _decay(v: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor | None:
    if g is not None:
        checks.expect_rank("g", g, 3, "[B, T, HV]")
    if g_gamma is None:
        return g
    checks.expect_rank("v", v, 4, "[B, T, HV, V]")
    checks.expect_shape("g_gamma", g_gamma, v.shape[2:3])
    checks.expect_floating({"g_gamma": g_gamma})
    if g is None:
        return g_gamma.expand(v.shape[:3])
    checks.expect_shape("g", g, v.shape[:3])
    return _fp32.widen(g) + g_gamma
