"""Blocks around attention on tensors of more than 2^31 elements: the last rows are those of the
rows alone."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from tests.support.operators import relative_error

ELEMENTS = 1 << 31
TAIL = 150
GIB = 1 << 30
# how long to wait for the memory of other processes
WAIT = 60.0


def expect_memory(tensors: int) -> None:
    """Skips where the GPU's free memory cannot hold this many tensors of 2^31 bfloat16 numbers, 4
    GiB each, and two more for everything that is small."""
    torch.cuda.empty_cache()
    needed, end = (tensors + 2) * 4 * GIB, time.monotonic() + WAIT
    total = torch.cuda.mem_get_info()[1]
    while (free := torch.cuda.mem_get_info()[0]) < needed <= total and time.monotonic() < end:
        time.sleep(1.0)
    if free < needed:
        found = f"{free / GIB:.1f} GiB of {total / GIB:.1f} are free"
        pytest.skip(f"needs {needed // GIB} GiB of the GPU's memory: {found}")


@dataclass(frozen=True)
class Case:
    """call: of rows [R, D] of each of `rows` tensors, and of `rest`, that are no rows."""

    call: Callable[..., Tensor]
    D: int
    rows: int = 1
    rest: tuple[int, ...] = ()


def rotated(x: Tensor, **options: Any) -> Tensor:
    """Every row at one position, so that the last ones do not know their place."""
    x = x.view(1, -1, 16, 128)
    cos, sin = (torch.full((1, 64), value, device=x.device) for value in (0.6, 0.8))
    where = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)
    return ops.rotary_embedding(x, cos, sin, positions=where, **options).view(-1, 2048)


def convolved(x: Tensor, w: Tensor, **options: Any) -> Tensor:
    return ops.short_convolution(x[None], w.view(-1, 4), activation="silu", **options)[0][0]


def shifted(x: Tensor, **options: Any) -> Tensor:
    return ops.token_shift(x[None], **options)[0][0]


def losses(x: Tensor, **options: Any) -> Tensor:
    target = torch.full((x.shape[0],), x.shape[1] - 1, device=x.device)
    return ops.cross_entropy(x, target, reduction="none", **options)[:, None]


CASES = {
    "rms_norm": Case(ops.rms_norm, 2048, rest=(2048,)),
    "rms_norm long rows": Case(ops.rms_norm, 40000, rest=(40000,)),
    "rms_norm residual": Case(
        lambda x, r, w, **o: ops.rms_norm(x, w, residual=r, **o), 2048, 2, (2048,)
    ),
    "rms_norm_gated": Case(ops.rms_norm_gated, 2048, 2, (2048,)),
    "layer_norm": Case(ops.layer_norm, 3000, rest=(3000, 3000)),
    "l2_norm": Case(ops.l2_norm, 64),
    "group_norm": Case(lambda x, w, **o: ops.group_norm(x, 16, w, **o), 2048, rest=(2048,)),
    "swiglu": Case(ops.swiglu, 1000, 2),
    "rotary_embedding": Case(rotated, 2048),
    "short_convolution": Case(convolved, 2048, rest=(4 * 2048,)),
    "token_shift": Case(shifted, 2048),
    "cross_entropy": Case(losses, 100003),
}


@pytest.fixture(autouse=True)
def _gives_memory_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", list(CASES))
def test_last_of_many_rows(name: str) -> None:
    case = CASES[name]
    # the rows and their gradients; y, its gradient, and what is kept for the backward
    expect_memory(2 * case.rows + 3)
    R = ELEMENTS // case.D + 2 * TAIL
    rows = [
        torch.randn(R, case.D, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(case.rows)
    ]
    rest = [torch.randn(size, device="cuda") for size in case.rest]
    y = case.call(*rows, *rest, impl="triton")
    dy = torch.zeros_like(y)
    dy[-TAIL:] = torch.randn_like(dy[-TAIL:])
    grads = torch.autograd.grad(y, rows, dy)
    # a convolution sees the rows before
    tails = [x[-2 * TAIL :].detach().float().requires_grad_() for x in rows]
    want = case.call(*tails, *rest, impl="eager")
    wants = torch.autograd.grad(want, tails, dy[-2 * TAIL :].float())
    assert relative_error(y[-TAIL:], want[-TAIL:]) < 0.01
    for x, w in zip(grads, wants, strict=True):
        assert relative_error(x[-TAIL:], w[-TAIL:]) < 0.01
        assert not x[: TAIL // 2].any()


def test_rows_of_a_huge_table() -> None:
    expect_memory(2)  # the table, and as many rows of a small one
    V, D = ELEMENTS // 2048 + 1000, 2048
    weight = torch.randn(V, D, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(V - 900, V, (3000,), device="cuda")
    assert torch.equal(ops.embedding(ids, weight), weight[ids])
    few = weight[-1000:]
    many = torch.randint(0, 1000, (ELEMENTS // D + 500,), device="cuda")
    got = ops.embedding(many, few)
    assert torch.equal(got[-500:], few[many[-500:]])


def test_states_of_a_huge_pool() -> None:
    expect_memory(1)
    slots, D, W = ELEMENTS // (2048 * 4) + 50, 2048, 4
    x, w = torch.randn(9, D, device="cuda"), torch.randn(D, W, device="cuda")
    pool = torch.randn(slots, D, W, device="cuda", dtype=torch.bfloat16)
    index = torch.arange(slots - 9, slots, device="cuda")
    few = pool[-9:].clone()
    update = partial(ops.short_convolution_update, activation="silu")
    got = update(x.bfloat16(), pool, w, state_indices=index, impl="triton")
    want = update(x.bfloat16(), few, w, impl="eager")
    assert relative_error(got, want) < 0.01 and torch.equal(pool[-9:], few)
