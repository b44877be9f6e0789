"""Which calls the scans with a decay per channel on sm_90 take, without importing Triton."""

import torch

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import CHUNK, scalar_decay_tokens
from slipstream.kernels.linear.triton.plan import kind
from slipstream.runtime import guarded_launch
from slipstream.runtime.backends import sm90_unsupported

WIDTH = 128  # of K and of V: two warpgroups with half of the state each


def takes(terms: LinearInputs) -> bool:
    """Whether it is of this family."""
    return terms.decay == "channel" or terms.gv is not None or terms.u is not None


def unsupported_reason(terms: LinearInputs) -> str | None:
    """Why the scans in Gluon can't take a call, or None if they can."""
    q, v, g = terms.q, terms.v, terms.g
    if reason := sm90_unsupported(q):
        return reason
    if terms.gv is not None or g is None or terms.decay != "channel":
        return "it takes one gate a channel of K"
    for name, x in (("q", q), ("k", terms.k), ("v", v), ("g", g)):
        if x.dtype != torch.bfloat16:
            return f"q, k, v and g have to be bfloat16, and {name} is {x.dtype}"
    if q.shape[-1] != WIDTH or v.shape[-1] != WIDTH:
        return f"K and V have to be {WIDTH}"
    B, T = q.shape[:2]
    programs = 2 * v.shape[2] * (B if terms.cu_seqlens is None else 1)
    if scalar_decay_tokens(programs, T, CHUNK) is not None:
        return "few heads of long sequences are cut into segments, which it does not do"
    tokens = B * T
    if not tokens or tokens * v.shape[2] * 2 >= 2**31:
        return "it counts tokens and value heads in 32 bits"
    return guarded_launch.known_failure(lambda: kind(terms, "sm90"), q.device)
