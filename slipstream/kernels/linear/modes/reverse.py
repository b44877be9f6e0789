"""Time from the last token to the first; packed sequences also change order."""

from typing import NamedTuple

from torch import Tensor

from slipstream.kernels.linear.modes.call import Call, Results


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
