"""From an operator's arguments to the selective scan: checks, choice, call."""

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.selective_scan.inputs import ScanInputs
from slipstream.kernels.selective_scan.op import kind, selective_scan
from slipstream.kernels.selective_scan.reference import selective_scan_reference
from slipstream.runtime import guarded_launch
from slipstream.runtime.backends import DTYPES, triton_unsupported
from slipstream.runtime.dispatch import Candidate, Selection, ValidationCache, choose, signature
from slipstream.runtime.token_ids import expect_offsets


def unsupported_reason(inputs: ScanInputs) -> str | None:
    """Why the Triton kernels can't take this call, or None if they can."""
    if torch.version.hip:
        return "its kernels have not been compiled for AMD's GPUs"
    for name, x in zip(ScanInputs._fields[:-1], inputs):
        if x is not None and x.dtype not in DTYPES:
            return f"it computes in float32, and {name} is {x.dtype}"
    u = inputs.u
    return triton_unsupported(u, "u") or guarded_launch.known_failure(
        lambda: kind(inputs), u.device
    )


CANDIDATES = (
    Candidate("triton", "portable Triton kernels, on CUDA", unsupported_reason),
    Candidate("eager", "plain torch, on any device"),
    Candidate("reference", "token by token, the oracle of the tests", by_name_only=True),
)
_PLANS = ValidationCache()


def run(
    inputs: ScanInputs, delta_softplus: bool, output_final_state: bool, impl: str | None
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] in u's dtype, and the final state [S, D, N] if asked for."""
    plan = _PLANS.get(signature(inputs, impl), lambda: _checked(inputs, impl))
    cu_seqlens = inputs.cu_seqlens
    if cu_seqlens is not None and cu_seqlens.is_cuda:  # plain torch looks on the CPU
        expect_offsets("cu_seqlens", cu_seqlens, inputs.u.shape[1])
    if plan.impl == "reference":
        y, final = selective_scan_reference(inputs, delta_softplus)
    else:
        y, final = selective_scan(inputs, delta_softplus, plan.tries)
    return y, final if output_final_state else None


def _checked(inputs: ScanInputs, impl: str | None) -> Selection:
    """Looks at nothing but shapes, dtypes and devices."""
    check(inputs)
    return choose(CANDIDATES, inputs, impl, "selective_scan", inputs.u)


def check(inputs: ScanInputs) -> None:
    u, A, B, cu_seqlens = inputs.u, inputs.A, inputs.B, inputs.cu_seqlens
    checks.expect_rank("u", u, 3, "[B, T, D]")
    checks.expect_rank("A", A, 2, "[D, N]")
    checks.expect_rank("B", B, 4, "[B, T, G, N]")
    rows, tokens, channels = u.shape
    checks.expect_shape("A", A, (channels, A.shape[1]))
    checks.expect_shape("B", B, (rows, tokens, B.shape[2], A.shape[1]))
    checks.expect_shape("C", inputs.C, B.shape)
    checks.expect_multiple("channels of u", channels, "groups of B", B.shape[2])
    sequences = rows
    if cu_seqlens is not None:
        checks.expect_cu_seqlens(cu_seqlens, rows, tokens)
        sequences = cu_seqlens.shape[0] - 1
    shapes = {
        "delta": u.shape,
        "z": u.shape,
        "D": (channels,),
        "delta_bias": (channels,),
        "initial_state": (sequences, *A.shape),
    }
    for name, shape in shapes.items():
        x = getattr(inputs, name)
        if x is not None:
            checks.expect_shape(name, x, shape)
    tensors = inputs._asdict()
    checks.expect_one_device(tensors)
    del tensors["cu_seqlens"]
    checks.expect_floating(tensors)
