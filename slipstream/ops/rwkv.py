"""RWKV's time mixing.

RWKV-4: of each channel a decayed mean of values, weighted by exp(k). RWKV-6 (Finch): a decay for
every channel, and a bonus for the current token. RWKV-7 (Goose): the generalised delta rule under
RWKV's names.
"""

from functools import partial

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.prefix_states import PrefixStates
from slipstream.ops._blocks import by_blocks
from slipstream.ops._fp32 import alike, widen
from slipstream.ops._preprocess import expect_inputs, in_time_order
from slipstream.ops._running_sums import Packing, running_mean
from slipstream.runtime import trees
from slipstream.runtime.context_parallel import ContextParallel

States = tuple[Tensor, Tensor]


@checks.operator
@trees.by_levels
def chunk_rwkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """RWKV-4's weighted mean of the values so far, elementwise.

        Z_t = exp(w) Z_{t-1} + exp(k_t);  M_t = (exp(w) Z_{t-1} M_{t-1} + exp(k_t) v_t) / Z_t
        o_t = (Z_{t-1} M_{t-1} + exp(u + k_t) v_t) / (Z_{t-1} + exp(u + k_t))

    A running maximum keeps every exponent near 0 or below it.

    Args:
        w: log decay of each channel [D], at most 0: -exp(time_decay) of RWKV's checkpoints.
        u: bonus of the current token [D].
        k: logarithms of weights [B, T, D].
        v: values [B, T, D].
        initial_state: before the first token, a tuple (M, log Z), each [N, D], float32; log Z is
            -inf where nothing is before, as if None.
        the others: as chunk_hgrn.

    Returns:
        o [B, T, D] in v's dtype, and the final state, a tuple like initial_state, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: reverse with a context.

    Cost: on CUDA one pass over k and v, forward and backward, whose programs have 16 channels of a
    sequence each; across ranks and on a CPU a gated scan of 2 D channels and log2(T) passes for a
    maximum. State 2 D floats.
    Source: Peng and others, "RWKV: Reinventing RNNs for the Transformer Era" (2023), equations 16
    and 22 to 25.
    """
    if context is not None and torch.compiler.is_compiling():
        return context.eagerly(
            chunk_rwkv4, w, u, k, v, initial_state=initial_state, reverse=reverse,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens, context=context,
            impl=impl,
        )  # fmt: skip
    M, z = initial_state or (None, None)
    N = expect_inputs(
        cu_seqlens, context, k=(k, "B T D"), v=(v, "B T D"), w=(w, "D"), u=(u, "D"),
        **{"initial_state[0]": (M, "N D"), "initial_state[1]": (z, "N D")},
    )  # fmt: skip
    w, u, k, v = alike(w, u, k, v)
    if M is None or z is None:
        z = widen(k).new_full((N, k.shape[2]), -torch.inf)
        start = torch.cat([torch.zeros_like(z), z], -1)
    else:  # a mean of nothing counts for nothing, whatever it is
        M, z = widen(M), widen(z)
        start = torch.cat([torch.where(z == -torch.inf, 0, M), z], -1)
    mixed = partial(_mixed, w=widen(w), u=widen(u), context=context, impl=impl)
    o, final = in_time_order(mixed, (k, v), (start,), cu_seqlens, context, reverse=reverse)
    # slices, which unlike the results of chunk may be changed in place
    D = k.shape[-1]
    return o, (final[0][..., :D], final[0][..., D:]) if output_final_state else None


def _mixed(
    tensors: tuple[Tensor, Tensor],
    states: tuple[Tensor],
    cu_seqlens: Tensor | None,
    w: Tensor,
    u: Tensor,
    context: ContextParallel | None,
    impl: str | None,
) -> tuple[Tensor, tuple[Tensor]]:
    """tensors: k, v. states: M and log Z before the first token of each sequence, [N, 2 D]."""
    o, final = running_mean(*tensors, w, u, *states, Packing(cu_seqlens, context, impl))
    return o, (final,)


@checks.operator
@trees.by_levels
def fused_recurrent_rwkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """Computes chunk_rwkv4: fla has this name."""
    return chunk_rwkv4(
        w, u, k, v, initial_state=initial_state, output_final_state=output_final_state,
        reverse=reverse, cu_seqlens=cu_seqlens, context=context, impl=impl,
    )  # fmt: skip


_RWKV6_NAMES = {"q": "r", "g": "w"}


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
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
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree).
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
        names=_RWKV6_NAMES,
    )


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
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
        names=_RWKV6_NAMES,
    )


_RWKV7_NAMES = {"q": "r", "g": "w"}


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
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
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree).
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
    options = scale, output_final_state, state_v_first, reverse, chunk_size, impl
    return run(
        LinearInputs(r, k, v, g=w, a=a, b=b, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(*options, context, consistent, prefix_states),
        recurrent=False,
        names=_RWKV7_NAMES,
    )


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
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
        names=_RWKV7_NAMES,
    )
