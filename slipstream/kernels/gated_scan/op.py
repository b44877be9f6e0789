"""The scan: an operator's checks, reversed time, choice, and the torch.library operators.

slipstream::_scan_forward gives h and the final state; _scan_backward the gradients of x, g and, if
it was given, initial_state. `impl` names the implementation, or several to try in order.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.gated_scan import eager
from slipstream.runtime import compile_ahead, kernel_pair
from slipstream.runtime.autograd import autograd_function, needs_autograd
from slipstream.runtime.context_exchange import tie
from slipstream.runtime.context_in_segments import scan_of_rank
from slipstream.runtime.context_parallel import ContextParallel, Share
from slipstream.runtime.custom_op import KernelOp
from slipstream.runtime.dispatch import Selection, ValidationCache, choose, signature
from slipstream.runtime.token_ids import expect_offsets


def kind(x: Tensor, g: Tensor) -> KernelKey:
    """The calls that share a verdict on the kernels."""
    return ("gated_scan.triton", x.dtype, g.dtype)


def _fake_forward(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty(rows, x.shape[2], dtype=checks.wide_dtype(x))


def _fake_backward(g: Tensor, h: Tensor, initial_state: Tensor | None, *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (h, g, initial_state) if x is not None]


_LAUNCH = "slipstream.kernels.gated_scan.triton_kernels"
_call_forward = KernelOp(
    "scan_forward",
    "(Tensor x, Tensor g, Tensor? initial_state, Tensor? cu_seqlens, str impl) -> (Tensor, Tensor)",
    fake=_fake_forward,
    kernel=f"{_LAUNCH}:forward",
    plain=eager.scan_forward,
    kind=kind,
    # two packed sequences, with states
    probe={
        "x": (1, kernel_pair.TOKENS, 40),
        "g": lambda g: -kernel_pair.random_like(g, 1, kernel_pair.TOKENS, 40).abs(),
        "initial_state": lambda x: torch.randn(2, 40, device=x.device),
        "cu_seqlens": lambda x: torch.tensor([0, 50, kernel_pair.TOKENS], device=x.device),
    },
    in_torch_if=lambda x: x.numel() == 0,
    replay=True,
    at_sizes=compile_ahead.AtSizes(tokens=(0, 1), states=(2,), offsets=(3,)),
)
_call_backward = KernelOp(
    "scan_backward",
    "(Tensor g, Tensor h, Tensor? initial_state, Tensor? cu_seqlens, Tensor? dh, Tensor? dfinal, "
    "str impl) -> Tensor[]",
    fake=_fake_backward,
    kernel=f"{_LAUNCH}:backward",
    plain=eager.scan_backward,
    kind=lambda h, g: kind(h, g),
    probe=lambda h, g: _call_forward._mismatch((h, g, None, None, "")),
    in_torch_if=lambda h: h.numel() == 0,
    replay=True,
    at_sizes=compile_ahead.AtSizes(tokens=(0, 1, 4), states=(2, 5), offsets=(3,)),
)
_Scan = autograd_function(_call_forward, _call_backward, results="h final", wrt="x g initial_state")


def scan(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    """h [B, T, D] in x's dtype and the final state [N, D], with gradients."""
    tensors = (x, g, initial_state)
    if needs_autograd(*tensors):
        return _Scan.apply(x, g, initial_state, cu_seqlens, impl)
    return _call_forward(x, g, initial_state, cu_seqlens, impl=impl)


def _unsupported_reason(x: Tensor, g: Tensor) -> str | None:
    """Why the Triton kernels can't take this call, or None if they can."""
    return "its kernel does not compile for AMD's GPUs" if torch.version.hip else None


_CANDIDATES = _call_forward.candidates(_unsupported_reason, asks_interpreter=True)
_PLANS = ValidationCache()


