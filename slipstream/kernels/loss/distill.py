"""The KL divergence of a student's distribution from a teacher's, both behind a linear layer.

    p = softmax(t / T), q = softmax(s / T)          t, s = hidden weight^T + bias, of each its own
    loss = T^2 sum(p (log p - log q))               ds = T (q - p), nothing for the teacher

One opaque operator, whose rows go through in chunks, so that no logits are held. For one number
the gradient is made in the forward, if it is wanted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.common import linear_rows
from slipstream.common.checks import cast, wide_dtype
from slipstream.common.linear_rows import LinearRows, row_chunks
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.loss.op import rows_function
from slipstream.runtime import autograd, custom_op, dispatch, kernel_pair

Linear = tuple[Tensor, Tensor, Tensor | None]


def kl_reference(s: Tensor, t: Tensor, live: Tensor | None, temperature: float) -> Tensor:
    """logits [N, V] of student and teacher -> loss [N]; plain differentiable torch."""
    q, p = (torch.log_softmax(x / temperature, -1) for x in (s, t))
    rows = torch.where(p == -torch.inf, 0, p.exp() * (p - q)).sum(-1) * temperature**2
    return rows if live is None else torch.where(live, rows, 0)


def kl_rows(
    student: Linear,
    teacher: Linear,
    live: Tensor | None,
    dloss: Tensor | None,
    temperature: float,
    grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss [N], and with `grads` dhidden [N, D], dweight [V, D], dbias [V] of the student, the last
    two in float32 or float64; else three empty ones.

    Args:
        dloss: [N] or [], what comes into each row's loss; None is 1.
    """
    hidden, weight, _ = student
    dtype = wide_dtype(hidden)
    layers = LinearRows(*student, grads, dtype), LinearRows(*teacher, False, dtype)
    loss = hidden.new_empty(hidden.shape[0], dtype=dtype)
    for rows in row_chunks(hidden, 2 * weight.shape[0]):
        q, p = (cast(x.logits(rows), dtype).div_(temperature).log_softmax(-1) for x in layers)
        live_rows = None if live is None else live[rows]
        row_loss = torch.where(p == -torch.inf, 0, p.exp() * (p - q)).sum(-1) * temperature**2
        loss[rows] = row_loss if live_rows is None else row_loss.masked_fill_(~live_rows, 0)
        if not grads:
            continue
        d = q.exp_().sub_(p.exp_()).mul_(temperature)
        if dloss is not None:
            d *= (dloss[rows] if dloss.dim() else dloss)[..., None]
        if live_rows is not None:
            d = d.masked_fill_(~live_rows[:, None], 0)
        layers[0].add(rows, d)
    return loss, layers[0].dhidden, layers[0].dweight, layers[0].dbias


def linear_kl_div(
    student: Linear,
    teacher: Linear,
    live: Tensor | None,
    temperature: float,
    reduction: str,
    impl: str,
) -> Tensor:
    """hidden [N, D], weight [V, D], bias [V] of each, whose D may differ -> loss [N] or []."""
    if impl == "reference":
        logits = [torch.nn.functional.linear(x, w, b) for x, w, b in (student, teacher)]
        return kl_div(logits[0], logits[1], live, temperature, reduction)
    tensors = (*student, *teacher, live)
    if autograd.needs_autograd(*student):
        rows = _Rows.apply(*tensors, temperature, reduction != "none", impl)
    else:
        rows = _CALL(*tensors, None, temperature=temperature, grads=False, impl=impl)[0]
    return _reduced(rows, live, reduction)


def kl_div(s: Tensor, t: Tensor, live: Tensor | None, temperature: float, reduction: str) -> Tensor:
    """logits [N, V] of student and teacher -> loss [N] or []; plain differentiable torch."""
    dtype = wide_dtype(s)
    return _reduced(kl_reference(s.to(dtype), t.to(dtype), live, temperature), live, reduction)


def _reduced(rows: Tensor, live: Tensor | None, reduction: str) -> Tensor:
    """_Rows has one number where its gradient is made in the forward."""
    if reduction == "none":
        return rows
    total = rows.sum()
    if reduction == "sum":
        return total
    return total / (max(rows.shape[0], 1) if live is None else live.sum().clamp(min=1))


def _impl(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tensors, live, dloss, temperature, grads, impl = args
    contiguous: Any = [None if t is None else t.contiguous() for t in tensors]
    x, w, b, y, u, c = contiguous
    options = live, None if dloss is None else cast(dloss, wide_dtype(x)), temperature, grads
    student, teacher = (x, w, b), (y, u, c)
    if not dispatch.is_triton(impl):
        return kl_rows(student, teacher, *options)
    kernel = "slipstream.kernels.loss.triton.kl_div:linear_rows"
    mismatch = partial(_mismatch, x, w.shape[0], kernel)
    call = student, teacher, *options
    return kernel_pair.guarded(impl, x.device, kernel, _plain, call, lambda: _kind(x, w), mismatch)


def _kind(x: Tensor, weight: Tensor) -> KernelKey:
    return ("linear_kl_div.triton", x.dtype, weight.shape[0])


def _plain(student: Linear, *call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the kernels have the dtypes."""
    (loss, dhidden, dweight, dbias), dtype = kl_rows(student, *call), student[1].dtype
    return loss, dhidden, cast(dweight, dtype), cast(dbias, dtype)


def _mismatch(like: Tensor, classes: int, kernel: str) -> str | None:
    """The probe: a few rows of as many classes, one of them left out."""
    shapes = {"hidden": (9, 16), "weight": (classes, 16), "bias": (classes,)}
    tensors = {
        f"{who}'s {name}": kernel_pair.random_like(like, *shape) / (4 if name == "weight" else 1)
        for who in ("student", "teacher")
        for name, shape in shapes.items()
    }
    live, dloss = torch.arange(9, device=like.device) != 4, torch.rand(9, device=like.device)

    def run(function: Callable) -> Callable:
        options = live, dloss, 1.5, True
        return lambda t: function((*t.values(),)[:3], (*t.values(),)[3:], *options)

    launch, bar = kernel_pair.launch_of(kernel), kernel_pair.BARS[like.dtype][1]
    return kernel_pair.mismatch(
        run(launch), run(kl_rows), tensors, gradients=False, minimum_bar=bar
    )


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias, *_, grads, impl = args
    return linear_rows.fake_rows(hidden, weight, bias, grads, dispatch.is_triton(impl))


_CALL = custom_op.KernelOp(
    "linear_kl_div",
    "(Tensor student, Tensor student_weight, Tensor? student_bias, Tensor teacher, "
    "Tensor teacher_weight, Tensor? teacher_bias, Tensor? live, Tensor? dloss, "
    "float temperature, bool grads, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    _impl,
    _fake,
)
_Rows = rows_function("slipstream::linear_kl_div", _CALL, 7)


def _of_operator(*args: Any) -> Any:
    """As slipstream::_linear_kl_div is called."""
    *tensors, dloss, temperature, _, impl = args
    return () if dloss is not None else _Rows.apply(*tensors, temperature, False, impl)


_CALL.set_gradient(_of_operator)
