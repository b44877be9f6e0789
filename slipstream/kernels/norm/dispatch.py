"""From a norm's arguments to an implementation."""

from torch import Tensor

from slipstream.kernels.norm import eager, reference
from slipstream.kernels.norm.inputs import NormOptions
from slipstream.kernels.norm.op import kind, norm
from slipstream.runtime import guarded_launch
from slipstream.runtime.backends import DTYPES
from slipstream.runtime.dispatch import choose, is_triton, triton_or_eager


def run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    n: NormOptions,
    impl: str | None,
) -> tuple[Tensor, Tensor]:
    """y in x's shape and dtype, and h = x + residual."""
    impl = choose(CANDIDATES, (x, n, weight, bias, gate, residual), impl, "norm", x).impls
    if is_triton(impl):
        y, h = norm(x, weight, bias, gate, residual, n, impl)
        return y, x if h is None else h
    functions = (eager.rms, eager.layer)
    if impl == "reference":
        functions = (reference.rms_reference, reference.layer_reference)
    return eager.compose(x, weight, bias, gate, residual, n, *functions)


def _unsupported_reason(x: Tensor, n: NormOptions, *tensors: Tensor | None) -> str | None:
    if x.shape[-1] == 0:
        return "there are no features"
    for t in tensors:
        if t is not None and t.dtype not in DTYPES:
            return f"it computes in float32, and an input is {t.dtype}"
    return guarded_launch.known_failure(lambda: kind(x, tensors[0], tensors[2], n), x.device)


CANDIDATES = triton_or_eager(_unsupported_reason)
