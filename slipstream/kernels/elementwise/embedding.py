"""Rows of a table by token id. An id outside the table is an error: on the CPU at once, on CUDA in
the next call, and there it reads the nearest row."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.backends import HAVE_TRITON
from slipstream.runtime.custom_op import KernelOp
from slipstream.runtime.dispatch import TRITON_OR_EAGER
from slipstream.runtime.kernel_pair import KernelPair, launch_of
from slipstream.runtime.token_ids import clamped, expect_ids, raise_pending


def rows(input_ids: Tensor, weight: Tensor) -> Tensor:
    """weight [V, D] at input_ids [...], with gradients."""
    return (Embedding.apply if needs_autograd(weight) else _call)(input_ids, weight)


class Embedding(Function):
    operator = "slipstream::embedding"

    @staticmethod
    def forward(ctx: Any, input_ids: Tensor, weight: Tensor) -> Tensor:
        save(ctx, input_ids)
        ctx.size = weight.shape[0]
        return _call(input_ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dy: Tensor) -> tuple[None, Tensor]:
        (ids,) = saved
        ids = clamped(ids, ctx.size)
        # a CPU adds the rows of a token in dy's dtype: in bfloat16 1 + ... + 1 ends at 256
        wide = dy.float() if dy.device.type == "cpu" and dy.dtype.itemsize == 2 else dy
        dw = torch.ops.aten.embedding_dense_backward(wide, ids, ctx.size, -1, False)
        return None, dw.to(dy.dtype)


def _embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    raise_pending()
    if not input_ids.is_cuda:
        expect_ids("input_ids", input_ids, weight.shape[0])
        return F.embedding(input_ids, weight)
    if weight.shape[0] == 0 and input_ids.numel():
        raise ValueError(f"weight: want at least one row [V, D], got shape {(*weight.shape,)}")
    if not HAVE_TRITON:
        return _nearest(input_ids, weight)
    return _pair(input_ids, weight, TRITON_OR_EAGER)


def _nearest(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Without a look at the ids."""
    return F.embedding(clamped(input_ids, weight.shape[0]), weight)


def _kind(input_ids: Tensor, weight: Tensor) -> KernelKey:
    return ("embedding.triton", input_ids.dtype, weight.dtype, weight.shape[1])


def _mismatch(args: tuple) -> str | None:
    """The probe: ids of a small table of the same width."""
    input_ids, weight, _ = args
    if weight.dtype not in numeric_probe.BARS:
        return None
    ids = torch.randint(0, 40, (3, 19), device=weight.device).to(input_ids.dtype)
    return numeric_probe.mismatch(
        lambda t: launch_of(_pair.kernel)(ids, t["weight"]),
        lambda t: _nearest(ids, t["weight"]),
        {"weight": numeric_probe.random_like(weight, 40, weight.shape[1])},
        gradients=False,
    )


_pair = KernelPair(
    ("input_ids", "weight", "impl"),
    "slipstream.kernels.elementwise.triton.embedding:gather",
    _nearest,
    _kind,
    _mismatch,
)
_call = KernelOp(
    "embedding",
    "(Tensor input_ids, Tensor weight) -> Tensor",
    _embedding,
    lambda input_ids, weight: weight.new_empty(*input_ids.shape, weight.shape[1]),
)
_call.set_gradient(Embedding.apply)
