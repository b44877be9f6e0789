"""RWKV-7 (Goose): the generalised delta rule under RWKV's names."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.prefix_states import PrefixStates
from slipstream.ops._blocks import by_blocks
from slipstream.runtime.context_parallel import ContextParallel

_NAMES = {"q": "r", "g": "w"}


@checks.operator
@by_blocks
def chunk_rwkv7(
    *,
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
    consistent: bool = False,
    prefix_states: PrefixStates | None = None,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7, chunkwise: decay each channel, read under a, add that under b, write.

        S_t = (diag(exp(w_t)) + b_t a_t^T) S_{t-1} + k_t v_t^T
        o_t = scale * S_t^T r_t

    Arguments have to be named: six tensors of much the same shape are too many to order.

    Args:
        r, k: receptances and keys [B, T, H, K].
        w: log decay [B, T, HV, K], at most 0, float32; RWKV-7's own is at least -0.6065.
        v: values [B, T, HV, V], HV a multiple of H: head hv reads r, k, a, b of head
            hv // (HV // H).
        a: what the transition reads [B, T, H, K]; RWKV-7's is -kk, the normalised removal key.
        b: where it adds what it read [B, T, H, K]; RWKV-7's is kk times its learning rate.
        scale: factor on the output; 1 as RWKV-7 has it, K^-0.5 if None.
        initial_state: state before the first token [N, HV, K, V], float32; zeros if None.
        output_final_state: return the state after the last token too.
        safe_gate, lower_bound: promises that w stays near 0, or above lower_bound < 0. Kernels
            may use them to go faster; the result is the same with and without.
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
        o [B, T, HV, V] in r's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: for chunks of C, about 2 T HV (4 K V + 2 C (K + V)) flops; state HV K V floats.
    Source: Peng and others, "RWKV-7 Goose with Expressive Dynamic State Evolution" (2025).
    """
    checks.expect_lower_bound(lower_bound)
    checks.expect_rank("w", w, 4, "[B, T, HV, K]")
    return run(
        LinearInputs(r, k, v, g=w, a=a, b=b, initial_state=initial_state, cu_seqlens=cu_seqlens),
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
        names=_NAMES,
    )


@checks.operator
def fused_recurrent_rwkv7(
    *,
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_rwkv7, but that the final state is returned unless
    output_final_state=False. Cost: 9 T HV K V flops, one after the other.
    """
    checks.expect_rank("w", w, 4, "[B, T, HV, K]")
    return run(
        LinearInputs(r, k, v, g=w, a=a, b=b, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
        names=_NAMES,
    )
