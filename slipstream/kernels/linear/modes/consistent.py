"""A step of one token a row with the bits of its block of 64 tokens (runtime/block_step.py)."""

from typing import NamedTuple

from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.modes.call import Call, Results
from slipstream.runtime.consistent import BLOCK, consistent_scope


class ConsistentStep(NamedTuple):
    def into(self, call: Call) -> Call:
        """With the whole blocks, as they are up to the step's token."""
        assert consistent_scope.step is not None
        return call._replace(terms=call.terms.with_tokens(consistent_scope.step.blocks))

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        assert consistent_scope.step is not None
        return consistent_scope.step.token(o), state


def checked(terms: LinearInputs) -> LinearInputs:
    """The terms as ConsistentStep hands them on, without data, for the checks."""
    if terms.q.shape[1] != 1:
        return terms
    return terms.of_tokens(lambda x: x.expand(x.shape[0], BLOCK, *x.shape[2:]))
