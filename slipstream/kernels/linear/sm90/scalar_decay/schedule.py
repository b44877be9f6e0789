"""Which calls the scalar-decay family's scan on sm_90 takes, decided without importing Triton."""

import torch

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.triton.plan import kind
from slipstream.runtime import guarded_launch
from slipstream.runtime.backends import sm90_unsupported

_DTYPES = (torch.bfloat16, torch.float16)
WIDTH = 128  # of K and of V: two warpgroups with half of the state each


def unsupported_reason(terms: LinearInputs) -> str | None:
    """Why the scan in Gluon can't take a call, or None if it can."""
    q, v = terms.q, terms.v
    if reason := sm90_unsupported(q):
        return reason
    if terms.transition != "none" or terms.decay == "channel":
        return "it takes no transition and no decay or one a token"
    if terms.gv is not None or terms.u is not None:
        return "it takes q, k, v and one gate"
    if q.dtype not in _DTYPES or terms.k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v have to be bfloat16 or float16, and q is {q.dtype}"
    if q.shape[-1] != WIDTH or v.shape[-1] != WIDTH:
        return f"K and V have to be {WIDTH}"
    tokens = q.shape[0] * q.shape[1]
    if not tokens or tokens * v.shape[2] * 2 >= 2**31:
        return "it counts tokens and value heads in 32 bits"
    return guarded_launch.known_failure(lambda: kind(terms, "sm90"), q.device)
