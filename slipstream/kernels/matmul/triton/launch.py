"""Launches of the portable matmul: no synchronisation. Memory beyond the result: S times as much in
float32 where K is split in S, and a copy of a factor neither of whose strides is 1."""

import torch
from torch import Tensor

from slipstream.kernels.matmul import config, inputs
from slipstream.kernels.matmul.triton.matmul import matmul_kernel, matmul_sum_kernel
from slipstream.runtime import backends, launch_cache


def matmul(t: inputs.MatmulInputs, c: config.MatmulConfig) -> Tensor:
    """out [M, N]."""
    (M, K), N = t.a.shape, t.b.shape[1]
    out = torch.empty(M, N, dtype=t.out_dtype, device=t.a.device)
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (t.a, t.b))
    a_t, b_t = a.stride(1) != 1, b.stride(1) != 1
    # it is of float32 only, and another one would be another kernel
    precision = t.precision if a.dtype == torch.float32 else "tf32"
    if backends.INTERPRETED:
        precision = "ieee"
    tiles = -(-M // c.block_m) * -(-N // c.block_n)
    S = c.split_k
    tensors, strides = inputs.epilogue(t)
    fused, target, f = tensors, out, t.activation
    if S > 1:
        fused, f = dict.fromkeys(tensors), ""
        target = out.new_empty(S, M, N, dtype=torch.float32)
    overlaps = S > 1 and backends.supports_pdl(a.device)
    with backends.device_of(a.device):
        launch_cache.cached(matmul_kernel)[(tiles, S)](
            a_ptr=a,
            b_ptr=b,
            **fused,
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
            columns = 512  # of a row, which a program adds up
            launch_cache.cached(matmul_sum_kernel)[(M, -(-N // columns))](
                partial_ptr=target,
                **tensors,
                out_ptr=out,
                M=M,
                N=N,
                S=S,
                **strides,
                BM=1,
                BN=columns,
                MAX_SPLITS=config.MAX_SPLIT_K,
                EVEN_N=N % 16 == 0,
                PDL=overlaps,
                ACTIVATION=t.activation,
                num_warps=4,
                **({"launch_pdl": True} if overlaps else {}),
            )
    return out
