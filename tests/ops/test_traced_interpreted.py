"""torch.jit.trace of operators that run kernels, as on a GPU: sizes are tensors to it."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.derivatives import CASES, Problem, in_float32
from tests.support.interpreted import interpreted

# one of each way from the public function to a launch
SOME = ["chunk_gla", "chunk_delta_rule", "chunk_gdn2", "chunk_gated_delta_product", "chunk_gsa"]
SOME += ["chunk_rwkv4", "chunk_rwkv7", "attention-packed", "latent_attention"]
SOME += ["rms_norm_gated-mamba2", "short_convolution-packed", "cross_entropy-mean"]

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


@interpreted
@pytest.mark.parametrize(
    "names", [SOME, pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_traced_kernels_take_other_inputs(names: list[str]) -> None:
    assert set(names) <= {c.name for c in CASES}
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
