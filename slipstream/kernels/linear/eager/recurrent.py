"""The linear family token by token: fused_recurrent on a CPU, and one decoding step.

Takes every term of terms.py at once, also the ones chunks have no form for: value decay with a
transition, and beta for each column. recurrent_backward.py has its gradients.

Cost a token and head: 4 to 8 K V flops, and the state read and written once or twice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.varlen import ChunkMap, check_cu_seqlens_values, chunk_map
from slipstream.kernels.linear.terms import Terms


class Tokens(NamedTuple):
    """The terms in the dtype of the arithmetic, time first, shaped to broadcast against a state.

    q, k, p, a, b [T, B, HV, K, 1]; v, gv [T, B, HV, 1, V]; g [T, B, HV, 1 or K, 1];
    beta [T, B, HV, 1, 1 or V]; u [HV, K, 1]. Gates are exponentials already.
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
        return Tokens(*(None if x is None else x[t] for x in self[:-1]), u=self.u)  # type: ignore


def gather(terms: Terms) -> Tokens:
    group = terms.v.shape[2] // terms.q.shape[2]

    def keyed(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.transpose(0, 1).to(terms.dtype)
        return (x if group == 1 else x.repeat_interleave(group, dim=2))[..., None]

    def valued(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.transpose(0, 1).to(terms.dtype)
        return x[..., None, None] if x.dim() == 3 else x[:, :, :, None]

    q, k, v = keyed(terms.q), keyed(terms.k), valued(terms.v)
    assert q is not None and k is not None and v is not None
    g = None
    if terms.g is not None:
        g = terms.g.transpose(0, 1).to(terms.dtype).exp()
        g = g[..., None, None] if g.dim() == 3 else g[..., None]
    return Tokens(
        q=q,
        k=k,
        v=v,
        g=g,
        gv=None if terms.gv is None else valued(terms.gv.exp()),
        beta=valued(terms.beta),
        p=keyed(terms.p),
        a=keyed(terms.a),
        b=keyed(terms.b),
        u=None if terms.u is None else terms.u.to(terms.dtype)[..., None],
    )


def dot(row: Tensor, S: Tensor) -> Tensor:
    """row^T S: [.., K, 1] and [.., K, V] to [.., 1, V]."""
    return torch.matmul(row.mT, S)


def step(tok: Tokens, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token: the state before it to (o / scale [B, HV, 1, V], the state after it)."""
    after = S
    if tok.g is not None:
        after = S * tok.g
    if tok.gv is not None:
        after = after * tok.gv
    v = tok.v
    if tok.beta is not None:
        v = tok.beta * (v - dot(tok.k if tok.p is None else tok.p, after))
    if tok.a is not None and tok.b is not None:
        after = after + tok.b * dot(tok.a, S)
    after = torch.addcmul(after, tok.k, v)
    if tok.u is None:
        return dot(tok.q, after), after
    return dot(tok.q, S) + dot(tok.q, tok.u * tok.k) * v, after


class Order:
    """Which state a token meets: sequences of a batch side by side, packed ones in turn."""

    def __init__(self, terms: Terms) -> None:
        self.tokens, self.shape, self.dtype = terms.q.shape[1], terms.state_shape, terms.dtype
        self.device = terms.q.device
        self.map: ChunkMap | None = None
        if terms.cu_seqlens is not None:
            check_cu_seqlens_values(terms.cu_seqlens, self.tokens)
            self.map = chunk_map(terms.cu_seqlens, self.tokens, 1)

    def ends(self, state: Tensor | None) -> Tensor:
        """The state of each sequence where the walk begins, [N, HV, K, V], to be overwritten."""
        if state is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return state.to(self.dtype, copy=True)

    def begin(self, ends: Tensor) -> Tensor:
        return ends if self.map is None else ends.new_zeros(1, *ends.shape[1:])

    def enter(self, S: Tensor, ends: Tensor, t: int, *, reverse: bool = False) -> Tensor:
        if self.map is None:
            return S
        begins = (self.map.last if reverse else self.map.first)[t]
        return torch.where(begins, ends.index_select(0, self.map.sequence[t : t + 1]), S)

    def leave(self, S: Tensor, ends: Tensor, t: int) -> None:
        if self.map is not None:
            ends.index_copy_(0, self.map.sequence[t : t + 1], S)

    def finish(self, S: Tensor, ends: Tensor) -> Tensor:
        return S if self.map is None else ends


def recurrent_forward(terms: Terms, scale: float) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V]."""
    order, tokens = Order(terms), gather(terms)
    ends = order.ends(terms.initial_state)
    S = order.begin(ends)
    o = torch.empty(terms.v.shape, dtype=terms.q.dtype, device=terms.q.device)
    for t in range(order.tokens):
        S = order.enter(S, ends, t)
        out, S = step(tokens.at(t), S)
        o[:, t] = out[:, :, 0].mul_(scale)
        order.leave(S, ends, t)
    return o, order.finish(S, ends)
