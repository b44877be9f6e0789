"""Gated DeltaNet-2: the gated delta rule whose decay, erase and write are gates of channels."""

from functools import partial

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.elementwise.erase import erase
from slipstream.kernels.linear import channel_gates, inputs
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.ops import _preprocess, kda
from slipstream.runtime.context_parallel import ContextParallel

# of terms, for users
NAMES = {"erase": "b", "write": "w"}


@checks.operator
def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet-2, chunkwise: each channel of the key has a decay and an erase of its own.

        S_t = (I - k_t (b_t * k_t)^T) diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T
        o_t = scale * S_t^T q_t

    KDA is b = w = beta. The kernels for sm_90 in 16 bits are KDA's with two more tensors to read;
    elsewhere it is dplr_delta_rule with a = -exp(g) * b * k, b = k and w * v for v.

    Args:
        q, k: queries and keys [B, T, H, K]; keys of norm 1 keep the recurrence stable.
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        g: log decay [B, T, HV, K], at most 0, float32.
        b: how much of the old value to erase, by channel of the key [B, T, HV, K], in (0, 1), or
            (0, 2).
        w: how much of the new value to write [B, T, HV, V], in (0, 1).
        chunk_size: as chunk_dplr_delta_rule. The others: as chunk_kda.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: as chunk_kda on sm_90 in 16 bits with b and w of q's dtype. Else as
    chunk_dplr_delta_rule, plus a tensor of the size of g and, if HV > H, copies of q and k for
    each value head.
    Source: the recurrence of fla-core 0.6.0, fla/ops/gdn2.
    """
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError(
            "lower_bound: want a number below 0 with safe_gate and use_gate_in_kernel, got None"
        )
    g = kda.channel_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, impl)
    terms = _terms(q, k, v, g, b, w, use_qk_l2norm_in_kernel, impl)
    if context is not None or not channel_gates.takes_as_they_are(terms, impl):
        terms = channel_gates.as_dplr(terms, partial(erase, impl=impl))
    return run(
        terms._replace(initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, chunk_size, impl, context),
        recurrent=False,
        names=NAMES,
    )


@checks.operator
def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet-2, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_gdn2. Cost: 8 T HV K V flops, one after the other.
    """
    g = kda.channel_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, impl)
    terms = channel_gates.as_dplr(
        _terms(q, k, v, g, b, w, use_qk_l2norm_in_kernel, impl), partial(erase, impl=impl)
    )
    return run(
        terms._replace(initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
    )


def _terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    normalise: bool,
    impl: str | None,
) -> inputs.LinearInputs:
    _preprocess.expect_inputs(
        None, None, q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"),
        g=(g, "B T HV K"), b=(b, "B T HV K"), w=(w, "B T HV V"),
    )  # fmt: skip
    if normalise:
        q, k = _preprocess.l2_normalised(impl, q=q, k=k)
    return inputs.LinearInputs(q, k, v, g=g, erase=b, write=w)
