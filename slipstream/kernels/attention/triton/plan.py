"""Which calls the Triton kernels take, decided without importing Triton."""

import torch
from torch import Tensor

from slipstream.common.rounded_keys import LARGEST
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.triton.tiles import MAX_HEAD_DIM_FP32, MIN_HEAD_DIM, family
from slipstream.runtime.backends import HAVE_TRITON as HAVE_TRITON
from slipstream.runtime.backends import INTERPRETED as INTERPRETED
from slipstream.runtime.backends import triton_unsupported

# the widest that tiles.py has tiles for
MAX_HEAD_DIM = 256


def unsupported_reason(qkv: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """Why the kernels can't take this call, or None if they can."""
    q, k, v = qkv
    if reason := triton_unsupported(q, "q"):
        return reason
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return "q, k and v differ in dtype"
    return _too_wide(q, v)


def cache_unsupported_reason(qkv: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """The same of what reads a cache, which may be in 8 bits."""
    q, k, v = qkv
    if k.dtype not in LARGEST or k.dtype != v.dtype:
        return unsupported_reason(qkv)
    if reason := triton_unsupported(q, "q"):
        return reason
    narrow = k.dtype == torch.float8_e4m3fn and q.is_cuda and not torch.version.hip
    if narrow and torch.cuda.get_device_capability(q.device) < (8, 9):
        return "float8 wants sm_89 or newer"
    return _too_wide(q, v)


def _too_wide(q: Tensor, v: Tensor) -> str | None:
    widest = max(q.shape[-1], v.shape[-1])
    if widest > MAX_HEAD_DIM:
        return f"head widths may be at most {MAX_HEAD_DIM}"
    if q.dtype == torch.float32 and q.is_cuda and widest > MAX_HEAD_DIM_FP32:
        of = family(torch.cuda.get_device_capability(q.device), hip=bool(torch.version.hip))
        if of in MIN_HEAD_DIM:
            limit = MAX_HEAD_DIM_FP32
            return f"float32 heads wider than {limit} want more shared memory than {of} has"
    return None


def kind(inputs: AttentionInputs, options: AttentionOptions, impl: str = "triton") -> KernelKey:
    """The calls that share a verdict on the kernels."""
    q, flags = (
        inputs.q,
        [name for name in AttentionInputs._fields[3:] if getattr(inputs, name) is not None],
    )
    windows = options.left >= 0 and "left", options.right >= 0 and "right"
    cap = options.softcap != 0 and "softcap"
    return (f"attention.{impl}", q.dtype, q.shape[-1], inputs.v.shape[-1], *windows, cap, *flags)


def kind_of_cache(what: str, q: Tensor, v: Tensor, table: Tensor | None) -> KernelKey:
    """The same of what reads a cache ("decode") or writes it ("append")."""
    pages = table is not None and "pages"
    key = f"attention.{what}", q.dtype, q.shape[-1], v.shape[-1], pages
    return key if v.dtype == q.dtype else (*key, v.dtype)
