"""A step of a mixer in plain torch: two passes over the states, whatever the mixer, and an oracle.

With e = exp(g), what is read of a state S is read before it decays:

    r, s = S^T (e k), S^T (e q)        one matrix product of two rows
    x = beta (v - r), or v;  with gates of channels r = S^T (e beta k), x = write v - r
    o = s + (q . k) x
    S <- e S + k x^T                   in place where every sequence has a slot of its own

The oracle is the recurrence as a formula, token by token:

x_t = silu(bias + sum_j weight_j x_{t-W+1+j})                  of the channels of q, k and v
q, k = q / |q|, k / |k|
dt = clamp(softplus(g + dt_bias)),  g = -exp(A_log) dt         or one of gate()
v = dt v
S <- exp(g) S,  then one of
    S <- S + k v^T                                             without beta
    S <- S + k (beta (v - S^T k))^T                            with beta [HV]
    S <- S + k (write v - S^T (beta k))^T                      with beta [HV, K], write [HV, V]
o = scale S^T q + D v                                          v before it is multiplied by dt
y = o / sqrt(mean(o^2) + eps) weight f(z)                      mean over groups of channels; f(z)
                                                               may come before the norm
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks, pool_rows
from slipstream.kernels.mixer_step.inputs import StepInputs, StepOptions, channel_offsets


def step_reference(out: Tensor, inputs: StepInputs, options: StepOptions) -> None:
    """Writes y into out [B, T - pending, HV, V] and the new states and windows into the pools."""
    B, T, *_ = inputs.sizes
    pools = [x for x in (inputs.state, inputs.conv_state) if x is not None]
    indices = range(B) if inputs.state_indices is None else inputs.state_indices.tolist()
    out.zero_()
    for n, cache_slot in enumerate(indices):
        if 0 <= cache_slot < inputs.state.shape[0]:
            pending = options.pending
            if inputs.num_accepted is not None:
                for t in range(min(max(int(inputs.num_accepted[n]), 0), pending)):
                    _token(inputs, options, n, t, cache_slot)
            before = [x[cache_slot].clone() for x in pools]
            for t in range(pending, T):
                out[n, t - pending] = _token(inputs, options, n, t, cache_slot).to(out.dtype)
            if inputs.num_accepted is not None:
                for x, y in zip(pools, before):
                    x[cache_slot].copy_(y)


_OF_TOKENS = ("q", "k", "v", "g", "beta", "write", "z")


def _token(inputs: StepInputs, options: StepOptions, n: int, t: int, cache_slot: int) -> Tensor:
    """y [HV, V] of one token of one sequence."""
    places = dict.fromkeys(_OF_TOKENS, (slice(n, n + 1), slice(t, t + 1)))
    places |= dict.fromkeys(("state", "conv_state"), (slice(cache_slot, cache_slot + 1),))
    alone = {name: x[places[name]] for name in places if (x := getattr(inputs, name)) is not None}
    one = inputs._replace(**alone, state_indices=None, num_accepted=None)
    return _outputs(one, options, None, pool_rows.PoolRows(None, 1), _formula)[0, 0]


class _Tokens(NamedTuple):
    """q, k: [B, T, HV, K]. v: [B, T, HV, V]. e: exp(g) [B, T, HV, 1 or K], or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    e: Tensor | None


def step_eager(out: Tensor, inputs: StepInputs, options: StepOptions) -> None:
    """Writes y into out [B, T - pending, HV, V] and the new states and windows into the pools."""
    accepted = None
    if inputs.num_accepted is not None:
        accepted = inputs.num_accepted.long().clamp(0, options.pending)
        inputs = _without_rejected(inputs, options, accepted)
    rows = pool_rows.PoolRows(inputs.state_indices, inputs.state.shape[0])
    y = _outputs(inputs, options, accepted, rows, _recurrence)
    if accepted is not None:
        y = _taken(y, accepted[:, None] + torch.arange(out.shape[1], device=y.device))
    out.copy_(rows.or_zero(y))


