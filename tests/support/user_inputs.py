"""Views in whose layouts users have their tensors, and what errors say."""

import torch
from torch import Tensor

from tests.support.derivatives import CASES

# torch's words, of a saved tensor and of one of several views
CHANGED = ("modified by an inplace operation", "has been modified inplace")
NAMED = r"^(\w|\.|\[\d\])+: "


def says_changed(error: Exception) -> bool:
    """Whether it says that what backward reads was changed after forward."""
    return any(words in str(error) for words in CHANGED)


def transposed(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def stepped(x: Tensor) -> Tensor:
    return torch.stack([torch.full_like(x, torch.nan), x], -1)[..., 1]


def offset(x: Tensor) -> Tensor:
    return torch.cat([x.new_full((3,), torch.nan), x.flatten()])[3:].view(x.shape)


def negated(x: Tensor) -> Tensor:
    """A view with torch's bit of negation."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


def one_row(x: Tensor) -> Tensor:
    """The same along every dimension but the last, in the memory of one."""
    return x[(0,) * (x.dim() - 1)].expand(x.shape) if x.dim() else x


def one_value(x: Tensor) -> Tensor:
    return x.flatten()[0].expand(x.shape)


def overlapping(x: Tensor) -> Tensor:
    """As windows over a sequence."""
    return x.contiguous().as_strided(x.shape, (1,) * x.dim())


LAYOUTS = {
    f.__name__: f for f in (transposed, stepped, offset, negated, one_row, one_value, overlapping)
}


# whose backward reads an output: torch says that it was changed, as it does of its own
READS_OUTPUTS = {"chunk_hgrn", "fused_recurrent_hgrn", "rms_norm-residual", "chunk_mamba3"}
READS_OUTPUTS |= {"fused_recurrent_mamba3", "chunk_mamba3-mimo", "attention"}
READS_OUTPUTS |= {"attnres", "flash_attn_func", "flash_attn_varlen_func"}
READS_OUTPUTS |= {c.name for c in CASES if c.name.startswith("attention-")}
