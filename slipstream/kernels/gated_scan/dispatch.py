"""From an operator's arguments to the scan: checks, reversed time, choice, call."""

from functools import partial

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.gated_scan import op, reference
from slipstream.runtime import backends, context_exchange, context_in_segments, guarded_launch
from slipstream.runtime.context_parallel import ContextParallel
from slipstream.runtime.context_share import Share
from slipstream.runtime.dispatch import Candidate, Selection, ValidationCache, choose, signature
from slipstream.runtime.token_ids import expect_offsets


def unsupported_reason(tensors: tuple[Tensor, Tensor]) -> str | None:
    """Why the Triton kernels can't take this call, or None if they can."""
    x, g = tensors
    if torch.version.hip:
        return "its kernel does not compile for AMD's GPUs"
    return backends.triton_unsupported(x, "x") or guarded_launch.known_failure(
        lambda: op.kind(x, g), x.device
    )


CANDIDATES = (
    Candidate("triton", "portable Triton kernels, on CUDA", unsupported_reason),
    Candidate("eager", "plain torch, on any device"),
    Candidate("reference", "token by token, the oracle of the tests", by_name_only=True),
)
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
        h, final = reference.scan_reference(x, g, initial_state, cu_seqlens)
    else:
        h, final = op.scan(x, g, initial_state, cu_seqlens, plan.impls)
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
        final = share.whole_states(context_exchange.tie(after, x, g), initial_state, rows)
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
    wide = reference.compute_dtype(x)

    def change(x: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        gates = g.to(wide, memory_format=torch.contiguous_format)
        return op.scan(x, g, state, None, impls)[1], gates.sum(1).exp()

    like = x.new_empty(1 if share.packed else x.shape[0], x.shape[2], dtype=wide)
    return context_in_segments.scan_of_rank(
        change, partial(op.scan, impl=impls), (x, g), initial_state, like, share, cu_seqlens
    )


def _checked(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, impl: str | None
) -> Selection:
    """Looks at nothing but shapes, dtypes and devices."""
    check(x, g, initial_state, cu_seqlens)
    return choose(CANDIDATES, (x, g), impl, "hgrn", x)


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
