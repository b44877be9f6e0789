"""linear_kl_div: distillation without ever holding the logits."""

import math

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.loss import distill
from slipstream.runtime.dispatch import choose, triton_or_eager

REDUCTIONS = ("mean", "sum", "none")


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
    _check_options(temperature, mask, shape, reduction)
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
    impl = choose(_CANDIDATES, (x,), impl, "linear_kl_div", x).impls
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
    _check_options(temperature, mask, shape, reduction)
    live = None if mask is None else mask.reshape(-1)
    s, t = (x.reshape(math.prod(shape), x.shape[-1]) for x in (student_logits, teacher_logits))
    loss = distill.kl_div(s, t.detach(), live, float(temperature), reduction)
    return loss.view(shape) if reduction == "none" else loss


def _check_options(
    temperature: float, mask: Tensor | None, shape: torch.Size, reduction: str
) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature: want a number above 0, got {temperature}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: want one of {REDUCTIONS}, got {reduction!r}")
    if mask is not None:
        checks.expect_shape("mask", mask, shape)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask: want torch.bool, got {mask.dtype}")


def _unsupported_reason(x: Tensor) -> str | None:
    return "there are no features" if x.shape[-1] == 0 else None


_CANDIDATES = triton_or_eager(_unsupported_reason)
