"""A call of the linear family on its way through its modes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from slipstream.kernels.linear.inputs import ForwardCall, LinearInputs, scale_or_default
from slipstream.kernels.linear.prefix_states import PrefixStates
from slipstream.runtime.context_parallel import ContextParallel

Results = tuple[Tensor, Tensor | None]


class LinearOptions(NamedTuple):
    """The options of every operator of the family, besides its tensors."""

    scale: float | None = None
    output_final_state: bool = False
    state_v_first: bool = False
    reverse: bool = False
    chunk_size: int | None = None
    impl: str | None = None
    context: ContextParallel | None = None
    consistent: bool = False
    prefix_states: PrefixStates | None = None

    def scale_of(self, q: Tensor) -> float:
        """The factor on the output: K^-0.5 if none is given."""
        return scale_or_default(self.scale, q)


class Road(NamedTuple):
    """The way back for modes whose call is several.

    Attributes:
        run: dispatch.run.
        choice: from `impl` to what chooses a back end for other terms.
    """

    run: Callable[..., Results]
    choice: Callable[[str | None], Callable[[LinearInputs], str]]


class Call(NamedTuple):
    """
    Attributes:
        names: how the user calls a term where that is not its name here.
        how: of op.linear.
        run: what takes the place of op.linear, if anything does.
    """

    terms: LinearInputs
    options: LinearOptions
    names: Mapping[str, str]
    how: ForwardCall
    road: Road
    run: "Callable[[Call], Results] | None" = None


class Mode(Protocol):
    """An option that only transforms inputs and results."""

    def into(self, call: Call) -> Call:
        """The call as modes inside have it."""
        raise NotImplementedError

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        """The results for the call that `into` got."""
        raise NotImplementedError
