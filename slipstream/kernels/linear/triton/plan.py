"""Which calls the Triton kernels take, decided without importing Triton."""

import importlib.util
import os
from functools import cache

import torch

from slipstream.kernels.linear.terms import Terms

WIDEST = 256
HAVE_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs the kernels on a CPU, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refuses(terms: Terms) -> str | None:
    """Why the kernels can't take this call, or None if they can."""
    if not HAVE_TRITON:
        return "Triton is not installed"
    if not (terms.q.is_cuda or INTERPRETED):
        return f"it runs on CUDA devices, and the tensors are on {terms.q.device.type}"
    if terms.q.dtype not in _DTYPES:
        return f"it computes in float32, and q is {terms.q.dtype}"
    if terms.v.dtype != terms.q.dtype or terms.k.dtype != terms.q.dtype:
        return "q, k and v differ in dtype"
    if max(terms.q.shape[-1], terms.v.shape[-1]) > WIDEST:
        return f"K and V may be at most {WIDEST}"
    if only_by_token(terms):
        return None
    if any(x is not None and x.dtype != terms.q.dtype for x in (terms.a, terms.b)):
        return "q, a and b differ in dtype"
    if terms.beta is not None and terms.beta.dim() != 3:
        return "it takes one beta a token"
    if terms.p is not None and terms.p.dtype != terms.q.dtype:
        return "q and p differ in dtype"
    if terms.p is not None and terms.decay == "channel":
        return "it has no decay per channel with p"
    wide = terms.transition == "dplr" or (terms.transition == "delta" and terms.decay == "channel")
    if wide and terms.q.dtype == torch.float32 and _is_hopper(terms.q.device):
        # kda with K = 30 and weak gates, with ptxas 12.8 and 13.0 (docs/log.md)
        return "in float32 its gradients' kernel makes an illegal access on sm_90"
    return None


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def only_by_token(terms: Terms) -> bool:
    """Whether only the step kernel takes these terms: no kernel takes them in chunks."""
    if terms.beta is not None and terms.beta.dim() == 4:
        return True
    rest = (terms.g, terms.u, terms.beta, terms.a)
    return terms.gv is not None and any(x is not None for x in rest)
