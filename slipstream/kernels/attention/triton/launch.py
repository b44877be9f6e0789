"""Launches of attention and its gradient: no synchronisation, nothing that depends on lengths.

Memory beyond results: two float32 numbers a query and head on the way back; with gates two more a
key and head both ways, and one a query and one a key for their gradient.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention import dropout
from slipstream.kernels.attention.cache import Cache
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.triton import decode_launch
from slipstream.kernels.attention.triton.backward import (
    softmax_delta_kernel,
    softmax_dkv_kernel,
    softmax_dq_kernel,
)
from slipstream.kernels.attention.triton.forward import softmax_fwd_kernel
from slipstream.kernels.attention.triton.gates import (
    softmax_gate_grad_kernel,
    softmax_gate_sums_kernel,
)
from slipstream.kernels.attention.triton.launch_utils import (
    bound,
    device_of,
    factor_and_cap,
    fp32_dot_precision,
    positive,
    tiles_of,
    unit_and_strides,
)
from slipstream.kernels.attention.triton.tiles import Tile, Tiles
from slipstream.runtime.launch_cache import cached

# rows of the kernels that are no attention, and tokens of a gate at a time
_DELTA_ROWS = 32
_GATES = 256


def forward(terms: AttentionInputs, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T], float32."""
    terms, options, _ = ready(terms, options)
    q, v = terms.q, terms.v
    B, T, H, _ = q.shape
    if decode_launch.is_supported(terms) and not options.dropout:
        return decode_launch.decode(
            Cache(q, terms.k, v, terms.lengths, sinks=terms.sinks, slopes=terms.slopes), options
        )
    o = q.new_empty(B, T, H, v.shape[-1])
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    tile = _tiles_of(terms, options).forward
    with device_of(q.device):
        sums = _gate_sums(terms)
        cached(softmax_fwd_kernel)[_grid(terms, tile.BM, H)](
            q,
            terms.k,
            v,
            o,
            lse,
            *sums,
            terms.sinks,
            *_rest(terms, options, _tiles(terms, tile.BM), scaled=False),
            HAS_SINKS=terms.sinks is not None,
            **_flags(terms, options, tile),
        )
    return o, lse


