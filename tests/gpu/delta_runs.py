"""Calls of the delta rule and of gates per channel that tests of several kernels on sm_90 make."""

from typing import Any

import torch
import torch.nn.functional as F

from slipstream.kernels.linear.inputs import LinearInputs
from tests.gpu.sm90_runs import LENGTHS, offsets

SIZES = {  # B, T, H, HV, K, V, lengths of packed sequences
    "whole": (1, 128, 1, 2, 128, 128, None),
    "odd": (2, 70, 1, 3, 128, 64, None),
    "packed": (1, 270, 2, 4, 64, 128, LENGTHS),
}

LIMIT = 0.006


def inputs(size: tuple, gated: bool) -> LinearInputs:
    B, T, H, HV, K, V, lengths = size
    N = B if lengths is None else len(lengths)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.rand(B, T, HV, device="cuda")
    return LinearInputs(
        torch.randn(B, T, H, K, **make),
        F.normalize(torch.randn(B, T, H, K, **make), dim=-1),
        torch.randn(B, T, HV, V, **make),
        g=torch.where(x < 0.1, -torch.inf, -x) if gated else None,
        beta=2 * torch.rand(B, T, HV, device="cuda"),
        initial_state=torch.randn(N, HV, K, V, device="cuda"),
        cu_seqlens=offsets(lengths),
    )


BARS = {"o": 5e-3, "final": 5e-3, "g": 2e-2, "beta": 2e-2}  # of the others 8e-3


def channels(
    kind: str, gates: str, dtype: torch.dtype, lengths: tuple | None, size: tuple = (2, 150, 2, 2)
) -> LinearInputs:
    """A gate a channel, and free a and b for dplr, erase and write for gdn2; strong gates are in
    chunks of their own ways, middling ones in chunks that only their halves allow."""
    B, T, H, HV, K = (1, 270, 1, 2, 128) if lengths else (*size, 128)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    k, a = (F.normalize(torch.randn(B, T, H, K, **make), dim=-1) for _ in range(2))
    g = -0.3 * torch.rand(B, T, HV, K, device="cuda")
    if gates == "strong":
        g = torch.where(torch.rand_like(g) < 0.1, 100 * g, g)
        g[:, 70] = -torch.inf
    if gates == "middling":
        g = -4.0 * torch.rand_like(g)
    cu = offsets(lengths)
    b = -(a.float() * torch.rand(B, T, H, 1, device="cuda")).bfloat16()
    return LinearInputs(
        torch.randn(B, T, H, K, **make),
        k,
        torch.randn(B, T, HV, 128, **make),
        g=g.to(dtype),
        beta=2 * torch.rand(B, T, HV, device="cuda") if kind == "kda" else None,
        a=a if kind in ("dplr", "iplr") else None,
        b=b if kind in ("dplr", "iplr") else None,
        erase=torch.rand(B, T, HV, K, **make) if kind == "gdn2" else None,
        write=torch.rand(B, T, HV, 128, **make) if kind == "gdn2" else None,
        initial_state=torch.randn(B if cu is None else len(cu) - 1, HV, K, 128, device="cuda"),
        cu_seqlens=cu,
    )
