"""Tiles and segments of the delta rule's kernels, by shapes, dtypes and device alone."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import Segments, delta_tokens, split_into_segments
from slipstream.kernels.linear.triton.common.tma import tma_descriptors
from slipstream.kernels.linear.triton.delta.tiles import DeltaTile, KernelTile, choose
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.tiles import family_of
from slipstream.runtime import backends, launch_cache

# Widths of K up to which products of the scans take pairs of bf16: without decay, 200 tokens that
# share 17 dimensions of K give o an error of 7.4e-3 in plain bf16, and 3.8e-3 in pairs.
MIN_SPLIT_BF16_WIDTH = 32
# Width of K up to which rows of p come in as many stages as those of k.
MAX_M_OFFSET_WIDTH = 128


@launch_cache.cache
def _tile(device: torch.device, K: int, V: int, bytes_each: int) -> tuple[DeltaTile, int]:
    return choose("interpreter" if INTERPRETED else family_of(device), K, V, bytes_each)


def tile_of(terms: LinearInputs) -> tuple[DeltaTile, int]:
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    return _tile(terms.q.device, K, V, terms.q.element_size())


def choose_segments(terms: LinearInputs) -> Segments | None:
    """Decided by shapes and device."""
    HV, V = terms.v.shape[2:]
    tile, _ = tile_of(terms)
    return segments_for_programs(terms, -(-V // tile.fwd.B) * HV * terms.sequences, tile.C)


def segments_for_programs(terms: LinearInputs, programs: int, C: int) -> Segments | None:
    """Segments for kernels that have this number of programs."""
    fits = can_pass_states(terms)
    tokens = delta_tokens(programs, terms.v.shape[1], C) if fits else None
    return split_into_segments(terms, tokens)


def can_pass_states(terms: LinearInputs) -> bool:
    """Whether M and a state fit shared memory."""
    tile, BK = tile_of(terms)
    return BK <= 128 and _shared(terms.q.device) >= 4 * BK * (BK + tile.fwd.B)


def _shared(device: torch.device) -> int:
    return backends.shared_memory_bytes(device.index or 0) if device.type == "cuda" else 1 << 17


def uses_split_bf16(terms: LinearInputs) -> bool:
    return terms.q.dtype == torch.bfloat16 and terms.q.shape[-1] <= MIN_SPLIT_BF16_WIDTH


def launch_options(terms: LinearInputs, kernel_tile: KernelTile) -> dict[str, Any]:
    # beside k there is no room for as many stages of p
    wide = terms.p is not None and terms.q.shape[-1] > MAX_M_OFFSET_WIDTH
    return {
        "FP32": terms.q.dtype == torch.float32,
        "PRECISION": backends.fp32_dot_precision(),
        "num_warps": kernel_tile.warps,
        "num_stages": 1 if wide else kernel_tile.stages,
    }


def scan_options(terms: LinearInputs, kernel_tile: KernelTile) -> dict[str, Any]:
    """launch_options of a scan; those of wide heads spill under Triton 3.9 on sm_90."""
    spills = terms.q.shape[-1] > 128 and family_of(terms.q.device) == "sm_90"
    spills = spills and tile_of(terms)[0].tma
    return launch_options(terms, kernel_tile) | (backends.FEWER_REGISTERS if spills else {})


def tma_descriptor(
    terms: LinearInputs, tensors: list[Tensor | None], widths: list[int]
) -> tuple[list[Any], bool]:
    """The tensors [B, T, heads, ...] as the kernels take them, and whether by descriptors."""
    tile, _ = tile_of(terms)
    if tile.tma and terms.cu_seqlens is None:
        descriptors = tma_descriptors(tensors, widths, tile.C)
        if descriptors is not None:
            return descriptors, True
    return tensors, False


def state_descriptor(states: Tensor, BV: int, BK: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(
        states, list(states.shape), list(states.stride()), [1, 1, int(BV), int(BK)]
    )
