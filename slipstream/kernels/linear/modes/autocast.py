"""Activations in autocast's dtype; gates and states keep theirs."""

from typing import NamedTuple

from torch import Tensor

from slipstream.common.checks import autocast_dtype
from slipstream.kernels.linear.inputs import TERMS, LinearInputs
from slipstream.kernels.linear.modes.call import Call, Results


class Autocast(NamedTuple):
    def into(self, call: Call) -> Call:
        return call._replace(terms=as_autocast(call.terms))

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        return o, state


def as_autocast(terms: LinearInputs) -> LinearInputs:
    """The terms in the dtype that autocast has for q's device, if it is on."""
    dtype = autocast_dtype(terms.q)
    if dtype is None:
        return terms
    cast = {
        name: x.to(dtype)
        for name, term in TERMS.items()
        if term.dtype != "own" and (x := getattr(terms, name)) is not None
    }
    return terms._replace(**cast)
