"""Log-probabilities of tokens and entropies of their distributions, without holding the logits."""

from typing import Literal, overload

import torch
from torch import Tensor

from slipstream.common import checks, linear_rows
from slipstream.kernels.elementwise import log_probs as op
from slipstream.ops.loss import linear_cross_entropy
from slipstream.runtime import dispatch, guarded_launch


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
    impl: str | None = None,
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
    impl: str | None = None,
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
    impl: str | None = None,
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
        impl: None chooses; "triton", "eager" or "reference" is used or refused.

    Returns:
        log_prob [...], float32, or float64 for float64 hidden; with return_entropy also the
        entropy, of the same shape and dtype. Both have gradients.

    Raises:
        ValueError: shapes do not fit, or on the CPU a target is outside [0, V). TypeError: dtypes.

    Cost: 2 N D V flops, and in the backward, which computes the logits again, 6 N D V. Memory: a
        chunk of rows of the logits, in hidden's dtype, and, with gradients, hidden's and weight's
        size. Without the entropy it is linear_cross_entropy.
    Source: Schulman et al., Proximal Policy Optimization Algorithms, 2017, equation 9 (entropy).
    """
    if not temperature > 0:
        raise ValueError(f"temperature: want a number above 0, got {temperature}")
    options = {"ignore_index": ignore_index, "logit_scale": 1 / temperature, "reduction": "none"}
    if not return_entropy:
        return -linear_cross_entropy(hidden, weight, target, bias, impl=impl, **options)
    _check(hidden, weight, target, bias)
    dtype = checks.autocast_dtype(hidden)
    if dtype is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    call = (hidden, weight.shape[0])
    impls = dispatch.choose(_CANDIDATES, call, impl, "linear_log_probs", hidden).impls
    rows, ids = hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1)
    given = linear_rows.ClassifierInputs(rows, weight, bias, ids)
    found = op.log_probs(given, 1 / float(temperature), ignore_index, impls)
    log_prob, entropy = (x.view(target.shape) for x in found)
    return log_prob, entropy


def _unsupported_reason(x: Tensor, classes: int) -> str | None:
    if x.shape[-1] == 0:
        return "there are no features"
    return guarded_launch.known_failure(lambda: op.kind(x.dtype, classes), x.device)


_CANDIDATES = dispatch.triton_or_eager(_unsupported_reason)


def _check(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
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
    if checks.autocast_dtype(hidden) is None:
        checks.expect_one_dtype(given)
    checks.expect_one_device({**given, "target": target})
    checks.expect_shape("target", target, hidden.shape[:-1])
    if target.dtype != torch.int64:
        raise TypeError(f"target: want torch.int64, got {target.dtype}")
