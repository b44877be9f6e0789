"""Which calls the Triton kernels take, decided without importing Triton."""

import importlib.util
import os

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
    if terms.transition == "dplr":
        return "it has no kernels for a and b"
    if terms.beta is not None and terms.beta.dim() != 3:
        return "it takes one beta a token"
    if terms.p is not None and terms.p.dtype != terms.q.dtype:
        return "q and p differ in dtype"
    if terms.gv is not None:
        return "it has no decay of the value columns (gv)"
    if terms.decay == "channel" or terms.u is not None:
        return "it has no decay per channel and no bonus u"
    if max(terms.q.shape[-1], terms.v.shape[-1]) > WIDEST:
        return f"K and V may be at most {WIDEST}"
    return None
