"""RWKV-4's time mixing: of each channel a decayed mean of values, weighted by exp(k)."""

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.ops._fp32 import result_dtype, widen
from slipstream.ops._running_sums import Packing, nothing_yet, running_sums, time_turned
from slipstream.runtime.context_parallel import ContextParallel

States = tuple[Tensor, Tensor]


@checks.operator
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
        output_final_state: return the state after the last token too.
        reverse: run time backwards; the final state is then that before the first token.
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        impl: "eager", "triton" or "reference" to insist on one for the scan; chosen if None.

    Returns:
        o [B, T, D] in v's dtype, and the final state, a tuple like initial_state, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: reverse with a context.

    Cost: a gated scan of 2 D channels, log2(T) passes over B T D floats for the maximum, and some
    more of them; state 2 D floats.
    Source: Peng and others, "RWKV: Reinventing RNNs for the Transformer Era" (2023), equations 16
    and 22 to 25.
    """
    if context is not None and torch.compiler.is_compiling():
        return context.eagerly(
            chunk_rwkv4, w, u, k, v, initial_state=initial_state, reverse=reverse,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens, context=context,
            impl=impl,
        )  # fmt: skip
    start = _checked(w, u, k, v, initial_state, cu_seqlens, reverse, context)
    dtype = result_dtype(v)
    w, u, k, v = (widen(x) for x in (w, u, k, v))
    if reverse:
        (k, v), cu_seqlens = time_turned((k, v), cu_seqlens)
        start = start if cu_seqlens is None else start.flip(0)
    _, before, final = running_sums(k, v, w, start, Packing(cu_seqlens, context, impl))
    mean, z = before.chunk(2, -1)
    o = torch.lerp(mean, v, torch.sigmoid(u + k - z)).to(dtype)
    if reverse:
        o, final = o.flip(1), final if cu_seqlens is None else final.flip(0)
    return o, (final[:, : k.shape[2]], final[:, k.shape[2] :]) if output_final_state else None


@checks.operator
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
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """The same as chunk_rwkv4 in every respect; fla has this name."""
    return chunk_rwkv4(
        w, u, k, v, initial_state=initial_state, output_final_state=output_final_state,
        reverse=reverse, cu_seqlens=cu_seqlens, context=context, impl=impl,
    )  # fmt: skip


def _checked(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: States | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    context: ContextParallel | None,
) -> Tensor:
    """M and log Z before the first token of each sequence, [N, 2 D]."""
    checks.expect_layouts(w=(w, "D"), u=(u, "D"), k=(k, "B T D"), v=(v, "B T D"))
    given = {"w": w, "u": u, "k": k, "v": v}
    N = sequences(k, cu_seqlens, reverse, context)
    if initial_state is not None:
        if not isinstance(initial_state, tuple) or len(initial_state) != 2:
            raise TypeError(
                "initial_state: want a tuple (M [N, D], log Z [N, D]), "
                f"got {type(initial_state).__name__}"
            )
        for i, state in enumerate(initial_state):
            checks.expect_shape(f"initial_state[{i}]", state, (N, k.shape[2]))
            given[f"initial_state[{i}]"] = state
    checks.expect_floating(given)
    checks.expect_one_device({**given, "cu_seqlens": cu_seqlens})
    if initial_state is None:
        return nothing_yet(k, True, N)
    mean, z = (widen(x) for x in initial_state)
    # a mean of nothing counts for nothing, whatever it is
    return torch.cat([torch.where(z == -torch.inf, 0, mean), z], -1)


def sequences(
    k: Tensor, cu_seqlens: Tensor | None, reverse: bool, context: ContextParallel | None
) -> int:
    """How many there are in the whole batch."""
    if context is not None:
        if reverse:
            raise NotImplementedError("reverse: not with a context")
        context.expect_no_offsets(cu_seqlens, None)
        return k.shape[0] if context.sequences is None else context.sequences
    if cu_seqlens is None:
        return k.shape[0]
    checks.expect_cu_seqlens(cu_seqlens, *k.shape[:2])
    return cu_seqlens.shape[0] - 1
