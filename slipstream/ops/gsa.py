"""Gated slot attention (GSA): softmax attention over a fixed number of slots that forget."""

from typing import cast

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import DEFAULT_CHUNK, LinearOptions, check, plan_for
from slipstream.kernels.linear.gsa import GSAInputs, attend
from slipstream.kernels.linear.modes.wide_heads import groups_of
from slipstream.ops import _fp32, _preprocess
from slipstream.runtime import context_parallel, dispatch, token_ids, trees

States = tuple[Tensor, Tensor]
_PLANS = dispatch.ValidationCache()


@checks.operator
@trees.by_levels
def chunk_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """Gated slot attention, chunkwise: M slots hold keys and values; a query attends to slots.

        Sk_t = Sk_{t-1} diag(exp(g_t)) + k_t s_t^T          [K, M]
        p_t = softmax(scale * Sk_t^T q_t)
        Sv_t = diag(exp(g_t)) Sv_{t-1} + s_t v_t^T          [M, V]
        o_t = Sv_t^T p_t

    Without g each slot is the mean of what was written to it, weighted by exp(s) (ABC attention):
    s_t becomes exp(s_t - z_t) and g_t = z_{t-1} - z_t, where z_t = logsumexp(s_1 .. s_t).

    Args:
        q: queries [B, T, HQ, K], HQ a multiple of H: head hq reads the rest of head
            hq // (HQ // H).
        k: keys [B, T, H, K].
        v: values [B, T, H, V].
        s: how much is written to each slot [B, T, H, M].
        g: log decay of each slot [B, T, H, M], at most 0, float32.
        scale: factor on the scores; K^-0.5 if None.
        initial_state: states before the first token, a tuple (Sk [N, H, K, M], Sv [N, H, M, V]),
            float32; zeros if None.
        output_final_state: return the states after the last token too.
        state_v_first: states are [N, H, M, K] and [N, H, V, M] instead.
        reverse: run time backwards; the final states are then those before the first token.
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree).
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        chunk_size: a hint, tokens a chunk in plain torch, a power of two from 16 to 256; Triton's
            kernels have their own. Chosen if None.
        impl: None chooses; "sm90", "triton", "eager" or "reference" is used or refused.

    Returns:
        o [B, T, HQ, V] in q's dtype, and the final states, a tuple like initial_state, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: no g, but cu_seqlens or initial_state.

    Cost: for chunks of C, 2 T HQ (2 M (K + V) + C (K + V + 2 M) / 2) flops; states H M (K + V)
    floats.
    Source: Zhang and others, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling"
    (2024); without g, Peng and others, "ABC: Attention with Bounded-memory Control" (2022).
    """
    options = LinearOptions(
        scale, output_final_state, state_v_first, reverse, chunk_size, impl, context
    )
    return _run(q, k, v, s, g, initial_state, cu_seqlens, options, recurrent=False)


@checks.operator
@trees.by_levels
def fused_recurrent_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """Gated slot attention, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_gsa. Cost: 4 T HQ M (K + V) flops, one after the other.
    """
    options = LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context)
    return _run(q, k, v, s, g, initial_state, cu_seqlens, options, recurrent=True)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None,
    initial_state: States | None,
    cu_seqlens: Tensor | None,
    options: LinearOptions,
    *,
    recurrent: bool,
) -> tuple[Tensor, States | None]:
    states = initial_state or (None, None)
    if cu_seqlens is not None and cu_seqlens.is_cuda:  # plain torch looks on the CPU
        token_ids.expect_offsets("cu_seqlens", cu_seqlens, k.shape[1])
    given = GSAInputs(q, k, v, s, cast(Tensor, g), *states, cu_seqlens)  # without g none is narrow
    if options.context is not None:
        _check(given, options)
        return _run_wide(given, options, recurrent)
    key, dtype = dispatch.signature(given, *options[1:], recurrent), None
    if key is not None:
        dtype = checks.autocast_dtype(q)
        key = (*key, dtype)
    plan = _PLANS.get(key, lambda: _plan(given, options, recurrent), given)
    if not plan:
        return _run_wide(given, options, recurrent)
    first, second, as_they_are = plan
    laid = given if as_they_are else _narrowed(given, dtype or _fp32.result_dtype(q))
    group = q.shape[2] // k.shape[2]
    chunk = 0 if recurrent else options.chunk_size or DEFAULT_CHUNK
    o, keys, values = attend(laid, options.scale_of(q), chunk, first, second)
    if not options.output_final_state:
        return o, None
    return o, (keys, values) if group == 1 else (keys[:, ::group], values[:, ::group])


