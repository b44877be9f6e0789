"""Building blocks by impl="triton" under Triton's interpreter, on a CPU, against their references.

The interpreter is chosen when a kernel is defined, so this runs in a process of its own:

TRITON_INTERPRET=1 python -m tests.support.interpreted rms_norm l2_norm      rows by function
"""

import functools
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream.compiler.kernel_key import KernelKey
from slipstream.runtime.backends import HAVE_TRITON
from slipstream.runtime.guarded_launch import Guard
from slipstream.tools.catalog import Sample
from tests.support.forked import run_script, run_test
from tests.support.formulas import wanted
from tests.support.operators import BLOCKS, Args, block_size, cast, each, with_grads
from tests.support.user_inputs import LAYOUTS

SIZES = ((1, 6), (7, 12), (37, 30), (0, 6))
# Of the largest value, outputs and gradients; the interpreter cuts 16-bit results off, which is
# twice the error of rounding.
LIMITS = {torch.float32: (1e-5, 3e-5), torch.float16: (4e-3, 8e-3)}

# Checks of more than a minute are in two parts: every form once or more, and further crossings.
PARTS = ("sample", pytest.param("further", marks=pytest.mark.slow))


def run(*names: str, script: str = "tests.support.interpreted") -> None:
    """The checks of rows by function, or parts of a script of their own, in another process."""
    status, text = run_script(script, *names)
    assert status == 0, text[-8000:]


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Has a test run under the interpreter, in a process of its own, where torch.empty holds NaN.
    Its parameters are strings; SEED in the environment is that of its random numbers."""

    @functools.wraps(test)
    def in_a_process(**given: str) -> None:
        status, text = run_test(test.__module__, test.__name__, given)
        assert status == 0, text[-8000:]

    return pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")(in_a_process)


def error(got: Tensor, want: Tensor) -> float:
    """The largest one, of the largest value or of one."""
    if got.shape != want.shape:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    off = (got.double() - want.double()).abs().max() / want.abs().max().clamp(min=1)
    return float(off.nan_to_num(float("inf")))


def check(block: Sample, T: int, D: int, dtype: torch.dtype, layout: str = "") -> list[str]:
    """layout: of every floating tensor, parameters too, as tests/support/user_inputs.py has it."""
    args = block.inputs(block_size(T, D, dtype))

    def call(given: Args) -> list[Tensor]:
        view = partial(each, lambda x: LAYOUTS[layout](x) if x.is_floating_point() else x)
        return block.call(
            {n: view(x) for n, x in given.items()} if layout else given, impl="triton"
        )

    found = with_grads(call, args)
    right = with_grads(partial(wanted, block), cast(args, torch.float64))
    return [
        f"{block.name} {T, D} {dtype} {layout} {what} {i}: {e:.1e} > {limit:.1e}"
        for what, limit, got, want in zip(("output", "gradient"), LIMITS[dtype], found, right)
        for i, (x, y) in enumerate(zip(got, want, strict=True))
        if not (e := error(x, y)) <= limit
    ]


def refused(block: Sample, probed: set[KernelKey]) -> list[str]:
    """The verdicts of the probes of its calls: any call may be the first of its kind. Those of
    kinds in `probed`, which are added to it, are known."""
    found: list[str] = []
    entered, probing = Guard.__enter__, False

    def enter(guard: Guard) -> bool:
        nonlocal probing
        if guard._probe is not None and not probing and (kind := guard._kind_of()) not in probed:
            probing = True
            probed.add(kind)
            try:
                text = guard._probe()
            finally:
                probing = False
            found.extend([] if text is None else [f"{block.name}: its probe says {text}"])
        return entered(guard)

    args = block.inputs(block_size(7, 12, torch.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "__enter__", enter)
        with_grads(lambda given: block.call(given, impl="triton"), args)
    return found


def main() -> None:
    torch.use_deterministic_algorithms(True)  # torch.empty holds NaN
    rows = [block for block in BLOCKS if block.op in sys.argv[1:]]
    assert {block.op for block in rows} == {*sys.argv[1:]}
    torch.manual_seed(0)
    faults = [
        fault
        for block in rows
        for T, D in SIZES
        for dtype in (torch.float32, torch.float16)
        if dtype == torch.float32 or T == 7
        for fault in check(block, T, D, dtype)
    ]
    faults += [
        fault
        for block in rows
        for layout in ("stepped", "negated")
        for fault in check(block, 7, 12, torch.float32, layout)
    ]
    probed: set[KernelKey] = set()
    faults += [fault for block in rows for fault in refused(block, probed)]
    raise SystemExit("\n".join(faults) if faults else 0)


if __name__ == "__main__":
    main()
