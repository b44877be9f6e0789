"""Losses over a vocabulary, of logits or of the linear layer before them, which are not held then.

Cross entropy, distillation (linear_kl_div), and log-probabilities of tokens, with entropies.
"""

import math
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.common import checks, linear_rows
from slipstream.kernels.elementwise import log_probs
from slipstream.kernels.loss import distill, eager, fused, op
from slipstream.runtime import dispatch, guarded_launch

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
    _check_target(target, logits.shape[:-1])
    terms = _terms(ignore_index, label_smoothing, softcap, z_loss, logit_scale)
    _check_reduction(reduction)
    impl = dispatch.choose(
        _CANDIDATES, (logits, logits.shape[-1]), impl, "cross_entropy", logits
    ).impls
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
    inputs = _classifier(hidden, weight, target, bias)
    terms = _terms(ignore_index, label_smoothing, softcap, z_loss, logit_scale)
    _check_reduction(reduction)
    call = (inputs.hidden, inputs.weight.shape[0])
    impl = dispatch.choose(_CANDIDATES, call, impl, "linear_cross_entropy", call[0]).impls
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


_CANDIDATES = dispatch.triton_or_eager(_unsupported_reason)


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: want one of {REDUCTIONS}, got {reduction!r}")


def _check_group(group: Any) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: want a process group or None, got {type(group).__name__}")


def _check_target(target: Tensor, shape: torch.Size) -> None:
    checks.expect_shape("target", target, shape)
    if target.dtype != torch.int64:
        raise TypeError(f"target: want torch.int64, got {target.dtype}")


def _classifier(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
) -> linear_rows.ClassifierInputs:
    """Rows, in the dtype that autocast wants."""
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
    _check_target(target, hidden.shape[:-1])
    rows = hidden.reshape(target.numel(), hidden.shape[-1])
    return linear_rows.ClassifierInputs(rows, weight, bias, target.reshape(-1))


def _terms(
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    logit_scale: float,
) -> eager.LossInputs:
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: want a number in [0, 1], got {label_smoothing}")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap: want None or a number above 0, got {softcap}")
    return eager.LossInputs(
        ignore_index, float(label_smoothing), float(softcap or 0.0), float(z_loss),
        float(logit_scale),
    )  # fmt: skip


KL_REDUCTIONS = ("mean", "sum", "none")


