"""Decoding: a whole mixer, the linear layers around it, any operator of the linear family, RWKV-7.

A mixer is one launch, from projections to the gated norm; each weight of linear layers is read
once.
"""

from typing import Any

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear import decode
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.mixer_step.inputs import StepInputs, StepOptions
from slipstream.kernels.mixer_step.op import run
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import inputs, op
from slipstream.kernels.time_mix import rwkv7_step as step
from slipstream.kernels.time_mix import token_mix as mixes
from slipstream.runtime.consistent import consistent_scope

ORDERS = ("qkv", "vkq")
ACTIVATIONS = (None, "silu", "swish")
GATES = ("silu", "swish", "sigmoid")


@checks.operator
def mixer_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: Tensor,
    state_indices: Tensor | None = None,
    num_pending: int = 0,
    num_accepted: Tensor | None = None,
    conv_state: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
    channel_order: str = "qkv",
    g: Tensor | None = None,
    A_log: Tensor | None = None,
    A: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    gate_logit_normalizer: float | None = None,
    dt_limit: tuple[float, float] | None = None,
    beta: Tensor | None = None,
    write: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    dt_scales_v: bool = False,
    D: Tensor | None = None,
    z: Tensor | None = None,
    z_activation: str = "silu",
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    norm_group_size: int | None = None,
    norm_before_gate: bool = True,
    state_v_first: bool = False,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """One token of a mixer, or a few: all between its input and output projections, in one launch.

        q, k, v = conv(q), conv(k), conv(v)          short convolution, with its activation
        q, k = q / |q|, k / |k|                      use_qk_l2norm_in_kernel
        g = -exp(A_log) dt,  dt = softplus(g + dt_bias)    or as below
        S <- exp(g) S
        S <- S + k (beta (v - S^T k))^T,  or without beta S + k v^T,
                                     or with write S + k (write v - S^T (beta k))^T
        o = scale S^T q + D v
        y = norm(o) norm_weight f(z)

    The states and the windows of the convolution are rows of pools, updated in place. A layer's
    decoding step is one such call between two matrix products:

        GatedDeltaNet      conv, A_log, dt_bias, beta, l2 norm, z
        KimiDeltaAttention the same with g [B, T, HV, K]; z_activation "sigmoid"
        GatedDeltaNet2     as that, with beta [B, T, HV, K] and write
        DeltaNet           conv, beta, l2 norm
        Mamba2             q, k, v = C, B, x; conv with bias, channel_order "vkq"; g = dt, A_log,
                           dt_bias, dt_scales_v, D, scale 1; norm_before_gate off,
                           norm_group_size = inner width / n_groups
        GatedLinearAttention   g [B, T, HV, K], gate_logit_normalizer; z
        MultiScaleRetention    q, k after their rotation; g of the heads, expanded; z

    What decays, by what is given:

        g alone                       g is the log decay, at most 0
        A_log                         -exp(A_log) softplus(g + dt_bias), dt within dt_limit
        lower_bound                   lower_bound sigmoid(exp(A_log) (g + dt_bias)), A_log 0 if None
        gate_logit_normalizer         logsigmoid(g) / gate_logit_normalizer

    Args:
        q, k: [B, T, H, K], as projected, any floating dtype; decoding has T == 1. Views of one
            projection are taken as they are.
        v: [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        state: the pool [slots, HV, K, V], any floating dtype; any strides between slots and
            heads.
        state_indices: the slot of each sequence [B] in both pools, int32 or int64, no slot twice;
            where it is negative nothing is read or written and y is 0. Sequence n has slot n if
            None, and the pools then have B slots. May change between replays of a CUDA graph.
        num_pending: how many of the T tokens, the first ones, are the drafts of the last call,
            given once more.
        num_accepted: [B], int32 or int64: how many of the pending tokens were right. These move
            the states and windows on; the new tokens are computed after them and do not, since
            they are pending in the next call. So a wrong draft costs no copy of a state.
        conv_state: the windows [slots, C, W], as short_convolution returns them, or [slots, C,
            W - 1]; any floating dtype and strides. C = 2 H K + HV V.
        conv_weight, conv_bias: [C, W] and [C].
        conv_activation: "silu", its other name "swish", or None.
        channel_order: of C: "qkv", or "vkq" as Mamba-2 has them (x, B, C).
        g: raw gates or log decays [B, T, HV] or, of each row of the state, [B, T, HV, K].
        A_log: [HV]. A: -exp(A_log), in its place, as engines keep it for Mamba-2. dt_bias: [HV], or
            [HV K] or [HV, K] for gates of rows.
        lower_bound: of the log decay, below 0.
        gate_logit_normalizer: GLA's, by which the log of the sigmoid is divided.
        dt_limit: least and largest dt.
        beta: how much of the old value to replace [B, T, HV]; with write how much of it to erase,
            by channel of the key [B, T, HV, K].
        write: how much of the new value to write [B, T, HV, V].
        use_beta_sigmoid_in_kernel: beta and write are raw: their sigmoids are used.
        allow_neg_eigval: 2 sigmoid(beta).
        use_qk_l2norm_in_kernel: q and k are x / sqrt(sum x^2 + 1e-6).
        scale: factor on the output; K^-0.5 if None.
        dt_scales_v: v is multiplied by dt, as Mamba-2 discretises it; D's v is not.
        D: skip [HV].
        z: gate of the norm [B, T, HV, V], raw. z_activation: f, "silu", "swish" or "sigmoid".
        norm_weight: [V], which the heads share, or [HV, V]; None is 1.
        norm_eps: of the RMS norm, 0 or more; None is no norm.
        norm_group_size: channels that are normalised together, V if None: a multiple of V.
        norm_before_gate: y = norm(o) weight f(z), else norm(o f(z)) weight.
        state_v_first: the pool is [slots, HV, V, K].
        out: where y is written to [B, T - num_pending, HV, V], any floating dtype.
        impl: None chooses; "triton", "eager" or "reference" is used or refused.

    Returns:
        y [B, T - num_pending, HV, V] in q's dtype, or out. All is computed in float32, or in
        float64 for q in float64, and rounded once: in y, the states and the windows. On
        sm_90 pending and new tokens in 16 bits with gates
        of heads, K and V of 64 or 128, are one product with the state, off by 2^-16 of its terms.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: a gradient is wanted.

    Cost: 8 T HV K V flops; HV K V numbers of state read and written for each sequence. From a few
    sequences on, this traffic takes all of the time.
    """
    checks.expect_rank("q", q, 4, "[B, T, H, K]")
    checks.expect_rank("v", v, 4, "[B, T, HV, V]")
    for name, value, known in (
        ("conv_activation", conv_activation, ACTIVATIONS),
        ("z_activation", z_activation, GATES),
        ("channel_order", channel_order, ORDERS),
    ):
        if value not in known:
            raise ValueError(f"{name}: want one of {known}, got {value!r}")
    if norm_eps is not None:
        checks.expect_not_negative("norm_eps", norm_eps)
    if A is not None and A_log is not None:
        raise ValueError("A: wants no A_log, of which it is -exp(A_log)")
    inputs = StepInputs(
        q, k, v, state, state_indices, num_accepted, conv_state, conv_weight, conv_bias,
        g, A_log if A is None else A, dt_bias, beta, write, D, z, norm_weight,
    )  # fmt: skip
    dt_min, dt_max = (0.0, float("inf")) if dt_limit is None else dt_limit
    options = StepOptions(
        scale=float(max(q.shape[-1], 1) ** -0.5 if scale is None else scale),
        pending=num_pending,
        state_v_first=state_v_first,
        channel_order=channel_order,
        conv_silu=conv_activation is not None,
        a_is_rate=A is not None,
        lower_bound=lower_bound,
        gate_logit_normalizer=gate_logit_normalizer,
        dt_min=float(dt_min),
        dt_max=float(dt_max),
        use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        qk_l2norm=use_qk_l2norm_in_kernel,
        dt_scales_v=dt_scales_v,
        norm_eps=norm_eps,
        norm_group_size=v.shape[3] if norm_group_size is None else norm_group_size,
        norm_before_gate=norm_before_gate,
        z_silu=z_activation != "sigmoid",
    )
    return run(inputs, options, out, impl)


