"""Launches of the linear layers of a step; memory beyond the result: none."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.primitives.begin_ahead import PREFETCH_ROWS
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import inputs
from slipstream.kernels.projection_step.triton import step, sums
from slipstream.runtime import backends, launch_cache


@dataclass(frozen=True)
class ProjectionTile:
    """BN rows of a weight a program, BK of their columns at a time, of BM rows of x.

    x_left: whether x is the left operand, whose BM rows are then those of a wgmma.
    """

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int
    x_left: bool = False


def tile_of(M: int, N: int, K: int, x_bytes: int, w_bytes: int, shared: int) -> ProjectionTile:
    """The tile, with as many columns of x at a time as fit into `shared` bytes of shared memory.

    N: rows of all weights, or of one of two that gate each other. x_bytes, w_bytes: bytes of an
        element of x and of the weights, of both where two gate each other.
    """
    if M == 1:
        return ProjectionTile(1, 8, min(1024, _power(K)), 8, 3)
    BM, BN = max(16, min(64, _power(M))), 32 if N >= 2048 else 16
    # of few rows loads alone take the time, and a program of one weight has room for more of them
    stages = 6 if BM == 16 and BN == 32 and w_bytes == x_bytes else 4
    BK = max(16, min(128 if BN == 32 else 256, _power(K)))
    while (stages - 1) * BK * (BM * x_bytes + BN * w_bytes) > shared and BK > 16:
        BK //= 2
    return ProjectionTile(BM, BN, BK, 4, stages)


def tile_of_many(N: int, K: int, weights: int, shared: int) -> ProjectionTile:
    """The tile for 33 to 64 rows of 16 bits on sm_90 and later.

    weights: 2 where two gate each other. One program a multiprocessor is enough, whose x and
    weights are on their way in `stages` parts.
    """
    BN, BK, stages = 32, max(16, min(128, _power(K))), 5
    while stages * BK * 2 * (64 + BN * weights) > shared:
        stages -= 1
    return ProjectionTile(64, BN, BK, 4, stages, True)


def tile_of_shares(K: int) -> tuple[ProjectionTile, int]:
    """The tile of a product by shares of K, and how many: about a program a multiprocessor."""
    if K > 2048:
        return ProjectionTile(64, 64, 128, 4, 3), 8
    return ProjectionTile(64, 32, 64, 4, 4), 4


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _in_words(t: inputs.ProjectionInputs) -> bool:
    """Whether all rows of the weights are whole words of 16 bytes."""
    row = t.weights[0].shape[1] * t.weights[0].element_size()
    return row % 16 == 0 and all(w.data_ptr() % 16 == 0 for w in t.weights)


def projection_step(t: inputs.ProjectionInputs) -> Tensor:
    M, K = t.x.shape
    y = torch.empty(M, t.size, dtype=t.out_dtype, device=t.x.device)
    x_bytes, w_bytes = t.x.element_size(), t.weights[0].element_size()
    shared = backends.shared_memory_bytes(t.x.get_device())
    if t.is_wide and backends.supports_pdl(t.x.device):
        tile = tile_of_many(t.size, K, 1 + t.glu, shared)
    else:
        tile = tile_of(M, t.size, K, x_bytes, w_bytes * (1 + t.glu), shared)
    _launch(t, y, tile, K)
    return y


def projection_norm(t: inputs.NormedInputs, n: NormOptions) -> tuple[Tensor, Tensor]:
    """Partial sums [shares, M, N] of shares of K, and their sum with the residual and its norm."""
    (M, K), N = t.x.shape, t.weight.shape[0]
    tile, shares = tile_of_shares(K)
    columns = -(-K // (shares * tile.BK)) * tile.BK
    shares = -(-K // columns)
    partial = torch.empty(shares, M, N, dtype=torch.float32, device=t.x.device)
    _launch(t.product, partial, tile, columns)
    h = torch.empty(M, N, dtype=t.residual.dtype, device=t.x.device)
    y = torch.empty(M, N, dtype=t.x.dtype, device=t.x.device)
    pdl = backends.supports_pdl(t.x.device)
    with backends.device_of(t.x.device):
        launch_cache.cached(sums.projection_sums_kernel)[(M,)](
            partial_ptr=partial,
            residual_ptr=t.residual,
            norm_weight_ptr=t.norm_weight,
            h_ptr=h,
            y_ptr=y,
            eps=n.eps,
            M=M,
            row_residual=t.residual.stride(0),
            N=N,
            S=shares,
            BS=_power(shares),
            BN=_power(N),
            **n.row_constants(),
            PDL=pdl,
            num_warps=8,
            **({"launch_pdl": True} if pdl else {}),
        )
    return h, y


def _launch(t: inputs.ProjectionInputs, y: Tensor, tile: ProjectionTile, columns: int) -> None:
    """columns: of a share of K; y: [M, N], or of several shares [shares, M, N]."""
    M, K = t.x.shape
    norm = t.norm if t.norm is not None and t.normalises else NormOptions(0.0)
    missing = inputs.MAX_WEIGHTS - len(t.weights)
    weights = [*t.weights, *[None] * missing]
    biases = [*t.biases, *[None] * missing]
    sizes = [0 if w is None else w.shape[0] for w in weights]
    pdl = backends.supports_pdl(t.x.device)
    blocks = sum(-(-n // tile.BN) for n in (sizes[:1] if t.glu else sizes))
    tensors = {f"w{i}_ptr": w for i, w in enumerate(weights)}
    tensors |= {f"b{i}_ptr": b for i, b in enumerate(biases)}
    with backends.device_of(t.x.device):
        launch_cache.cached(step.projection_step_kernel)[blocks, -(-K // columns)](
            x_ptr=t.x,
            **tensors,
            norm_weight_ptr=t.norm_weight if t.normalises else None,
            residual_ptr=t.residual,
            y_ptr=y,
            eps=norm.eps,
            M=M,
            **{f"N{i}": n for i, n in enumerate(sizes)},
            row_x=t.x.stride(0),
            row_y=y.stride(-2),
            row_residual=0 if t.residual is None else t.residual.stride(0),
            K=K,
            ONE=M == 1,
            BM=tile.BM,
            BN=tile.BN,
            BK=tile.BK,
            NORM=t.normalises,
            **norm.row_constants(),
            GLU=t.glu,
            COLUMNS=columns,
            X_LEFT=tile.x_left,
            PDL=pdl,
            PREFETCH=pdl and M <= PREFETCH_ROWS and _in_words(t),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **({"launch_pdl": True} if pdl else {}),
        )
