"""Rows of a table by token id. An id outside the table is an error on the CPU, and on a device
never reads out of bounds."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.core.ids import clamped, expect_ids
from slipstream.core.library import define


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input_ids)
        ctx.size = weight.shape[0]
        return _EMBEDDING(input_ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        ids = clamped(ids, ctx.size)
        return None, torch.ops.aten.embedding_dense_backward(dy, ids, ctx.size, -1, False)


def _embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    expect_ids("input_ids", input_ids, weight.shape[0])
    return F.embedding(clamped(input_ids, weight.shape[0]), weight)


def _embedding_fake(input_ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*input_ids.shape, weight.shape[1])


_EMBEDDING = define(
    "embedding", "(Tensor input_ids, Tensor weight) -> Tensor", _embedding, _embedding_fake
)