def run(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    reverse: bool,
    cu_seqlens: Tensor | None,
    impl: str | None,
    context: ContextParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """h [B, T, D] in x's dtype, and the final state [N, D] if asked for."""
    if context is not None:
        args = x, g, initial_state, output_final_state, reverse, cu_seqlens, impl, context
        return context.eagerly(_run_across_ranks, *args)
    tensors = x, g, initial_state, cu_seqlens
    plan = _PLANS.get(signature(tensors, impl), lambda: _checked(*tensors, impl), tensors)
    if cu_seqlens is not None and cu_seqlens.is_cuda:  # plain torch looks on the CPU
        expect_offsets("cu_seqlens", cu_seqlens, x.shape[1])
    if reverse:
        x, g, initial_state, cu_seqlens = _from_the_end(x, g, initial_state, cu_seqlens)
    if plan.impl == "reference":
        h, final = eager.scan_reference(x, g, initial_state, cu_seqlens)
    else:
        h, final = scan(x, g, initial_state, cu_seqlens, plan.impls)
    if reverse:
        h, final = h.flip(1), final if cu_seqlens is None else final.flip(0)
    return h, final if output_final_state else None


def _run_across_ranks(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    reverse: bool,
    cu_seqlens: Tensor | None,
    impl: str | None,
    context: ContextParallel,
) -> tuple[Tensor, Tensor | None]:
    """As run, of this rank's tokens: its head starts from what the ranks before it come to."""
    context.expect_no_offsets(cu_seqlens, impl)
    cu_seqlens = context.offsets_on(x.device)
    plan = _checked(x, g, None, cu_seqlens, impl)
    share, rows = context.share(x.shape[1]), 1 if context.cu_seqlens is not None else x.shape[0]
    if initial_state is not None:
        checks.expect_shape("initial_state", initial_state, (share.sequences * rows, x.shape[2]))
        checks.expect_floating({"initial_state": initial_state})
    if reverse:
        share = share.reversed()
        x, g, initial_state, cu_seqlens = _from_the_end(x, g, initial_state, cu_seqlens)
    h, after = _scan_of_rank(x, g, cu_seqlens, initial_state, share, plan.impls)
    final = None
    if output_final_state:
        final = share.whole_states(tie(after, x, g), initial_state, rows)
    if reverse:
        h = h.flip(1)
        final = final if cu_seqlens is None or final is None else final.flip(0)
    return h, final


def _from_the_end(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The arguments in reversed time; packed sequences change their order, too."""
    if cu_seqlens is not None:
        cu_seqlens = x.shape[1] - cu_seqlens.flip(0)
        initial_state = None if initial_state is None else initial_state.flip(0)
    return x.flip(1), g.flip(1), initial_state, cu_seqlens


def _scan_of_rank(
    x: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    share: Share,
    impls: str,
) -> tuple[Tensor, Tensor]:
    """h, and the states after this rank's pieces."""
    wide = checks.wide_dtype(x)

    def change(x: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        gates = g.to(wide, memory_format=torch.contiguous_format)
        return scan(x, g, state, None, impls)[1], gates.sum(1).exp()

    like = x.new_empty(1 if share.packed else x.shape[0], x.shape[2], dtype=wide)
    return scan_of_rank(
        change, partial(scan, impl=impls), (x, g), initial_state, like, share, cu_seqlens
    )


def _checked(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, impl: str | None
) -> Selection:
    """Looks at nothing but shapes, dtypes and devices."""
    check(x, g, initial_state, cu_seqlens)
    return choose(_CANDIDATES, (x, g), impl, "hgrn", x)


def check(x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    checks.expect_rank("x", x, 3, "[B, T, D]")
    B, _, D = x.shape
    checks.expect_shape("g", g, x.shape)
    sequences = B
    if cu_seqlens is not None:
        checks.expect_cu_seqlens(cu_seqlens, *x.shape[:2])
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        checks.expect_shape("initial_state", initial_state, (sequences, D))
    tensors = {"x": x, "g": g, "initial_state": initial_state}
    checks.expect_one_device({**tensors, "cu_seqlens": cu_seqlens})
    checks.expect_floating(tensors)