@checks.operator
def projection_step(
    x: Tensor,
    weights: Tensor | list | tuple,
    biases: list | tuple | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    norm_options: dict | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Linear layers with one input of few rows, as a decoding step has them, in one launch.

        x' = x / sqrt(mean(x^2) + norm_eps) norm_weight, or x
        y_i = x' weight_i^T + bias_i
        y = y_0, y_1, ... side by side, or silu(y_0) y_1
        out = y + residual

    Args:
        x: [M, K], any floating dtype.
        weights: [N_i, K], one or up to five, of one dtype.
        biases: [N_i], each a tensor or None; None is none at all.
        norm_weight: [K]; None is 1. norm_eps: of the RMS norm, 0 or more; None is no norm.
        norm_options: what else rms_norm takes to make the factor of norm_weight, by its names.
        activation: "swiglu": two weights of one shape, the gate's first; None is none.
        residual: [M, N], any floating dtype.
        impl: None chooses; "triton", "eager" or "reference" is used or refused.

    Returns:
        [M, N] in residual's dtype, or the weights': N the sum of all N_i, or N_0 for "swiglu".

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: a gradient is wanted; impl can't take the call.

    Cost: 2 M N K flops; every weight is read once, which is all the time there is. The kernel takes
        up to 64 rows, and a norm of one row: matrix products are as fast for more.
    """
    checks.expect_tensor("x", x)
    if activation not in (None, "swiglu"):
        raise ValueError(f"activation: want 'swiglu' or None, got {activation!r}")
    if norm_eps is not None:
        checks.expect_not_negative("norm_eps", norm_eps)
    norm = _row_norm(norm_eps, norm_options or {})
    layers: list[Any] = [weights] if isinstance(weights, Tensor) else list(weights)
    bias: list[Any] = [None] * len(layers) if biases is None else list(biases)
    if not all(isinstance(w, Tensor) for w in layers):
        raise TypeError(
            f"weights: want a tensor or several, got {type(weights).__name__} of others"
        )
    if not all(b is None or isinstance(b, Tensor) for b in bias):
        raise TypeError(f"biases: want tensors or None, got {type(biases).__name__} of others")
    glu = activation == "swiglu"
    options = norm, glu, consistent_scope.on
    t = inputs.ProjectionInputs(x, layers, bias, norm_weight, residual, *options)
    return op.run(t, impl)


def _row_norm(eps: float | None, options: dict) -> NormOptions | None:
    if eps is None and not options:
        return None
    if eps is not None and options.keys() <= {*NormOptions._fields[1:]}:
        norm = NormOptions(eps, **options)
        if norm.is_row_norm:
            return norm
    raise ValueError(
        f"norm_options: want options of rms_norm that make the factor, and norm_eps, got {options}"
    )


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
    pool = decode.Pool(state, state_indices, state_v_first)
    return decode.run(terms, pool, scale, use_qk_l2norm_in_kernel, impl)


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
