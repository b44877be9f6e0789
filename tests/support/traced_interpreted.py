"""Operators' kernels under torch.jit.trace, in Triton's interpreter. Sizes are then tensors of a
CPU, and what a GPU would refuse of them is refused.

TRITON_INTERPRET=1 python -m tests.support.traced_interpreted         all
TRITON_INTERPRET=1 python -m tests.support.traced_interpreted chunk_delta_rule attention-packed
"""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.derivatives import CASES, Problem, in_float32

REPEATS = {torch.Tensor.repeat_interleave, torch.repeat_interleave}
BOUNDS = {torch.Tensor.clamp, torch.clamp}


class _SizesAreNumbers(TorchFunctionMode):
    """Refuses torch.jit.trace's sizes where they have to be on the GPU of the other tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [isinstance(x, Tensor) for x in (*args[1:], *(kwargs or {}).values())]
        # beside a number a bound is taken as one
        if (func in REPEATS and any(given)) or (func in BOUNDS and all(given)):
            raise TypeError(f"{func.__name__}: a size is a tensor of a CPU")
        return func(*args, **(kwargs or {}))


def main(names: list[str]) -> None:
    warnings.filterwarnings("ignore", ".*torch.jit.trace", DeprecationWarning)
    warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # pyright: ignore[reportPrivateImportUsage]
    for case in CASES:
        # the operator's own name is of an implementation on a CPU
        if case.name == "short_convolution-operator" or (names and case.name not in names):
            continue
        for grads in (False, True):
            torch.manual_seed(0)
            problem = Problem(in_float32(case))
            with _SizesAreNumbers():
                problem.expect_traced_is_the_call(grads)
        print(case.name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
