"""Decoding with RWKV-7's time mixing: a token's mixes, and what follows their projections."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.time_mix import rwkv7_step as step
from slipstream.kernels.time_mix import token_mix_step as mixes


@checks.operator
def token_mix_step(
    x: Tensor,
    mu: Tensor,
    *,
    state: Tensor,
    state_indices: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Mixes of one token of each sequence with the one before, in one launch.

        y_m = x + (before - x) mu_m          of each mix m
        before <- x

    Args:
        x: [N, D], any floating dtype.
        mu: [M, D], the mixes: RWKV-7's time mixing has six, its channel mixing one.
        state: the pool of last tokens [slots, D], any floating dtype, updated in place.
        state_indices: the row of each sequence [N] in the pool, int32 or int64, none twice; where
            it is negative nothing is read or written and y is 0. Sequence n has row n if None, and
            the pool then has N rows. May change between replays of a CUDA graph.
        impl: None chooses; "triton", "eager" or "reference" is used or refused.

    Returns:
        y [M, N, D] in x's dtype, rounded once.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: a gradient is wanted.

    Cost: x and the last tokens are read and written once, beside M N D numbers of y.
    Source: Peng et al., RWKV-7 Goose, 2025, section 4.
    """
    return mixes.run(x, mu, state, state_indices, impl)


@checks.operator
def rwkv7_step(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    g: Tensor,
    *,
    state: Tensor,
    state_indices: Tensor | None = None,
    v_gate: Tensor | None = None,
    first_value: Tensor | None = None,
    w_bias: Tensor | None = None,
    a_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    k_k: Tensor,
    k_a: Tensor,
    r_k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    norm_eps: float = 1e-5,
    state_v_first: bool = False,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """One token of RWKV-7's time mixing: all between its projections, in one launch.

        w = -exp(-1/2) sigmoid(w + w_bias);  a = sigmoid(a + a_bias)
        v = v + (first_value - v) sigmoid(v_gate + v_bias)     but in the first layer
        kk = l2_norm_per_head(k k_k);  k = k (1 + (a - 1) k_a)
        S <- diag(exp(w)) S - (kk a) (kk^T S) + k v^T
        y = (group_norm_per_head(S^T r) + sum(r k r_k) v) g

    The states are rows of a pool, updated in place. What is before it in a layer, the mixes with
    the last token, is token_mix_step; the matrix products are the caller's.

    Args:
        r, w, k, v, a, g: [N, D] as projected, each of any floating dtype, D = H K; w and a behind
            the second matrix of their low-rank layers, without its bias, g its result. Rows may
            have other numbers between them.
        state: the pool [slots, H, K, K], of each head [K, V], any floating dtype; any strides
            between slots and heads.
        state_indices: the slot of each sequence [N], int32 or int64, no slot twice; where it is
            negative nothing is read or written and y is 0. Sequence n has slot n if None, and the
            pool then has N slots. May change between replays of a CUDA graph.
        v_gate, first_value: [N, D], both or neither: how far v goes towards the v of the model's
            first such layer, before its sigmoid, and that v.
        w_bias, a_bias, v_bias: [D] of w, a and v_gate, added in the launch; None is 0.
        k_k, k_a: [D]. r_k: [H, K].
        norm_weight, norm_bias: [D], of the group norm of each head's K channels. norm_eps: its eps,
            0 or more; published models have K 1e-5.
        state_v_first: the pool is [slots, H, V, K].
        out: where y is written to [N, D], any floating dtype.
        impl: None chooses; "triton", "eager" or "reference" is used or refused.

    Returns:
        y [N, D] in r's dtype, or out. All is computed in float32, or in float64 for r in float64,
        and rounded once: in y and the states.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: a gradient is wanted.

    Cost: 8 N H K^2 flops; H K^2 numbers of state read and written for each sequence. From a few
    sequences on, this traffic takes all of the time.
    Source: Peng et al., RWKV-7 Goose, 2025, section 4.
    """
    checks.expect_not_negative("norm_eps", norm_eps)
    inputs = step.StepInputs(
        r, w, k, v, a, g, v_gate, first_value, w_bias, a_bias, v_bias, k_k, k_a, r_k, norm_weight,
        norm_bias,
    )  # fmt: skip
    call = step.StepCall(state, state_indices, float(norm_eps), state_v_first)
    return step.run(inputs, call, out, impl)
