"""The delta rule on sm_90: its inverse and the walk for o are kernels here, the rest portable."""

from torch import Tensor

from slipstream.kernels.linear.hopper import delta_launch as sm90
from slipstream.kernels.linear.terms import Terms
from slipstream.kernels.linear.triton import delta_launch as portable
from slipstream.kernels.linear.triton.launch import Split


def forward(terms: Terms, scale: float) -> tuple[Tensor, Tensor]:
    """As the portable one."""
    return portable.forward(terms, scale, _OWN)


def backward(
    terms: Terms, dout: Tensor | None, dfinal: Tensor | None, scale: float
) -> dict[str, Tensor]:
    """As the portable one."""
    return portable.backward(terms, dout, dfinal, scale, _OWN)


def _walk(
    terms: Terms,
    solved: portable.Solved,
    scale: float,
    o: Tensor,
    *,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    split: Split | None = None,
) -> None:
    segment = None if split is None else (split.tokens, split.slots)
    sm90.walk(terms, *solved, scale, o, s_in=s_in, s_out=s_out, segment=segment)


_OWN = portable.Own(sm90.solve, _walk)
