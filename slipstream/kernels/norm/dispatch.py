"""From a norm's arguments to an implementation."""

from torch import Tensor

from slipstream.kernels.norm import eager, reference
from slipstream.kernels.norm.inputs import NormInputs, NormOptions
from slipstream.kernels.norm.op import kind, norm
from slipstream.runtime import guarded_launch
from slipstream.runtime.backends import DTYPES
from slipstream.runtime.dispatch import choose, is_triton, triton_or_eager


def run(t: NormInputs, n: NormOptions, impl: str | None) -> tuple[Tensor, Tensor]:
    """y in x's shape and dtype, and h = x + residual."""
    impl = choose(CANDIDATES, (t.x, n, t), impl, "norm", t.x).impls
    if is_triton(impl):
        y, h = norm(t, n, impl)
        return y, t.x if h is None else h
    functions = (eager.rms, eager.layer)
    if impl == "reference":
        functions = (reference.rms_reference, reference.layer_reference)
    return eager.compose(t, n, *functions)


def _unsupported_reason(x: Tensor, n: NormOptions, t: NormInputs) -> str | None:
    if x.shape[-1] == 0:
        return "there are no features"
    for other in t[1:]:
        if other is not None and other.dtype not in DTYPES:
            return f"it computes in float32, and an input is {other.dtype}"
    return guarded_launch.known_failure(lambda: kind(x, t.weight, t.gate, n), x.device)


CANDIDATES = triton_or_eager(_unsupported_reason)
