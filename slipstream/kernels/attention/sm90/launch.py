"""Launches of attention and its gradient for sm_90: no synchronisation, nothing that depends on
lengths. TMA reads q, k, v and do where they lie, if their strides let it; else they are copied.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention import plan
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.plan import MAX_ROPE_WIDTH, MAX_WIDTH
from slipstream.kernels.attention.sm90 import bwd_dkv, bwd_dq, bwd_fused, decode_latent
from slipstream.kernels.attention.sm90.forward import panels, softmax_fwd_sm90_kernel
from slipstream.kernels.attention.triton import decode_launch
from slipstream.kernels.attention.triton import launch as triton_launch
from slipstream.kernels.attention.triton import sums as sum_kernels
from slipstream.kernels.attention.triton import tiles as tiling
from slipstream.kernels.primitives.sm90 import TensorDescriptor, gl
from slipstream.runtime.backends import sm_count
from slipstream.runtime.launch_cache import cache, cached

# by the width of a head: the fused backward's buffers of queries
BUFFERS = {64: 3, 128: 2}
# queries and keys of a tile of the fused backward
BM, BN = 64, 128
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def forward(inputs: AttentionInputs, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """o [B, T, H, D] in q's dtype and lse [B, H, T], float32."""
    if decode_launch.is_supported(inputs):
        return triton_launch.forward(inputs, options)
    inputs, options, _ = tiling.to_kernel_layout(inputs, options)
    q, k, v = inputs[:3]
    B, T, H, D = q.shape
    DV = v.shape[-1]
    tile = plan.FORWARD[D, DV] if (D, DV) in plan.FORWARD else plan.TILES[D].forward
    width, columns = D // panels(D), min(DV, plan.MAX_COLUMNS)
    o = q.new_empty(B, T, H, DV)
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    matrices = _matrix("q", q, 64, width) | _matrix("k", k, tile.B, width)
    grid, sizes = _sizes(inputs, tile, section=_section(inputs, options))
    varlen = any(x is not None for x in (inputs.cu_q, inputs.cu_k, inputs.lengths))
    uneven = max(options.left, options.right) >= 0 or varlen
    dynamic = uneven and sizes["units"] > grid[0] and tile.persistent
    with tiling.device_of(q.device):
        for o_columns, v_columns in zip(o.split(columns, -1), v.split(columns, -1)):
            counter = torch.zeros(1, dtype=torch.int32, device=q.device) if dynamic else None
            cached(softmax_fwd_sm90_kernel)[grid](
                **matrices,
                **_matrix("v", v_columns, tile.B),
                o_ptr=o_columns,
                lse_ptr=lse,
                sinks_ptr=inputs.sinks,
                counter_ptr=counter,
                **tiling.common_args(inputs, options),
                **sizes,
                NC=tile.rows // 64,
                BN=tile.B,
                D=D,
                DV=columns,
                PITCH=DV,
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
    inputs, options, _ = tiling.to_kernel_layout(inputs, options)
    q, k, v = inputs[:3]
    do = torch.zeros_like(o) if do is None else do.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    with tiling.device_of(q.device):
        if q.shape[-1] in BUFFERS:
            rows = _fused(inputs, options, o, lse, do, dlse, dq, dk, dv)
        else:
            rows = _row_sums(o, lse, do, dlse)
            _separate(inputs, options, do, dq, dk, dv, *rows)
    grads = {"q": dq, "k": dk, "v": dv}
    if inputs.sinks is not None:
        grads["sinks"] = tiling.sinks_gradient(inputs.sinks, *rows)
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
    inputs, options, _ = tiling.to_kernel_layout(inputs, options)
    q, HKV = inputs.q, inputs.k.shape[2]
    B, T, H, D = q.shape
    grads = torch.empty(B, T, H + 2 * HKV, D, dtype=q.dtype, device=q.device)
    dq, dk, dv = grads.split([H, HKV, HKV], 2)
    do, tables = do.contiguous(), (cos.contiguous(), sin.contiguous())
    with tiling.device_of(q.device):
        _fused(inputs, options, o, lse, do, None, dq, dk, dv, tables)
    return grads


def _section(inputs: AttentionInputs, options: AttentionOptions) -> int:
    """How many pairs of sequence and head the forward works on at a time: as few as keep all
    programs busy, two where their units differ in work, so that keys and values stay close."""
    k, v = inputs.k, inputs.v
    masked = max(options.left, options.right) >= 0
    group = inputs.q.shape[2] // k.shape[2]
    pair = k.shape[1] * (k.shape[3] + v.shape[3]) * k.element_size()
    return max(1 + masked, plan.FWD_SECTION_BYTES * group // pair)


def _row_sums(o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """base and delta [B, H, T], in rows that begin at 16 bytes."""
    B, H, T = lse.shape
    capacity = B, H, -(-T // 4) * 4
    base, delta = (torch.empty(capacity, dtype=torch.float32, device=o.device) for _ in range(2))
    sum_kernels.launch_delta(o, do, lse, dlse, base, delta)
    return base[..., :T], delta[..., :T]


def _separate(
    inputs: AttentionInputs,
    options: AttentionOptions,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    base: Tensor,
    delta: Tensor,
) -> None:
    """Writes dq by one kernel, dk and dv by another."""
    D = inputs.q.shape[-1]
    of_q, of_k = plan.TILES[D].dq, plan.TILES[D].dkv
    assert of_q is not None and of_k is not None
    buffers = {"KS": of_q.buffers[0], "VS": of_q.buffers[1]}
    outputs = {"dk_ptr": dk, "dv_ptr": dv}
    for kernel, tile, specific in (
        (bwd_dq.softmax_dq_sm90_kernel, of_q, {"dq_ptr": dq, "BN": of_q.B, **buffers}),
        (bwd_dkv.softmax_dkv_sm90_kernel, of_k, {**outputs, "BM": of_k.B, "ST": of_k.buffers[0]}),
    ):
        grid, sizes = _sizes(inputs, tile, of_keys=tile is of_k)
        queries, keys = (64, tile.B) if tile is of_q else (tile.B, 64)
        cached(kernel)[grid](
            **_matrix("q", inputs.q, queries),
            **_matrix("k", inputs.k, keys),
            **_matrix("v", inputs.v, keys),
            **_matrix("do", do, queries),
            base_ptr=base,
            delta_ptr=delta,
            scale=options.scale,
            **tiling.common_args(inputs, options),
            **sizes,
            D=D,
            **specific,
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


def _sizes(
    inputs: AttentionInputs, tile: plan.Tile, of_keys: bool = False, section: int = 0
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
        1, plan.SECTION_BYTES // (streamed_rows * 2 * q.shape[-1] * q.element_size())
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
    return (min(units, tiling.multiprocessors(q.device)) if tile.persistent else units,), sizes


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
    # registers of a thread of the warpgroups that compute, of one that loads, and of each of the 12
    # warps before they are handed out
    registers = {"CONSUMER": 240, "PRODUCER": 24, "maxnreg": 168}
    return {"FLAGS": flags, "num_warps": 4, **registers}


def _fused(
    inputs: AttentionInputs,
    options: AttentionOptions,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    tables: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes dq, dk and dv by one kernel, with what goes before and after it.

    Args:
        tables: cos and sin [B or 1, T, D / 2], float32, of a rotary embedding that has turned q and
            k: dq and dk are of those before. Then dq, dk and dv are heads of one tensor, one after
            another.

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
    sum_kernels.launch_delta_of_tiles(o, do, lse, dlse, base, delta, inputs.cu_q, queries, BM)
    sums = torch.empty(B * H * queries * BM, D, dtype=torch.float32, device=do.device)
    semaphores = torch.zeros(B * H * queries, dtype=torch.int32, device=do.device)
    matrices = _matrix("q", inputs.q, BM) | _matrix("k", inputs.k, BN)
    matrices |= _matrix("v", inputs.v, BN) | _matrix("do", do, BM)
    rotation: dict[str, Any] = {"cos_ptr": None, "sin_ptr": None, "table_rows": None}
    if tables is not None:
        cos, sin = tables
        each = T if cos.shape[0] > 1 else 0
        rotation = {"cos_ptr": cos, "sin_ptr": sin, "table_rows": each}
    pair_bytes = T * H // HKV * 4 * D * do.element_size()
    section = pairs_at_work(pairs, pair_bytes, options.right >= 0, sm_count(do.get_device()))
    cached(bwd_fused.softmax_bwd_sm90_kernel)[(tiles * pairs,)](
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
        **tiling.common_args(inputs, options),
        **matrices,
        BM=BM,
        D=D,
        ST=BUFFERS[D],
        **_flags(inputs._replace(sinks=None), options),
        **rotation,
    )
    cached(sum_kernels.softmax_dq_of_sums_kernel)[(B * H * queries,)](
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


def takes_latent(q: Tensor, latent: Tensor, width: int, table: Tensor | None) -> bool:
    """Whether decode_latent.py takes a call: the widths, pages of whole tiles, strides for TMA."""
    size, row = latent.shape[1], latent.stride(1)
    widest = MAX_WIDTH + MAX_ROPE_WIDTH
    return (
        width == MAX_WIDTH
        and q.shape[-1] == widest
        and q.is_contiguous()
        and latent.stride(2) == 1
        and row >= widest
        and row % 8 == 0
        and latent.stride(0) % row == 0
        and (q.data_ptr() | latent.data_ptr()) % 16 == 0
        and (table is None or (size % 64 == 0 and latent.stride(0) == size * row))
    )


def launch_latent(q: Tensor, latent: Tensor, grid: tuple[int], common: dict[str, Any]) -> None:
    """Writes o and lse of each share of a cache of latents. common: triton/decode_latent.py's."""
    (B, T, H, D), row = q.shape, latent.stride(1)
    rows_b = latent.stride(0) // row
    shape = [(latent.shape[0] - 1) * rows_b + latent.shape[1], D]
    descs = {
        f"desc_{name}{suffix}": TensorDescriptor(
            x, size, [stride, 1], [64, width], _layout(64, width, q.dtype)
        )
        for name, x, size, stride in (("q", q, [B * T * H, D], D), ("k", latent, shape, row))
        for suffix, width in (("", MAX_WIDTH // 2), ("r", MAX_ROPE_WIDTH))
    }
    run = cached(decode_latent.softmax_latent_decode_sm90_kernel)[grid]
    run(**descs, **common, rows_b=rows_b, num_warps=4, maxnreg=168)