def backward(
    terms: AttentionInputs,
    options: AttentionOptions,
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype."""
    terms, options, sign = ready(terms, options)
    q, k, v = terms.q, terms.k, terms.v
    B, T, H, _ = q.shape
    do = torch.zeros_like(o) if do is None else do.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    size = B, H, -(-T // 4) * 4
    base, delta = (torch.empty(size, dtype=torch.float32, device=q.device) for _ in range(2))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    rows = columns = None
    if terms.g is not None:
        rows, columns = base.new_empty(B, H, T), base.new_empty(k.shape[0], H, k.shape[1])
    tiles = _tiles_of(terms, options)
    with device_of(q.device):
        row_sums(o, do, lse, dlse, base, delta)
        sums = _gate_sums(terms)
        cached(softmax_dq_kernel)[_grid(terms, tiles.dq.BM, H)](
            q,
            k,
            v,
            do,
            dq,
            base,
            delta,
            rows,
            *sums,
            *_rest(terms, options, _tiles(terms, tiles.dq.BM)),
            **_flags(terms, options, tiles.dq),
        )
        for tile, *parts in _parts(tiles):
            cached(softmax_dkv_kernel)[_grid(terms, tile.BN, k.shape[2], of_keys=True)](
                q,
                k,
                v,
                do,
                dk,
                dv,
                base,
                delta,
                columns,
                *sums,
                *_rest(terms, options, _tiles(terms, tile.BN, of_keys=True)),
                GROUPED=k.shape[2] != H,
                HAS_DK=parts[0],
                HAS_DV=parts[1],
                **_flags(terms, options, tile),
            )
        grads = {"q": dq if sign == 1 else dq * sign, "k": dk, "v": dv}
        if terms.g is not None:
            grads["g"] = _gate_gradient(terms, rows, columns)
    if terms.sinks is not None:
        p = (terms.sinks.float()[:, None] - lse).exp()
        p = torch.where(lse == -torch.inf, 0.0, p)
        grads["sinks"] = -(p * delta[..., :T]).sum((0, 2)).to(terms.sinks.dtype)
    return grads


def _parts(tiles: Tiles) -> list[tuple[Tile, bool, bool]]:
    """The launches for the gradients of keys and values: their tiles, and whether each makes dk and
    dv."""
    if tiles.dv is None:
        return [(tiles.dkv, True, True)]
    return [(tiles.dkv, True, False), (tiles.dv, False, True)]


def ready(
    terms: AttentionInputs, options: AttentionOptions
) -> tuple[AttentionInputs, AttentionOptions, int]:
    """As the kernels index them, with a positive scale; the sign is taken from q."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in terms[:3])
    q, options, sign = positive(q, options)
    slopes = terms.slopes
    rest = (None if x is None else x.contiguous() for x in (terms.sinks, terms.cu_q, terms.cu_k))
    sinks, cu_q, cu_k = rest
    terms = AttentionInputs(
        q,
        k,
        v,
        terms.g,
        sinks,
        None if slopes is None else slopes.float().contiguous(),
        cu_q,
        cu_k,
        None if terms.lengths is None else terms.lengths.contiguous(),
        terms.seed,
    )
    return terms, options, sign


def _tiles_of(terms: AttentionInputs, options: AttentionOptions) -> Tiles:
    q, v = terms.q, terms.v
    busy = terms.g is not None or terms.slopes is not None
    busy = busy or options.softcap != 0 or options.left >= 0
    return tiles_of(q.device, q.shape[-1], v.shape[-1], q.element_size(), busy)[0]


def _tiles(terms: AttentionInputs, rows: int, of_keys: bool = False) -> int:
    """An upper bound where lengths are not known: the tiles of all that is packed."""
    total, cu = terms.k.shape[1] if of_keys else terms.q.shape[1], terms.cu_q
    if of_keys:
        cu = terms.cu_k
    return -(-total // rows) if cu is None else total // rows + terms.sequences


def _grid(terms: AttentionInputs, rows: int, heads: int, of_keys: bool = False) -> tuple[int]:
    packed = terms.cu_k if of_keys else terms.cu_q
    return (_tiles(terms, rows, of_keys) * heads * (1 if packed is not None else terms.sequences),)


def _rest(
    terms: AttentionInputs, options: AttentionOptions, tiles: int, scaled: bool = True
) -> tuple:
    """The arguments from slopes_ptr to the strides."""
    q, k, slopes = terms.q, terms.k, terms.slopes
    drops = terms.seed is not None
    return (
        slopes,
        terms.cu_q,
        terms.cu_k,
        terms.lengths,
        terms.seed,
        dropout.threshold(options.dropout) if drops else None,
        dropout.factor(options.dropout) if drops else None,
        *factor_and_cap(options),
        *((options.scale,) if scaled else ()),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        terms.sequences,
        tiles,
        (terms.sequences - 1).bit_length(),
        bound(options.left),
        bound(options.right),
        q.shape[2] // k.shape[2],
        q.shape[2] if slopes is not None and slopes.dim() == 2 else 0,
        *unit_and_strides(*terms[:3])[1],
    )


def _flags(terms: AttentionInputs, options: AttentionOptions, tile: Tile) -> dict[str, Any]:
    q, v = terms.q, terms.v
    D, DV = q.shape[-1], v.shape[-1]
    _, BD, BV = tiles_of(q.device, D, DV, q.element_size())
    return {
        "D": D,
        "DV": DV,
        "BD": BD,
        "BV": BV,
        "BM": tile.BM,
        "BN": tile.BN,
        "UNIT": unit_and_strides(*terms[:3])[0],
        "HAS_SOFTCAP": options.softcap != 0,
        "HAS_SLOPES": terms.slopes is not None,
        "HAS_GATE": terms.g is not None,
        "HAS_LEFT": options.left >= 0,
        "HAS_RIGHT": options.right >= 0,
        "HAS_LENGTHS": terms.lengths is not None,
        "HAS_DROPOUT": terms.seed is not None,
        "PACKED_Q": terms.cu_q is not None,
        "PACKED_K": terms.cu_k is not None,
        "PRECISION": fp32_dot_precision(),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _gate_sums(terms: AttentionInputs) -> tuple[Tensor | None, Tensor | None]:
    g = terms.g
    if g is None:
        return None, None
    B, S, H = g.shape
    high, low = (torch.empty(B, H, S, dtype=torch.float32, device=g.device) for _ in range(2))
    grid = (H * (B if terms.cu_k is None else terms.sequences),)
    cached(softmax_gate_sums_kernel)[grid](
        g, high, low, terms.cu_k, S, H, *g.stride(), C=_GATES, PACKED=terms.cu_k is not None
    )
    return high, low


def _gate_gradient(terms: AttentionInputs, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    assert terms.g is not None
    dg = terms.g.new_empty(terms.g.shape)
    T, H = terms.q.shape[1:3]
    cached(softmax_gate_grad_kernel)[(H * terms.sequences,)](
        rows,
        columns,
        dg,
        terms.cu_q,
        terms.cu_k,
        terms.lengths,
        T,
        terms.k.shape[1],
        H,
        C=_GATES,
        PACKED_Q=terms.cu_q is not None,
        PACKED_K=terms.cu_k is not None,
        HAS_LENGTHS=terms.lengths is not None,
    )
    return dg


def row_sums(
    o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None, base: Tensor, delta: Tensor
) -> None:
    B, T, H, DV = o.shape
    tiles = -(-T // _DELTA_ROWS)
    cached(softmax_delta_kernel)[(tiles * H * B,)](
        o.contiguous(),
        do,
        lse,
        dlse,
        base,
        delta,
        T,
        H,
        tiles,
        DV=DV,
        BV=max(16, 1 << (DV - 1).bit_length()),
        BM=_DELTA_ROWS,
        HAS_DLSE=dlse is not None,
    )
