"""Which calls the Gluon kernels take, decided without importing Triton."""

import torch

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.sm90.tiles import MIXED_WIDTHS, TILES
from slipstream.kernels.attention.triton.plan import kind
from slipstream.runtime import guarded_launch
from slipstream.runtime.backends import sm90_unsupported


def unsupported_reason(inputs: AttentionInputs, options: AttentionOptions) -> str | None:
    """Why the kernels can't take this call, or None if they can."""
    q, k, v = inputs[:3]
    if reason := sm90_unsupported(q):
        return reason
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, and q is {q.dtype}"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return "q, k and v differ in dtype"
    D, DV = q.shape[-1], v.shape[-1]
    if (D not in TILES) if D == DV else (D, DV) not in MIXED_WIDTHS:
        widths = ", ".join([*map(str, TILES), *(f"{x} and {y}" for x, y in MIXED_WIDTHS)])
        return f"heads of q and v are to be of one width of {widths}"
    for name in ("g", "slopes"):
        if getattr(inputs, name) is not None:
            return f"it takes no {name}"
    if options.scale <= 0:
        return "the scale is to be positive"
    return guarded_launch.known_failure(lambda: kind(inputs, options, "sm90"), q.device)
