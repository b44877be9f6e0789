"""Launches of attention to selected keys: no synchronisation, nothing that depends on lengths.

Memory beyond results, in tensors of the lists' size: 2 for the unions, while they are made some
more of a sort; backward 4 more for the inverse lists, and two float32 numbers a query and head.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from slipstream.kernels.attention.triton import launch as dense_launch
from slipstream.kernels.attention.triton import sums, tiles
from slipstream.kernels.selected_attention import inputs as calls
from slipstream.kernels.selected_attention import triton_entries, triton_lists
from slipstream.kernels.selected_attention import triton_kernels as kernels
from slipstream.kernels.selected_attention.inputs import SelectedInputs, SelectedOptions
from slipstream.runtime.kernel_pair import guarded
from slipstream.runtime.launch_cache import cached

# keys a block of lists whose tiles of queries make gradients of keys, which are then added up
BY_ENTRY_UP_TO = 4
# entries a program of these makes
SPAN = 128
_ADDS = (
    *("S", "units", "share", "G", "N", "search_steps", "D", "DV", "BD", "BV", "BLOCK"),
    *("HAS_LENGTHS", "PACKED_K"),
)


class Merged(NamedTuple):
    """Lists [rows, G, W] as selected_merge_kernel leaves them."""

    entries: Tensor
    bits: Tensor
    counts: Tensor


class Plan(NamedTuple):
    """units of R heads with one list, `share` of them with one head of keys."""

    units: int
    share: int
    R: int

    def rows(self, most: int, queries: int) -> dict[str, int]:
        """Of a tile of at most so many queries; a product's rows are 16 at least."""
        QT = min(max(most // self.R, 1), queries)
        return {"QT": QT, "R": self.R, "BM": max(triton.next_power_of_2(QT * self.R), 16)}


def forward(inputs: SelectedInputs, options: SelectedOptions) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T], float32."""
    inputs, options, _ = _to_kernel_layout(inputs, options)
    if not calls.takes_sm90(inputs, options) or 0 in (inputs.q.numel(), inputs.k.numel()):
        return _forward(inputs, options)

    def merge(queries: int) -> Merged:
        return _merged(inputs, options, queries, None)[0]

    kernel = "slipstream.kernels.selected_attention.sm90_launch:forward"
    args, kind = (inputs, options, merge), partial(calls.sm90_kind, inputs, options)
    # the probe of all kernels, which comes before, is of this one too
    return guarded("sm90|triton", inputs.q.device, kernel, _forward, args, kind, lambda: None)


def _forward(inputs: SelectedInputs, options: SelectedOptions, _: Any = None) -> Any:
    """The same by the kernel for every architecture."""
    q, v = inputs.q, inputs.v
    B, T, H, _ = q.shape
    o = q.new_zeros(B, T, H, v.shape[-1])
    lse = q.new_full((B, H, T), -torch.inf, dtype=torch.float32)
    if 0 in (q.numel(), v.numel(), inputs.sequences):
        if inputs.sinks is not None:
            lse.copy_(inputs.sinks[:, None].expand_as(lse))
        return o, lse
    tile = _tiles_of(inputs, options)[0].forward
    outputs = {"o_ptr": o, "lse_ptr": lse, "sinks_ptr": inputs.sinks}
    _launch_queries(inputs, options, tile, outputs)
    return o, lse


def backward(
    inputs: SelectedInputs,
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
    options: SelectedOptions,
) -> list[Tensor]:
    """Gradients of q, k, v, and of sinks if there are any."""
    inputs, options, sign = _to_kernel_layout(inputs, options)
    q, k, v, sinks = inputs.q, inputs.k, inputs.v, inputs.sinks
    B, T, H, _ = q.shape
    if 0 in (q.numel(), v.numel(), inputs.sequences):
        grads = [x.new_zeros(x.shape) for x in (q, k, v)]
        if sinks is not None:
            none = torch.zeros_like(sinks) if dlse is None else dlse.sum((0, 2)).to(sinks.dtype)
            grads.append(none)
        return grads
    do = torch.zeros_like(o) if do is None else do.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    size = B, H, -(-T // 4) * 4
    base, delta = (torch.empty(size, dtype=torch.float32, device=q.device) for _ in range(2))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    sums.launch_delta(o, do, lse.contiguous(), dlse, base, delta)
    operands = {"do_ptr": do, "base_ptr": base, "delta_ptr": delta}
    chosen, of_entries = _tiles_of(inputs, options)
    merged = _launch_queries(inputs, options, chosen.dq, {**operands, "dq_ptr": dq})
    # wider rows of queries and their gradients fit beside keys on sm_90 in 16 bits alone
    size = q.element_size()
    narrow = max(q.shape[-1], v.shape[-1]) * size <= 256
    fits = narrow or (size == 2 and tiles.family_of(q.device) == "sm_90")
    if options.block > BY_ENTRY_UP_TO or not fits:
        del merged
        _launch_keys(inputs, options, chosen, {**operands, "dk_ptr": dk, "dv_ptr": dv})
    else:
        wide = [x.new_empty(x.shape, dtype=torch.float32) for x in (dk, dv)]
        _launch_near_keys(
            inputs, options, chosen, {**operands, "dk_ptr": wide[0], "dv_ptr": wide[1]}
        )
        _launch_entries(inputs, options, chosen.dq.BM, of_entries, operands, merged, wide)
        dk, dv = (x.to(k.dtype) for x in wide)
    grads = [dq if sign == 1 else dq * sign, dk, dv]
    if sinks is not None:
        grads.append(tiles.sinks_gradient(sinks, base[..., :T], delta[..., :T]))
    return grads


def _to_kernel_layout(
    inputs: SelectedInputs, options: SelectedOptions
) -> tuple[SelectedInputs, SelectedOptions, int]:
    dense, positive, sign = tiles.to_kernel_layout(
        inputs.dense, tiles.AttentionOptions(options.scale)
    )
    packed = dense.cu_q, dense.cu_k, dense.lengths
    inputs = SelectedInputs(*dense[:3], inputs.selected.contiguous(), dense.sinks, *packed)
    return inputs, options._replace(scale=positive.scale), sign


def _tiles_of(inputs: SelectedInputs, options: SelectedOptions) -> tuple[tiles.Tiles, tiles.Tile]:
    """Dense attention's, but where a sweep on an H200 found faster ones; and that of entries, whose
    rows are those of dq. On sm_90 no product has less than 64 columns beside others, which ptxas
    12.8 gets wrong (docs/dev/facts.md)."""
    q, v = inputs.q, inputs.v
    chosen, BD, BV = tiles.tiles_for(q.device, q.shape[-1], v.shape[-1], q.element_size())
    if tiles.family_of(q.device) != "sm_90" or q.element_size() != 2:
        return chosen, chosen.dkv
    if max(BD, BV) <= 128:
        tile = tiles.Tile(128, 64, 8, 2)
        return replace(chosen, forward=tiles.Tile(64, 64, 4, 3), dkv=tile), tile
    chosen, tile = replace(chosen, dkv=tiles.Tile(64, 64, 8, 1), dv=None), tiles.Tile(64, 64, 8, 2)
    # a backward of QSA takes 81 ms, with 128 rows, which spill more, 98
    return replace(chosen, dq=tile) if options.block <= BY_ENTRY_UP_TO else chosen, tile


def _plan(inputs: SelectedInputs) -> Plan:
    H, HKV, G = inputs.q.shape[2], inputs.k.shape[2], inputs.selected.shape[2]
    units = max(HKV, G)
    return Plan(units, units // HKV, H // units)


def _merged(
    inputs: SelectedInputs, options: SelectedOptions, QT: int, SB: int | None
) -> tuple[Merged, int]:
    """Lists of QT queries as one, with a bit a query; or with SB those of each query by tiles of SB
    keys, with a bit a block. And how many rows of lists a sequence has, or all have if packed."""
    selected = inputs.selected
    G, entries = selected.shape[2:]
    T, N, W = inputs.q.shape[1], inputs.sequences, QT * selected.shape[3]
    packed = inputs.cu_q is not None
    rows = T // QT + N if packed else -(-T // QT)
    count = rows * (1 if packed else N)
    keys = selected.new_empty(count, G, W)
    BW = min(max(triton.next_power_of_2(W), 16), 1024)
    if W:
        cached(triton_lists.selected_keys_kernel)[(count * G,)](
            lists_ptr=selected,
            keys_ptr=keys,
            cu_q_ptr=inputs.cu_q,
            cu_k_ptr=inputs.cu_k,
            lengths_ptr=inputs.lengths,
            T=T,
            S=inputs.k.shape[1],
            G=G,
            N=N,
            W=W,
            entries=entries,
            tiles=rows,
            search_steps=(N - 1).bit_length(),
            total=_key_tiles(inputs, SB or 1),
            QT=QT,
            BLOCK=options.block,
            CAUSAL=options.causal,
            SB=SB or options.block,
            BY_KEY=SB is not None,
            PACKED_Q=packed,
            PACKED_K=inputs.cu_k is not None,
            HAS_LENGTHS=inputs.lengths is not None,
            BW=BW,
            num_warps=4,
        )
        keys = keys.sort(-1)[0]
    DIV = QT if SB is None else SB // options.block
    # more than 16 bits, and sums of them, are in 64
    sums = torch.empty_like(keys, dtype=torch.int32 if DIV <= 16 else torch.int64)
    bits = keys if DIV <= 16 else torch.empty_like(sums)
    merged = Merged(torch.empty_like(keys), bits, keys.new_empty(count, G))
    cached(triton_lists.selected_merge_kernel)[(count * G,)](
        keys_ptr=keys,
        merged_ptr=merged.entries,
        sums_ptr=sums,
        bits_ptr=bits,
        counts_ptr=merged.counts,
        W=W,
        DIV=DIV,
        BY_KEY=SB is not None,
        BW=BW,
        num_warps=4,
    )
    return merged, rows


def _key_tiles(inputs: SelectedInputs, size: int) -> int:
    """Of so many keys, in all sequences; if packed an upper bound."""
    S, N = inputs.k.shape[1], inputs.sequences
    return S // size + N if inputs.cu_k is not None else -(-S // size) * N


def _launch_queries(
    inputs: SelectedInputs, options: SelectedOptions, tile: tiles.Tile, operands: dict[str, Any]
) -> Merged:
    """o, or the gradient of q: operands has the arguments of one of the two. The lists of tiles."""
    plan = _plan(inputs)
    rows = plan.rows(tile.BM, 32)
    merged, tile_rows = _merged(inputs, options, rows["QT"], None)
    names = (*dense_launch._OUTPUTS, *dense_launch._GRADIENTS[:-1])
    grid = tile_rows * plan.units * (1 if inputs.cu_q is not None else inputs.sequences)
    cached(kernels.selected_queries_kernel)[(grid,)](
        **dict.fromkeys(names) | operands,
        merged_ptr=merged.entries,
        bits_ptr=merged.bits,
        counts_ptr=merged.counts,
        W=merged.entries.shape[2],
        tiles=tile_rows,
        **rows,
        BN=tile.BN,
        HAS_SINKS=operands.get("sinks_ptr") is not None,
        **_common(inputs, options, plan, tile),
    )
    return merged


def _launch_keys(
    inputs: SelectedInputs, options: SelectedOptions, chosen: tiles.Tiles, operands: dict[str, Any]
) -> None:
    """The gradients of keys and values."""
    plan, block = _plan(inputs), options.block
    # an entry has a bit a block
    BN = min(chosen.dkv.BN, 64 * block)
    SB = max(BN, block)
    merged, _ = _merged(inputs, options, 1, SB)
    total, (_, G, W) = _key_tiles(inputs, SB), merged.entries.shape
    by_tile, order = merged.entries.flatten().sort(stable=True)
    bounds = torch.arange(G * total + 1, dtype=torch.int32, device=order.device)
    starts = torch.searchsorted(by_tile, bounds, out_int32=True)
    named = order.div(G * W, rounding_mode="floor").int() if W else order.int()
    bits = merged.bits.flatten().index_select(0, order)
    del merged, by_tile, order
    key_rows = _key_tiles(inputs, BN)
    launches = dense_launch._dkv_launches(chosen)
    for tile, *outputs in launches:
        cached(kernels.selected_keys_grad_kernel)[(key_rows * inputs.k.shape[2],)](
            **operands,
            named_ptr=named,
            starts_ptr=starts,
            bits_ptr=bits,
            total=total,
            tiles=key_rows if inputs.cu_k is not None else key_rows // inputs.sequences,
            **plan.rows(tile.BM, tile.BM),
            BN=BN,
            SB=SB,
            HAS_DK=outputs[0],
            HAS_DV=outputs[1],
            **_common(inputs, options, plan, tile),
        )


def _common(
    inputs: SelectedInputs, options: SelectedOptions, plan: Plan, tile: tiles.Tile
) -> dict[str, Any]:
    """Arguments that both kernels take."""
    q, k, v = inputs[:3]
    D, DV = q.shape[-1], v.shape[-1]
    _, BD, BV = tiles.tiles_for(q.device, D, DV, q.element_size())
    unit, strides = tiles.unit_and_strides(q, k, v)
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "cu_q_ptr": inputs.cu_q,
        "cu_k_ptr": inputs.cu_k,
        "lengths_ptr": inputs.lengths,
        "factor": tiles.LOG2E * options.scale,
        "scale": options.scale,
        "T": q.shape[1],
        "S": k.shape[1],
        "H": q.shape[2],
        "units": plan.units,
        "share": plan.share,
        "G": inputs.selected.shape[2],
        "N": inputs.sequences,
        "search_steps": (inputs.sequences - 1).bit_length(),
        "left": options.left,
        "right": options.right,
        **dict(zip(tiles.STRIDES, strides)),
        "D": D,
        "DV": DV,
        "BD": BD,
        "BV": BV,
        "UNIT": unit,
        "BLOCK": options.block,
        "CAUSAL": options.causal,
        "TAIL": options.tail,
        "HAS_WINDOW": options.left + options.right >= 0,
        "HAS_LENGTHS": inputs.lengths is not None,
        "PACKED_Q": inputs.cu_q is not None,
        "PACKED_K": inputs.cu_k is not None,
        "PRECISION": tiles.fp32_dot_precision(),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _launch_near_keys(
    inputs: SelectedInputs, options: SelectedOptions, chosen: tiles.Tiles, operands: dict[str, Any]
) -> None:
    """Gradients of keys from the queries that they are near, zeros where there are none."""
    none = SelectedInputs(*inputs[:3], inputs.selected[..., :0], *inputs[4:])
    _launch_keys(none, options, chosen, operands)


def _launch_entries(
    inputs: SelectedInputs,
    options: SelectedOptions,
    BM: int,
    tile: tiles.Tile,
    operands: dict[str, Any],
    merged: Merged,
    wide: list[Tensor],
) -> None:
    """Adds to `wide`, dk and dv in float32, what the entries of the lists have. BM: rows of the
    tiles whose lists are merged."""
    plan, block, (rows, G, W) = _plan(inputs), options.block, merged.entries.shape
    entries = inputs.selected.numel()
    if not entries:
        return
    q, k, v = inputs[:3]
    device, HKV, total = q.device, k.shape[2], _key_tiles(inputs, block)
    of = plan.rows(BM, 32)
    counts = merged.counts.flatten()
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    live = torch.arange(W, device=device) < merged.counts[..., None]
    ids = merged.entries + _first_blocks(inputs, options, rows, of["QT"])[:, None, None]
    ids += torch.arange(G, device=device, dtype=torch.int32)[:, None] * total
    ids = ids.masked_fill_(~live, 2147483647).flatten()
    by_block, order = ids.sort(stable=True)
    bounds = torch.arange(G * total + 1, dtype=torch.int32, device=device)
    starts = torch.searchsorted(by_block, bounds, out_int32=True)
    places = offsets[:-1, None] + torch.arange(W, dtype=torch.int32, device=device)
    named = places.flatten().index_select(0, order)
    del live, ids, by_block, order, places
    upcoming = starts[:-1].view(G, 1, total).repeat(1, plan.units // G, 1)
    width = k.shape[-1] + v.shape[-1]
    dtype = q.dtype if q.dtype == torch.bfloat16 else torch.float32
    each = plan.units // G * block * width * dtype.itemsize
    most = max(min(q.numel() * q.element_size() // each, entries), 1)
    most = -(-most // SPAN) * SPAN
    sums = q.new_empty(plan.units // G * most * block * width, dtype=dtype)
    common = _common(inputs, options, plan, tile)
    adds = {x: common[x] for x in _ADDS} | {"num_warps": 4}
    cu_k, lengths = inputs.cu_k, inputs.lengths
    given = {**operands, "sums_ptr": sums, "merged_ptr": merged.entries, "bits_ptr": merged.bits}
    given |= {"offsets_ptr": offsets, "W": W, "total": rows * G, "most": most, "SPAN": SPAN}
    given |= {"tiles": rows if inputs.cu_q is not None else rows // inputs.sequences}
    given |= {"list_steps": (rows * G - 1).bit_length(), "BN": tile.BN}
    adds |= {"sums_ptr": sums, "dk_ptr": wide[0], "dv_ptr": wide[1], "named_ptr": named}
    adds |= {"starts_ptr": starts, "next_ptr": upcoming, "total": total, "most": most}
    adds |= {"offsets_ptr": offsets, "lists": rows * G}
    adds |= {"tiles": total if cu_k is not None else total // inputs.sequences}
    adds |= {"cu_k_ptr": cu_k, "lengths_ptr": lengths, "ROWS": 16}
    given |= of
    for first in range(0, entries, most):
        now = {"first": first, "until": min(first + most, entries)}
        grid = (most // SPAN, plan.units // G)
        cached(triton_entries.selected_entries_grad_kernel)[grid](**given, **now, **common)
        cached(triton_entries.selected_add_entries_kernel)[(total, HKV)](**now, **adds)


def _first_blocks(inputs: SelectedInputs, options: SelectedOptions, rows: int, QT: int) -> Tensor:
    """int32 [rows]: how many blocks of keys are before those of a tile of queries' sequence."""
    device, N = inputs.q.device, inputs.sequences
    row = torch.arange(rows, device=device)
    if inputs.cu_q is None:
        n = row // (rows // N)
    else:
        before = inputs.cu_q[1:].clamp(min=0) // QT + torch.arange(1, N + 1, device=device)
        n = torch.searchsorted(before, row, right=True).clamp(max=N - 1)
    if inputs.cu_k is None:
        return (n * -(-inputs.k.shape[1] // options.block)).int()
    return (inputs.cu_k[:-1].clamp(min=0)[n] // options.block + n).int()
