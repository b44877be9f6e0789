"""Log-probabilities of tokens and entropies of their distributions, without holding the logits."""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.common.checks import autocast_dtype
from slipstream.kernels.loss.eager import CHUNK_ELEMENTS
from slipstream.ops.loss import linear_cross_entropy
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.custom_op import KernelOp


@overload
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@checks.operator
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of each target, and if asked for the entropy of its distribution.

        z = (hidden weight^T + bias) / temperature;  log p = log_softmax(z), in nats
        log_prob = log p[target];  entropy = -sum p log p

    What PPO, GRPO and their kind need of a policy, for any number of tokens and classes.

    Args:
        hidden: [..., D], any floating dtype; of the tokens that come before the targets.
        weight: [V, D], hidden's dtype.
        target: int64 [...], in [0, V) or ignore_index.
        bias: [V], hidden's dtype; None is 0.
        temperature: of the distribution that the tokens were drawn from, above 0.
        ignore_index: where the target is this both results and their gradients are 0.
        return_entropy: return the entropies too.

    Returns:
        log_prob [...], float32, or float64 for float64 hidden; with return_entropy also the
        entropy, alike. Both have gradients.

    Raises:
        ValueError: shapes do not fit, or on the CPU a target is outside [0, V). TypeError: dtypes.

    Cost: 2 N D V flops, and in the backward, which computes the logits again, 6 N D V. Memory: a
        chunk of rows of the logits and, with gradients, hidden's and weight's size. Without the
        entropy it is linear_cross_entropy, whose kernels run; with it plain torch.
    Source: Schulman et al., Proximal Policy Optimization Algorithms, 2017, equation 9 (entropy).
    """
    if not temperature > 0:
        raise ValueError(f"temperature: want a number above 0, got {temperature}")
    options = {"ignore_index": ignore_index, "logit_scale": 1 / temperature, "reduction": "none"}
    if not return_entropy:
        return -linear_cross_entropy(hidden, weight, target, bias, **options)
    _check(hidden, weight, target, bias, ignore_index)
    dtype = autocast_dtype(hidden)
    if dtype is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    given = hidden.reshape(target.numel(), hidden.shape[-1]), weight, bias, target.reshape(-1)
    scale = 1 / float(temperature)
    if needs_autograd(*given[:3]):
        found = _LogProbs.apply(*given, scale, ignore_index)
    else:
        found = _forward(*given, scale, ignore_index)
    log_prob, entropy = (x.view(target.shape) for x in found)
    return log_prob, entropy


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int
) -> None:
    if hidden.dim() == 0:
        raise ValueError("hidden: want at least one dimension [..., D], got a scalar")
    checks.expect_rank("weight", weight, 2, "[V, D]")
    V = weight.shape[0]
    if V == 0:
        raise ValueError("weight: want at least one class, got V = 0")
    checks.expect_shape("weight", weight, (V, hidden.shape[-1]))
    if bias is not None:
        checks.expect_shape("bias", bias, (V,))
    given = {"hidden": hidden, "weight": weight, "bias": bias}
    checks.expect_floating(given)
    if autocast_dtype(hidden) is None:
        checks.expect_one_dtype(given)
    checks.expect_one_device({**given, "target": target})
    checks.expect_shape("target", target, hidden.shape[:-1])
    if target.dtype != torch.int64:
        raise TypeError(f"target: want torch.int64, got {target.dtype}")
    if target.device.type == "cpu" and not torch.compiler.is_compiling() and target.numel():
        live = target[target != ignore_index]
        if live.numel() and not (int(live.min()) >= 0 and int(live.max()) < V):
            raise ValueError(f"target: want classes in [0, {V}) or {ignore_index}")


class _LogProbs(Function):
    operator = "slipstream::linear_log_probs"

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: float,
        ignore_index: int,
    ) -> tuple[Tensor, Tensor]:
        found = _forward(hidden, weight, bias, target, scale, ignore_index)
        save(ctx, hidden, weight, bias, target)
        ctx.options = scale, ignore_index
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dlog_prob: Tensor, dentropy: Tensor) -> Any:
        weight, bias = saved[1:3]
        grads = _backward(*saved, dlog_prob.contiguous(), dentropy.contiguous(), *ctx.options)
        dhidden, dweight, dbias = grads
        dbias = None if bias is None else dbias.to(bias.dtype)
        return dhidden, dweight.to(weight.dtype), dbias, None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    most = CHUNK_ELEMENTS.get(hidden.device.type, 1 << 20)
    step = max(most // weight.shape[0], 1)
    return [slice(i, i + step) for i in range(0, hidden.shape[0], step)]


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    z = torch.nn.functional.linear(hidden, weight, bias)
    z = z if z.dtype == torch.float64 else z.float()
    return z.mul_(scale).log_softmax(-1)


def _entropy(log_p: Tensor) -> Tensor:
    """A class that cannot be, whose logarithm is -inf, adds nothing."""
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def _forward_impl(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: float,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    log_prob, entropy = (hidden.new_zeros(len(target), dtype=dtype) for _ in range(2))
    for rows in _chunks(hidden, weight):
        log_p, at = _log_softmax(hidden[rows], weight, bias, scale), target[rows]
        live = at != ignore_index
        chosen = log_p.gather(1, torch.where(live, at, 0)[:, None])[:, 0]
        log_prob[rows] = torch.where(live, chosen, 0)
        entropy[rows] = torch.where(live, _entropy(log_p), 0)
    return log_prob, entropy


def _backward_impl(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    dlog_prob: Tensor,
    dentropy: Tensor,
    scale: float,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dz = dlog_prob (onehot - p) - dentropy p (log p + entropy)"""
    dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    dweight = weight.new_zeros(weight.shape, dtype=dlog_prob.dtype)
    dbias = dlog_prob.new_zeros(0 if bias is None else len(weight))
    for rows in _chunks(hidden, weight):
        log_p, at = _log_softmax(hidden[rows], weight, bias, scale), target[rows]
        live = at != ignore_index
        up, down = (torch.where(live, g[rows], 0)[:, None] for g in (dlog_prob, dentropy))
        entropy = _entropy(log_p)[:, None]
        p = log_p.exp()
        d = log_p.clamp_(min=torch.finfo(log_p.dtype).min).add_(entropy).mul_(-down).sub_(up)
        d.mul_(p).scatter_add_(1, torch.where(live, at, 0)[:, None], up)
        # masked, not multiplied: an ignored row may hold inf or NaN
        d = d.mul_(scale).masked_fill_(~live[:, None], 0)
        if bias is not None:
            dbias += d.sum(0)
        d = d.to(hidden.dtype)
        dhidden[rows] = d @ weight
        dweight += d.t() @ hidden[rows]
    return dhidden, dweight, dbias


def _forward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return hidden.new_empty(target.shape, dtype=dtype), hidden.new_empty(target.shape, dtype=dtype)


def _backward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, d: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = d.new_empty(0 if bias is None else weight.shape[0])
    return hidden.new_empty(hidden.shape), d.new_empty(weight.shape), dbias


_TENSORS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target"
_forward = KernelOp(
    "linear_log_probs",
    f"({_TENSORS}, float scale, int ignore_index) -> (Tensor, Tensor)",
    _forward_impl,
    _forward_fake,
    replay=False,
)
_backward = KernelOp(
    "linear_log_probs_backward",
    f"({_TENSORS}, Tensor dlog_prob, Tensor dentropy, float scale, int ignore_index) "
    "-> (Tensor, Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
    replay=False,
)
