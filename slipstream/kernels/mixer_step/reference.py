"""A step of a mixer as a formula, token by token.

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

import torch
import torch.nn.functional as F
from torch import Tensor

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


def _token(inputs: StepInputs, options: StepOptions, n: int, t: int, cache_slot: int) -> Tensor:
    """y [HV, V] of one token of one sequence."""
    _, _, H, HV, _, _ = inputs.sizes
    wide = inputs.dtype
    q, k, v = (x[n, t].to(wide) for x in inputs[:3])
    if inputs.conv_state is not None:
        q, k, v = _convolved(inputs, options, q, k, v, inputs.conv_state[cache_slot])
    if options.qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, dim=0) for x in (q, k))  # [HV, K]
    g, dt = gate(inputs, options, n, t)
    value = v
    if options.dt_scales_v:
        assert dt is not None
        v = v * dt[:, None]
    memory = inputs.state[cache_slot].mT if options.state_v_first else inputs.state[cache_slot]
    S = memory.to(wide)  # [HV, K, V]
    if g is not None:
        S = S * g.exp()[..., None].view(HV, -1, 1)
    if inputs.beta is not None:
        beta = inputs.beta[n, t].to(wide)
        if options.use_beta_sigmoid:
            beta = beta.sigmoid() * (2 if options.allow_neg_eigval else 1)
        if inputs.write is None:
            v = beta[:, None] * (v - torch.einsum("hkv,hk->hv", S, k))
        else:
            write = inputs.write[n, t].to(wide)
            write = write.sigmoid() if options.use_beta_sigmoid else write
            v = write * v - torch.einsum("hkv,hk->hv", S, beta * k)
    S = S + k[:, :, None] * v[:, None, :]
    memory.copy_(S)
    o = options.scale * torch.einsum("hkv,hk->hv", S, q)
    if inputs.D is not None:
        o = o + inputs.D.to(wide)[:, None] * value
    return _gated_norm(inputs, options, o, None if inputs.z is None else inputs.z[n, t].to(wide))


def _convolved(
    inputs: StepInputs, options: StepOptions, q: Tensor, k: Tensor, v: Tensor, window: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v after the convolution; the window [C, W or W - 1] moves on."""
    assert inputs.conv_weight is not None
    weight = inputs.conv_weight.to(q.dtype)
    W = weight.shape[1]
    named = {"q": q, "k": k, "v": v}
    x = torch.cat([named[name].flatten() for name in options.channel_order])
    seen = torch.cat([window.to(q.dtype), x[:, None]], dim=1)
    window.copy_(seen[:, 1:])
    y = (seen[:, -W:] * weight).sum(-1)
    if inputs.conv_bias is not None:
        y = y + inputs.conv_bias.to(q.dtype)
    y = F.silu(y) if options.conv_silu else y
    starts = channel_offsets(inputs, options.channel_order)
    q, k, v = (y[at : at + z.numel()].view_as(z) for at, z in zip(starts, (q, k, v)))
    return q, k, v


def gate(
    inputs: StepInputs, options: StepOptions, n: int, t: int
) -> tuple[Tensor | None, Tensor | None]:
    """Log decay [HV] or [HV, K] of a token, and dt [HV] where that comes from one."""
    if inputs.g is None:
        return None, None
    x = inputs.g[n, t].to(inputs.dtype)
    if inputs.dt_bias is not None:
        x = x + inputs.dt_bias.to(x.dtype).view_as(x)
    rate = None
    if inputs.A_log is not None:
        a = inputs.A_log.to(x.dtype).view(-1, *([1] * (x.dim() - 1)))
        rate = -a if options.a_is_rate else a.exp()
    if options.lower_bound is not None:
        return options.lower_bound * torch.sigmoid(x if rate is None else rate * x), None
    if options.gate_logit_normalizer is not None:
        return F.logsigmoid(x) / options.gate_logit_normalizer, None
    if rate is None:
        return x, None
    dt = F.softplus(x, threshold=100.0).clamp(options.dt_min, options.dt_max)
    return -rate * dt, dt


def _gated_norm(inputs: StepInputs, options: StepOptions, o: Tensor, z: Tensor | None) -> Tensor:
    if z is not None:
        z = F.silu(z) if options.z_silu else torch.sigmoid(z)
    if options.norm_eps is None:
        return o if z is None else o * z
    if z is not None and not options.norm_before_gate:
        o = o * z
    groups = o.reshape(-1, options.norm_group_size)
    groups = groups * (groups.square().mean(-1, keepdim=True) + options.norm_eps).rsqrt()
    y = groups.view_as(o)
    if inputs.norm_weight is not None:
        y = y * inputs.norm_weight.to(o.dtype)
    return y * z if z is not None and options.norm_before_gate else y
