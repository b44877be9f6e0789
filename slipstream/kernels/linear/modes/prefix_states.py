"""Calls that leave states on their way (kernels/linear/prefix_states.py)."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from slipstream.kernels.linear import op, prefix_states
from slipstream.kernels.linear.inputs import NUM_TERMS, ForwardCall, LinearInputs
from slipstream.kernels.linear.modes.call import Call, Results
from slipstream.kernels.linear.prefix_states import NoKernel, PrefixStates
from slipstream.runtime import consistent, custom_op, dispatch


class Prefix(NamedTuple):
    """split: whether kernels take the heads as groups."""

    split: bool

    def into(self, call: Call) -> Call:
        if call.options.prefix_states is None:
            call = call._replace(options=call.options._replace(prefix_states=_of_scope(call)))
        return call._replace(run=partial(_run, split=self.split))

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        return o, state


def _of_scope(call: Call) -> PrefixStates:
    """Where a layer leaves its states with the others of its model's call."""
    prefixes, terms = consistent.prefix_scope.prefixes, call.terms
    assert prefixes is not None
    _, HV, K, V = terms.state_shape
    pool = terms.q.new_empty(prefixes.count, HV, V, K, dtype=terms.dtype)
    prefixes.add("recurrent", pool if call.options.state_v_first else pool.mT)
    return PrefixStates(pool, prefixes.rows)


def _forward_with_prefix_states(*args: Any) -> tuple[Any, ...]:
    """As call_forward, and pool and rows behind its arguments."""
    return op.forward_impl(*args[:-2], extras=op.Extras(prefix=PrefixStates(*args[-2:])))[:2]


def _at_sizes(args: tuple) -> Iterator[tuple]:
    for *other, pool, rows in op.SIZES(args):
        terms, call = LinearInputs(*other[:NUM_TERMS]), ForwardCall(*other[NUM_TERMS:])
        rows = rows.new_empty(terms.sequences, -(-terms.q.shape[1] // consistent.BLOCK))
        yield (*terms, *call._replace(impl=op.impls_at(terms, call.impl)), pool, rows)


_call_with_prefix_states = custom_op.DirectCall(
    _forward_with_prefix_states, at_sizes=_at_sizes, written={-2: "prefix_states.pool"}
)


def _run(call: Call, split: bool) -> Results:
    """o and the final state, by one call of kernels or by several of the operator."""
    terms, options = call.terms, call.options
    assert options.prefix_states is not None
    prefix = prefix_states.check(options.prefix_states, terms)
    plain = call.how.impl.partition("|")[0] in dispatch.PLAIN
    if not plain and not split and terms.gv is None:
        with suppress(NoKernel):
            o, state = _call_with_prefix_states(*terms, *call.how, *prefix)
            return o, state
    ends: dict[str, Any] = {"output_final_state": True, "state_v_first": False}
    options = options._replace(**ends, prefix_states=None)
    again = partial(call.road.run, options=options, recurrent=False)
    return prefix_states.by_calls(again, terms, prefix)
