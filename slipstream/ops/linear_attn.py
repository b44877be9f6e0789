"""Linear attention, with or without its normaliser."""

from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, check, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._fp32 import result_dtype, run_wide, widen
from slipstream.runtime import autograd, context_parallel, trees

# Of ones, of which one is read: as few as are fast.
COLUMNS = 16
# Added to the sum of the weights, by which o is divided.
EPS = 1e-10

State = Tensor | tuple[Tensor, Tensor]


@checks.operator
@trees.by_levels
def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, State | None]:
    """Linear attention, chunkwise: a state that sums up the past and never forgets.

        S_t = S_{t-1} + k_t v_t^T
        o_t = scale * S_t^T q_t

    and, with normalize, the weights of the values sum to 1:

        z_t = z_{t-1} + k_t
        o_t = scale * S_t^T q_t / (scale * z_t . q_t + 1e-10)

    Args:
        q, k: queries and keys [B, T, H, K]; with normalize positive ones, or the sum they are
            divided by may vanish.
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        scale: factor on the output; K^-0.5 if None.
        initial_state: state before the first token [N, HV, K, V], float32; zeros if None. With
            normalize a tuple of it and z [N, 1, HV, K].
        output_final_state: return the state after the last token too.
        normalize: divide by the sum of the weights.
        state_v_first: states are [N, HV, V, K] instead; z is as ever.
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
        o [B, T, HV, V] in q's dtype, and the final state, of the form of initial_state, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: for chunks of C, 2 T HV (2 K V + C (K + V) / 2) flops; state HV K V floats. The
    normaliser is one more column of v; in bfloat16 on a GPU a run with 16 columns, and o is then
    rounded before it is divided too.
    Source: Katharopoulos, Vyas, Pappas, Fleuret, "Transformers are RNNs: Fast Autoregressive
    Transformers with Linear Attention" (2020).
    """
    options = LinearOptions(
        scale, output_final_state, state_v_first, reverse, chunk_size, impl, context
    )
    return _run(q, k, v, initial_state, cu_seqlens, options, normalize, recurrent=False)


@checks.operator
@trees.by_levels
def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    normalize: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, State | None]:
    """Linear attention, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_linear_attn, but that normalize is False by default.
    Cost: 4 T HV K V flops, one after the other.
    """
    options = LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context)
    return _run(q, k, v, initial_state, cu_seqlens, options, normalize, recurrent=True)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: State | None,
    cu_seqlens: Tensor | None,
    options: LinearOptions,
    normalize: bool,
    *,
    recurrent: bool,
) -> tuple[Tensor, State | None]:
    terms = LinearInputs(q, k, v, cu_seqlens=cu_seqlens)
    if normalize:
        return _normalized(terms, initial_state, options, recurrent)
    if isinstance(initial_state, tuple):
        raise TypeError("initial_state: want a tensor without normalize, got a tuple")
    return run(terms._replace(initial_state=initial_state), options, recurrent=recurrent)


def _normalized(
    terms: LinearInputs, initial_state: State | None, options: LinearOptions, recurrent: bool
) -> tuple[Tensor, State | None]:
    """The sum of the weights is what a value of 1 would come out as: one more column of v, or a run
    with few columns where that costs less."""
    check(terms, {}, options, recurrent)
    v_first, dtype = options.state_v_first, result_dtype(terms.q)
    kv = z = None
    if initial_state is not None:
        N, HV, K, V = terms.state_shape
        N = N if options.context is None else options.context.sequences or N
        kv, z = _parts(initial_state, (N, HV, K, V), v_first)
        checks.expect_floating({"initial_state[0]": kv, "initial_state[1]": z})
    options = options._replace(state_v_first=False)
    if _two_are_faster(terms.q) and options.context is None:
        q, first = terms.q, (kv, z)
        o, weights, kv, z = _in_two(terms._replace(q=q.detach()), kv, z, options, recurrent)
        o = (o / (weights + EPS)).to(dtype)
        if autograd.needs_autograd(q):
            given = (o, weights, q, terms.k, terms.v, terms.cu_seqlens, *first)
            o = _WithQuery.apply(options.scale_of(q), options.reverse, *given)
    else:
        o, weights, kv, z = _in_one(terms, kv, z, options, recurrent)
        o = (o / (weights + EPS)).to(dtype)
    if kv is None or z is None:
        return o, None
    return o, (kv.mT if v_first else kv, z[..., 0].unsqueeze(1))


Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _in_one(
    terms: LinearInputs,
    kv: Tensor | None,
    z: Tensor | None,
    options: LinearOptions,
    recurrent: bool,
) -> Parts:
    """o, the sums of the weights, kv [N, HV, K, V] and z [N, HV, K, at least 1]."""
    ones = terms.v.new_ones(*terms.v.shape[:3], 1)
    state = None if kv is None or z is None else torch.cat([kv, z.to(kv.dtype)], dim=-1)
    terms = terms._replace(v=torch.cat([terms.v, ones], dim=-1), initial_state=state)
    o, state = run_wide(terms, options, recurrent=recurrent)
    kv, z = (None, None) if state is None else (state[..., :-1], state[..., -1:])
    return o[..., :-1], o[..., -1:], kv, z


