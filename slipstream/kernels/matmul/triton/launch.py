"""Launches of the portable matmul: no synchronisation. Memory beyond the result: S times as much in
float32 where K is split in S, and a copy of a factor neither of whose strides is 1."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.matmul.config import MAX_SPLIT_K, MatmulConfig
from slipstream.kernels.matmul.inputs import MatmulInputs
from slipstream.kernels.matmul.triton.matmul import matmul_kernel, matmul_sum_kernel
from slipstream.runtime.backends import INTERPRETED, device_of, supports_pdl
from slipstream.runtime.launch_cache import cached

# elements of a row that one program of matmul_sum_kernel adds up, by 4 warps
SUM_COLUMNS = 512


def matmul(t: MatmulInputs, c: MatmulConfig) -> Tensor:
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
    S = c.split_k
    bias = None if t.bias is None else t.bias.contiguous()
    epilogue: dict[str, Any] = {"bias_ptr": bias, "r_ptr": residual, "sa_ptr": sa, "sb_ptr": sb}
    strides = {
        "r_stride": 0 if residual is None else residual.stride(0),
        "sa_stride": 0 if sa is None else sa.dim(),
        "sb_stride": 0 if sb is None else sb.dim(),
    }
    fused_epilogue, target, f = epilogue, out, t.activation
    if S > 1:
        fused_epilogue, f = dict.fromkeys(epilogue), ""
        target = out.new_empty(S, M, N, dtype=torch.float32)
    overlaps = S > 1 and supports_pdl(a.device)
    with device_of(a.device):
        cached(matmul_kernel)[(tiles, S)](
            a_ptr=a,
            b_ptr=b,
            **fused_epilogue,
            out_ptr=target,
            M=M,
            N=N,
            K=K,
            a_stride=a.stride(0 if not a_t else 1),
            b_stride=b.stride(0 if not b_t else 1),
            **strides,
            BM=c.block_m,
            BN=c.block_n,
            BK=c.block_k,
            GROUP=c.group_m,
            A_T=a_t,
            B_T=b_t,
            EVEN_M=M % 16 == 0,
            EVEN_N=N % 16 == 0,
            EVEN_K=K % 16 == 0,
            SPLIT=S > 1,
            PDL=overlaps,
            ACTIVATION=f,
            PRECISION=precision,
            num_warps=c.num_warps,
            num_stages=c.num_stages,
        )
        if S > 1:
            cached(matmul_sum_kernel)[(M, -(-N // SUM_COLUMNS))](
                partial_ptr=target,
                **epilogue,
                out_ptr=out,
                M=M,
                N=N,
                S=S,
                **strides,
                BM=1,
                BN=SUM_COLUMNS,
                MAX_SPLITS=MAX_SPLIT_K,
                EVEN_N=N % 16 == 0,
                PDL=overlaps,
                ACTIVATION=t.activation,
                num_warps=4,
                **({"launch_pdl": True} if overlaps else {}),
            )
    return out


def _rows(x: Tensor | None) -> Tensor | None:
    """With adjacent elements in a row."""
    return x if x is None or x.stride(1) == 1 else x.contiguous()
