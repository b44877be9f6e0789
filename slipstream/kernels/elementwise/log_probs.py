"""Log-probabilities and entropies of a classifier's targets: operators, and plain torch.

    z = scale (hidden weight^T + bias)          p = softmax(z)
    log_prob = log p[target]                    entropy = -sum p log p
    dz = dlog_prob (onehot(target) - p) - dentropy p (log p + entropy)

slipstream::_linear_log_probs gives both, slipstream::_linear_log_probs_backward their gradients.
Rows go through in chunks, whose logits are dropped again; backward makes them a second time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import linear_rows
from slipstream.common.linear_rows import ClassifierInputs, LinearRows, row_chunks
from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, custom_op, kernel_pair, token_ids


def log_probs(
    inputs: ClassifierInputs, scale: float, ignore_index: int, impl: str
) -> tuple[Tensor, Tensor]:
    """log_prob and entropy [N]."""
    if impl == "reference":
        return reference(inputs, scale, ignore_index)
    call = _LogProbs.apply if autograd.needs_autograd(*inputs) else _forward
    return call(*inputs, scale, ignore_index, impl)


def reference(inputs: ClassifierInputs, scale: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Plain differentiable torch, which holds the logits."""
    z = torch.nn.functional.linear(inputs.hidden, inputs.weight, inputs.bias)
    log_p = (z.to(inputs.compute_dtype) * scale).log_softmax(-1)
    live = inputs.target != ignore_index
    chosen = log_p.gather(1, torch.where(live, inputs.target, 0)[:, None])[:, 0]
    return torch.where(live, chosen, 0), torch.where(live, entropy_of(log_p), 0)


def plain(inputs: ClassifierInputs, scale: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """log_prob and entropy [N]; 0 where the target is ignored."""
    hidden, target = inputs.hidden, inputs.target
    token_ids.expect_ids("target", target, inputs.weight.shape[0], ignore_index)
    log_prob, entropy = (
        hidden.new_zeros(len(target), dtype=inputs.compute_dtype) for _ in range(2)
    )
    for rows in row_chunks(hidden, len(inputs.weight)):
        log_p, at = _log_softmax(inputs, rows, scale), target[rows]
        live = at != ignore_index
        chosen = log_p.gather(1, torch.where(live, at, 0)[:, None])[:, 0]
        log_prob[rows] = torch.where(live, chosen, 0)
        entropy[rows] = torch.where(live, entropy_of(log_p), 0)
    return log_prob, entropy


def _plain_backward(
    inputs: ClassifierInputs, dlog_prob: Tensor, dentropy: Tensor, scale: float, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dhidden [N, D], dweight [V, D] and dbias [V]."""
    hidden, weight, bias, target = inputs
    layer = LinearRows(hidden, weight, bias, True, inputs.compute_dtype)
    for rows in row_chunks(hidden, len(weight)):
        log_p, at = _log_softmax(inputs, rows, scale), target[rows]
        live = at != ignore_index
        up, down = (torch.where(live, g[rows], 0)[:, None] for g in (dlog_prob, dentropy))
        entropy = entropy_of(log_p)[:, None]
        p = log_p.exp()
        # finite where a class cannot be, however large `down`: its p, 0, comes last
        d = log_p.masked_fill_(log_p == -torch.inf, 0).add_(entropy).mul_(-down).sub_(up)
        d.mul_(p).scatter_add_(1, torch.where(live, at, 0)[:, None], up)
        # masked, not multiplied: an ignored row may hold inf or NaN
        layer.add(rows, d.mul_(scale).masked_fill_(~live[:, None], 0))
    dtype = weight.dtype
    return layer.dhidden, layer.dweight.to(dtype), layer.dbias.to(dtype)


def _log_softmax(inputs: ClassifierInputs, rows: slice, scale: float) -> Tensor:
    z = F.linear(inputs.hidden[rows], inputs.weight, inputs.bias).to(inputs.compute_dtype)
    return z.mul_(scale).log_softmax(-1)


def entropy_of(log_p: Tensor) -> Tensor:
    """A class that cannot be, whose logarithm is -inf, adds nothing."""
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)


def kind(dtype: torch.dtype, classes: int) -> KernelKey:
    """The calls that share a verdict on the kernel."""
    return ("log_probs.triton", dtype, classes)


def _some_targets(target: Tensor) -> Tensor:
    """A few of two classes, one of them ignored."""
    return torch.tensor([0, 1, 0, 1, -100, 1, 1, 0, 0], device=target.device)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = ClassifierInputs(*args[:4])
    shape, dtype = inputs.target.shape, inputs.compute_dtype
    return inputs.hidden.new_empty(shape, dtype=dtype), inputs.hidden.new_empty(shape, dtype=dtype)


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, bias = args[:3]
    return linear_rows.empty_gradients(hidden, weight, bias, weight.dtype)


_LAUNCH = "slipstream.kernels.elementwise.triton.log_probs"
_TENSORS = custom_op.schema_of(ClassifierInputs)
_forward = custom_op.KernelOp(
    "linear_log_probs",
    f"({_TENSORS}, float scale, int ignore_index, str impl) -> (Tensor, Tensor)",
    fake=_fake,
    kernel=f"{_LAUNCH}:forward",
    plain=plain,
    kind=lambda inputs: kind(inputs.hidden.dtype, inputs.weight.shape[0]),
    # a few rows of as many classes
    probe={
        "hidden": (9, 16),
        "weight": lambda weight: kernel_pair.random_like(weight, weight.shape[0], 16) / 4,
        "bias": None,
        "target": _some_targets,
        "scale": 0.9,
        "ignore_index": -100,
    },
    packed={"inputs": ClassifierInputs},
)
_LogProbs = _forward.with_gradient(
    f"({_TENSORS}, Tensor dlog_prob, Tensor dentropy, float scale, int ignore_index, str impl) "
    "-> (Tensor, Tensor, Tensor)",
    f"{_LAUNCH}:backward",
    plain=_plain_backward,
    fake=_backward_fake,
    results="log_prob entropy",
    wrt="hidden weight bias",
)
