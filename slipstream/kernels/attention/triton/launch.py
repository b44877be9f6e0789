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
from slipstream.kernels.attention.triton import decode_launch, softmax, wide_launch
from slipstream.kernels.attention.triton import sums as sum_kernels
from slipstream.kernels.attention.triton import tiles as tiling
from slipstream.runtime.launch_cache import cached

# tokens of a gate at a time
_GATES = 256


def forward(inputs: AttentionInputs, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T], float32."""
    inputs, options, _ = tiling.to_kernel_layout(inputs, options)
    q, v = inputs.q, inputs.v
    B, T, H, _ = q.shape
    if decode_launch.is_supported(inputs) and not options.dropout:
        return decode_launch.decode(
            Cache(q, inputs.k, v, inputs.lengths, sinks=inputs.sinks, slopes=inputs.slopes), options
        )
    o = q.new_empty(B, T, H, v.shape[-1])
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    tile = _tiles_of(inputs, options).forward
    with tiling.device_of(q.device):
        outputs = {"o_ptr": o, "lse_ptr": lse, "sinks_ptr": inputs.sinks, "scale": None}
        _launch_queries(inputs, options, tile, outputs | _gate_sums(inputs))
    return o, lse


def backward(
    inputs: AttentionInputs,
    options: AttentionOptions,
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype."""
    inputs, options, sign = tiling.to_kernel_layout(inputs, options)
    q, k, v = inputs.q, inputs.k, inputs.v
    B, T, H, _ = q.shape
    do = torch.zeros_like(o) if do is None else do.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    size = B, H, -(-T // 4) * 4
    base, delta = (torch.empty(size, dtype=torch.float32, device=q.device) for _ in range(2))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    rows = columns = None
    if inputs.g is not None:
        rows, columns = base.new_empty(B, H, T), base.new_empty(k.shape[0], H, k.shape[1])
    with tiling.device_of(q.device):
        sum_kernels.launch_delta(o, do, lse, dlse, base, delta)
        if (wide := wide_launch.tile_for(inputs)) is not None:
            wide_launch.backward(inputs, options, wide, do, base, delta, (dq, dk, dv))
        else:
            _separate(inputs, options, do, base, delta, (dq, dk, dv), (rows, columns))
        grads = {"q": dq if sign == 1 else dq * sign, "k": dk, "v": dv}
        if inputs.g is not None:
            grads["g"] = _gate_gradient(inputs, rows, columns)
    if inputs.sinks is not None:
        grads["sinks"] = tiling.sinks_gradient(inputs.sinks, base[..., :T], delta[..., :T])
    return grads


def _separate(
    inputs: AttentionInputs,
    options: AttentionOptions,
    do: Tensor,
    base: Tensor,
    delta: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    gate_sums: tuple[Tensor | None, Tensor | None],
) -> None:
    """Writes dq by one kernel, dk and dv by another; gate_sums: of the rows and columns of dx."""
    (dq, dk, dv), (rows, columns), k = grads, gate_sums, inputs.k
    tiles = _tiles_of(inputs, options)
    sums = _gate_sums(inputs)
    operands = {
        "do_ptr": do,
        "base_ptr": base,
        "delta_ptr": delta,
        "scale": options.scale,
        **sums,
    }
    _launch_queries(inputs, options, tiles.dq, {**operands, "dq_ptr": dq, "sums_ptr": rows})
    for tile, *outputs in _dkv_launches(tiles):
        cached(softmax.softmax_dkv_kernel)[_grid(inputs, tile.BN, k.shape[2], of_keys=True)](
            dk_ptr=dk,
            dv_ptr=dv,
            sums_ptr=columns,
            **operands,
            **_common(inputs, options, _tiles(inputs, tile.BN, of_keys=True)),
            GROUPED=k.shape[2] != inputs.q.shape[2],
            HAS_DK=outputs[0],
            HAS_DV=outputs[1],
            **_flags(inputs, options, tile),
        )


# of the kernel of queries, those of the forward pass, and those of the gradient
_OUTPUTS = ("o_ptr", "lse_ptr", "sinks_ptr")
_GRADIENTS = ("do_ptr", "dq_ptr", "base_ptr", "delta_ptr", "sums_ptr")


def _launch_queries(
    inputs: AttentionInputs, options: AttentionOptions, tile: tiling.Tile, operands: dict[str, Any]
) -> None:
    """o, or the gradient of q: operands has the arguments of one of the two."""
    cached(softmax.softmax_queries_kernel)[_grid(inputs, tile.BM, inputs.q.shape[2])](
        **dict.fromkeys((*_OUTPUTS, *_GRADIENTS)) | operands,
        **_common(inputs, options, _tiles(inputs, tile.BM)),
        HAS_SINKS=operands.get("sinks_ptr") is not None,
        **_flags(inputs, options, tile),
    )


def _dkv_launches(tiles: tiling.Tiles) -> list[tuple[tiling.Tile, bool, bool]]:
    """The launches for the gradients of keys and values: their tiles, and whether each makes dk and
    dv."""
    if tiles.dv is None:
        return [(tiles.dkv, True, True)]
    return [(tiles.dkv, True, False), (tiles.dv, False, True)]


def _tiles_of(inputs: AttentionInputs, options: AttentionOptions) -> tiling.Tiles:
    q, v = inputs.q, inputs.v
    has_bias = inputs.g is not None or inputs.slopes is not None
    has_bias = has_bias or options.softcap != 0 or options.left >= 0
    return tiling.tiles_for(q.device, q.shape[-1], v.shape[-1], q.element_size(), has_bias)[0]


def _tiles(inputs: AttentionInputs, rows: int, of_keys: bool = False) -> int:
    """An upper bound where lengths are not known: the tiles of all that is packed."""
    total, cu = inputs.k.shape[1] if of_keys else inputs.q.shape[1], inputs.cu_q
    if of_keys:
        cu = inputs.cu_k
    return -(-total // rows) if cu is None else total // rows + inputs.sequences


def _grid(inputs: AttentionInputs, rows: int, heads: int, of_keys: bool = False) -> tuple[int]:
    packed = inputs.cu_k if of_keys else inputs.cu_q
    return (
        _tiles(inputs, rows, of_keys) * heads * (1 if packed is not None else inputs.sequences),
    )


def _common(inputs: AttentionInputs, options: AttentionOptions, tiles: int) -> dict[str, Any]:
    """Arguments that the kernels of forward and backward take."""
    q, k, slopes = inputs.q, inputs.k, inputs.slopes
    drops = inputs.seed is not None
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": inputs.v,
        "slopes_ptr": slopes,
        **tiling.common_args(inputs, options),
        "seed_ptr": inputs.seed,
        "threshold": dropout.threshold(options.dropout) if drops else None,
        "keep_scale": dropout.factor(options.dropout) if drops else None,
        "T": q.shape[1],
        "S": k.shape[1],
        "H": q.shape[2],
        "N": inputs.sequences,
        "tiles": tiles,
        "search_steps": (inputs.sequences - 1).bit_length(),
        "group": q.shape[2] // k.shape[2],
        "stride_slope": q.shape[2] if slopes is not None and slopes.dim() == 2 else 0,
        **dict(zip(tiling.STRIDES, tiling.unit_and_strides(*inputs[:3])[1])),
    }


def _flags(inputs: AttentionInputs, options: AttentionOptions, tile: tiling.Tile) -> dict[str, Any]:
    q, v = inputs.q, inputs.v
    D, DV = q.shape[-1], v.shape[-1]
    _, BD, BV = tiling.tiles_for(q.device, D, DV, q.element_size())
    return {
        "D": D,
        "DV": DV,
        "BD": BD,
        "BV": BV,
        "BM": tile.BM,
        "BN": tile.BN,
        "UNIT": tiling.unit_and_strides(*inputs[:3])[0],
        "HAS_SOFTCAP": options.softcap != 0,
        "HAS_SLOPES": inputs.slopes is not None,
        "HAS_GATE": inputs.g is not None,
        "HAS_LEFT": options.left >= 0,
        "HAS_RIGHT": options.right >= 0,
        "HAS_LENGTHS": inputs.lengths is not None,
        "HAS_DROPOUT": inputs.seed is not None,
        "PACKED_Q": inputs.cu_q is not None,
        "PACKED_K": inputs.cu_k is not None,
        "PRECISION": tiling.fp32_dot_precision(),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _gate_sums(inputs: AttentionInputs) -> dict[str, Tensor | None]:
    """Arguments of the kernels, high_ptr and low_ptr."""
    g = inputs.g
    if g is None:
        return {"high_ptr": None, "low_ptr": None}
    B, S, H = g.shape
    high, low = (torch.empty(B, H, S, dtype=torch.float32, device=g.device) for _ in range(2))
    grid = (H * (B if inputs.cu_k is None else inputs.sequences),)
    cached(sum_kernels.softmax_gate_sums_kernel)[grid](
        g_ptr=g,
        high_ptr=high,
        low_ptr=low,
        cu_ptr=inputs.cu_k,
        S=S,
        H=H,
        **dict(zip(("stride_b", "stride_t", "stride_h"), g.stride())),
        C=_GATES,
        PACKED=inputs.cu_k is not None,
    )
    return {"high_ptr": high, "low_ptr": low}


def _gate_gradient(inputs: AttentionInputs, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    assert inputs.g is not None
    dg = inputs.g.new_empty(inputs.g.shape)
    T, H = inputs.q.shape[1:3]
    cached(sum_kernels.softmax_gate_grad_kernel)[(H * inputs.sequences,)](
        rows_ptr=rows,
        columns_ptr=columns,
        dg_ptr=dg,
        cu_q_ptr=inputs.cu_q,
        cu_k_ptr=inputs.cu_k,
        lengths_ptr=inputs.lengths,
        T=T,
        S=inputs.k.shape[1],
        H=H,
        C=_GATES,
        PACKED_Q=inputs.cu_q is not None,
        PACKED_K=inputs.cu_k is not None,
        HAS_LENGTHS=inputs.lengths is not None,
    )
    return dg
