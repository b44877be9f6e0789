"""Launches of attention and its gradient for sm_90: no synchronisation, nothing that depends on
lengths. TMA reads q, k, v and do where they lie, if their strides let it; else they are copied.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.sm90.bwd_dkv import softmax_dkv_sm90_kernel
from slipstream.kernels.attention.sm90.bwd_dq import softmax_dq_sm90_kernel
from slipstream.kernels.attention.sm90.bwd_fused_launch import BUFFERS, fused
from slipstream.kernels.attention.sm90.forward import softmax_fwd_sm90_kernel
from slipstream.kernels.attention.sm90.forward_load import panels
from slipstream.kernels.attention.sm90.tiles import (
    FWD_SECTION_BYTES,
    MIXED_WIDTHS,
    REGISTERS,
    SECTION_BYTES,
    TILES,
    Tile,
)
from slipstream.kernels.attention.triton import decode_launch
from slipstream.kernels.attention.triton import launch as triton_launch
from slipstream.kernels.attention.triton.delta import launch_delta
from slipstream.kernels.attention.triton.launch_utils import (
    bound,
    device_of,
    factor_and_cap,
    multiprocessors,
    sinks_gradient,
    to_kernel_layout,
)
from slipstream.kernels.primitives.gluon_compat import TensorDescriptor, gl
from slipstream.runtime.launch_cache import cache, cached

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def forward(inputs: AttentionInputs, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """o [B, T, H, D] in q's dtype and lse [B, H, T], float32."""
    if decode_launch.is_supported(inputs):
        return triton_launch.forward(inputs, options)
    inputs, options, _ = to_kernel_layout(inputs, options)
    q, k, v = inputs[:3]
    B, T, H, D = q.shape
    DV = v.shape[-1]
    tile = MIXED_WIDTHS[D, DV] if D != DV else TILES[D].forward
    width = D // panels(D)
    o = q.new_empty(B, T, H, DV)
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    matrices = _matrix("q", q, 64, width) | _matrix("k", k, tile.B, width) | _matrix("v", v, tile.B)
    grid, sizes = _sizes(inputs, tile, section=_section(inputs, options))
    varlen = any(x is not None for x in (inputs.cu_q, inputs.cu_k, inputs.lengths))
    uneven = max(options.left, options.right) >= 0 or varlen
    dynamic = uneven and sizes["units"] > grid[0] and tile.persistent
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if dynamic else None
    with device_of(q.device):
        cached(softmax_fwd_sm90_kernel)[grid](
            **matrices,
            o_ptr=o,
            lse_ptr=lse,
            sinks_ptr=inputs.sinks,
            counter_ptr=counter,
            **_common(inputs, options),
            **sizes,
            NC=tile.rows // 64,
            BN=tile.B,
            D=D,
            DV=DV,
            ST=tile.buffers[0],
            Q_STAGES=tile.queries,
            **_flags(inputs, options, dynamic),
        )
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
    assert inputs.q.shape[-1] == inputs.v.shape[-1]  # dispatch.py's OF_GRADIENTS
    inputs, options, _ = to_kernel_layout(inputs, options)
    q, k, v = inputs[:3]
    do = torch.zeros_like(o) if do is None else do.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    with device_of(q.device):
        if q.shape[-1] in BUFFERS:
            flags = _flags(inputs._replace(sinks=None), options)
            common = _common(inputs, options)
            rows = fused(inputs, options, o, lse, do, dlse, dq, dk, dv, _matrix, common, flags)
        else:
            rows = _row_sums(o, lse, do, dlse)
            _dq(inputs, options, do, dq, *rows)
            _dkv(inputs, options, do, dk, dv, *rows)
    grads = {"q": dq, "k": dk, "v": dv}
    if inputs.sinks is not None:
        grads["sinks"] = sinks_gradient(inputs.sinks, *rows)
    return grads


