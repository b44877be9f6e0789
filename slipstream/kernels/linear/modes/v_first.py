"""States [N, HV, V, K] in place of [N, HV, K, V]."""

from typing import NamedTuple

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.modes.call import Call, Results


class VFirst(NamedTuple):
    def into(self, call: Call) -> Call:
        state = call.terms.initial_state
        if state is None:
            return call
        return call._replace(terms=call.terms._replace(initial_state=state.transpose(-1, -2)))

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        return o, None if state is None else state.transpose(-1, -2)


def checked(terms: LinearInputs) -> LinearInputs:
    """The terms as VFirst hands them on, for the checks."""
    if terms.initial_state is None:
        return terms
    checks.expect_rank("initial_state", terms.initial_state, 4, "[N, HV, V, K]")
    return terms._replace(initial_state=terms.initial_state.transpose(-1, -2))