@checks.operator
def linear_kl_div(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
    impl: str | None = None,
) -> Tensor:
    """KL divergence of a student's classes from a teacher's, of logits that are never stored whole.

        s, t = student student_weight^T + student_bias, and the teacher's
        p, q = softmax(t / T), softmax(s / T);  loss = T^2 sum(p (log p - log q)), in nats

    Args:
        student: hidden states [..., D], any floating dtype.
        student_weight: [V, D].
        teacher: [..., E], student's dtype; E may differ from D. It gets no gradient.
        teacher_weight: [V, E]. It gets no gradient.
        student_bias, teacher_bias: [V]; None is 0.
        temperature: T, above 0. T^2 keeps the gradient's size as T grows.
        mask: bool [...]; rows that are False have loss and gradient 0 and are not counted.
        reduction: "mean" over the rows that count (0 if there are none), "sum", or "none".
        impl: None chooses; "eager", "triton" or "reference" is used or refused.

    Returns:
        The loss, float32, or float64 for float64 states.

    Raises:
        ValueError: shapes or an option do not fit. TypeError: dtypes. NotImplementedError: the
            teacher wants a gradient.

    Cost: 2 N V (D + E) flops, and 4 N V D more for gradients, which "mean" and "sum" make in the
        forward ("none" in the backward, from logits computed again). Memory: a chunk of rows of
        both logits and, with gradients, student's and its weight's size.
    Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015, section 2.
    """
    if student.dim() == 0:
        raise ValueError("student: want at least one dimension [..., D], got a scalar")
    checks.expect_rank("student_weight", student_weight, 2, "[V, D]")
    checks.expect_rank("teacher_weight", teacher_weight, 2, "[V, E]")
    shape, V = student.shape[:-1], student_weight.shape[0]
    if V == 0:
        raise ValueError("student_weight: want at least one class, got V = 0")
    checks.expect_shape("student_weight", student_weight, (V, student.shape[-1]))
    checks.expect_shape("teacher", teacher, (*shape, *teacher.shape[-1:]))
    checks.expect_shape("teacher_weight", teacher_weight, (V, teacher.shape[-1]))
    for name, bias in (("student_bias", student_bias), ("teacher_bias", teacher_bias)):
        if bias is not None:
            checks.expect_shape(name, bias, (V,))
    _check_kl_options(temperature, mask, shape, reduction)
    teachers = {"teacher": teacher, "teacher_weight": teacher_weight, "teacher_bias": teacher_bias}
    for name, x in teachers.items():
        if x is not None and torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(f"{name}: it gets no gradient; detach it")
    students = {"student": student, "student_weight": student_weight, "student_bias": student_bias}
    checks.expect_one_device({**students, **teachers, "mask": mask})
    given = {**students, **teachers}
    checks.expect_floating(given)
    dtype = checks.autocast_dtype(student)
    if dtype is None:
        checks.expect_one_dtype(given)
    else:
        given = {name: None if x is None else x.to(dtype) for name, x in given.items()}
    x, w, b, y, u, c = given.values()
    assert x is not None and w is not None and y is not None and u is not None
    impl = dispatch.choose(_KL_CANDIDATES, (x,), impl, "linear_kl_div", x).impls
    live = None if mask is None else mask.reshape(-1)
    rows, others = (z.reshape(math.prod(shape), z.shape[-1]) for z in (x, y))
    loss = distill.linear_kl_div(
        (rows, w, b), (others, u, c), live, float(temperature), reduction, impl
    )
    return loss.view(shape) if reduction == "none" else loss


def kl_div(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """linear_kl_div of logits [..., V] that the caller has; the teacher's get no gradient."""
    checks.expect_tensor("student_logits", student_logits)
    checks.expect_tensor("teacher_logits", teacher_logits)
    checks.expect_shape("teacher_logits", teacher_logits, student_logits.shape)
    shape = student_logits.shape[:-1]
    _check_kl_options(temperature, mask, shape, reduction)
    live = None if mask is None else mask.reshape(-1)
    s, t = (x.reshape(math.prod(shape), x.shape[-1]) for x in (student_logits, teacher_logits))
    loss = distill.kl_div(s, t.detach(), live, float(temperature), reduction)
    return loss.view(shape) if reduction == "none" else loss


def _check_kl_options(
    temperature: float, mask: Tensor | None, shape: torch.Size, reduction: str
) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature: want a number above 0, got {temperature}")
    if reduction not in KL_REDUCTIONS:
        raise ValueError(f"reduction: want one of {KL_REDUCTIONS}, got {reduction!r}")
    if mask is not None:
        checks.expect_shape("mask", mask, shape)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask: want torch.bool, got {mask.dtype}")


def _kl_unsupported(x: Tensor) -> str | None:
    return "there are no features" if x.shape[-1] == 0 else None


_KL_CANDIDATES = dispatch.triton_or_eager(_kl_unsupported)


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
    given = _classifier(hidden, weight, target, bias)
    call = (given.hidden, given.weight.shape[0])
    impls = dispatch.choose(_LOG_PROBS_CANDIDATES, call, impl, "linear_log_probs", call[0]).impls
    found = log_probs.log_probs(given, 1 / float(temperature), ignore_index, impls)
    log_prob, entropy = (x.view(target.shape) for x in found)
    return log_prob, entropy


def _log_probs_unsupported(x: Tensor, classes: int) -> str | None:
    if x.shape[-1] == 0:
        return "there are no features"
    return guarded_launch.known_failure(lambda: log_probs.kind(x.dtype, classes), x.device)


_LOG_PROBS_CANDIDATES = dispatch.triton_or_eager(_log_probs_unsupported)
