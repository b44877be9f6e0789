"""Running sums of exponentials, which rwkv4 divides by: kernels where the tokens are
all here and on a GPU, and else kernels/running_mean/op.py, across ranks too."""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.gated_scan.op import run as gated_scan
from slipstream.kernels.running_mean import inputs, op
from slipstream.ops._fp32 import result_dtype, widen
from slipstream.ops.token_shift import token_shift
from slipstream.runtime import context_parallel, token_ids


class Packing(NamedTuple):
    """The place where sequences begin: side by side, packed, or divided among ranks."""

    cu_seqlens: Tensor | None
    context: context_parallel.ContextParallel | None
    impl: str | None


def running_mean(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, start: Tensor, packing: Packing
) -> tuple[Tensor, Tensor]:
    """o [B, T, D] and M and z after the last token [N, 2 D]; start: before the first."""
    if packing.context is None and torch.float64 not in (k.dtype, v.dtype, w.dtype, u.dtype):
        impl = op.chosen(packing.impl, k, v)
        if impl is not None:
            if packing.cu_seqlens is not None:
                token_ids.expect_offsets("cu_seqlens", packing.cu_seqlens, k.shape[1])
            return op.running_mean(inputs.MeanInputs(k, v, w, u, start, packing.cu_seqlens), impl)
    wide = widen(k), widen(v)
    sums = running_sums(*wide, w, start, packing)
    return op.outputs(u, *wide, sums).to(result_dtype(v)), sums.final


def running_sums(
    k: Tensor, v: Tensor, w: Tensor, start: Tensor, packing: Packing
) -> op.RunningSums:
    """Computes eager.running_sums, across ranks too."""
    cu_seqlens, context, impl = packing
    # of a shift, which is a copy: the reference would look at the offsets
    copied = None if impl == "reference" else impl

    def previous(rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        found, final = token_shift(
            rows, initial_state=before, output_final_state=True, cu_seqlens=cu_seqlens,
            context=context, impl=copied,
        )  # fmt: skip
        assert final is not None
        return found, final

    def scanned(x: Tensor, g: Tensor, before: Tensor) -> Tensor:
        return gated_scan(x, g, before, False, False, cu_seqlens, impl, context)[0]

    m = running_max(k, w, start, cu_seqlens, context)
    return op.running_sums(k, v, w, start, m, scanned, previous)


@torch.no_grad()
def running_max(
    k: Tensor,
    w: Tensor,
    start: Tensor,
    cu_seqlens: Tensor | None,
    context: context_parallel.ContextParallel | None,
) -> Tensor:
    """m_t = max(m_{t-1} + w, k_t) [B, T, D], from the last D columns of start [N, .]."""
    first = start[:, -k.shape[2] :].to(k.dtype)
    if context is None:
        return op.running_max(k, w, first, cu_seqlens)
    share, offsets = context.share(k.shape[1]), context.offsets_on(k.device)
    rows = 1 if share.packed else k.shape[0]
    nothing = k.new_full((rows, k.shape[2]), -torch.inf)
    local = share.local_states(first, nothing if share.earlier else None, rows)
    assert local is not None
    m = op.running_max(k, w, local, offsets)
    if not share.crossings.any:
        return m
    every = share.gather(m[:, -1] if share.later else nothing)
    if share.earlier:
        m = torch.cat([_continued(m, w, every, share), m[:, share.head_end :]], dim=1)
    return m


def _continued(m: Tensor, w: Tensor, every: list[Tensor], share: context_parallel.Share) -> Tensor:
    """m of the head's tokens, with what the ranks before have of its sequence."""
    n, before = share.pieces[0], torch.full_like(every[0], -torch.inf)
    for rank in share.earlier:
        before = torch.maximum(before + w * share.tokens_of(rank, n), every[rank])
    steps = torch.arange(1, share.head_end + 1, device=m.device, dtype=m.dtype)
    return torch.maximum(m[:, : share.head_end], before[:, None] + steps[:, None] * w)
