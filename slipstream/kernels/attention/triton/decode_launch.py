"""Launches over a cache: how many shares the keys are cut into, and where new keys go."""

import torch
from torch import Tensor

from slipstream.kernels.attention import cache, inputs
from slipstream.kernels.attention.triton import decode as kernels
from slipstream.kernels.attention.triton import tiles as tiling
from slipstream.runtime import backends, launch_cache

# queries times heads of a group up to which cutting the keys is worth it
MAX_DECODE_ROWS = 64


def is_supported(inputs: inputs.AttentionInputs) -> bool:
    """Whether a call is like decoding: few queries of each sequence, no gate."""
    rows = inputs.q.shape[1] * (inputs.q.shape[2] // inputs.k.shape[2])
    return inputs.cu_q is None and inputs.g is None and rows <= MAX_DECODE_ROWS


def choose_splits(
    device: torch.device, programs: int, capacity: int, BN: int, per_multiprocessor: int
) -> int:
    """From the size of the cache alone, so that no length is waited for. As many programs as
    fit."""
    splits_to_fill = per_multiprocessor * tiling.multiprocessors(device) // programs
    # a share has four tiles of keys or more
    return max(1, min(splits_to_fill, capacity // (4 * BN), 64))


def decode(call: cache.Cache, options: inputs.AttentionOptions) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T], float32."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in call[:3])
    B, T, H, D = q.shape
    HKV, DV = k.shape[2], v.shape[-1]
    all_tiles, BD, BV = tiling.tiles_for(q.device, D, DV, q.element_size())
    in_words = call.k_scale is not None and _fit_words(q, k, v)
    tile = all_tiles.decode
    if in_words:
        BD, BV = max(BD, 64), max(BV, 64)  # a product takes a quarter, 16 channels at least
        tile = tiling.rounded(tiling.family_of(q.device), max(BD, BV), tile)
    group = H // HKV
    tiles = -(-T * group // tile.BM)
    # two a multiprocessor, or four with narrow heads (bench/results/attention_decode_gpu.csv)
    fill = 8 // tile.warps if in_words else 4 if max(BD, BV) <= 64 else 2
    splits = choose_splits(q.device, tiles * HKV * B, call.capacity, tile.BN, fill)
    partial_o = torch.empty(splits, B, T, H, DV, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(splits, B, H, T, dtype=torch.float32, device=q.device)
    q, options, _ = tiling.positive(q, options)
    float8 = in_words and k.dtype == torch.float8_e4m3fn
    if in_words:
        k, v = k.view(torch.int32), v.view(torch.int32)
    unit, strides = tiling.unit_and_strides(q, k, v)
    factor, cap = tiling.factor_and_cap(options)
    slopes, table = call.slopes, call.table
    k_scale, v_scale = call.k_scale, call.v_scale
    if k_scale is not None and v_scale is not None:
        same = k_scale.stride() == v_scale.stride() and k_scale.stride(2) == 1
        k_scale, v_scale = (x if same else x.contiguous() for x in (k_scale, v_scale))
    slopes = None if slopes is None else slopes.float().contiguous()
    with tiling.device_of(q.device):
        launch_cache.cached(kernels.softmax_decode_kernel)[(splits * tiles * HKV * B,)](
            q_ptr=q,
            k_ptr=k,
            v_ptr=v,
            o_ptr=partial_o,
            lse_ptr=partial_lse,
            slopes_ptr=slopes,
            lengths_ptr=call.lengths,
            rows_ptr=call.rows,
            leftpad_ptr=call.leftpad,
            table_ptr=table,
            k_scale_ptr=k_scale,
            v_scale_ptr=v_scale,
            factor=factor,
            cap=cap,
            T=T,
            HKV=HKV,
            B=B,
            tiles=tiles,
            splits=splits,
            left=tiling.bound(options.left),
            right=tiling.bound(options.right),
            group=group,
            capacity=call.capacity,
            cache_rows=k.shape[0],
            stride_slope=H if slopes is not None and slopes.dim() == 2 else 0,
            stride_table=0 if table is None else table.stride(0),
            **dict(zip(tiling.STRIDES, strides)),
            stride_sb=None if k_scale is None else k_scale.stride(0),
            stride_st=None if k_scale is None else k_scale.stride(1),
            D=D,
            DV=DV,
            BD=BD,
            BV=BV,
            BM=tile.BM,
            BN=tile.BN,
            UNIT=unit,
            PAGE=0 if table is None else k.shape[1],
            HAS_SOFTCAP=options.softcap != 0,
            HAS_SLOPES=slopes is not None,
            HAS_LEFT=options.left >= 0,
            HAS_RIGHT=options.right >= 0,
            HAS_LENGTHS=call.lengths is not None,
            HAS_ROWS=call.rows is not None and table is None,
            HAS_LEFTPAD=call.leftpad is not None,
            WORDS=in_words,
            FLOAT8=float8,
            # by instructions of NVIDIA's GPUs
            ASM=in_words and not backends.INTERPRETED and torch.version.hip is None,
            PRECISION=tiling.fp32_dot_precision(),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return combine(partial_o, partial_lse, q, call.sinks, BV)


def combine(
    partial_o: Tensor, partial_lse: Tensor, q: Tensor, sinks: Tensor | None, BV: int
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T] of those of shares of the keys."""
    splits, B, T, H, DV = partial_o.shape
    o, lse = q.new_empty(B, T, H, DV), partial_lse.new_empty(B, H, T)
    launch_cache.cached(kernels.softmax_combine_kernel)[(B * T * H,)](
        partial_o_ptr=partial_o,
        partial_lse_ptr=partial_lse,
        sinks_ptr=sinks,
        o_ptr=o,
        lse_ptr=lse,
        T=T,
        H=H,
        B=B,
        splits=splits,
        DV=DV,
        BV=BV,
        # 1, 4, 16 or 64: each is a kernel of its own
        BS=4 ** -(-(splits - 1).bit_length() // 2),
        HAS_SINKS=sinks is not None,
    )
    return o, lse


def _fit_words(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether decode_words.py takes a cache in 8 bits."""
    sizes = [n for x in (k, v) for n in (x.shape[-1], x.storage_offset(), *x.stride()[:3])]
    return q.element_size() == 2 and all(n % 4 == 0 for n in sizes)


def _apart(x: Tensor, *caches: Tensor) -> Tensor:
    """x, contiguous; a copy where it lies in a cache: another program may write there first."""
    y = x.contiguous()
    memory = y.untyped_storage()._cdata
    return y.clone() if any(memory == c.untyped_storage()._cdata for c in caches) else y


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    rows: Tensor | None,
    table: Tensor | None,
) -> Tensor:
    """Writes k, v [B, T, HKV, ...] behind the `lengths` keys that there are, and returns the
    lengths after that; a negative one stays, and nothing is written for it."""
    B, T, HKV, D = k.shape
    after = torch.empty_like(lengths)
    DV, size = v.shape[-1], k_cache.shape[1]
    with tiling.device_of(k.device):
        launch_cache.cached(kernels.softmax_append_kernel)[(HKV * T * B,)](
            k_ptr=k_cache,
            v_ptr=v_cache,
            new_k_ptr=_apart(k, k_cache, v_cache),
            new_v_ptr=_apart(v, k_cache, v_cache),
            lengths_ptr=lengths,
            rows_ptr=rows,
            table_ptr=table,
            after_ptr=after,
            T=T,
            HKV=HKV,
            capacity=size if table is None else size * table.shape[1],
            cache_rows=k_cache.shape[0],
            stride_table=0 if table is None else table.stride(0),
            **dict(zip(tiling.STRIDES[3:], (*k_cache.stride()[:3], *v_cache.stride()[:3]))),
            D=D,
            DV=DV,
            BX=max(16, 1 << (max(D, DV) - 1).bit_length()),
            PAGE=0 if table is None else size,
            HAS_ROWS=rows is not None and table is None,
        )
    return after
