"""From an operator's arguments to the selective scan: checks, choice, call."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.selective_scan import op, reference
from slipstream.kernels.selective_scan.inputs import ScanInputs, compute_dtype
from slipstream.runtime import context_exchange, guarded_launch
from slipstream.runtime.backends import DTYPES, sm90_unsupported, triton_unsupported
from slipstream.runtime.context_in_segments import scan_of_rank
from slipstream.runtime.context_parallel import ContextParallel
from slipstream.runtime.context_share import Share
from slipstream.runtime.dispatch import Candidate, Selection, ValidationCache, choose, signature
from slipstream.runtime.token_ids import expect_offsets

# numbers of a channel's state that registers have room for, on sm_90
MAX_N = 64


def unsupported_reason(inputs: ScanInputs) -> str | None:
    """Why the Triton kernels can't take this call, or None if they can."""
    if torch.version.hip:
        return "its kernels have not been compiled for AMD's GPUs"
    return _wider(inputs) or triton_unsupported(inputs.u, "u") or _failure(inputs, "triton")


def _sm90_unsupported(inputs: ScanInputs) -> str | None:
    if reason := sm90_unsupported(inputs.u) or _wider(inputs):
        return reason
    if inputs.A.shape[1] > MAX_N:
        return f"a state of more than {MAX_N} numbers a channel has no room in registers"
    return _failure(inputs, "sm90")


def _wider(inputs: ScanInputs) -> str | None:
    for name, x in zip(ScanInputs._fields[:-1], inputs):
        if x is not None and x.dtype not in DTYPES:
            return f"it computes in float32, and {name} is {x.dtype}"
    return None


def _failure(inputs: ScanInputs, name: str) -> str | None:
    return guarded_launch.known_failure(lambda: op.kind(inputs, name), inputs.u.device)


CANDIDATES = (
    Candidate("sm90", "kernels for sm_90", _sm90_unsupported),
    Candidate("triton", "portable Triton kernels, on CUDA", unsupported_reason),
    Candidate("eager", "plain torch, on any device"),
    Candidate("reference", "token by token, the oracle of the tests", by_name_only=True),
)
_PLANS = ValidationCache()


def run(
    inputs: ScanInputs,
    delta_softplus: bool,
    output_final_state: bool,
    impl: str | None,
    context: ContextParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] in u's dtype, and the final state [S, D, N] if asked for."""
    if context is not None:
        args = inputs, delta_softplus, output_final_state, impl, context
        return context.eagerly(_run_across_ranks, *args)
    plan = _plan(inputs, impl)
    cu_seqlens = inputs.cu_seqlens
    if cu_seqlens is not None and cu_seqlens.is_cuda:  # plain torch looks on the CPU
        expect_offsets("cu_seqlens", cu_seqlens, inputs.u.shape[1])
    if plan.impl == "reference":
        y, final = reference.selective_scan_reference(inputs, delta_softplus)
    else:
        y, final = op.selective_scan(inputs, delta_softplus, plan.impls)
    return y, final if output_final_state else None


def _plan(inputs: ScanInputs, impl: str | None) -> Selection:
    return _PLANS.get(signature(inputs, impl), lambda: _checked(inputs, impl), inputs)


def _run_across_ranks(
    inputs: ScanInputs,
    delta_softplus: bool,
    output_final_state: bool,
    impl: str | None,
    context: ContextParallel,
) -> tuple[Tensor, Tensor | None]:
    """As run, of this rank's tokens: its head starts from what the ranks before it come to."""
    context.expect_no_offsets(inputs.cu_seqlens, impl)
    u, A, initial_state = inputs.u, inputs.A, inputs.initial_state
    inputs = inputs._replace(initial_state=None, cu_seqlens=context.offsets_on(u.device))
    plan = _plan(inputs, impl)
    share, rows = context.share(u.shape[1]), 1 if inputs.cu_seqlens is not None else u.shape[0]
    if initial_state is not None:
        checks.expect_shape("initial_state", initial_state, (share.sequences * rows, *A.shape))
        checks.expect_floating({"initial_state": initial_state})
        checks.expect_one_device({"u": u, "initial_state": initial_state})
    y, after = _scan_of_rank(inputs, initial_state, share, delta_softplus, plan.impls)
    if not output_final_state:
        return y, None
    tensors = [x for x in inputs[:8] if x is not None]
    return y, share.whole_states(context_exchange.tie(after, *tensors), initial_state, rows)


def _scan_of_rank(
    inputs: ScanInputs, initial_state: Tensor | None, share: Share, delta_softplus: bool, impls: str
) -> tuple[Tensor, Tensor]:
    """y, and the states after this rank's pieces."""
    names = [name for name in ("u", "delta", "B", "C", "z") if getattr(inputs, name) is not None]

    def of(*args: Any) -> ScanInputs:
        *tensors, state, offsets = args
        tokens = dict(zip(names, tensors, strict=True))
        return inputs._replace(**tokens, initial_state=state, cu_seqlens=offsets)

    def change(*args: Any) -> tuple[Tensor, Tensor]:
        return _change_of(of(*args, None), delta_softplus, impls)

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        return op.selective_scan(of(*args), delta_softplus, impls)

    u, tensors = inputs.u, [getattr(inputs, name) for name in names]
    rows = 1 if share.packed else u.shape[0]
    like = u.new_empty(rows, *inputs.A.shape, dtype=compute_dtype(u))
    others = [x for x in (inputs.A, inputs.D, inputs.delta_bias) if x is not None]
    return scan_of_rank(change, run, tensors, initial_state, like, share, inputs.cu_seqlens, others)


def _change_of(inputs: ScanInputs, delta_softplus: bool, impls: str) -> tuple[Tensor, Tensor]:
    """The state after a sequence's tokens, from zeros or the given one, and the product of their
    decays, [rows, D, N] each."""
    alone = inputs._replace(D=None, z=None)
    _, added = op.selective_scan(alone, delta_softplus, impls)
    steps = inputs.delta.to(added.dtype, memory_format=torch.contiguous_format)
    if inputs.delta_bias is not None:
        steps = steps + inputs.delta_bias.to(added.dtype)
    if delta_softplus:
        steps = F.softplus(steps)
    return added, (steps.sum(1)[..., None] * inputs.A.to(added.dtype)).exp()


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
