"""Tensors as TMA reads and writes them on sm_90, for the launches of every family."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import inputs, segments
from slipstream.kernels.primitives.sm90 import TensorDescriptor, gl
from slipstream.runtime.launch_cache import cache

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def align16(x: Tensor) -> Tensor:
    """x, or a copy of it that begins at a multiple of 16 bytes."""
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % 16 else x


def align_for_tma(terms: inputs.LinearInputs) -> inputs.LinearInputs:
    """With all tensors that kernels read by TMA aligned."""
    names = ("q", "k", "v", "a", "b", "g", "erase")
    given = {name: x for name in names if (x := getattr(terms, name)) is not None}
    return terms._replace(**{name: align16(x) for name, x in given.items()})


def tma_descriptor(
    x: Tensor | None, width: int, rows: int, columns: int, stride: int | None = None
) -> Any:
    """A descriptor of x as rows of `width`, in tiles [rows, columns]; None of None. stride: from
    row to row, `width` if None."""
    if x is None:
        return None
    shape, strides = [x.numel() // width, width], [stride or width, 1]
    return TensorDescriptor(x, shape, strides, *_tile(int(rows), int(columns), x.dtype))


def token_tiles(x: Tensor | None, columns: int, stride: int | None = None) -> Any:
    """A descriptor of x [B, T, heads, channels] as rows of all heads, in tiles [CHUNK, columns];
    None of None. stride: from token to token, if not those of all heads."""
    if x is None:
        return None
    return tma_descriptor(x, x.shape[2] * x.shape[3], segments.CHUNK, columns, stride)


@cache
def _tile(rows: int, columns: int, dtype: torch.dtype) -> tuple[list[int], Any]:
    return [rows, columns], gl.NVMMASharedLayout.get_default_for([rows, columns], _TYPES[dtype])
