"""The linear family token by token: fused_recurrent on a CPU, and one decoding step.

Takes every term of inputs.py at once, also the ones chunks have no form for: value decay with a
transition, and beta for each column. recurrent_backward.py has its gradients.

Cost a token and head: 4 to 8 K V flops, and the state read and written once or twice.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks, varlen
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime.autograd import as_base


class Tokens(NamedTuple):
    """The terms in the dtype of the arithmetic, time first, shaped to broadcast against a state.

    With G = B HV rows: q, k, p, a, b [T, G, K, 1]; v, gv [T, G, 1, V]; g [T, G, 1 or K, 1];
    beta [T, G, 1, 1 or V]; u [G, K, 1]. Gates are exponentials already.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    gv: Tensor | None
    beta: Tensor | None
    p: Tensor | None
    a: Tensor | None
    b: Tensor | None
    u: Tensor | None

    def at(self, t: int) -> "Tokens":
        return Tokens(*[None if x is None else x[t] for x in self[:-1]], u=self.u)  # type: ignore


def gather(terms: LinearInputs) -> Tokens:
    B, T, HV = terms.v.shape[:3]
    group, dtype = checks.plain_int(HV // terms.q.shape[2]), terms.dtype

    def rows(x: Tensor | None, *shape: int) -> Tensor | None:
        if x is None:
            return None
        if x.shape[2] != HV:
            x = x.repeat_interleave(group, dim=2)
        return checks.cast(x, dtype).transpose(0, 1).reshape(T, B * HV, *shape)

    g, gv, beta = terms.g, terms.gv, terms.beta
    wide = beta is not None and beta.dim() == 4
    q, k, v = rows(terms.q, -1, 1), rows(terms.k, -1, 1), rows(terms.v, 1, -1)
    assert q is not None and k is not None and v is not None
    u = None
    if terms.u is not None:
        u = terms.u.to(dtype).expand(B, HV, -1).reshape(B * HV, -1, 1)
    return Tokens(
        q=q,
        k=k,
        v=v,
        g=rows(None if g is None else g.exp(), 1 if g is not None and g.dim() == 3 else -1, 1),
        gv=rows(None if gv is None else gv.exp(), 1, -1),
        beta=rows(beta, 1, -1 if wide else 1),
        p=rows(terms.p, -1, 1),
        a=rows(terms.a, -1, 1),
        b=rows(terms.b, -1, 1),
        u=u,
    )


def step(tok: Tokens, S: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """One token: the state before it [G, K, V] to (o / scale [G, 1, V], the state after it)."""
    o = None if tok.u is None else torch.bmm(tok.q.mT, S)
    read = None if tok.a is None else torch.bmm(tok.a.mT, S)
    held = None if tok.p is None else torch.bmm(tok.p.mT, S)
    out = S if in_place else torch.empty_like(S)
    if tok.g is not None:
        torch.mul(S, tok.g, out=out)
    elif not in_place:
        out.copy_(S)
    if tok.gv is not None:
        out.mul_(tok.gv)
    v = tok.v
    if tok.beta is not None:
        v = torch.baddbmm(v, tok.k.mT, out, alpha=-1) if held is None else v - held
        v = v.mul_(tok.beta)
    if tok.b is not None and read is not None:
        out.baddbmm_(tok.b, read)
    out.baddbmm_(tok.k, v)
    if o is None or tok.u is None:
        return torch.bmm(tok.q.mT, out), out
    return o.baddbmm_(torch.bmm(tok.q.mT, tok.u * tok.k), v), out


class Order:
    """Which state a token meets: sequences of a batch side by side, packed ones in turn."""

    def __init__(self, terms: LinearInputs) -> None:
        self.tokens, self.shape, self.dtype = terms.q.shape[1], terms.state_shape, terms.dtype
        self.like: dict[str, Any] = {"dtype": self.dtype, "device": terms.q.device}
        self.map: varlen.ChunkMap | None = None
        if terms.cu_seqlens is not None:
            varlen.check_cu_seqlens_values(terms.cu_seqlens, self.tokens)
            self.map = varlen.chunk_map(terms.cu_seqlens, self.tokens, 1)

    def ends(self, state: Tensor | None) -> Tensor:
        """The state of each sequence where the scan begins, [N, HV, K, V], to be overwritten; of
        packed ones one row more, for tokens that no sequence has."""
        if state is None or self.map is not None:
            more = int(self.map is not None)
            ends = torch.zeros(self.shape[0] + more, *self.shape[1:], **self.like)
            if state is not None:
                ends[: self.shape[0]] = state
            return ends
        return state.to(self.dtype, copy=True, memory_format=torch.contiguous_format)

    def begin(self, ends: Tensor) -> Tensor:
        """The state [G, K, V] that the scan carries."""
        return ends.flatten(0, 1) if self.map is None else torch.zeros_like(ends[0])

    def enter(self, S: Tensor, ends: Tensor, t: int, *, reverse: bool = False) -> Tensor:
        if self.map is None:
            return S
        begins = (self.map.last if reverse else self.map.first)[t]
        return torch.where(begins, ends.index_select(0, self.map.sequence[t : t + 1])[0], S)

    def leave(self, S: Tensor, ends: Tensor, t: int) -> None:
        if self.map is not None:
            ends.index_copy_(0, self.map.sequence[t : t + 1], S[None])

    def finish(self, S: Tensor, ends: Tensor) -> Tensor:
        return S.view(self.shape) if self.map is None else ends[: self.shape[0]]


def recurrent_forward(terms: LinearInputs, scale: float) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V]."""
    order, tokens = Order(terms), gather(terms)
    B, T, HV, V = terms.v.shape
    borrowed = order.map is None and terms.initial_state is not None
    if borrowed:  # the first token writes a state of its own instead of into a copy
        assert terms.initial_state is not None
        ends = checks.cast(terms.initial_state, terms.dtype)
        S = ends.reshape(B * HV, *ends.shape[2:])
    else:
        ends = order.ends(terms.initial_state)
        S = order.begin(ends)
    o = torch.empty(T, B * HV, V, dtype=terms.dtype, device=terms.q.device)
    for t in range(order.tokens):
        S = order.enter(S, ends, t)
        out, S = step(tokens.at(t), S, in_place=t > 0 or not borrowed)
        torch.mul(out[:, 0], scale, out=o[t])
        order.leave(S, ends, t)
    o = checks.cast(o.view(T, B, HV, V).transpose(0, 1), terms.q.dtype).contiguous()
    return as_base(o), order.finish(S, ends)
