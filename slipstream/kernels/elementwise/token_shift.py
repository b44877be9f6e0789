"""The previous token: y_t = x_{t-1}, and at a sequence's first token its state.

slipstream::_token_shift is the operator of the Triton kernel. Backwards, with the final state's
gradient in the state's place, it is its own gradient: dx_t = dy_{t+1}.
"""

import torch
from torch import Tensor

from slipstream.common import varlen
from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, custom_op, dispatch, kernel_pair
from slipstream.runtime.compile_ahead import AtSizes, Size


def shift_reference(
    x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x [B, T, D], state [N, D] -> y [B, T, D] and the last token of each sequence [N, D]."""

    def of_one(x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        first = x.new_zeros(x.shape[0], x.shape[2]) if state is None else state
        past = torch.cat([first[:, None], x], dim=1)
        return past[:, :-1], past[:, -1]

    return varlen.by_sequence(of_one, (x,), state, cu_seqlens)


def shift(x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same without a look at the offsets' values."""
    if cu_seqlens is None or x.shape[1] == 0:
        return _dense(x, state, cu_seqlens)
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if state is None:
        state = x.new_zeros(begin.shape[0], x.shape[2])
    live = (end > begin)[:, None]
    # bounded on both sides: on a GPU wrong offsets are known only later
    last = torch.where(live, x[0].index_select(0, (end - 1).clamp(0, x.shape[1] - 1)), state)
    # one more row takes what empty sequences would write
    moved = torch.cat([x[0, :1], x[0]])  # row t: token t - 1
    row = torch.where(live[:, 0], begin, x.shape[1]).clamp(0, x.shape[1])
    return moved.index_copy(0, row, state)[None, : x.shape[1]], last


def _dense(x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    if x.shape[1] == 0:
        return x, x.new_zeros(_sequences(x, cu_seqlens), x.shape[2]) if state is None else state
    # of x[:, :-1] torch.export would want two tokens or more, so three of x
    moved = torch.nn.functional.pad(x, (0, 0, 1, -1))
    if state is not None:
        moved = moved.select_scatter(state, 1, 0)
    # a copy: a state that were a view would keep all of x alive
    return moved, x[:, -1].clone()


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def previous(
    x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, impl: str | None
) -> tuple[Tensor, Tensor]:
    """y and the last tokens, by the implementation that is chosen."""
    impl = dispatch.choose(_CANDIDATES, (x, cu_seqlens), impl, "token_shift", x).impls
    if impl not in dispatch.PLAIN:
        return kernel_shift(x, state, cu_seqlens, impl)
    return (shift_reference if impl == "reference" else shift)(x, state, cu_seqlens)


def kernel_shift(
    x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    """impl: triton, or triton|eager."""
    if autograd.needs_autograd(x, state):
        return _Shift.apply(x, state, cu_seqlens, False, impl)
    return _call(x, state, cu_seqlens, back=False, impl=impl)


def _eager(
    x: Tensor, edge: Tensor | None, cu_seqlens: Tensor | None, back: bool
) -> tuple[Tensor, Tensor]:
    if back:  # the sequences from their ends on
        x, edge, cu_seqlens = x.flip(1), edge, _from_the_end(cu_seqlens)
        edge = edge if edge is None or cu_seqlens is None else edge.flip(0)
    y, end = shift(x, edge, cu_seqlens)
    if back:
        y, end = y.flip(1), end if cu_seqlens is None else end.flip(0)
    return y.clone(memory_format=torch.contiguous_format), end.clone()


def _from_the_end(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else (cu_seqlens[-1:] - cu_seqlens).flip(0)


def _kind(x: Tensor) -> KernelKey:
    return ("token_shift.triton", x.dtype, x.shape[-1] % 16 == 0)


def _unsupported_reason(x: Tensor, cu_seqlens: Tensor | None) -> str | None:
    """Why the Triton kernel can't take a call, or None if it can."""
    if 0 in (x.shape[0], x.shape[2]) or (cu_seqlens is not None and cu_seqlens.shape[0] < 2):
        return "there are no features or sequences"
    if torch.version.hip:
        return "its kernel does not compile for AMD's GPUs at all sizes"
    return None


def _fake(
    x: Tensor, edge: Tensor | None, cu_seqlens: Tensor | None, back: bool, impl: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(_sequences(x, cu_seqlens), x.shape[2])


_call = custom_op.KernelOp(
    "token_shift",
    "(Tensor x, Tensor? edge, Tensor? cu_seqlens, bool back, str impl) -> (Tensor, Tensor)",
    fake=_fake,
    kernel="slipstream.kernels.elementwise.triton.token_shift:shift",
    plain=_eager,
    kind=_kind,
    # three packed sequences, one of them empty, with states
    probe={
        "x": (1, 40, 0),
        "edge": lambda x: kernel_pair.random_like(x, 3, x.shape[-1]),
        "cu_seqlens": lambda x: torch.tensor([0, 17, 17, 40], device=x.device),
        "back": False,
    },
    replay=True,
    # rows of features that are no multiple of 16, where a batch's tokens are one or none
    at_sizes=AtSizes((0,), (1,), (2,), steps=(Size(1, 1), Size(1, 3), Size(1, 16))),
)
_CANDIDATES = _call.candidates(_unsupported_reason)
_Shift = autograd.autograd_function(_call, _call, results="y last", wrt="x edge", inverse="back")
