"""The launches of bwd_fused.py, and of what goes before and after it."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.sm90.bwd_fused import softmax_bwd_sm90_kernel
from slipstream.kernels.attention.sm90.dq_of_sums import softmax_dq_of_sums_kernel
from slipstream.kernels.attention.triton.delta import launch_delta_of_tiles
from slipstream.kernels.primitives.gluon_compat import TensorDescriptor, gl
from slipstream.runtime.backends import sm_count
from slipstream.runtime.launch_cache import cached

# by the width of a head: buffers of queries
BUFFERS = {64: 3, 128: 2}
# queries and keys of a tile
BM, BN = 64, 128


def fused(
    inputs: AttentionInputs,
    options: AttentionOptions,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    matrix: Any,
    common: dict[str, Any],
    flags: dict[str, Any],
    tables: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes dq, dk and dv. `matrix` makes launch.py's descriptors, `common` and `flags`
    are arguments that it gives all kernels.

    tables: cos and sin [B or 1, T, D / 2], float32, of a rotary embedding that has turned q and k:
    dq and dk are of those before. Then dq, dk and dv are heads of one tensor, one after another.

    Returns:
        base and delta [B, H, tiles * BM], infinite and 0 where there is no query.
    """
    B, T, H, D = do.shape
    S, HKV = inputs.k.shape[1:3]
    N = inputs.sequences
    # tiles of keys and of queries, an upper bound where lengths are not known
    tiles = -(-S // BN) if inputs.cu_k is None else S // BN + N
    pairs = HKV if inputs.cu_k is not None else HKV * N
    queries = -(-T // BM) if inputs.cu_q is None else T // BM + N
    search_steps = (N - 1).bit_length()
    base, delta = (
        torch.empty(B, H, queries * BM, dtype=torch.float32, device=do.device) for _ in range(2)
    )
    launch_delta_of_tiles(o, do, lse, dlse, base, delta, inputs.cu_q, queries, BM)
    sums = torch.empty(B * H * queries * BM, D, dtype=torch.float32, device=do.device)
    semaphores = torch.zeros(B * H * queries, dtype=torch.int32, device=do.device)
    matrices = matrix("q", inputs.q, BM) | matrix("k", inputs.k, BN)
    matrices |= matrix("v", inputs.v, BN) | matrix("do", do, BM)
    rotation: dict[str, Any] = {"cos_ptr": None, "sin_ptr": None, "table_rows": None}
    if tables is not None:
        cos, sin = tables
        each = T if cos.shape[0] > 1 else 0
        rotation = {"cos_ptr": cos, "sin_ptr": sin, "table_rows": each}
    pair_bytes = T * H // HKV * 4 * D * do.element_size()
    section = pairs_at_work(pairs, pair_bytes, options.right >= 0, sm_count(do.get_device()))
    cached(softmax_bwd_sm90_kernel)[(tiles * pairs,)](
        desc_base=_tiles(base.view(-1), BM),
        desc_delta=_tiles(delta.view(-1), BM),
        desc_dq=_tiles(sums, BM, D // 2),
        semaphores_ptr=semaphores,
        dk_ptr=dk,
        dv_ptr=dv,
        scale=options.scale,
        T=T,
        S=S,
        H=H,
        N=N,
        group=H // HKV,
        tiles=tiles,
        search_steps=search_steps,
        section=section,
        units=tiles * pairs,
        **common,
        **matrices,
        BM=BM,
        D=D,
        ST=BUFFERS[D],
        **flags,
        **rotation,
    )
    cached(softmax_dq_of_sums_kernel)[(B * H * queries,)](
        sums_ptr=sums,
        semaphores_ptr=semaphores,
        dq_ptr=dq,
        cu_q_ptr=inputs.cu_q,
        scale=options.scale,
        T=T,
        H=H,
        N=N,
        tiles=queries,
        search_steps=search_steps,
        D=D,
        BM=BM,
        PACKED=inputs.cu_q is not None,
        num_warps=4,
        PITCH=None if tables is None else H + 2 * HKV,
        **rotation,
    )
    return base, delta


def pairs_at_work(pairs: int, pair_bytes: int, causal: bool, processors: int) -> int:
    """How many pairs of sequence and head of k the fused backward works on at a time.

    With few pairs, several tiles of keys of one pair run at once, and the queries that they read
    and the dq that they add to stay in the L2 cache. With too few, these tiles wait for each other
    to add to dq, most of all in causal calls.

    pair_bytes: of a pair's queries, their gradients and sums; where they are small, more pairs.
    """
    # 3 pairs of 16,384 tokens without a mask on an H100, which 8 slow down by 4%
    tiles, size = (5, 96 << 20) if causal else (44, 32 << 20)
    return min(pairs, max(processors // tiles, size // pair_bytes, 1))


def _tiles(x: Tensor, *block: int) -> TensorDescriptor:
    sizes = [*map(int, block)]
    layout = gl.NVMMASharedLayout.get_default_for(sizes, gl.float32)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), sizes, layout)
