"""Which calls the Gluon kernels take, decided without importing Triton."""

import torch

from slipstream.core import guard
from slipstream.kernels.launching import not_hopper
from slipstream.kernels.linear.terms import Terms
from slipstream.kernels.linear.triton.plan import kind

_DTYPES = (torch.bfloat16, torch.float16)
_WIDTHS = (64, 128)
CHUNK = 64
TILE_V = 64


def refuses(terms: Terms) -> str | None:
    """Why the walk of the delta rule in Gluon can't take a call, or None if it can."""
    q, v = terms.q, terms.v
    if reason := not_hopper(q):
        return reason
    if terms.transition != "delta" or terms.decay == "channel" or terms.beta is None:
        return "it takes the delta rule with no decay or one a token"
    if terms.p is not None or terms.gv is not None or terms.u is not None or terms.beta.dim() != 3:
        return "it takes q, k, v, one gate and one beta a token"
    if q.dtype not in _DTYPES or terms.k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v have to be bfloat16 or float16, and q is {q.dtype}"
    if q.shape[-1] not in _WIDTHS or v.shape[-1] % TILE_V or not v.shape[-1]:
        return f"K has to be one of {_WIDTHS} and V a multiple of {TILE_V}"
    tokens = q.shape[0] * q.shape[1]
    if not tokens or tokens * v.shape[2] * 2 >= 2**31:
        return "it counts tokens and value heads in 32 bits"
    return guard.objection(lambda: kind(terms, "hopper"), q.device)
