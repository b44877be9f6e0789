"""Gated DeltaProduct: several Householder steps of the gated delta rule for each token."""

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear import gated_delta_product, inputs
from slipstream.kernels.linear.dispatch import DEFAULT_CHUNK, LinearOptions, check, plan_for, run
from slipstream.kernels.linear.gated_delta_product import Steps, product
from slipstream.kernels.linear.modes.wide_heads import groups_of
from slipstream.ops._preprocess import l2_normalised
from slipstream.runtime import trees
from slipstream.runtime.context_parallel import ContextParallel
from slipstream.runtime.dispatch import ValidationCache, signature

_PLANS = ValidationCache()


@checks.operator
@trees.by_levels
def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaProduct, chunkwise: decay once, then n corrections under n keys, then read.

        S_{t,0} = exp(g_t) S_{t-1}
        S_{t,i} = (I - beta_{t,i} k_{t,i} k_{t,i}^T) S_{t,i-1} + beta_{t,i} k_{t,i} v_{t,i}^T
        S_t = S_{t,n}                              i = 1 .. n, n = num_householder
        o_t = scale * S_t^T q_t

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T n, H, K], those of token t at t n .. t n + n - 1; of norm 1 for stability.
        v: values [B, T n, HV, V], HV a multiple of H: head hv reads q, k of head
            hv // (HV // H).
        g: log decay [B, T, HV], at most 0, float32; none if None.
        beta: how much of the old value to replace [B, T n, HV], in (0, 1), or (0, 2).
        num_householder: corrections for each token, n.
        scale: factor on the output; K^-0.5 if None.
        initial_state: state before the first token [N, HV, K, V], float32; zeros if None.
        output_final_state: return the state after the last token too.
        use_qk_l2norm_in_kernel: normalise q and k to norm 1 first.
        state_v_first: states are [N, HV, V, K] instead.
        reverse: run time backwards, each token's n steps still in their order; the final state is
            then that before the first token.
        cu_seqlens: offsets [N+1] in tokens of N sequences packed in B == 1, int32 or int64.
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree).
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        chunk_size: a hint, steps a chunk in plain torch, a power of two from 16 to 256; Triton's
            kernels have their own. Chosen if None.
        impl: None chooses; "sm90", "triton", "eager" or "reference" is used or refused.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: for chunks of C, 2 T n HV (3 K V + C (3 K + 2 V) / 2) flops; state HV K V floats.
    Source: Siems and others, "DeltaProduct: Improving State-Tracking in Linear RNNs via
    Householder Products" (2025).
    """
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalised(impl, q=q, k=k)
    options = LinearOptions(
        scale, output_final_state, state_v_first, reverse, chunk_size, impl, context
    )
    given = Steps(q, k, v, beta, g, initial_state)
    return _run(given, num_householder, cu_seqlens, options, recurrent=False)


@checks.operator
@trees.by_levels
def fused_recurrent_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaProduct, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_gated_delta_product. Cost: 7 T n HV K V flops, one after
    the other.
    """
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalised(impl, q=q, k=k)
    options = LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context)
    given = Steps(q, k, v, beta, g, initial_state)
    return _run(given, num_householder, cu_seqlens, options, recurrent=True)


def _run(
    given: Steps, n: int, cu_seqlens: Tensor | None, options: LinearOptions, *, recurrent: bool
) -> tuple[Tensor, Tensor | None]:
    checks.expect_tensor("q", given.q)
    if not isinstance(n, int) or n < 1:  # a list is no key
        raise ValueError(f"num_householder: want an integer of at least 1, got {n!r}")
    if options.context is not None:
        _check(given, n)
        options = options._replace(context=options.context.repeated(n))
        terms = _steps(given, n, options.reverse, cu_seqlens)
        o, state = run(terms, options, recurrent=recurrent)
        return _reads(o, n, options.reverse), state
    key = signature((*given, cu_seqlens), n, *options[1:], recurrent)
    if key is not None:
        key = (*key, checks.autocast_dtype(given.q))
    tensors = (*given, cu_seqlens)
    impl = _PLANS.get(key, lambda: _impl(given, n, cu_seqlens, options, recurrent), tensors)
    if not impl:
        terms = _steps(given, n, options.reverse, cu_seqlens)
        o, state = run(terms, options, recurrent=recurrent)
        return _reads(o, n, options.reverse), state
    chunk = 0 if recurrent else options.chunk_size or DEFAULT_CHUNK
    o, state = product(given, options.scale_of(given.q), chunk, impl)
    return o, state if options.output_final_state else None


def _impl(
    given: Steps, n: int, cu_seqlens: Tensor | None, options: LinearOptions, recurrent: bool
) -> str:
    """The impl of the steps as one operator, "" where torch lays them out; looks at no values."""
    _check(given, n)
    q, v = given.q, given.v
    turned = options.reverse or options.state_v_first or options.impl == "reference"
    plain = not turned and cu_seqlens is None and checks.autocast_dtype(q) is None
    # as one operator its states are float32
    plain = plain and q.dtype != torch.float64
    if not (plain and q.is_cuda and q.numel() and v.numel()):
        return ""
    one = given._replace(q=q[:, :1], k=given.k[:, :n], v=v[:, :n], beta=given.beta[:, :n])
    laid, _ = one._replace(g=None if given.g is None else given.g[:, :1]).terms("eager")
    check(laid, {}, options, recurrent)
    return "" if groups_of(laid).is_split else plan_for(laid, options.impl).impls


def _steps(given: Steps, n: int, reverse: bool, cu_seqlens: Tensor | None) -> inputs.LinearInputs:
    """Every Householder step as a token of the gated delta rule.

    The first step of a token decays, its last reads. Time turned back would turn the steps of a
    token too, so with reverse they are turned beforehand.
    """
    q, k, v, beta, g, state = given
    tokens = q.shape[1]
    q = gated_delta_product.at_step(q, n, last=not reverse)
    if g is not None:
        g = gated_delta_product.at_step(g, n, last=reverse)
    if reverse:
        k, v, beta = (x.unflatten(1, (tokens, n)).flip(2).flatten(1, 2) for x in (k, v, beta))
    if cu_seqlens is not None:
        checks.expect_tensor("cu_seqlens", cu_seqlens)
        cu_seqlens = cu_seqlens * n
    return inputs.LinearInputs(q, k, v, g=g, beta=beta, initial_state=state, cu_seqlens=cu_seqlens)


def _reads(o: Tensor, n: int, reverse: bool) -> Tensor:
    return o[:, (0 if reverse else n - 1) :: n]


def _check(given: Steps, n: int) -> None:
    q, k, v, beta, g, _ = given
    checks.expect_rank("q", q, 4, "[B, T, H, K]")
    checks.expect_rank("v", v, 4, "[B, T n, HV, V]")
    B, T, H, K = q.shape
    checks.expect_shape("k", k, (B, T * n, H, K))
    checks.expect_shape("v", v, (B, T * n, *v.shape[2:]))
    checks.expect_shape("beta", beta, (B, T * n, v.shape[2]))
    if g is not None:
        checks.expect_shape("g", g, (B, T, v.shape[2]))
