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
    if max(terms.q.shape[-1], terms.v.shape[-1]) > WIDEST:
        return f"K and V may be at most {WIDEST}"
    if only_by_token(terms):
        return None
    if terms.a is not None and terms.b is not None:
        if terms.a.dtype != terms.q.dtype or terms.b.dtype != terms.q.dtype:
            return "q, a and b differ in dtype"
    if terms.beta is not None and terms.beta.dim() != 3:
        return "it takes one beta a token"
    if terms.p is not None and terms.p.dtype != terms.q.dtype:
        return "q and p differ in dtype"
    if terms.p is not None and terms.decay == "channel":
        return "it has no decay per channel with p"
    return None


def only_by_token(terms: Terms) -> bool:
    """Whether only the step kernel takes these terms: no kernel takes them in chunks."""
    if terms.beta is not None and terms.beta.dim() == 4:
        return True
    rest = (terms.g, terms.u, terms.beta, terms.a)
    return terms.gv is not None and any(x is not None for x in rest)
