"""The linear family over several ranks, each with a part of the tokens.

What a rank's tokens do to a state is S -> M S + E. Each rank sends M and E of the sequence that
goes on at the next rank, combines those of the ranks before it into the state that its own tokens
start from, and then runs as if it were alone. Backward is the same from the last rank to the first:
gradients of states go back through M^T. Who has which tokens: runtime/context_parallel.py.

M is one number, one number a row or column, or a matrix [K, K] where tokens erase; E comes from a
run over the tail's tokens, and so does M where it is a matrix, from the identity. The states
exchanged are float32 (float64 for float64).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import DIFFERENTIABLE, LinearInputs
from slipstream.kernels.linear.op import call_forward, gradients
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.context_parallel import Share

NUM_TERMS = len(LinearInputs._fields)
# From the terms of a call to the implementations to try for it.
Choose = Callable[[LinearInputs], str]


class Call(NamedTuple):
    """How the operator runs on each rank: see op.py."""

    scale: float
    chunk: int
    impl: str
    choose: Choose


def linear_across_ranks(
    terms: LinearInputs, initial_state: Tensor | None, share: Share, call: Call
) -> tuple[Tensor, Tensor]:
    """o of this rank's tokens, and the final states of all sequences, the same on every rank.

    Args:
        terms: this rank's tokens, with the offsets of its pieces and without a state.
        initial_state: of all sequences [N, HV, K, V], the same on every rank. Its gradient on a
            rank is that of the sequences that begin there.
    """
    given = *terms._replace(initial_state=initial_state), share, call
    if needs_autograd(*terms, initial_state):
        return _AcrossRanks.apply(*given)
    o, final, _, _ = _forward(terms, initial_state, share, call)
    return o, final


class _AcrossRanks(Function):
    operator = "slipstream::linear"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        given, (share, call) = LinearInputs(*args[:NUM_TERMS]), args[NUM_TERMS:]
        terms = given._replace(initial_state=None)
        o, final, states, transitions = _forward(terms, given.initial_state, share, call)
        ctx.share, ctx.call = share, call
        ctx.has_initial = given.initial_state is not None
        ctx.num_transitions = len(transitions)
        save(ctx, *terms._replace(initial_state=states), *transitions)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dout: Tensor, dfinal: Tensor) -> Any:
        terms, transitions = LinearInputs(*saved[:NUM_TERMS]), list(saved[NUM_TERMS:])
        share, call = ctx.share, ctx.call
        width = _rows(terms)
        dfinal = share.add_up(dfinal.to(terms.dtype).clone(memory_format=torch.contiguous_format))
        local = share.local_states(dfinal, None, width)
        assert local is not None
        if share.crossings.any:
            _gradients_from_later(terms, dout, local, share, call, transitions)
        gate_gradient = ctx.needs_input_grad[LinearInputs._fields.index("g")]
        # without a state its gradient would not come back
        start = terms.initial_state
        if start is None and ctx.has_initial:
            start = torch.zeros_like(local)
        whole = terms._replace(initial_state=start)
        scale, chunk, impl, _ = call
        grads = gradients(whole, dout, local, scale, chunk, impl, gate_gradient)
        if ctx.has_initial:
            grads["initial_state"] = _whole_gradient(grads["initial_state"], dfinal, share, width)
        else:
            grads.pop("initial_state", None)
        return (*(grads.get(name) for name in DIFFERENTIABLE), None, None, None)


def _rows(terms: LinearInputs) -> int:
    """States of one sequence: a row of the batch each, or one where sequences are packed."""
    return terms.q.shape[0] if terms.cu_seqlens is None else 1


def _forward(
    terms: LinearInputs, initial_state: Tensor | None, share: Share, call: Call
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """o; final states of all sequences; states before this rank's pieces; M of every rank."""
    width = _rows(terms)
    if initial_state is not None:
        initial_state = initial_state.to(terms.dtype)
    states = share.local_states(initial_state, None, width)
    transitions: list[Tensor] = []
    if share.crossings.any:
        added, transitions = _exchange(terms, states, share, call)
        if share.earlier:
            before = _combine(share.earlier, added, transitions, terms.transition != "none")
            states = share.local_states(initial_state, before, width)
    o, after = call_forward(*terms._replace(initial_state=states), *call[:3], False)
    return o, share.whole_states(after, initial_state, width), states, transitions


