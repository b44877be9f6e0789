"""The oracle of the linear family: its recurrence token by token, as inputs.py writes it.

Plain differentiable torch in the dtype of the inputs (float32 at least), so that in float64 it is
the measure of every other path, values and gradients. Cost: T steps of O(B HV K V), all of whose
states autograd keeps.
"""

import torch
from torch import Tensor

from slipstream.common.varlen import by_sequence
from slipstream.kernels.linear.inputs import TOKEN_TERMS, LinearInputs


def linear_reference(terms: LinearInputs, scale: float) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V]."""

    def run(*given: Tensor | None) -> tuple[Tensor, Tensor]:
        *tokens, state = given
        named = dict(zip(TOKEN_TERMS, tokens))
        return _run(terms._replace(**named, initial_state=state, cu_seqlens=None), scale)

    tokens = [getattr(terms, name) for name in TOKEN_TERMS]
    o, state = by_sequence(run, tokens, terms.initial_state, terms.cu_seqlens)
    return o.to(terms.q.dtype), state


def _run(terms: LinearInputs, scale: float) -> tuple[Tensor, Tensor]:
    group = terms.v.shape[2] // terms.q.shape[2]
    q, k, p, a, b = (
        None if x is None else x.to(terms.dtype).repeat_interleave(group, dim=2)
        for x in (terms.q, terms.k, terms.p, terms.a, terms.b)
    )
    v, g, gv, beta, u, erase, write = (
        None if x is None else x.to(terms.dtype)
        for x in (terms.v, terms.g, terms.gv, terms.beta, terms.u, terms.erase, terms.write)
    )
    assert q is not None and k is not None and v is not None
    if terms.initial_state is None:
        S = v.new_zeros(terms.state_shape)
    else:
        S = terms.initial_state.to(terms.dtype)
    outputs = []
    for t in range(q.shape[1]):
        before, kt, vt = S, k[:, t, :, :, None], v[:, t, :, None, :]  # [B,HV,K,1] [B,HV,1,V]
        if g is not None:
            gt = g[:, t, :, None, None] if g.dim() == 3 else g[:, t, :, :, None]
            S = gt.exp() * S
        if gv is not None:
            S = S * gv[:, t, :, None, :].exp()
        if beta is not None:
            held = kt * S if p is None else p[:, t, :, :, None] * before
            bt = beta[:, t, :, None, None] if beta.dim() == 3 else beta[:, t, :, None, :]
            vt = bt * (vt - held.sum(-2, keepdim=True))
        if erase is not None and write is not None:
            held = erase[:, t, :, :, None] * kt * S
            vt = write[:, t, :, None, :] * vt - held.sum(-2, keepdim=True)
        if a is not None and b is not None:
            S = S + b[:, t, :, :, None] * (a[:, t, :, :, None] * before).sum(-2, keepdim=True)
        S = S + kt * vt
        qt = q[:, t, :, :, None]
        if u is None:
            outputs.append((qt * S).sum(-2))
        else:
            now = (qt * u[:, :, None] * kt).sum(-2) * vt[..., 0, :]
            outputs.append((qt * before).sum(-2) + now)
    o = scale * torch.stack(outputs, dim=1) if outputs else torch.empty_like(v)
    return o, S
