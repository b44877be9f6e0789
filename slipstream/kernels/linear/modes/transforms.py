"""Modes that change tensors on their way and nothing else: autocast, reversed time, V first, steps
of blocks.
"""

from typing import NamedTuple

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.inputs import TERMS, LinearInputs
from slipstream.kernels.linear.modes.call import Call, Results
from slipstream.runtime.consistent import BLOCK, consistent_scope


class Autocast(NamedTuple):
    def into(self, call: Call) -> Call:
        return call._replace(terms=as_autocast(call.terms))

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        return o, state


def as_autocast(terms: LinearInputs) -> LinearInputs:
    """The terms in the dtype that autocast has for q's device, if it is on."""
    dtype = checks.autocast_dtype(terms.q)
    if dtype is None:
        return terms
    cast = {
        name: x.to(dtype)
        for name, term in TERMS.items()
        if term.dtype != "own" and (x := getattr(terms, name)) is not None
    }
    return terms._replace(**cast)


class ConsistentStep(NamedTuple):
    def into(self, call: Call) -> Call:
        """With the whole blocks, as they are up to the step's token."""
        assert consistent_scope.step is not None
        return call._replace(terms=call.terms.with_tokens(consistent_scope.step.blocks))

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        assert consistent_scope.step is not None
        return consistent_scope.step.token(o), state


def checked_consistent(terms: LinearInputs) -> LinearInputs:
    """The terms as ConsistentStep hands them on, without data, for the checks."""
    if terms.q.shape[1] != 1:
        return terms
    return terms.of_tokens(lambda x: x.expand(x.shape[0], BLOCK, *x.shape[2:]))


class Reverse(NamedTuple):
    def into(self, call: Call) -> Call:
        terms = call.terms.of_tokens(lambda x: x.flip(1))
        if terms.cu_seqlens is not None:
            state = None if terms.initial_state is None else terms.initial_state.flip(0)
            offsets = terms.q.shape[1] - terms.cu_seqlens.flip(0)
            terms = terms._replace(initial_state=state, cu_seqlens=offsets)
        return call._replace(terms=terms)

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        if state is not None and call.terms.cu_seqlens is not None:
            state = state.flip(0)
        return o.flip(1), state


class VFirst(NamedTuple):
    def into(self, call: Call) -> Call:
        state = call.terms.initial_state
        if state is None:
            return call
        return call._replace(terms=call.terms._replace(initial_state=state.transpose(-1, -2)))

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        return o, None if state is None else state.transpose(-1, -2)


def checked_v_first(terms: LinearInputs) -> LinearInputs:
    """The terms as VFirst hands them on, for the checks."""
    if terms.initial_state is None:
        return terms
    checks.expect_rank("initial_state", terms.initial_state, 4, "[N, HV, V, K]")
    return terms._replace(initial_state=terms.initial_state.transpose(-1, -2))
