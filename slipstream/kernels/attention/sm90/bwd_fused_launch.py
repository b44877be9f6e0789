"""The launches of bwd_fused.py, and of what goes before and after it."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.sm90.bwd_fused import softmax_bwd_sm90_kernel
from slipstream.kernels.attention.sm90.bwd_preprocess import (
    softmax_dq_of_sums_kernel,
    softmax_rows_of_tiles_kernel,
)
from slipstream.kernels.attention.sm90.tiles import FUSED_SECTION_BYTES
from slipstream.kernels.attention.triton.launch_utils import bound, factor_and_cap
from slipstream.kernels.primitives.gluon_compat import TensorDescriptor, gl
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
    flags: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Writes dq, dk and dv. `matrix` makes launch.py's descriptors, `flags` are its flags.

    Returns:
        base and delta [B, H, tiles * BM], infinite and 0 where there is no query.
    """
    B, T, H, D = do.shape
    S, HKV = inputs.k.shape[1:3]
    N, offsets = inputs.sequences, (inputs.cu_q, inputs.cu_k, inputs.lengths)
    # tiles of keys and of queries, an upper bound where lengths are not known
    tiles = -(-S // BN) if inputs.cu_k is None else S // BN + N
    pairs = HKV if inputs.cu_k is not None else HKV * N
    queries = -(-T // BM) if inputs.cu_q is None else T // BM + N
    search_steps = (N - 1).bit_length()
    each = T, H, N, queries, search_steps
    packed = inputs.cu_q is not None
    base, delta = (
        torch.empty(B * H * queries * BM, dtype=torch.float32, device=do.device) for _ in range(2)
    )
    cached(softmax_rows_of_tiles_kernel)[(B * H * queries,)](
        *(o.contiguous(), do, lse, dlse, base, delta, inputs.cu_q, *each),
        D=D,
        BM=BM,
        HAS_DLSE=dlse is not None,
        PACKED=packed,
        num_warps=4,
    )
    sums = torch.empty(B * H * queries * BM, D, dtype=torch.float32, device=do.device)
    semaphores = torch.zeros(B * H * queries, dtype=torch.int32, device=do.device)
    x = (inputs.q, BM), (inputs.k, BN), (inputs.v, BN), (do, BM)
    descs, strides = zip(*(matrix(*each) for each in x))
    section = max(1, min(pairs, FUSED_SECTION_BYTES // (T * H // HKV * 4 * D * do.element_size())))
    cached(softmax_bwd_sm90_kernel)[(tiles * pairs,)](
        *descs,
        _tiles(base, BM),
        _tiles(delta, BM),
        _tiles(sums, BM, D // 2),
        semaphores,
        dk,
        dv,
        *offsets,
        *factor_and_cap(options),
        options.scale,
        *(T, S, H, N, H // HKV, tiles, search_steps, section, tiles * pairs),
        bound(options.left),
        bound(options.right),
        *(n for at in strides for n in at),
        BM=BM,
        D=D,
        ST=BUFFERS[D],
        **flags,
    )
    cached(softmax_dq_of_sums_kernel)[(B * H * queries,)](
        *(sums, semaphores, dq, inputs.cu_q, options.scale, *each),
        D=D,
        BM=BM,
        PACKED=packed,
        num_warps=4,
    )
    return base.view(B, H, -1), delta.view(B, H, -1)


def _tiles(x: Tensor, *block: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.float32)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)
