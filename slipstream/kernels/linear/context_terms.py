"""What both ways of exchanging states between ranks share: how the operator is called there, and
the terms of a part of a sequence."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear import backend, inputs, op
from slipstream.runtime.context_parallel import Share

# From the terms of a call to the implementations to try for it.
Choose = Callable[[inputs.LinearInputs], str]


class Call(NamedTuple):
    """How the operator runs on each rank: see op.py."""

    how: inputs.ForwardCall
    choose: Choose
    wants_final: bool


def states_per_sequence(terms: inputs.LinearInputs) -> int:
    """States of one sequence: a row of the batch each, or one where sequences are packed."""
    return terms.q.shape[0] if terms.cu_seqlens is None else 1


def terms_of(terms: inputs.LinearInputs, begin: int, end: int | None) -> inputs.LinearInputs:
    """Tokens `begin` to `end` alone, without a state before them."""
    terms = terms.of_tokens(lambda x: x[:, begin:end])
    return terms._replace(initial_state=None, cu_seqlens=None)


def tail_state(
    terms: inputs.LinearInputs,
    share: Share,
    call: Call,
    start: Tensor | None,
    exchange: backend.Exchange | None = None,
) -> Tensor:
    """The state at this rank's end of the sequence that continues, begun with `start`
    [width, HV, K, V]. exchange: of this rank alone, with the segments to compute by."""
    tail = terms_of(terms, share.tail_begin, None)._replace(initial_state=start)
    if exchange is not None:
        return op.forward_impl(*tail, *call.how, extras=op.Extras(exchange=exchange))[1]
    return op.call_forward(*tail, *call.how)[1]


def head_gradient(
    terms: inputs.LinearInputs,
    share: Share,
    call: Call,
    dout: Tensor,
    dfinal: Tensor | None,
    exchange: backend.Exchange | None = None,
) -> Tensor:
    """The gradient of the state with which a sequence from earlier ranks begins here, from those of
    its outputs and of the state with which it ends [width, HV, K, V]. exchange: as tail_state has
    it."""
    end, states = share.head_end, terms.initial_state
    assert states is not None
    head = terms_of(terms, 0, end)._replace(initial_state=states[: states_per_sequence(terms)])
    given = *head, *inputs.BackwardCall(dout[:, :end], dfinal, *call.how.backward, False)
    if exchange is not None:
        grads = op.backward_impl(*given, extras=op.Extras(exchange=exchange))
    else:
        grads = op.call_backward(*given)
    return op.by_name(head, False, grads)["initial_state"]


def _identity(terms: inputs.LinearInputs, width: int) -> Tensor:
    (HV, K), options = terms.state_shape[1:3], {"dtype": terms.dtype, "device": terms.q.device}
    return torch.eye(K, **options).expand(width, HV, K, K).contiguous()


def transition_matrix(tail: inputs.LinearInputs, width: int, call: Call) -> Tensor:
    """M [width, HV, K, K]: where the identity ends up if nothing is written."""
    K = tail.q.shape[-1]
    v = tail.v.new_zeros(*tail.v.shape[:3], K)
    alone = tail._replace(v=v, initial_state=_identity(tail, width))
    return op.call_forward(*alone, *call.how._replace(impl=call.choose(alone)))[1]


def transition_factors(tail: inputs.LinearInputs) -> Tensor:
    """M as factors of the state's elements, [width, HV, K or 1, V or 1]."""
    M = tail.v.new_ones(1, 1, 1, 1, dtype=tail.dtype)
    if tail.g is not None:
        total = tail.g.to(tail.dtype).sum(1).exp()
        M = M * (total[..., None, None] if total.dim() == 2 else total[..., None])
    if tail.gv is not None:
        M = M * tail.gv.to(tail.dtype).sum(1).exp()[..., None, :]
    return M
