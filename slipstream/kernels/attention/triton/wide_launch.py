"""Launches of wide.py, as many as its workspace asks for: by the sizes of tensors alone.

Memory beyond results: the workspace, WORKSPACE_BYTES or one tile of queries; where the queries of a
pair of sequence and head of keys do not fit, float32 sums of dk or dv of one pair too.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention import dropout
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.plan import MAX_COLUMNS
from slipstream.kernels.attention.triton import tiles as tiling
from slipstream.kernels.attention.triton import wide
from slipstream.runtime.launch_cache import cached


def tile_for(inputs: AttentionInputs) -> tiling.WideTile | None:
    """The tile of calls whose gradients these kernels make: wide heads in 16 bits, without gates,
    which want sums of dx by rows and columns, and of widths that need no second term of dx."""
    q, v = inputs.q, inputs.v
    D, DV = q.shape[-1], v.shape[-1]
    if inputs.g is not None or max(D, DV) <= MAX_COLUMNS or D % 8 or DV % 8:
        return None
    return tiling.WIDE.get((tiling.family_of(q.device), q.element_size()))


def backward(
    inputs: AttentionInputs,
    options: AttentionOptions,
    tile: tiling.WideTile,
    do: Tensor,
    base: Tensor,
    delta: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Writes dq, dk and dv; base and delta [B, H, T rounded up to 4]."""
    q, k, v = inputs[:3]
    (_, T, H, D), (_, S, HKV, DV) = q.shape, v.shape
    N, group = inputs.sequences, H // HKV
    packed, packed_k = inputs.cu_q is not None, inputs.cu_k is not None
    pairs = HKV if packed else HKV * N
    tiles = T // tile.BM + N if packed else -(-T // tile.BM)
    column_tiles = -(-S // tile.BN)
    # of keys of a pair: where they are rows and queries packed, those of all sequences
    key_tiles = S // tile.BN + N if packed_k else column_tiles * (N if packed else 1)
    rows, pairs_at_once = fit(tiles, pairs, column_tiles, group, tile, q.element_size())
    shape = pairs_at_once * group, rows * tile.BM, column_tiles * tile.BN
    p, dx = q.new_empty(shape), q.new_empty(shape)
    # where tiles fit there is one launch, which reads and writes none
    keys = 1 if rows >= tiles else S * (N if packed and not packed_k else 1)
    dk_sums, dv_sums = (
        torch.empty(pairs_at_once, keys, x, dtype=torch.float32, device=q.device) for x in (D, DV)
    )
    common = _common(inputs, options, tile)
    unit, strides = tiling.unit_and_strides(q, k, v)
    stride = dict(zip(tiling.STRIDES, strides))
    of_y = {f"stride_y{x}": stride[f"stride_q{x}"] for x in "bth"}
    # as q: rows of do are H DV long
    of_do = {"stride_yb": T * H, "stride_yt": H, "stride_yh": 1}
    dq, dk, dv = grads
    for first_pair in range(0, pairs, pairs_at_once):
        count = min(pairs_at_once, pairs - first_pair)
        heads = count * group
        for first_tile in range(0, tiles, rows):
            tile_count = min(rows, tiles - first_tile)
            place = {
                "first_pair": first_pair,
                "first_tile": first_tile,
                "rows": tile_count,
                "column_tiles": column_tiles,
            }
            cached(wide.softmax_weights_kernel)[(column_tiles * tile_count * heads,)](
                q_ptr=q,
                k_ptr=k,
                v_ptr=v,
                do_ptr=do,
                p_ptr=p,
                dx_ptr=dx,
                base_ptr=base,
                delta_ptr=delta,
                **_of_scores(inputs, options),
                **stride,
                **place,
                **common,
                D=D,
                DV=DV,
                BK=tile.BK,
                UNIT=unit,
                HAS_SOFTCAP=options.softcap != 0,
                HAS_SLOPES=inputs.slopes is not None,
                HAS_DROPOUT=inputs.seed is not None,
                num_stages=tile.stages[0],
                num_warps=tile.warps[0],
            )
            of_products = {
                "BS": tile.BS,
                "BC": tile.BC,
                "num_stages": tile.stages[1],
                "num_warps": tile.warps[1],
            }
            blocks = -(-D // tile.BC)
            cached(wide.softmax_wide_dq_kernel)[(blocks * heads * tile_count,)](
                dx_ptr=dx,
                k_ptr=k,
                dq_ptr=dq,
                scale=options.scale,
                **{name: x for name, x in stride.items() if name.startswith("stride_k")},
                **place,
                heads=heads,
                **common,
                D=D,
                UNIT=unit,
                **of_products,
            )
            for x, y, out, sums, scale, ystride, width, each in (
                (dx, q, dk, dk_sums, options.scale, of_y, D, unit),
                (p, do, dv, dv_sums, 1.0, of_do, DV, DV),
            ):
                blocks = -(-width // tile.BC)
                cached(wide.softmax_wide_dkv_kernel)[(blocks * key_tiles * count,)](
                    x_ptr=x,
                    y_ptr=y,
                    out_ptr=out,
                    sums_ptr=sums,
                    scale=scale,
                    tiles=key_tiles,
                    **ystride,
                    **place,
                    adds=int(first_tile > 0),
                    keeps=int(first_tile + tile_count < tiles),
                    **common,
                    D=width,
                    UNIT=each,
                    **of_products,
                )


def fit(
    tiles: int, pairs: int, column_tiles: int, group: int, tile: tiling.WideTile, element: int
) -> tuple[int, int]:
    """Tiles of queries of a pair, and pairs, that the workspace holds at a time."""
    each = 2 * group * tile.BM * column_tiles * tile.BN * element
    fitting = max(1, tiling.WORKSPACE_BYTES // each)
    return (fitting, 1) if fitting < tiles else (tiles, min(pairs, fitting // tiles))


def _common(
    inputs: AttentionInputs, options: AttentionOptions, tile: tiling.WideTile
) -> dict[str, Any]:
    """Arguments of all kernels."""
    q, k = inputs.q, inputs.k
    return {
        "cu_q_ptr": inputs.cu_q,
        "cu_k_ptr": inputs.cu_k,
        "lengths_ptr": inputs.lengths,
        "T": q.shape[1],
        "S": k.shape[1],
        "H": q.shape[2],
        "N": inputs.sequences,
        "search_steps": (inputs.sequences - 1).bit_length(),
        "left": tiling.bound(options.left),
        "right": tiling.bound(options.right),
        "group": q.shape[2] // k.shape[2],
        "BM": tile.BM,
        "BN": tile.BN,
        "HAS_LEFT": options.left >= 0,
        "HAS_RIGHT": options.right >= 0,
        "HAS_LENGTHS": inputs.lengths is not None,
        "PACKED_Q": inputs.cu_q is not None,
        "PACKED_K": inputs.cu_k is not None,
        "PRECISION": tiling.fp32_dot_precision(),
    }


def _of_scores(inputs: AttentionInputs, options: AttentionOptions) -> dict[str, Any]:
    slopes, drops = inputs.slopes, inputs.seed is not None
    factor, cap = tiling.factor_and_cap(options)
    return {
        "slopes_ptr": slopes,
        "seed_ptr": inputs.seed,
        "threshold": dropout.threshold(options.dropout) if drops else None,
        "keep_scale": dropout.factor(options.dropout) if drops else None,
        "factor": factor,
        "cap": cap,
        "stride_slope": inputs.q.shape[2] if slopes is not None and slopes.dim() == 2 else 0,
    }
