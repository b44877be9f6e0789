"""A linear layer whose outputs are too many to keep: rows of them at a time, and its gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common.checks import cast, wide_dtype

# Numbers that plain torch works on at a time: on a CPU they stay in cache. Of logits at N 2048,
# D 256, V 4096 on one core 0.25 to 8 M took the same time within noise.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}


class ClassifierInputs(NamedTuple):
    """Inputs of a linear layer whose V outputs are logits of classes, and the class of each row."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    target: Tensor  # int64 [N]

    @property
    def compute_dtype(self) -> torch.dtype:
        return wide_dtype(self.hidden)


def row_chunks(hidden: Tensor, columns: int) -> list[slice]:
    """Slices of the rows of hidden [N, D] whose logits have at most CHUNK_ELEMENTS numbers."""
    step = max(CHUNK_ELEMENTS.get(hidden.device.type, 1 << 20) // max(columns, 1), 1)
    return [slice(i, i + step) for i in range(0, hidden.shape[0], step)]


def empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for dhidden, and dweight and dbias of a dtype."""
    dbias = weight.new_empty(0 if bias is None else weight.shape[0], dtype=dtype)
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape, dtype=dtype), dbias


def fake_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, grads: bool, of_kernels: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for a loss [N], and for the layer's gradients as kernels or plain torch have them."""
    wide = wide_dtype(hidden)
    loss, none = hidden.new_empty(hidden.shape[0], dtype=wide), hidden.new_empty(0)
    if not grads:
        return loss, none, none.clone(), none.clone()
    return loss, *empty_gradients(hidden, weight, bias, weight.dtype if of_kernels else wide)


def scaled(x: Tensor, s: Tensor) -> Tensor:
    """x times s [], in the dtype of s, which float16 may not hold; what is 0 stays 0.

    x is a gradient that was made before s, which comes from above, was known. Rows without a loss
    are 0 in it, and stay so if a mean over no rows, or an overflow, makes s inf or NaN.
    """
    return (cast(x, s.dtype) * s).masked_fill_(x == 0, 0)


class LinearRows:
    """logits = hidden weight^T + bias for a slice of rows at a time, and the layer's gradients.

    Attributes:
        dhidden, dweight, dbias: the gradients of all slices passed to `add` so far, in hidden's
            dtype, sum_dtype, and float32 or float64. Empty without `grads`.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        grads: bool,
        sum_dtype: torch.dtype,
    ) -> None:
        """hidden [N, D], weight [V, D], bias [V]."""
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.dhidden, self.dweight, self.dbias = (hidden.new_empty(0) for _ in range(3))
        if grads:
            self.dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
            # the first rows' product needs no zeros beneath it
            empty = torch.empty_like if hidden.shape[0] else torch.zeros_like
            self.dweight = empty(weight, dtype=sum_dtype)
            wide = torch.promote_types(sum_dtype, torch.float32)
            self.dbias = weight.new_zeros(0 if bias is None else weight.shape[0], dtype=wide)

    def logits(self, rows: slice, out: Tensor | None = None) -> Tensor:
        h, w = self.hidden[rows], self.weight.t()
        if self.bias is None:
            return torch.mm(h, w, out=out)
        return torch.addmm(self.bias, h, w, out=out)

    def add(self, rows: slice, dlogits: Tensor) -> None:
        """Adds the gradients that follow from dlogits, those of the logits of `rows`.

        They are rounded to hidden's dtype for the products. The first call has rows from 0 on.
        """
        if self.bias is not None:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)
        d, h = cast(dlogits, self.hidden.dtype), self.hidden[rows]
        torch.mm(d, self.weight, out=self.dhidden[rows])
        one_dtype = self.dweight.dtype == d.dtype
        if rows.start == 0:
            if one_dtype:
                torch.mm(d.t(), h, out=self.dweight)
            else:
                self.dweight.copy_(d.t() @ h)
        elif one_dtype:
            self.dweight.addmm_(d.t(), h)
        else:
            self.dweight += d.t() @ h
