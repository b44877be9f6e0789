"""Gradients of the token-by-token path (MATH.md): the tokens again from the last to the first.

The states it needs are made again from one kept every SEGMENT tokens, so memory is that of
T / SEGMENT + SEGMENT states, and the cost about four times the forward pass.
"""

import torch
from torch import Tensor

from slipstream.kernels.linear.eager.recurrent import Order, Tokens, gather, step
from slipstream.kernels.linear.inputs import LinearInputs

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
