"""Views in whose layouts users have their tensors, and what errors say."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.support.derivatives import CASES, Case, Problem, assert_near

# torch's words, of a saved tensor and of one of several views
CHANGED = ("modified by an inplace operation", "has been modified inplace")
NAMED = r"^(\w|\.|\[\d\])+: "


def says_changed(error: Exception) -> bool:
    """Whether it says that what backward reads was changed after forward."""
    return any(words in str(error) for words in CHANGED)


def transposed(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def stepped(x: Tensor) -> Tensor:
    return torch.stack([torch.full_like(x, torch.nan), x], -1)[..., 1]


def offset(x: Tensor) -> Tensor:
    return torch.cat([x.new_full((3,), torch.nan), x.flatten()])[3:].view(x.shape)


def negated(x: Tensor) -> Tensor:
    """A view with torch's bit of negation."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


def one_row(x: Tensor) -> Tensor:
    """The same along every dimension but the last, in the memory of one."""
    return x[(0,) * (x.dim() - 1)].expand(x.shape) if x.dim() else x


def one_value(x: Tensor) -> Tensor:
    return x.flatten()[0].expand(x.shape)


def overlapping(x: Tensor) -> Tensor:
    """As windows over a sequence."""
    return x.contiguous().as_strided(x.shape, (1,) * x.dim())


LAYOUTS = {
    f.__name__: f for f in (transposed, stepped, offset, negated, one_row, one_value, overlapping)
}

# whose backward reads an output: torch says that it was changed, as it does of its own
READS_OUTPUTS = {"chunk_hgrn", "fused_recurrent_hgrn", "rms_norm-residual", "chunk_mamba3"}
READS_OUTPUTS |= {"fused_recurrent_mamba3", "chunk_mamba3-mimo", "attention"}
READS_OUTPUTS |= {"attnres", "flash_attn_func", "flash_attn_varlen_func", "mhc_pre"}
READS_OUTPUTS |= {c.name for c in CASES if c.name.startswith("attention-")}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def expect_any_layout(case: Case, layout: str, near: float) -> None:
    """Results and gradients are those of dense copies."""
    problem, view = Problem(case), LAYOUTS[layout]

    def found(dense: bool) -> tuple[list[Tensor], list[Tensor]]:
        given = problem.leaves()
        views = [view(x) for x in given]
        if dense:
            views = [x.clone(memory_format=torch.contiguous_format) for x in views]
        outputs = problem.run(*views)
        grads = torch.autograd.grad(problem.of_outputs(outputs), given)
        return [x.detach() for x in outputs], list(grads)

    for got, want in zip(found(False), found(True)):
        assert_near(got, want, near)


def expect_changes_of_outputs(case: Case, near: float) -> None:
    """In place, which gradients follow."""
    problem = Problem(case)
    want = problem.gradient()
    for k in range(len(want) and len(problem.weights)):
        given = problem.leaves()
        outputs = list(problem.run(*given))
        if not outputs[k].requires_grad:
            continue
        outputs[k].add_(1.0)
        outputs[k] = outputs[k] - 1.0
        loss = problem.of_outputs(tuple(outputs))
        try:
            assert_near(list(torch.autograd.grad(loss, given)), want, near)
        except RuntimeError as error:
            if case.name not in READS_OUTPUTS or not says_changed(error):
                raise


def expect_change_is_seen(case: Case, of: str, near: float) -> None:
    """Under no_grad, where torch itself does not look: its error, or the right gradient."""
    problem = Problem(case)
    want = problem.gradient()
    for i in range(len(want if of == "input" else problem.weights)):
        leaves = problem.leaves()
        given = [x * 1 for x in leaves]
        outputs = problem.run(*given)
        weights = [w * (1 + 2 * y.detach().double()) for w, y in zip(problem.weights, outputs)]
        grads = [w.to(y.dtype) for w, y in zip(weights, outputs)]
        with torch.no_grad():
            (given if of == "input" else outputs)[i].mul_(-3.0)
        try:
            assert_near(list(torch.autograd.grad(outputs, leaves, grads)), want, near)
        except RuntimeError as error:
            if not says_changed(error):
                raise
