"""Decoding with any operator of the linear family, on states kept in place."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.decode import Pool, run
from slipstream.kernels.linear.inputs import LinearInputs


@checks.operator
def recurrent_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: Tensor,
    state_indices: Tensor | None = None,
    g: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    p: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    u: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The recurrence of every fused_recurrent operator, on a pool of states updated in place.

        S <- exp(g_t) S exp(gv_t)
        x_t = v_t, or beta_t (v_t - k_t^T S), or with p: beta_t (v_t - p_t^T S_{t-1})
        S <- S + b_t (a_t^T S_{t-1}) + k_t x_t^T
        o_t = scale * q_t^T S, or with u: scale * (q_t^T S_{t-1} + (q_t . u k_t) x_t)

    Which operator it is follows from what is given:

        linear_attn                        nothing but q, k, v
        retention, lightning, simple_gla   g [B, T, HV]
        gla                                g [B, T, HV, K]
        rwkv6                              g [B, T, HV, K] (w), u
        delta_rule, gated_delta_rule       beta; and g [B, T, HV]
        kda, comba                         beta, g [B, T, HV, K]; beta, g [B, T, HV], p
        dplr_delta_rule, rwkv7             a, b, g [B, T, HV, K]
        gdn2                               the same, of what its recurrence says

    Args:
        q, k: queries and keys [B, T, H, K]; decoding has T == 1.
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k, p, a, b of head
            hv // (HV // H).
        state: the pool [slots, HV, K, V], float32 or another floating dtype that states are kept
            in; any strides between slots and heads. It is overwritten.
        state_indices: the slot of each sequence [N], int32 or int64, no slot twice; where it is
            negative no state is read or written and o is 0. Sequence n has slot n if None, and the
            pool then has N slots.
        g: log decay, at most 0, of the state [B, T, HV] or of its rows [B, T, HV, K].
        gv: log decay of its columns [B, T, HV, V].
        beta: how much of the old value to replace [B, T, HV], or [B, T, HV, V] for each column.
        p: keys that the old value is read under, before the decay [B, T, H, K]; if None it is
            read under k, after it.
        a, b: read and write directions of the free transition [B, T, H, K].
        u: bonus of the current token [HV, K], which is then read before the state decays.
        scale: factor on the output; K^-0.5 if None.
        use_qk_l2norm_in_kernel: normalise q, k and p to norm 1 first.
        state_v_first: the pool is [slots, HV, V, K].
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        impl: None chooses; "triton" or "eager" is used or refused.

    Returns:
        o [B, T, HV, V] in q's dtype.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: a gradient is wanted.

    Cost: 4 to 8 T HV K V flops; HV K V numbers of state read and written for each sequence.
    """
    terms = LinearInputs(q, k, v, g=g, gv=gv, beta=beta, p=p, a=a, b=b, u=u, cu_seqlens=cu_seqlens)
    pool = Pool(state, state_indices, state_v_first)
    return run(terms, pool, scale, use_qk_l2norm_in_kernel, impl)
