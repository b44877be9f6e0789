"""Which calls the Triton kernels take, decided without importing Triton."""

import importlib.util
import os

import torch
from torch import Tensor

from slipstream.kernels.softmax.triton.tiles import NARROWEST, WIDEST_FLOAT32, family

WIDEST = 256
HAVE_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs the kernels on a CPU, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refuses(qkv: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """Why the kernels can't take this call, or None if they can."""
    q, k, v = qkv
    if not HAVE_TRITON:
        return "Triton is not installed"
    if not (q.is_cuda or INTERPRETED):
        return f"it runs on CUDA devices, and the tensors are on {q.device.type}"
    if q.dtype not in _DTYPES:
        return f"it computes in float32, and q is {q.dtype}"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return "q, k and v differ in dtype"
    widest = max(q.shape[-1], v.shape[-1])
    if widest > WIDEST:
        return f"head widths may be at most {WIDEST}"
    if q.dtype == torch.float32 and q.is_cuda and widest > WIDEST_FLOAT32:
        of = family(torch.cuda.get_device_capability(q.device), hip=bool(torch.version.hip))
        if of in NARROWEST:
            return (
                f"float32 heads wider than {WIDEST_FLOAT32} want more shared memory than {of} has"
            )
    return None
