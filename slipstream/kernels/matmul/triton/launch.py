# pyright: reportCallIssue=false, reportIndexIssue=false
"""Launch of the portable matmul: no synchronisation; nothing but the result is allocated, but for
a copy of a factor neither of whose strides is 1."""

import torch
from torch import Tensor

from slipstream.kernels.kept import kept
from slipstream.kernels.launching import INTERPRETED, on
from slipstream.kernels.matmul.config import MatmulConfig
from slipstream.kernels.matmul.terms import Terms
from slipstream.kernels.matmul.triton.matmul import matmul_kernel


def matmul(t: Terms, c: MatmulConfig) -> Tensor:
    """out [M, N]."""
    (M, K), N = t.a.shape, t.b.shape[1]
    out = torch.empty(M, N, dtype=t.out_dtype, device=t.a.device)
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (t.a, t.b))
    a_t, b_t = a.stride(1) != 1, b.stride(1) != 1
    residual = _rows(t.residual)
    sa, sb = (None if x is None else x.float().contiguous() for x in (t.scale_a, t.scale_b))
    # it is of float32 only, and another one would be another kernel
    precision = t.precision if a.dtype == torch.float32 else "tf32"
    if INTERPRETED:
        precision = "ieee"
    tiles = -(-M // c.block_m) * -(-N // c.block_n)
    with on(a.device):
        kept(matmul_kernel)[(tiles,)](
            a, b, None if t.bias is None else t.bias.contiguous(), residual, sa, sb, out, M, N, K,
            a.stride(0 if not a_t else 1), b.stride(0 if not b_t else 1),
            0 if residual is None else residual.stride(0),
            0 if sa is None else sa.dim(), 0 if sb is None else sb.dim(),
            c.block_m, c.block_n, c.block_k, c.group_m, a_t, b_t,
            M % 16 == 0, N % 16 == 0, K % 16 == 0, t.activation, precision,
            num_warps=c.num_warps, num_stages=c.num_stages,
        )  # fmt: skip
    return out


def _rows(x: Tensor | None) -> Tensor | None:
    """With adjacent elements in a row."""
    return x if x is None or x.stride(1) == 1 else x.contiguous()
