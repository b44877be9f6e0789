"""Steps before a recurrence that several operators share: checks, norms, gates, heads, time.

An operator that is another one with its arguments changed is a prologue from its arguments to
LinearInputs, and a call of linear.dispatch.run, which checks what the prologue passes on.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.elementwise.decay_gate import decay_gate
from slipstream.kernels.elementwise.glu import glu
from slipstream.ops.norm import l2_norm
from slipstream.runtime import autograd, backends, consistent, dispatch
from slipstream.runtime.context_parallel import ContextParallel


def per_head(v: Tensor, make: Callable[..., Tensor], *more: Any) -> Tensor:
    """make(h, *more) of the heads h = 0 .. HV - 1 of v, float64, in float32 unless v is wider.

    Kept by make, a function of a module, and more; but not where a graph or a tracer would own it.
    """
    checks.expect_rank("v", v, 4, "[B, T, HV, V]")
    dtype = checks.wide_dtype(v)
    if not backends.is_plain_call(v) or (v.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _made(v.shape[2], v.device, dtype, make, more)
    return _cached_table(v.shape[2], v.device, dtype, make, more)


def _made(
    HV: int, device: torch.device, dtype: torch.dtype, make: Callable[..., Tensor], more: tuple
) -> Tensor:
    return make(torch.arange(HV, dtype=torch.float64, device=device), *more).to(dtype)


@lru_cache(1024)
def _cached_table(
    HV: int, device: torch.device, dtype: torch.dtype, make: Callable[..., Tensor], more: tuple
) -> Tensor:
    # the copy waits for itself, so that any stream may read it
    with torch.inference_mode(False):
        return _made(HV, torch.device("cpu"), dtype, make, more).to(device)


def expect_inputs(
    cu_seqlens: Tensor | None, context: ContextParallel | None, **tensors: tuple[Tensor | None, str]
) -> int:
    """Checks the tensors that a prologue reads, and returns how many sequences there are.

    tensors: as checks.expect_layouts takes them, floating, of one device. The first begins with
        B T, HV is a multiple of H, and N is the number of sequences.
    """
    sizes = checks.expect_layouts(**tensors)
    given = {name: x for name, (x, _) in tensors.items()}
    checks.expect_floating(given)
    checks.expect_one_device({**given, "cu_seqlens": cu_seqlens})
    if "H" in sizes and "HV" in sizes:
        checks.expect_multiple("HV", sizes["HV"], "H", sizes["H"])
    N = sizes["B"]
    if context is not None:
        context.expect_no_offsets(cu_seqlens, None)
        N = N if context.sequences is None else context.sequences
    elif cu_seqlens is not None:
        checks.expect_cu_seqlens(cu_seqlens, N, sizes["T"])
        N = cu_seqlens.shape[0] - 1
    if sizes.get("N", N) != N:
        raise ValueError(f"initial_state: want that of {N} sequences, got {sizes['N']}")
    return N


def scan_impl(impl: str | None) -> str | None:
    """The impl of a gated scan before the recurrence: it has no kernels of its own for sm_90."""
    return "triton" if impl == "sm90" else impl


def in_time_order(
    run: Callable[..., tuple[Tensor, tuple[Tensor, ...] | None]],
    tensors: tuple[Tensor, ...],
    states: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | None,
    context: ContextParallel | None,
    *,
    reverse: bool,
) -> tuple[Tensor, Any]:
    """run(tensors, states, cu_seqlens), with reverse from the last tokens to the first.

    Raises:
        NotImplementedError: reverse with a context.
    """
    if not reverse:
        return run(tensors, states, cu_seqlens)
    if context is not None:
        raise NotImplementedError("reverse: not with a context")
    packed = cu_seqlens is not None
    if packed:  # sequences change their order too
        cu_seqlens = tensors[0].shape[1] - cu_seqlens.flip(0)
        states = tuple(None if x is None else x.flip(0) for x in states)
    o, final = run(tuple(x.flip(1) for x in tensors), states, cu_seqlens)
    return o.flip(1), tuple(x.flip(0) for x in final) if packed and final else final


def l2_normalised(impl: str | None, **tensors: Tensor) -> tuple[Tensor, ...]:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension of each; impl: of the recurrence."""
    for name, x in tensors.items():
        checks.expect_rank(name, x, 4, "[B, T, H, K]")
    checks.expect_floating(tensors)
    return tuple(l2_norm(x, impl=dispatch.plain_impl(impl)) for x in tensors.values())


def delta_gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
    impl: str | None = None,
) -> Tensor:
    """Log decays from what a layer projects.

    -exp(A_log) * softplus(g + dt_bias), or, bounded below, lower_bound * sigmoid(exp(A_log) *
    (g + dt_bias)), where A_log None stands for 0.

    Args:
        g: [B, T, HV] or [B, T, HV, K], any float dtype; the result is float32 at least.
        A_log: [HV]. dt_bias: [HV], or [HV * K] for a gate of every channel.
        lower_bound: below 0.
        impl: of the recurrence: plain torch here too if it is named.
    """
    checks.expect_lower_bound(lower_bound)
    given = {"g": g, "A_log": A_log, "dt_bias": dt_bias}
    checks.expect_floating(given)
    checks.expect_one_device(given)
    if dt_bias is not None:
        checks.expect_shape("dt_bias", dt_bias.flatten(), (math.prod(g.shape[2:]),))
    if A_log is not None:
        checks.expect_shape("A_log", A_log.flatten(), (g.shape[2],))
    elif lower_bound is None:
        raise ValueError("A_log: want a tensor [HV] with use_gate_in_kernel, got None")
    return decay_gate(g, A_log, dt_bias, lower_bound, impl)


def beta_or_ones(beta: Tensor | None, v: Tensor) -> Tensor:
    checks.expect_rank("v", v, 4, "[B, T, HV, V]")
    return v.new_ones(v.shape[:3]) if beta is None else beta


def beta_sigmoid(beta: Tensor, is_raw: bool, allow_neg_eigval: bool) -> Tensor:
    """sigmoid(beta), or 2 sigmoid(beta): eigenvalues of the transition down to -1 instead of 0.

    In beta's dtype, the same bits as torch.sigmoid(beta) passed as beta, but those of a kernel
    where a step of a consistent model has it within another (kernels/mixer_step/block_inputs.py);
    the gradient is that of the sigmoid before it is rounded.
    """
    if not is_raw:
        raise ValueError(
            "allow_neg_eigval: doubles the sigmoid of use_beta_sigmoid_in_kernel=True, "
            "which is off; pass beta in (0, 2) itself"
        )
    checks.expect_floating({"beta": beta})
    narrow = beta.dtype.itemsize == 2
    if narrow and consistent.consistent_scope.on and beta.is_cuda:
        beta = glu(beta, None, "sigmoid", None)
    elif narrow and autograd.needs_autograd(beta):
        beta = beta.float().sigmoid().to(beta.dtype)
    else:
        beta = beta.sigmoid()
    return 2 * beta if allow_neg_eigval else beta
