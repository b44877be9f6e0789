"""Kernels that do to the compiler what bad luck does: compile, raise, abort, be killed, hang."""

import os
import signal
import sys
import time

import triton
import triton.language as tl


class Deed:
    """A class: of what a constexpr function refers to, Triton looks into functions only."""

    def __init__(self, what: str) -> None:
        if what == "abort":
            os.abort()
        if what == "assert":
            path = "/builder/tree/lib/Scheduler.cpp:12: void some::Scheduler::order(const Block &)"
            print(f"python: {path}: Assertion `x > 0' failed.", file=sys.stderr, flush=True)
            os.abort()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(3600)
        if what == "raise":
            raise RuntimeError("error: planted refusal")


@triton.constexpr_function
def _do(what):
    Deed(what)
    return 1


@triton.jit
def planted_kernel(x_ptr, n, WHAT: tl.constexpr):
    one: tl.constexpr = _do(WHAT)
    i = tl.arange(0, 16)
    tl.store(x_ptr + i, i + one, mask=i < n)


@triton.jit(do_not_specialize=["scale", "n"])
def product_kernel(
    x_ptr, y_ptr, o_ptr, bias_ptr, scale, n, N: tl.constexpr, PRECISION: tl.constexpr = "tf32"
):
    """o = scale x y + bias, all [N, N]; rows from n on are left out."""
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    x = tl.load(x_ptr + at, mask=i[:, None] < n, other=0.0)
    o = tl.dot(x, tl.load(y_ptr + at), input_precision=PRECISION) * scale
    if bias_ptr is not None:
        o += tl.load(bias_ptr + i)[None, :]
    tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=i[:, None] < n)


@triton.jit
def turned_kernel(x_ptr, y_ptr, o_ptr, M: tl.constexpr, N: tl.constexpr):
    """o = (x y)^T y, the left operand a product that is transposed."""
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    y = tl.load(y_ptr + at)
    z = tl.dot(tl.load(x_ptr + at), y).to(tl.bfloat16)
    tl.store(o_ptr + at, tl.dot(tl.trans(z), y))


@triton.jit
def narrow_kernel(x_ptr, y_ptr, o_ptr, M: tl.constexpr, N: tl.constexpr):
    """o = x y + x y', of N columns."""
    o_m, o_n, o_k = tl.arange(0, M)[:, None], tl.arange(0, N), tl.arange(0, 64)
    x = tl.load(x_ptr + o_m * 64 + o_k[None, :])
    y = tl.load(y_ptr + o_k[:, None] * N + o_n[None, :])
    o = tl.dot(x, y, tl.dot(x, tl.load(y_ptr + 64 * N + o_k[:, None] * N + o_n[None, :])))
    tl.store(o_ptr + o_m * N + o_n[None, :], o)


@triton.jit
def ahead_kernel(x_ptr, y_ptr, o_ptr, sums_ptr, n, BOTH: tl.constexpr):
    """o [64, 64] = the sum of n products x y^T of tiles; BOTH: and sums of what x has."""
    i = tl.arange(0, 64)
    at = i[:, None] * 64 + i[None, :]
    o = tl.zeros((64, 64), tl.float32)
    sums = tl.zeros((64,), tl.float32)
    for _ in range(n):
        x = tl.load(x_ptr + at)
        if BOTH:
            sums += tl.sum(x.to(tl.float32), 0)
        o = tl.dot(x, tl.trans(tl.load(y_ptr + at)), o)
        at += 64 * 64
    tl.store(o_ptr + i[:, None] * 64 + i[None, :], o)
    tl.store(sums_ptr + i, sums)


@triton.jit
def broadcast_sum_kernel(x_ptr, y_ptr, o_ptr, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(x_ptr + o), tl.load(y_ptr + o)
    tl.store(o_ptr + o, tl.sum(x[:, :, None] * y[None, :, :], 1))