def _exchange(
    terms: LinearInputs, states: Tensor | None, share: Share, call: Call
) -> tuple[list[Tensor], list[Tensor]]:
    """E of every rank's tail [width, HV, K, V], and M if any sequence goes through a whole rank."""
    width, (HV, K, V) = _rows(terms), terms.state_shape[1:]
    added = terms.v.new_zeros(width, HV, K, V, dtype=terms.dtype)
    matrix = terms.transition != "none"
    M = _identity(terms, width) if matrix else None
    if share.later:
        tail = _tokens(terms, share.tail_begin, None)
        begins = share.begins_here(len(share.pieces) - 1)
        start = states[-width:] if begins and states is not None else None
        E = call_forward(*tail._replace(initial_state=start), *call[:3], False)[1]
        added.copy_(E)
        if share.passes_through:
            M = _transition_matrix(tail, width, call) if matrix else _transition(tail)
    if not share.crossings.through or not (matrix or terms.decay != "none" or terms.gv is not None):
        return share.gather(added), []
    if M is None:
        rows, columns = K if terms.decay == "channel" else 1, 1 if terms.gv is None else V
        M = added.new_ones(width, HV, rows, columns)
    return share.gather(added), share.gather(M)


def _tokens(terms: LinearInputs, begin: int, end: int | None) -> LinearInputs:
    """One piece alone, without its state."""
    cut = {
        name: x[:, begin:end]
        for name, x in terms._asdict().items()
        if x is not None and name not in ("u", "initial_state", "cu_seqlens")
    }
    return terms._replace(**cut, initial_state=None, cu_seqlens=None)


def _identity(terms: LinearInputs, width: int) -> Tensor:
    (HV, K), options = terms.state_shape[1:3], {"dtype": terms.dtype, "device": terms.q.device}
    return torch.eye(K, **options).expand(width, HV, K, K).contiguous()


def _transition_matrix(tail: LinearInputs, width: int, call: Call) -> Tensor:
    """M [width, HV, K, K]: where the identity ends up if nothing is written."""
    K = tail.q.shape[-1]
    v = tail.v.new_zeros(*tail.v.shape[:3], K)
    alone = tail._replace(v=v, initial_state=_identity(tail, width))
    return call_forward(*alone, call.scale, call.chunk, call.choose(alone), False)[1]


def _transition(tail: LinearInputs) -> Tensor:
    """M as factors of the state's elements, [width, HV, K or 1, V or 1]."""
    M = tail.v.new_ones(1, 1, 1, 1, dtype=tail.dtype)
    if tail.g is not None:
        total = tail.g.to(tail.dtype).sum(1).exp()
        M = M * (total[..., None, None] if total.dim() == 2 else total[..., None])
    if tail.gv is not None:
        M = M * tail.gv.to(tail.dtype).sum(1).exp()[..., None, :]
    return M


def _combine(
    ranks: list[int], added: list[Tensor], transitions: list[Tensor], matrix: bool
) -> Tensor:
    """The last rank's `added` plus its transition of what the ranks before it come to."""
    total = added[ranks[0]]
    for r in ranks[1:]:
        if transitions:
            total = transitions[r] @ total if matrix else transitions[r] * total
        total = total + added[r]
    return total


def _gradients_from_later(
    terms: LinearInputs,
    dout: Tensor,
    dfinal: Tensor,
    share: Share,
    call: Call,
    transitions: list[Tensor],
) -> None:
    """Writes into dfinal's last row what later ranks' outputs say about the tail's last state."""
    width, (HV, K, V) = _rows(terms), terms.state_shape[1:]
    ds = terms.v.new_zeros(width, HV, K, V, dtype=terms.dtype)
    if share.earlier:
        assert terms.initial_state is not None
        head = _tokens(terms, 0, share.head_end)._replace(initial_state=terms.initial_state[:width])
        end = dfinal[:width] if share.ends_here(0) else None
        do = dout[:, : share.head_end]
        ds.copy_(gradients(head, do, end, *call[:3], False)["initial_state"])
    found = share.gather(ds)
    if not share.later:
        return
    matrix = terms.transition != "none"
    back = [M.mT for M in transitions] if matrix else transitions
    dfinal[-width:] = _combine(share.later[::-1], found, back, matrix)


def _whole_gradient(local: Tensor, dfinal: Tensor, share: Share, width: int) -> Tensor:
    """Of the initial states of all sequences: of those that begin here, and on the first rank of
    those without tokens, whose final states they are."""
    whole = torch.zeros_like(dfinal)
    for i, n in enumerate(share.pieces):
        if share.begins_here(i):
            whole[n * width : (n + 1) * width] = local[i * width : (i + 1) * width]
    if share.rank == 0:
        for n in share.without_tokens:
            whole[n * width : (n + 1) * width] = dfinal[n * width : (n + 1) * width]
    return whole
