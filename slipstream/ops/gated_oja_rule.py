"""The gated Oja rule: the delta rule with the roles of keys and values exchanged."""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._fp32 import widen
from slipstream.ops._preprocess import beta_or_ones, expect_inputs, for_value_heads, l2_normalised
from slipstream.ops.token_shift import token_shift
from slipstream.runtime.context_parallel import ContextParallel
from slipstream.runtime.dispatch import plain_impl


@checks.operator
def chunk_gated_oja_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gv: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_q_l2norm: bool = False,
    use_k_l2norm: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated Oja rule, chunkwise: a key is written without what the state has under its value.

        S'_t = S_{t-1} diag(exp(gv_t))
        S_t = S'_t + beta_t (k_t - S'_t v_t) v_t^T
        o_t = scale * S_t^T q_t

    The state's transpose goes through the recurrence of KDA, with v for its keys and k for its
    values; what that writes, beta_t (k_t - S'_t v_t), are the keys of gated linear attention.

    Args:
        q, k: queries and keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H);
            values of norm 1 keep the recurrence stable.
        gv: log decay of the state's columns [B, T, HV, V], at most 0, float32.
        beta: how much of the old key to replace [B, T, HV], in (0, 1), or (0, 2).
        use_q_l2norm, use_k_l2norm: normalise q, k to norm 1 first.
        the others: as chunk_gla.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: that of chunk_kda and of chunk_gla, and a few passes over k and v; with reverse or a
    context chunk_kda's keys have V + 16 channels or fewer, and above V = 240 it runs in plain
    torch. State HV K V floats.
    Source: Oja, "A Simplified Neuron Model as a Principal Component Analyzer" (1982), as an update
    of a state in Irie, Faccio, Schmidhuber, "Neural Differential Equations for Learning to Program
    Neural Nets Through Continuous Learning Rules" (2022); with a decay in fla-core 0.6.0,
    fla/ops/gated_oja_rule.
    """
    options = LinearOptions(
        scale, output_final_state, state_v_first, reverse, chunk_size, impl, context
    )
    given = q, k, v, gv, beta, initial_state, cu_seqlens
    terms = _terms(*given, options, use_q_l2norm, use_k_l2norm)
    return _run(terms, options, recurrent=False)


@checks.operator
def fused_recurrent_gated_oja_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_q_l2norm: bool = False,
    use_k_l2norm: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated Oja rule, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_gated_oja_rule; without gv nothing decays, and beta None
    is 1. Cost: 11 T HV K V flops, one after the other.
    """
    options = LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context)
    given = q, k, v, gv, beta, initial_state, cu_seqlens
    terms = _terms(*given, options, use_q_l2norm, use_k_l2norm)
    return _run(terms, options, recurrent=True)


def _terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gv: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: LinearOptions,
    normalise_q: bool,
    normalise_k: bool,
) -> LinearInputs:
    """Returns the given tensors, with q and k repeated for each value head."""
    beta = beta_or_ones(beta, v)
    if gv is None:
        gv = torch.zeros_like(v, dtype=torch.float64 if v.dtype == torch.float64 else torch.float32)
    expect_inputs(
        cu_seqlens, options.context, q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"),
        gv=(gv, "B T HV V"), beta=(beta, "B T HV"),
        initial_state=(initial_state, "N HV V K" if options.state_v_first else "N HV K V"),
    )  # fmt: skip
    if normalise_q:
        (q,) = l2_normalised(options.impl, q=q)
    if normalise_k:
        (k,) = l2_normalised(options.impl, k=k)
    q, k = for_value_heads(v, q, k)
    return LinearInputs(
        q, k, v, gv=gv, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens
    )


def _run(
    terms: LinearInputs, options: LinearOptions, *, recurrent: bool
) -> tuple[Tensor, Tensor | None]:
    once = options._replace(scale=1.0, output_final_state=False, state_v_first=True)
    state = terms.initial_state
    if state is not None and options.state_v_first:
        state = state.mT
    if recurrent or options.reverse or options.context is not None:
        more = _more_channels(terms.v.shape[-1])
        state = None if state is None else F.pad(state, (0, more))
        keys, _ = run(_written_keys(terms, state), once, recurrent=recurrent, names=_NAMES)
    else:
        keys = _keys_after_reads(terms, state, once)
    return run(terms._replace(k=keys, beta=None), options, recurrent=recurrent)


_NAMES = {"k": "v", "v": "k", "g": "gv"}


def _keys_after_reads(terms: LinearInputs, state: Tensor | None, once: LinearOptions) -> Tensor:
    """beta_t (k_t - S'_t v_t) [B, T, HV, K], by KDA's recurrence with the next token's read as
    query: S'_{t+1} v_{t+1} = S_t (exp(gv_{t+1}) * v_{t+1}).

    At a sequence's end it reads what nobody wants. state: [N, HV, K, V].
    """
    v, gv, beta, cu_seqlens = terms.v, terms.gv, terms.beta, terms.cu_seqlens
    assert gv is not None and beta is not None
    reads = (widen(gv).exp() * v).to(v.dtype)
    keys = LinearInputs(
        reads.roll(-1, 1), v, terms.k, g=gv, beta=beta,
        initial_state=state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    o, _ = run(keys, once, recurrent=False, names=_NAMES)
    first = None if state is None else _first_reads(reads, state, cu_seqlens).to(o.dtype)
    old, _ = token_shift(
        o.flatten(2), initial_state=first, cu_seqlens=cu_seqlens, impl=plain_impl(once.impl)
    )
    return (beta[..., None] * (widen(terms.k) - widen(old.view(o.shape)))).to(o.dtype)


def _first_reads(reads: Tensor, state: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The read of each sequence's state by its first token, [N, HV K]; zeros without tokens."""
    T = reads.shape[1]
    if T == 0:
        return state.new_zeros(state.shape[:3]).flatten(1)
    if cu_seqlens is None:
        first = reads[:, 0]
    else:
        first = reads[0].index_select(0, cu_seqlens[:-1].long().clamp(0, T - 1))
    return (widen(state) * widen(first)[:, :, None]).sum(-1).flatten(1)


def _written_keys(terms: LinearInputs, state: Tensor | None) -> LinearInputs:
    """The call of KDA's recurrence that returns beta_t (k_t - S'_t v_t), [B, T, HV, K].

    Its keys have one more channel, always 1, whose row of the state is forgotten at every token:
    what is read there is what was written there. Further channels of 0 make rows of 16 bits begin
    where kernels load them at once.
    """
    v, more = terms.v, _more_channels(terms.v.shape[-1])
    assert terms.gv is not None
    at = torch.zeros(more, dtype=v.dtype, device=v.device)
    at[:1].fill_(1)  # not at[0] = 1, which copies from the host
    keys = torch.cat([v, at.expand(*v.shape[:3], more)], dim=-1)
    gates = torch.zeros(more, dtype=terms.gv.dtype, device=v.device)
    gates[:1].fill_(-torch.inf)
    g = torch.cat([terms.gv, gates.expand(*v.shape[:3], more)], dim=-1)
    reads = F.pad(at, (v.shape[-1], 0)).expand_as(keys)
    return LinearInputs(
        reads, keys, terms.k, g=g, beta=terms.beta,
        initial_state=state, cu_seqlens=terms.cu_seqlens,
    )  # fmt: skip


def _more_channels(V: int) -> int:
    """So many that V and they are a multiple of 16."""
    return 16 - V % 16