def _outputs(
    inputs: StepInputs,
    options: StepOptions,
    accepted: Tensor | None,
    rows: pool_rows.PoolRows,
    recurrence: Callable[..., Tensor],
) -> Tensor:
    """y [B, T, HV, V]; the pools move on. recurrence: as _recurrence."""
    q, k, v = (x.to(inputs.dtype) for x in inputs[:3])
    if inputs.conv_state is not None:
        q, k, v = _convolved(inputs, options, q, k, v, accepted, rows)
    q, k, value = _heads(options, q, k, v)
    g, dt = _log_decay(inputs, options)
    v = value if dt is None or not options.dt_scales_v else value * dt[..., None]
    tokens = _Tokens(q, k, v, None if g is None else g.exp())
    o = recurrence(inputs, options, tokens, accepted, rows)
    if inputs.D is not None:
        o = o + inputs.D.to(o.dtype)[:, None] * value
    return _gated_norm(inputs, options, o)


def _taken(x: Tensor, tokens: Tensor) -> Tensor:
    """Tokens [B, N] of x [B, T, ...]."""
    index = tokens.view(*tokens.shape, *([1] * (x.dim() - 2)))
    return x.gather(1, index.expand(*tokens.shape, *x.shape[2:]))


def _without_rejected(inputs: StepInputs, options: StepOptions, accepted: Tensor) -> StepInputs:
    """Tokens in order: those accepted, then the new ones; the rest is padding."""
    T, pending = inputs.q.shape[1], options.pending
    t = torch.arange(T, device=accepted.device)
    new = t >= accepted[:, None]  # [B, T]
    rows = torch.where(new, t + pending - accepted[:, None], t).clamp(max=T - 1)
    by_name = {name: getattr(inputs, name) for name in _OF_TOKENS}
    return inputs._replace(**{n: _taken(x, rows) for n, x in by_name.items() if x is not None})


def _convolved(
    inputs: StepInputs,
    options: StepOptions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    accepted: Tensor | None,
    rows: pool_rows.PoolRows,
) -> tuple[Tensor, Tensor, Tensor]:
    assert inputs.conv_state is not None and inputs.conv_weight is not None
    _, T, H, HV, K, V = inputs.sizes
    named = {"q": q, "k": k, "v": v}
    x = torch.cat([named[name].flatten(2) for name in options.channel_order], dim=2)
    window = rows.read(inputs.conv_state).to(inputs.dtype)
    length = window.shape[2]
    seen = torch.cat([window, x.mT], dim=2)  # [B, C, length + T]
    after = seen[:, :, T:]
    if accepted is not None:
        after = _taken(seen.mT, accepted[:, None] + torch.arange(length, device=seen.device)).mT
    rows.write(inputs.conv_state, after)
    weight = inputs.conv_weight.to(inputs.dtype)
    W = weight.shape[1]
    if T == 1:
        y = (seen[:, :, length + 1 - W :] * weight).sum(-1)[:, None]  # [B, 1, C]
    else:
        first = length + 1 - W
        y = sum(seen[:, :, first + j : first + j + T] * weight[:, j : j + 1] for j in range(W))
        assert isinstance(y, Tensor)
        y = y.mT
    if inputs.conv_bias is not None:
        y = y + inputs.conv_bias.to(y.dtype)
    if options.conv_silu:
        y = F.silu(y)
    starts = channel_offsets(inputs, options.channel_order)
    sizes = ((H, K), (H, K), (HV, V))
    q, k, v = (y[..., at : at + h * d].unflatten(-1, (h, d)) for at, (h, d) in zip(starts, sizes))
    return q, k, v


