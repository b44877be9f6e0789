"""Launches over a cache: how many shares the keys are cut into, and where new keys go."""

import torch
from torch import Tensor

from slipstream.kernels.attention.cache import Cache
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.triton.decode import (
    softmax_append_kernel,
    softmax_combine_kernel,
    softmax_decode_kernel,
)
from slipstream.kernels.attention.triton.launch_utils import (
    bound,
    device_of,
    factor_and_cap,
    fp32_dot_precision,
    multiprocessors,
    positive,
    tiles_of,
    unit_and_strides,
)
from slipstream.runtime.launch_cache import cached

# queries times heads of a group up to which cutting the keys is worth it
MAX_DECODE_ROWS = 64
# the least keys of a share in tiles, the most shares
_LEAST, _MOST = 4, 64


def is_supported(terms: AttentionInputs) -> bool:
    """Whether a call is like decoding: few queries of each sequence, no gate."""
    rows = terms.q.shape[1] * (terms.q.shape[2] // terms.k.shape[2])
    return terms.cu_q is None and terms.g is None and rows <= MAX_DECODE_ROWS


def shares(device: torch.device, programs: int, room: int, BN: int, width: int) -> int:
    """From the size of the cache alone, so that no length is waited for. As many programs as fit:
    two a multiprocessor, or four with narrow heads (bench/results/attention_decode_gpu.csv)."""
    wanted = (4 if width <= 64 else 2) * multiprocessors(device) // programs
    return max(1, min(wanted, room // (_LEAST * BN), _MOST))


def decode(call: Cache, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T], float32."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in call[:3])
    B, T, H, D = q.shape
    HKV, DV = k.shape[2], v.shape[-1]
    every, BD, BV = tiles_of(q.device, D, DV, q.element_size())
    tile = every.decode
    group = H // HKV
    tiles = -(-T * group // tile.BM)
    parts = shares(q.device, tiles * HKV * B, call.room, tile.BN, max(BD, BV))
    part = torch.empty(parts, B, T, H, DV, dtype=torch.float32, device=q.device)
    lses = torch.empty(parts, B, H, T, dtype=torch.float32, device=q.device)
    o, lse = q.new_empty(B, T, H, DV), lses.new_empty(B, H, T)
    q, options, _ = positive(q, options)
    unit, strides = unit_and_strides(q, k, v)
    slopes, table = call.slopes, call.table
    slopes = None if slopes is None else slopes.float().contiguous()
    with device_of(q.device):
        cached(softmax_decode_kernel)[(parts * tiles * HKV * B,)](
            q,
            k,
            v,
            part,
            lses,
            slopes,
            call.lengths,
            call.rows,
            call.leftpad,
            table,
            *factor_and_cap(options),
            T,
            HKV,
            B,
            tiles,
            parts,
            bound(options.left),
            bound(options.right),
            group,
            call.room,
            k.shape[0],
            H if slopes is not None and slopes.dim() == 2 else 0,
            0 if table is None else table.stride(0),
            *strides,
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
            PRECISION=fp32_dot_precision(),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        cached(softmax_combine_kernel)[(B * T * H,)](
            part,
            lses,
            call.sinks,
            o,
            lse,
            T,
            H,
            B,
            parts,
            DV=DV,
            BV=BV,
            BS=1 << (parts - 1).bit_length(),
            HAS_SINKS=call.sinks is not None,
        )
    return o, lse


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
    with device_of(k.device):
        cached(softmax_append_kernel)[(HKV * T * B,)](
            k_cache,
            v_cache,
            k.contiguous(),
            v.contiguous(),
            lengths,
            rows,
            table,
            after,
            T,
            HKV,
            size if table is None else size * table.shape[1],
            k_cache.shape[0],
            0 if table is None else table.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            D=D,
            DV=DV,
            BX=max(16, 1 << (max(D, DV) - 1).bit_length()),
            PAGE=0 if table is None else size,
            HAS_ROWS=rows is not None and table is None,
        )
    return after
