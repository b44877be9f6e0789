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
