"""Rows of a table by token id. An id outside the table is an error: on the CPU at once, on CUDA in
the next call, and there it reads the nearest row."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, backends, custom_op, dispatch, kernel_pair, token_ids


def rows(input_ids: Tensor, weight: Tensor) -> Tensor:
    """weight [V, D] at input_ids [...], with gradients."""
    return (Embedding.apply if autograd.needs_autograd(weight) else _call)(input_ids, weight)


class Embedding(autograd.Function):
    operator = "slipstream::embedding"

    @staticmethod
    def forward(ctx: Any, input_ids: Tensor, weight: Tensor) -> Tensor:
        autograd.save(ctx, input_ids)
        ctx.size = weight.shape[0]
        return _call(input_ids, weight)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dy: Tensor) -> tuple[None, Tensor]:
        (ids,) = saved
        ids = token_ids.clamped(ids, ctx.size)
        # a CPU adds the rows of a token in dy's dtype: in bfloat16 1 + ... + 1 ends at 256
        wide = dy.float() if dy.device.type == "cpu" and dy.dtype.itemsize == 2 else dy
        dw = torch.ops.aten.embedding_dense_backward(wide, ids, ctx.size, -1, False)
        return None, dw.to(dy.dtype)


def _embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    token_ids.raise_pending()
    if not input_ids.is_cuda:
        token_ids.expect_ids("input_ids", input_ids, weight.shape[0])
        return F.embedding(input_ids, weight)
    if weight.shape[0] == 0 and input_ids.numel():
        raise ValueError(f"weight: want at least one row [V, D], got shape {(*weight.shape,)}")
    if not backends.HAVE_TRITON:
        return _nearest(input_ids, weight)
    return _pair(input_ids, weight, dispatch.TRITON_OR_EAGER)


def _nearest(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Without a look at the ids."""
    return F.embedding(token_ids.clamped(input_ids, weight.shape[0]), weight)


def _kind(input_ids: Tensor, weight: Tensor) -> KernelKey:
    return ("embedding.triton", input_ids.dtype, weight.dtype, weight.shape[1])


def _mismatch(args: tuple) -> str | None:
    """The probe: ids of a small table of the same width."""
    input_ids, weight, _ = args
    if weight.dtype not in kernel_pair.BARS:
        return None
    ids = torch.randint(0, 40, (3, 19), device=weight.device).to(input_ids.dtype)
    return kernel_pair.mismatch(
        lambda t: kernel_pair.launch_of(_pair.kernel)(ids, t["weight"]),
        lambda t: _nearest(ids, t["weight"]),
        {"weight": kernel_pair.random_like(weight, 40, weight.shape[1])},
        gradients=False,
    )


_pair = kernel_pair.KernelPair(
    ("input_ids", "weight", "impl"),
    "slipstream.kernels.elementwise.triton.embedding:gather",
    _nearest,
    _kind,
    _mismatch,
)
_call = custom_op.KernelOp(
    "embedding",
    "(Tensor input_ids, Tensor weight) -> Tensor",
    _embedding,
    lambda input_ids, weight: weight.new_empty(*input_ids.shape, weight.shape[1]),
)
_call.set_gradient(Embedding.apply)
