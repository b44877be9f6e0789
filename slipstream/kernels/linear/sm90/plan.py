"""Which calls the Gluon kernels take, decided without importing Triton."""

import torch

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import CHUNK
from slipstream.kernels.linear.sm90.scalar_decay import schedule
from slipstream.kernels.linear.sm90.vector_decay import schedule as vector_decay_schedule
from slipstream.kernels.linear.triton.plan import kind
from slipstream.runtime import guarded_launch
from slipstream.runtime.backends import sm90_unsupported

_DTYPES = (torch.bfloat16, torch.float16)
_WIDTHS, _WIDTHS_V = (64, 128), (64, 128, 256)  # a tile of the gradients' kernel is as wide as V


def per_channel(terms: LinearInputs) -> bool:
    """Whether the kernels of decays per channel, and of free a and b, take it."""
    return terms.transition == "dplr" or (terms.transition == "delta" and terms.decay == "channel")


def unsupported_reason(terms: LinearInputs) -> str | None:
    """Why the kernels in Gluon can't take a call, or None if they can."""
    if terms.transition == "none":
        plan = vector_decay_schedule if vector_decay_schedule.takes(terms) else schedule
        return plan.unsupported_reason(terms)
    q, v = terms.q, terms.v
    if reason := sm90_unsupported(q):
        return reason
    if terms.gv is not None or terms.u is not None:
        return "it takes one gate"
    if terms.beta is not None and (terms.p is not None or terms.beta.dim() != 3):
        return "it takes q, k, v and one beta a token"
    others = (terms.k, v, terms.a, terms.b)
    if q.dtype not in _DTYPES or any(x is not None and x.dtype != q.dtype for x in others):
        return f"q, k, v, a and b have to be bfloat16 or float16, and q is {q.dtype}"
    if per_channel(terms) and not {q.shape[-1], v.shape[-1]} <= set(_WIDTHS):
        return f"K and V have to be of {_WIDTHS}"
    if q.shape[-1] not in _WIDTHS or v.shape[-1] not in _WIDTHS_V:
        return f"K has to be one of {_WIDTHS} and V of {_WIDTHS_V}"
    tokens = q.shape[0] * q.shape[1]
    if not tokens or (tokens + CHUNK * terms.sequences) * v.shape[2] * 2 >= 2**31:
        return "it counts tokens and value heads in 32 bits"
    return guarded_launch.known_failure(lambda: kind(terms, "sm90"), q.device)
