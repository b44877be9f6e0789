"""The linear family token by token: fused_recurrent on a CPU, and one decoding step.

Takes every term of inputs.py at once, also the ones chunks have no form for: value decay with a
transition, and beta for each column. MATH.md has the gradients.

Cost a token and head: 4 to 8 K V flops, and the state read and written once or twice.

Backward goes through the tokens again from the last to the first. The states it needs are made
again from one kept every SEGMENT tokens, so memory is that of T / SEGMENT + SEGMENT states, and the
cost about four times the forward pass.
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


# about sqrt(T) for 4096 tokens, where T / SEGMENT + SEGMENT is least
SEGMENT = 64


def recurrent_backward(
    terms: LinearInputs, do: Tensor | None, dfinal: Tensor | None, scale: float
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype."""
    order, tokens = Order(terms), gather(terms)
    initial = order.ends(terms.initial_state)
    saved = _saved_states(order, tokens, initial.clone())
    dends = order.ends(dfinal)
    dS = order.begin(dends)
    douts = torch.zeros_like(terms.v) if do is None else do
    douts = (douts.transpose(0, 1).to(order.dtype) * scale).flatten(1, 2)[
        :, :, None
    ]  # [T, G, 1, V]
    grads = Tokens(*(None if x is None else torch.zeros_like(x) for x in tokens))  # type: ignore
    for start in reversed(range(0, order.tokens, SEGMENT)):
        stop = min(start + SEGMENT, order.tokens)
        entries = [saved.pop()]
        for t in range(start, stop - 1):
            entries.append(
                order.enter(step(tokens.at(t), entries[-1], in_place=False)[1], initial, t + 1)
            )
        for t in reversed(range(start, stop)):
            dS = order.enter(dS, dends, t, reverse=True)
            dS = _step_backward(tokens.at(t), entries.pop(), douts[t], dS, grads.at(t))
            order.leave(dS, dends, t)
    out = _by_term(terms, grads)
    if terms.initial_state is not None:
        out["initial_state"] = order.finish(dS, dends).to(terms.initial_state.dtype)
    return out


def _saved_states(order: Order, tokens: Tokens, ends: Tensor) -> list[Tensor]:
    """The state that the first token of each segment meets."""
    saved, S = [], order.begin(ends)
    for t in range(order.tokens):
        S = order.enter(S, ends, t)
        if t % SEGMENT == 0:
            saved.append(S.clone())
        S = step(tokens.at(t), S, in_place=True)[1]
        order.leave(S, ends, t)
    return saved


def _dot(row: Tensor, S: Tensor) -> Tensor:
    return torch.bmm(row.mT, S)


def _step_backward(tok: Tokens, S: Tensor, do: Tensor, dS: Tensor, grads: Tokens) -> Tensor:
    """Gradient of the state before a token from that of the state after it; fills `grads`.

    Args:
        S: state before the token, [G, K, V]. do: gradient of o times scale, [G, 1, V].
        grads: the token's places, to be added to; those of g and gv take gradients of the logs.
    """
    decay = None if tok.g is None else tok.g
    if tok.gv is not None:
        decay = tok.gv if decay is None else decay * tok.gv
    decayed = S if decay is None else S * decay
    error = x = tok.v
    if tok.beta is not None:
        error = tok.v - (_dot(tok.k, decayed) if tok.p is None else _dot(tok.p, S))
        x = tok.beta * error
    through = None  # what reaches the state before the decay
    if tok.u is None:
        written = decayed + tok.k * x
        if tok.a is not None and tok.b is not None:
            written = written + tok.b * _dot(tok.a, S)
        grads.q.add_(written @ do.mT)
        dS = dS + tok.q * do
    else:
        assert grads.u is not None
        through = tok.q * do
        dc = do @ x.mT  # of c = q . (u k)
        grads.q.add_(S @ do.mT + dc * tok.u * tok.k)
        grads.k.add_(dc * tok.u * tok.q)
        grads.v.add_(_dot(tok.q, tok.u * tok.k) * do)
        grads.u.add_(dc * tok.q * tok.k)
    grads.k.add_(dS @ x.mT)
    dx = _dot(tok.k, dS)
    ddecayed = dS
    if tok.beta is not None:
        assert grads.beta is not None
        dbeta = dx * error
        grads.beta.add_(dbeta.sum(-1, keepdim=True) if tok.beta.shape[-1] == 1 else dbeta)
        dx = tok.beta * dx
        if tok.p is None:
            grads.k.sub_(decayed @ dx.mT)
            ddecayed = dS - tok.k * dx
        else:
            assert grads.p is not None
            grads.p.sub_(S @ dx.mT)
            erased = -tok.p * dx
            through = erased if through is None else through + erased
    grads.v.add_(dx)
    if tok.a is not None and tok.b is not None:
        assert grads.a is not None and grads.b is not None
        grads.b.add_(dS @ _dot(tok.a, S).mT)
        dread = _dot(tok.b, dS)
        grads.a.add_(S @ dread.mT)
        through = tok.a * dread if through is None else through + tok.a * dread
    log_decay = ddecayed * decayed
    if grads.g is not None:
        by_row = log_decay.sum(-1, keepdim=True)
        grads.g.add_(by_row.sum(-2, keepdim=True) if grads.g.shape[-2] == 1 else by_row)
    if grads.gv is not None:
        grads.gv.add_(log_decay.sum(-2, keepdim=True))
    before = ddecayed if decay is None else ddecayed * decay
    return before if through is None else before + through


def _by_term(terms: LinearInputs, grads: Tokens) -> dict[str, Tensor]:
    """Back to the shapes of the terms, summed over the value heads that share a head."""
    B, T, HV = terms.v.shape[:3]
    out = {}
    for name, x in grads._asdict().items():
        term = getattr(terms, name)
        if term is None:
            continue
        if name == "u":
            x = x.view(B, *term.shape).sum(0)
        else:  # [T, G, 1 or K, 1 or V] to [B, T, HV or H, ...]
            x = x.view(T, B, HV, -1).transpose(0, 1)
            x = x.unflatten(2, (term.shape[2], -1)).sum(3)
        out[name] = x.reshape(term.shape).to(term.dtype, copy=True)
    return out
