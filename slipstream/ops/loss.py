"""cross_entropy and linear_cross_entropy, the latter without ever holding the logits."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.common import checks, linear_rows
from slipstream.kernels.loss import eager, fused, op
from slipstream.runtime import guarded_launch
from slipstream.runtime.dispatch import choose, triton_or_eager

REDUCTIONS = ("mean", "sum", "none")


@checks.operator
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    group: Any = None,
    impl: str | None = None,
) -> Tensor:
    """Cross entropy of class targets, in nats.

        z = logit_scale * logits, then softcap * tanh(z / softcap) if given;  lse = log sum exp(z)
        loss = (1 - s) (lse - z[target]) + s (lse - mean(z)) + z_loss lse^2

    Args:
        logits: [..., V], any floating dtype; 16-bit logits are converted to float32.
        target: int64 [...], in [0, V) or ignore_index.
        ignore_index: rows with this target have loss and gradient 0 and are not counted.
        label_smoothing: s, in [0, 1].
        softcap: bound on |z|; None is no bound.
        z_loss: weight of lse^2, which keeps the logits from drifting.
        logit_scale: factor before everything else.
        reduction: "mean" over the rows that count (0 if there are none, where torch has NaN),
            "sum", or "none" for shape [...].
        group: a process group, whose ranks hold the vocabulary in equal parts, in their order:
            logits [..., V / ranks], targets of the whole vocabulary. Every rank gets the loss, and
            the gradient of its logits. Not under torch.compile.
        impl: None chooses; "eager", "triton" or "reference" is used or refused.

    Returns:
        The loss, float32, or float64 for float64 logits.

    Raises:
        ValueError: shapes do not fit, an option is out of range, or a target is outside [0, V)
            (checked on a CPU, outside of torch.compile). TypeError: dtypes.

    Cost: on CUDA one read of logits and, if gradients are wanted, one write of them, which "mean"
        and "sum" make in the forward (under torch.compile in the backward, with one more read, as
        "none"); elsewhere one array of logits' size, kept for backward.
    Source: Szegedy et al., Rethinking the Inception Architecture, 2015, section 7 (smoothing);
        Chowdhery et al., PaLM, 2022, section 5 (z loss).
    """
    if logits.dim() == 0:
        raise ValueError("logits: want at least one dimension [..., V], got a scalar")
    if logits.shape[-1] == 0:
        raise ValueError("logits: want at least one class, got V = 0")
    checks.expect_floating({"logits": logits})
    checks.expect_one_device({"logits": logits, "target": target})
    terms = _terms(
        target, logits.shape[:-1], ignore_index, label_smoothing, softcap, z_loss, logit_scale
    )
    _check_reduction(reduction)
    impl = choose(_CANDIDATES, (logits, logits.shape[-1]), impl, "cross_entropy", logits).impls
    rows, ids = logits, target
    if logits.dim() != 2:
        rows, ids = logits.reshape(target.numel(), logits.shape[-1]), target.reshape(-1)
    if group is not None:
        from slipstream.kernels.loss import shard  # builds of torch without collectives exist

        _check_group(group)
        part = shard.equal_shards(logits.shape[-1], group)
        loss = shard.cross_entropy(rows, ids, terms, part, reduction, impl)
        return loss.view(target.shape) if reduction == "none" else loss
    loss = op.cross_entropy(rows, ids, terms, reduction, impl)
    return loss.view(target.shape) if reduction == "none" else loss


@checks.operator
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    group: Any = None,
    impl: str | None = None,
) -> Tensor:
    """Cross entropy of logits = hidden weight^T + bias, never stored whole, in nats.

        z = logit_scale * logits, then softcap * tanh(z / softcap) if given;  lse = log sum exp(z)
        loss = (1 - s) (lse - z[target]) + s (lse - mean(z)) + z_loss lse^2

    Args:
        hidden: [..., D], any floating dtype.
        weight: [V, D], hidden's dtype.
        target: int64 [...], in [0, V) or ignore_index.
        bias: [V], hidden's dtype; None is 0.
        group: as cross_entropy's, of weight [V / ranks, D] and bias [V / ranks]; hidden is the
            same on every rank, and so is its gradient.
        The rest: as cross_entropy.

    Returns:
        The loss, float32, or float64 for float64 hidden.

    Raises:
        ValueError: shapes do not fit, an option is out of range, or on the CPU a target is
            outside [0, V). TypeError: dtypes.

    Cost: 2 N D V flops, and 4 N D V more for gradients, which "mean" and "sum" make in the forward
        if they are wanted ("none" in the backward, from logits computed again). Memory: a chunk of
        rows of the logits and, with gradients, hidden's and weight's size.
    """
    checks.expect_rank("weight", weight, 2, "[V, D]")
    if weight.shape[0] == 0:
        raise ValueError("weight: want at least one class, got V = 0")
    if hidden.dim() == 0:
        raise ValueError("hidden: want at least one dimension [..., D], got a scalar")
    checks.expect_shape("weight", weight, (weight.shape[0], hidden.shape[-1]))
    if bias is not None:
        checks.expect_shape("bias", bias, weight.shape[:1])
    given = {"hidden": hidden, "weight": weight, "bias": bias}
    checks.expect_floating(given)
    if (dtype := checks.autocast_dtype(hidden)) is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    else:
        checks.expect_one_dtype(given)
    checks.expect_one_device({**given, "target": target})
    terms = _terms(
        target, hidden.shape[:-1], ignore_index, label_smoothing, softcap, z_loss, logit_scale
    )
    _check_reduction(reduction)
    call = (hidden, weight.shape[0])
    impl = choose(_CANDIDATES, call, impl, "linear_cross_entropy", hidden).impls
    rows, ids = hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1)
    inputs = linear_rows.ClassifierInputs(rows, weight, bias, ids)
    if group is not None:
        from slipstream.kernels.loss import shard

        _check_group(group)
        part = shard.equal_shards(weight.shape[0], group)
        loss = shard.linear_cross_entropy(inputs, terms, part, reduction, impl)
        return loss.view(target.shape) if reduction == "none" else loss
    loss = op.linear_cross_entropy(inputs, terms, reduction, impl)
    return loss.view(target.shape) if reduction == "none" else loss


def _unsupported_reason(x: Tensor, size: int) -> str | None:
    if x.shape[-1] == 0:
        return "there are no features"
    return guarded_launch.known_failure(lambda: fused.kind(x.dtype, size), x.device)


_CANDIDATES = triton_or_eager(_unsupported_reason)


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: want one of {REDUCTIONS}, got {reduction!r}")


def _check_group(group: Any) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: want a process group or None, got {type(group).__name__}")


def _terms(
    target: Tensor,
    shape: torch.Size,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    logit_scale: float,
) -> eager.LossInputs:
    checks.expect_shape("target", target, shape)
    if target.dtype != torch.int64:
        raise TypeError(f"target: want torch.int64, got {target.dtype}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: want a number in [0, 1], got {label_smoothing}")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap: want None or a number above 0, got {softcap}")
    return eager.LossInputs(
        ignore_index, float(label_smoothing), float(softcap or 0.0), float(z_loss),
        float(logit_scale),
    )  # fmt: skip