def _in_two(
    terms: LinearInputs,
    kv: Tensor | None,
    z: Tensor | None,
    options: LinearOptions,
    recurrent: bool,
) -> Parts:
    """Computes _in_one's results by two calls in 16 bits, which round more than o and the sums."""
    ones = terms.v.new_ones(*terms.v.shape[:3], COLUMNS)
    z = None if z is None else z.expand(*z.shape[:-1], COLUMNS)
    o, kv = run(terms._replace(initial_state=kv), options, recurrent=recurrent)
    weights, z = run(terms._replace(v=ones, initial_state=z), options, recurrent=recurrent)
    return o, widen(weights[..., :1]), kv, z


class _WithQuery(autograd.Function):
    """o, with the gradient of q, which o was computed without.

    With keys of one sign it is what is left of two sums that nearly cancel: in float32, where
    d = do / w, z_i the sum of the keys up to i, and (d . v_j) the scores of one more scan,

        dq_i = x_i - z_i (x_i . q_i) / w_i        x_i = scale sum_j (d_i . v_j) k_j
    """

    operator = "slipstream::linear_attn"

    @staticmethod
    def forward(ctx: Any, scale: float, reverse: bool, o: Tensor, *given: Any) -> Tensor:
        ctx.options = LinearOptions(scale=scale, reverse=reverse)
        autograd.save(ctx, *given)
        return o.view_as(o)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, do: Tensor) -> Any:
        weights, q, k, v, cu_seqlens, kv, z = saved
        d = widen(do) / (weights + EPS)
        k = widen(k).repeat_interleave(v.shape[2] // k.shape[2], dim=2)
        ones = d.new_full((*d.shape[:3], COLUMNS), COLUMNS**-0.5)
        each = None if z is None else (widen(z) * COLUMNS**-0.5).mT.expand(-1, -1, COLUMNS, -1)
        kv = None if kv is None else widen(kv).mT
        x = _run_half(
            LinearInputs(d, widen(v), k, initial_state=kv, cu_seqlens=cu_seqlens), ctx.options
        )
        z = _run_half(
            LinearInputs(ones, ones, k, initial_state=each, cu_seqlens=cu_seqlens), ctx.options
        )
        x, z = (y.unflatten(2, (q.shape[2], -1)) for y in (x, z))
        wide = widen(q).unsqueeze(3)
        share = (x * wide).sum(-1, keepdim=True) / ((z * wide).sum(-1, keepdim=True) + EPS)
        return None, None, do, None, (x - z * share).sum(3).to(q.dtype), *(None,) * 5


def _run_half(terms: LinearInputs, options: LinearOptions) -> Tensor:
    with torch.autocast(terms.q.device.type, enabled=False):
        return run(terms, options, recurrent=False)[0]


def _two_are_faster(q: Tensor) -> bool:
    """float16 could not hold the sums before they are divided."""
    # torch.export would keep the forward of _WithQuery alone, without the gradient of q
    exported = torch.compiler.is_exporting()
    return q.is_cuda and result_dtype(q) == torch.bfloat16 and not exported


def _parts(state: State, shape: tuple[int, int, int, int], v_first: bool) -> tuple[Tensor, Tensor]:
    """kv [N, HV, K, V] and z [N, HV, K, 1]."""
    N, HV, K, V = shape
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(
            "initial_state: want a tuple (kv [N, HV, K, V], z [N, 1, HV, K]) with normalize, "
            f"got {type(state).__name__}"
        )
    kv, z = state
    checks.expect_shape("initial_state[0]", kv, (N, HV, V, K) if v_first else shape)
    checks.expect_shape("initial_state[1]", z, (N, 1, HV, K))
    return kv.mT if v_first else kv, z.squeeze(1).unsqueeze(-1)
