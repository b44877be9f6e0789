# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
"""The launch of backward_fused.py: which calls it takes, and dq's sums in float32."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.gluon import TensorDescriptor, gl
from slipstream.kernels.kept import kept
from slipstream.kernels.softmax.hopper.backward_fused import softmax_bwd_sm90_kernel
from slipstream.kernels.softmax.hopper.sums import softmax_dq_of_sums_kernel
from slipstream.kernels.softmax.hopper.tiles import REGISTERS, SECTION
from slipstream.kernels.softmax.terms import Options, Terms
from slipstream.kernels.softmax.triton.device import bound, factor_and_cap

# by the width of a head: buffers of queries
BUFFERS = {64: 3, 128: 2}
# queries and keys of a tile
BM, BN = 64, 128


def takes(terms: Terms, options: Options) -> bool:
    """Whether it is known who adds to a tile of dq: all keys, from the first on."""
    offsets = terms.cu_q, terms.cu_k, terms.lengths
    plain = options.left < 0 and all(x is None for x in offsets)
    return plain and terms.q.shape[-1] in BUFFERS


def fused(
    terms: Terms,
    options: Options,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    base: Tensor,
    delta: Tensor,
    matrix: Any,
) -> None:
    """Writes dq, dk and dv. `matrix` makes launch.py's descriptors."""
    B, T, H, D = do.shape
    S, HKV = terms.k.shape[1:3]
    tiles, pairs = -(-S // BN), HKV * B
    rows = -(-T // BM) * BM
    # queries before the first key are in no tile
    make = torch.zeros if T > S else torch.empty
    sums = make(B * H * rows, D, dtype=torch.float32, device=do.device)
    turns = torch.zeros(B, H, rows // BM, dtype=torch.int32, device=do.device)
    x = (terms.q, BM), (terms.k, BN), (terms.v, BN), (do, BM)
    descs, ats = zip(*(matrix(*each) for each in x))
    section = max(1, min(pairs, SECTION // (T * H // HKV * 4 * D * do.element_size())))
    consumer, producer, at_most = REGISTERS[2]
    kept(softmax_bwd_sm90_kernel)[(tiles * pairs,)](
        *descs,
        _tiles(base.view(-1), BM),
        _tiles(delta.view(-1), BM),
        _tiles(sums, BM, D // 2),
        turns,
        dk,
        dv,
        *factor_and_cap(options),
        options.scale,
        *(T, S, H, B, H // HKV, tiles, (B - 1).bit_length(), section, tiles * pairs),
        bound(options.left),
        bound(options.right),
        *(n for at in ats for n in at),
        BM=BM,
        D=D,
        ST=BUFFERS[D],
        FLAGS=2 * (options.right >= 0) + 4 * (options.softcap != 0),
        CONSUMER=consumer,
        PRODUCER=producer,
        maxnreg=at_most,
        num_warps=4,
    )
    kept(softmax_dq_of_sums_kernel)[(B * H * rows // BM,)](
        sums, dq, options.scale, T, H, rows // BM, D=D, BM=BM, num_warps=4
    )


def _tiles(x: Tensor, *block: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.float32)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)