def _heads(options: StepOptions, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of norm 1 if wanted, one for each head of v."""
    if options.qk_l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    if (group := checks.plain_int(v.shape[2] // q.shape[2])) > 1:
        q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    return q, k, v


def _log_decay(inputs: StepInputs, options: StepOptions) -> tuple[Tensor | None, Tensor | None]:
    """g [B, T, HV, 1 or K], and dt [B, T, HV] where it comes from one."""
    if inputs.g is None:
        return None, None
    x = inputs.g.to(inputs.dtype)
    x = x if x.dim() == 4 else x[..., None]  # [B, T, HV, 1 or K]
    if inputs.dt_bias is not None:
        x = x + inputs.dt_bias.to(x.dtype).view(x.shape[2:])
    rate = None
    if inputs.A_log is not None:
        a = inputs.A_log.to(x.dtype)[:, None]
        rate = -a if options.a_is_rate else a.exp()
    if options.lower_bound is not None:
        return options.lower_bound * torch.sigmoid(x if rate is None else rate * x), None
    if options.gate_logit_normalizer is not None:
        return F.logsigmoid(x) / options.gate_logit_normalizer, None
    if rate is None:
        return x, None
    dt = F.softplus(x)
    if (options.dt_min, options.dt_max) != (0.0, float("inf")):
        dt = dt.clamp(options.dt_min, options.dt_max)
    return -rate * dt, dt[..., 0]


def _recurrence(
    inputs: StepInputs,
    options: StepOptions,
    tokens: _Tokens,
    accepted: Tensor | None,
    rows: pool_rows.PoolRows,
) -> Tensor:
    """o [B, T, HV, V]."""
    T = inputs.q.shape[1]
    pool = inputs.pool(options.state_v_first)
    # the pool itself, where that is in this dtype
    state = rows.read(pool).to(inputs.dtype)
    after = state
    if accepted is not None:
        after, state = state.clone(), state.clone()
    beta, write = _strengths(inputs, options)
    outputs = []
    for t in range(T):
        q, k, x = tokens.q[:, t], tokens.k[:, t], tokens.v[:, t]
        e = None if tokens.e is None else tokens.e[:, t]
        erased = k if beta is None or write is None else beta[:, t] * k
        # [B, HV, 1 or 2, K]
        both = torch.stack((erased, q), 2) if beta is not None else q[:, :, None]
        if e is not None:
            both = both * e[:, :, None]
        read = both @ state  # [B, HV, 1 or 2, V]
        if write is not None:
            x = write[:, t] * x - read[:, :, 0]
        elif beta is not None:
            x = beta[:, t, :, None] * (x - read[:, :, 0])
        o = read[:, :, -1] + (q * k).sum(-1, keepdim=True) * x
        outputs.append(o)
        if e is not None:
            state.mul_(e[..., None])
        state.addcmul_(k[..., None], x[:, :, None])
        if accepted is not None:
            after = torch.where((accepted == t + 1)[:, None, None, None], state, after)
    if after is not pool:
        rows.write(pool, after)
    o = outputs[0][:, None] if T == 1 else torch.stack(outputs, 1)
    return o if options.scale == 1 else o * options.scale


def _strengths(inputs: StepInputs, options: StepOptions) -> tuple[Tensor | None, Tensor | None]:
    """beta and write, as the recurrence has them."""
    beta, write = (None if x is None else x.to(inputs.dtype) for x in (inputs.beta, inputs.write))
    if options.use_beta_sigmoid:
        beta, write = (None if x is None else x.sigmoid() for x in (beta, write))
        beta = beta * 2 if beta is not None and options.allow_neg_eigval else beta
    return beta, write


def _formula(
    inputs: StepInputs, options: StepOptions, tokens: _Tokens, *_: pool_rows.PoolRows | None
) -> Tensor:
    """o [1, 1, HV, V] of one token, and its state."""
    q, k, v = (x[0, 0] for x in tokens[:3])
    memory = inputs.pool(options.state_v_first)[0]
    S = memory.to(inputs.dtype)  # [HV, K, V]
    S = S if tokens.e is None else S * tokens.e[0, 0, :, :, None]
    beta, write = (None if x is None else x[0, 0] for x in _strengths(inputs, options))
    if beta is not None and write is None:
        v = beta[:, None] * (v - torch.einsum("hkv,hk->hv", S, k))
    elif beta is not None and write is not None:
        v = write * v - torch.einsum("hkv,hk->hv", S, beta * k)
    S = S + k[:, :, None] * v[:, None, :]
    memory.copy_(S)
    return (options.scale * torch.einsum("hkv,hk->hv", S, q))[None, None]


def _gated_norm(inputs: StepInputs, options: StepOptions, o: Tensor) -> Tensor:
    """y [B, T, HV, V]."""
    z = None
    if inputs.z is not None:
        z = inputs.z.to(o.dtype)
        z = F.silu(z) if options.z_silu else torch.sigmoid(z)
    if options.norm_eps is None:
        return o if z is None else o * z
    if z is not None and not options.norm_before_gate:
        o = o * z
    size = options.norm_group_size
    groups = o if size == o.shape[-1] else o.flatten(2).unflatten(2, (-1, size))
    groups = groups * (groups.square().mean(-1, keepdim=True) + options.norm_eps).rsqrt()
    y = groups.view_as(o)
    if inputs.norm_weight is not None:
        y = y * inputs.norm_weight.to(o.dtype)
    return y * z if z is not None and options.norm_before_gate else y