def backward_of_rotated(
    inputs: AttentionInputs,
    options: AttentionOptions,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Gradients of q, k and v before q and k were turned by the tables [B or 1, T, D / 2], as heads
    of one tensor [B, T, H + 2 HKV, D], for widths in BUFFERS."""
    inputs, options, _ = to_kernel_layout(inputs, options)
    q, HKV = inputs.q, inputs.k.shape[2]
    B, T, H, D = q.shape
    grads = torch.empty(B, T, H + 2 * HKV, D, dtype=q.dtype, device=q.device)
    dq, dk, dv = grads.split([H, HKV, HKV], 2)
    do, tables = do.contiguous(), (cos.contiguous(), sin.contiguous())
    common, flags = _common(inputs, options), _flags(inputs, options)
    with device_of(q.device):
        fused(inputs, options, o, lse, do, None, dq, dk, dv, _matrix, common, flags, tables)
    return grads


def _section(inputs: AttentionInputs, options: AttentionOptions) -> int:
    """How many pairs of sequence and head the forward works on at a time: as few as keep all
    programs busy, two where their units differ in work, so that keys and values stay close."""
    k, v = inputs.k, inputs.v
    masked = max(options.left, options.right) >= 0
    group = inputs.q.shape[2] // k.shape[2]
    pair = k.shape[1] * (k.shape[3] + v.shape[3]) * k.element_size()
    return max(1 + masked, FWD_SECTION_BYTES * group // pair)


def _row_sums(o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """base and delta [B, H, T], in rows that begin at 16 bytes."""
    B, H, T = lse.shape
    capacity = B, H, -(-T // 4) * 4
    base, delta = (torch.empty(capacity, dtype=torch.float32, device=o.device) for _ in range(2))
    launch_delta(o, do, lse, dlse, base, delta)
    return base[..., :T], delta[..., :T]


def _dq(
    inputs: AttentionInputs,
    options: AttentionOptions,
    do: Tensor,
    dq: Tensor,
    base: Tensor,
    delta: Tensor,
) -> None:
    D = inputs.q.shape[-1]
    tile = TILES[D].dq
    assert tile is not None
    grid, sizes = _sizes(inputs, tile)
    cached(softmax_dq_sm90_kernel)[grid](
        **_matrix("q", inputs.q, 64),
        **_matrix("k", inputs.k, tile.B),
        **_matrix("v", inputs.v, tile.B),
        **_matrix("do", do, 64),
        dq_ptr=dq,
        base_ptr=base,
        delta_ptr=delta,
        scale=options.scale,
        **_common(inputs, options),
        **sizes,
        BN=tile.B,
        D=D,
        KS=tile.buffers[0],
        VS=tile.buffers[1],
        **_flags(inputs, options),
    )


def _dkv(
    inputs: AttentionInputs,
    options: AttentionOptions,
    do: Tensor,
    dk: Tensor,
    dv: Tensor,
    base: Tensor,
    delta: Tensor,
) -> None:
    D = inputs.q.shape[-1]
    tile = TILES[D].dkv
    assert tile is not None
    grid, sizes = _sizes(inputs, tile, of_keys=True)
    cached(softmax_dkv_sm90_kernel)[grid](
        **_matrix("q", inputs.q, tile.B),
        **_matrix("k", inputs.k, 64),
        **_matrix("v", inputs.v, 64),
        **_matrix("do", do, tile.B),
        dk_ptr=dk,
        dv_ptr=dv,
        base_ptr=base,
        delta_ptr=delta,
        scale=options.scale,
        **_common(inputs, options),
        **sizes,
        BM=tile.B,
        D=D,
        ST=tile.buffers[0],
        **_flags(inputs, options),
    )


def _matrix(name: str, x: Tensor, rows: int, width: int | None = None) -> dict[str, Any]:
    """Arguments of a kernel: desc_name, x [B, T, H, D] as a matrix in tiles of `rows` by `width` or
    D, and where a batch and a head begin in it, name_rb, name_rh and name_ch."""
    B, T, H, D = x.shape
    if not _is_tma_readable(x):
        x = x.clone(memory_format=torch.contiguous_format)  # contiguous() may leave it where it is
    b, t, h, _ = x.stride()
    t = H * D if T == 1 else t
    b, h = b if B > 1 else 0, h if H > 1 else 0
    rb, (rh, ch) = b // t, (h // t, 0) if h % t == 0 else (0, h)
    shape = [(B - 1) * rb + (H - 1) * rh + T, (H - 1) * ch + D]
    rows, width = int(rows), int(width or D)
    layout = _layout(rows, width, x.dtype)
    desc = TensorDescriptor(x, shape, [t, 1], [rows, width], layout)
    return {f"desc_{name}": desc, f"{name}_rb": rb, f"{name}_rh": rh, f"{name}_ch": ch}


def _is_tma_readable(x: Tensor) -> bool:
    """Whether TMA can read x as it lies, with heads beside one another or one after another."""
    B, T, H, D = x.shape
    b, t, h, d = x.stride()
    if T == 1:
        return x.is_contiguous() and x.data_ptr() % 16 == 0
    if d != 1 or t < D or t % 8 or x.data_ptr() % 16 or (B > 1 and b % t):
        return False
    return H == 1 or h % t == 0 or h * (H - 1) + D <= t


@cache
def _layout(rows: int, D: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, D], _DTYPES[dtype])


def _common(inputs: AttentionInputs, options: AttentionOptions) -> dict[str, Any]:
    """Arguments that all kernels take."""
    factor, cap = factor_and_cap(options)
    return {
        "cu_q_ptr": inputs.cu_q,
        "cu_k_ptr": inputs.cu_k,
        "lengths_ptr": inputs.lengths,
        "factor": factor,
        "cap": cap,
        "left": bound(options.left),
        "right": bound(options.right),
    }


def _sizes(
    inputs: AttentionInputs,
    tile: Tile,
    of_keys: bool = False,
    section: int = 0,
) -> tuple[tuple[int], dict[str, int]]:
    """The grid and the arguments from T to units. section: pairs at a time, 0 for what SECTION
    holds."""
    q, k = inputs.q, inputs.k
    T, S, H, HKV, N = q.shape[1], k.shape[1], q.shape[2], k.shape[2], inputs.sequences
    total, cu, heads = (S, inputs.cu_k, HKV) if of_keys else (T, inputs.cu_q, H)
    # an upper bound where lengths are not known: the tiles of all that is packed
    tiles = -(-total // tile.rows) if cu is None else total // tile.rows + N
    pairs = heads if cu is not None else heads * N
    streamed_rows = (T * H // HKV) if of_keys else -(-S * HKV // H)
    section = section or max(
        1, SECTION_BYTES // (streamed_rows * 2 * q.shape[-1] * q.element_size())
    )
    units = tiles * pairs
    sizes = {
        "T": T,
        "S": S,
        "H": H,
        "N": N,
        "group": H // HKV,
        "tiles": tiles,
        "search_steps": (N - 1).bit_length(),
        "section": min(section, pairs),
        "units": units,
    }
    return (min(units, multiprocessors(q.device)) if tile.persistent else units,), sizes


def _flags(
    inputs: AttentionInputs, options: AttentionOptions, dynamic: bool = False
) -> dict[str, Any]:
    """common.py's flags, those of the forward, and registers."""
    features = (
        options.left >= 0,
        options.right >= 0,
        options.softcap != 0,
        inputs.lengths is not None,
        inputs.cu_q is not None,
        inputs.cu_k is not None,
        inputs.sinks is not None,
        dynamic,
    )
    flags = sum(1 << i for i, x in enumerate(features) if x)
    consumer, producer, max_registers = REGISTERS
    registers = {"CONSUMER": consumer, "PRODUCER": producer, "maxnreg": max_registers}
    return {"FLAGS": flags, "num_warps": 4, **registers}
