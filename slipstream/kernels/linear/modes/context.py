"""Calls of several ranks, each with a part of the tokens (kernels/linear/context.py)."""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear import context_terms, inputs
from slipstream.kernels.linear.context import linear_across_ranks
from slipstream.kernels.linear.modes.call import Call, LinearOptions, Results
from slipstream.runtime import context_parallel


class Context(NamedTuple):
    def into(self, call: Call) -> Call:
        """With the offsets of this rank's pieces; initial_state is that of all sequences."""
        context, terms, names = call.options.context, call.terms, call.names
        assert context is not None
        _expect_narrow(terms, names.get("beta", "beta"))
        share, state = context.share(terms.q.shape[1]), terms.initial_state
        if state is not None:
            name = names.get("initial_state", "initial_state")
            rows = share.sequences if share.packed else terms.q.shape[0]
            checks.expect_shape(name, state, (rows, *terms.state_shape[1:]))
            checks.expect_floating({name: state})
            checks.expect_one_device({"q": terms.q, name: state})
        offsets = context.offsets_on(terms.q.device)
        run = partial(_run, share=share.reversed() if call.options.reverse else share)
        return call._replace(terms=terms._replace(cu_seqlens=offsets), run=run)

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        return o, state


def _expect_narrow(terms: inputs.LinearInputs, beta: str) -> None:
    """
    Raises:
        NotImplementedError: for terms that run on one rank alone.
    """
    if terms.max_head_dim > inputs.MAX_HEAD_DIM:
        raise NotImplementedError(
            f"context: heads of more than {inputs.MAX_HEAD_DIM} channels run on one rank, got "
            f"{terms.max_head_dim}"
        )
    if terms.beta is not None and terms.beta.dim() == 4:
        raise NotImplementedError(
            f"{beta}: want one value for each token and head with a context, got one per channel"
        )


def _run(call: Call, share: context_parallel.Share) -> Results:
    terms, options = call.terms, call.options
    choose = call.road.choice(options.impl)
    how = context_terms.Call(call.how, choose, options.output_final_state)
    initial_state = terms.initial_state
    return linear_across_ranks(terms._replace(initial_state=None), initial_state, share, how)


def checked(terms: inputs.LinearInputs, options: LinearOptions) -> inputs.LinearInputs:
    """This rank's tokens, for the checks."""
    context = options.context
    assert context is not None
    context.expect_no_offsets(terms.cu_seqlens, options.impl)
    return terms._replace(initial_state=None, cu_seqlens=context.offsets_on(terms.q.device))


def key_of(context: context_parallel.ContextParallel | None) -> tuple[bool, int | None] | None:
    """What a plan depends on: whether segments are given, and the pieces of sequences."""
    if context is None:
        return None
    offsets = context.cu_seqlens
    return context.segment_tokens is not None, None if offsets is None else offsets.shape[0]