def _plan(
    given: GSAInputs, options: LinearOptions, recurrent: bool
) -> tuple[str, str, bool] | tuple[()]:
    """The implementations of both passes where only the scores are float32, and whether they take
    the tensors as they are; else (). Looks at no values."""
    _check(given, options)
    dtype = _fp32.result_dtype(given.q)
    if not _stays_narrow(given, dtype, options):
        return ()
    laid = _narrowed(given, dtype)
    passes = (laid.first(), {"v": "s", "gv": "g"}), (laid.second(laid.s), {})
    for terms, names in passes:
        check(terms, names, options, recurrent)
    first, second = (plan_for(terms, options.impl).impls for terms, _ in passes)
    return first, second, laid is given


def _narrowed(given: GSAInputs, dtype: torch.dtype) -> GSAInputs:
    """Casts all but gates and states to dtype, and repeats k and v for each head of q."""
    if given.q.shape[2] != given.k.shape[2]:
        given = _grouped(given)
    if any(x.dtype != dtype for x in given[:4]):
        given = given._replace(**{n: getattr(given, n).to(dtype) for n in "qkvs"})
    return given


def _grouped(given: GSAInputs) -> GSAInputs:
    group = checks.plain_int(given.q.shape[2] // given.k.shape[2])
    for names, dim in (("kvsg", 2), (("keys", "values"), 1)):
        every = {n: x for n in names if (x := getattr(given, n)) is not None}
        each = {n: x.repeat_interleave(group, dim=dim) for n, x in every.items()}
        given = given._replace(**each)
    return given


def _run_wide(
    given: GSAInputs, options: LinearOptions, recurrent: bool
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Computes in float32 throughout."""
    q, group = given.q, given.q.shape[2] // given.k.shape[2]
    if given.g is None:
        s, g = _abc(given.s, options.reverse)
        given = given._replace(s=s, g=g)
    if group > 1:
        given = _grouped(given)
    names, once = {"v": "s", "gv": "g"}, options._replace(scale=1.0)
    scores, keys = _fp32.run_wide(given.first(), options, recurrent=recurrent, names=names)
    p = scores.softmax(-1)
    o, values = _fp32.run_wide(given.second(p), once, recurrent=recurrent)
    o = o.to(_fp32.result_dtype(q))
    if keys is None or values is None:
        return o, None
    return o, (keys[:, ::group], values[:, ::group])


def _stays_narrow(given: GSAInputs, dtype: torch.dtype, options: LinearOptions) -> bool:
    """Whether only the scores are float32 (kernels/linear/gsa.py)."""
    plain = not (options.reverse or options.state_v_first or options.impl == "reference")
    plain = plain and given.g is not None and given.q.is_cuda
    plain = plain and not any(groups_of(x).is_split for x in (given.first(), given.second(given.s)))
    whole = all(x.numel() > 0 for x in (given.q, given.v, given.s))
    return plain and whole and dtype in (torch.bfloat16, torch.float16)


def _abc(s: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Slot weights and log decays that keep each slot a weighted mean."""
    s = _fp32.widen(s)
    z = (s.flip(1) if reverse else s).logcumsumexp(1)
    # of z[:, :-1] torch.export would want two tokens or more, so three of s
    g = -z.diff(dim=1, prepend=z[:, :1])
    if reverse:
        z, g = z.flip(1), g.flip(1)
    return (s - z).exp(), g


def _check(given: GSAInputs, options: LinearOptions) -> None:
    q, k, v, s, g, keys, values, cu_seqlens = given
    v_first = options.state_v_first
    _preprocess.expect_inputs(
        cu_seqlens, options.context, q=(q, "B T HQ K"), k=(k, "B T H K"), v=(v, "B T H V"),
        s=(s, "B T H M"), g=(g, "B T H M"),
        **{
            "initial_state[0]": (keys, "N H M K" if v_first else "N H K M"),
            "initial_state[1]": (values, "N H V M" if v_first else "N H M V"),
        },
    )  # fmt: skip
    checks.expect_multiple("heads of q", q.shape[2], "heads of k", k.shape[2])
    if checks.autocast_dtype(q) is None:
        checks.expect_one_dtype({"q": q, "k": k, "v": v, "s": s})
    if g is None and (cu_seqlens is not None or keys is not None):
        given_too = "initial_state" if cu_seqlens is None else "cu_seqlens"
        raise NotImplementedError(
            f"{given_too}: want g beside it: without g, slots are normalised over one whole "
            "sequence; pass g, or each sequence whole and alone"
        )
