"""Means of all tokens so far, weighted by exponentials, as operators with gradients.

    z_t = log(exp(w + z_{t-1}) + exp(k_t))           r_t = k_t - w - z_{t-1}
    c_t = exp(k_t - z_t) = sigmoid(r_t)              a_t = exp(w + z_{t-1} - z_t) = 1 - c_t
    M_t = a_t M_{t-1} + c_t v_t                      s_t = sigmoid(r_t + w + u)
    o_t = M_{t-1} + s_t (v_t - M_{t-1})

slipstream::_running_weights gives c and log a, of w = 0: what a state decays by and a token writes
with, so that it stays a mean (LightNet). _running_mean gives o (RWKV-4). MATH.md has the
gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.running_mean import eager
from slipstream.kernels.running_mean.inputs import NUM_INPUTS, MeanInputs
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import needs_autograd, transformed
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.dispatch import TRITON_OR_EAGER, choose, is_triton, triton_or_eager
from slipstream.runtime.gradient import autograd_function
from slipstream.runtime.guarded_launch import Guard, known_failure, plain_gradients


def chosen(operator: str, impl: str | None, k: Tensor, *others: Tensor) -> str | None:
    """The impl of running_weights and running_mean; None where torch computes them."""
    if impl == "reference" or transformed():
        return None
    impls = choose(_CANDIDATES, (k, *others), impl, operator, k).impls
    return impls if is_triton(impls) else None


def running_weights(
    k: Tensor, z: Tensor, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """c [B, T, D] in k's dtype, log a, float32, 0 where nothing is before, and z after the last
    token. k: any floating dtype but float64. z: [N, D], float32, -inf for nothing."""
    inputs = k.contiguous(), z.contiguous(), cu_seqlens
    return (_Weights.apply if needs_autograd(k, z) else _weights)(*inputs, impl)


def running_mean(inputs: MeanInputs, impl: str) -> tuple[Tensor, Tensor]:
    """o [B, T, D] in v's dtype, and M and z after the last token."""
    inputs = MeanInputs._make(None if x is None else x.contiguous() for x in inputs)
    if needs_autograd(*inputs[:5]):
        return _Mean.apply(*inputs, impl)
    return _mean(*inputs, keep=False, impl=impl)[:2]


def _unsupported_reason(*tensors: Tensor) -> str | None:
    """Why the Triton kernels can't take a call, or None if they can."""
    k = tensors[0]
    if k.numel() == 0:
        return "there are no tokens or channels"
    if torch.version.hip:
        return "its kernels have not been tried on AMD's GPUs"
    return known_failure(lambda: _kind(k), k.device)


_CANDIDATES = triton_or_eager(_unsupported_reason)


def _kind(k: Tensor) -> KernelKey:
    return ("running_mean.triton", k.dtype)


def _mismatch(k: Tensor) -> str | None:
    """The probe: packed sequences of more than a tile, with states, by both operators."""
    inputs = {
        "k": numeric_probe.random_like(k, 1, 150, 40),
        "v": numeric_probe.random_like(k, 1, 150, 40),
        "start": torch.randn(2, 80, device=k.device),
        "w": -torch.rand(40, device=k.device),
        "u": torch.randn(40, device=k.device),
    }
    cu_seqlens = torch.tensor([0, 40, 150], device=k.device)

    def both(weights: Callable, mean: Callable) -> Callable:
        return lambda t: (
            *weights(t["k"], t["start"][:, 40:], cu_seqlens),
            *mean(MeanInputs(t["k"], t["v"], t["w"], t["u"], t["start"], cu_seqlens)),
        )

    return numeric_probe.mismatch(
        both(
            partial(running_weights, impl=TRITON_OR_EAGER),
            partial(running_mean, impl=TRITON_OR_EAGER),
        ),
        both(_plain_weights, _plain_mean),
        inputs,
    )


def _plain_weights(
    k: Tensor, z: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _widen(k)
    sums = eager.plain_sums(wide, None, None, z, cu_seqlens)
    c, g = eager.weights_and_decays(wide, sums)
    return c.to(k.dtype), g, sums.final


def _plain_mean(inputs: MeanInputs) -> tuple[Tensor, Tensor]:
    wide = _widen(inputs.k), _widen(inputs.v)
    sums = eager.plain_sums(*wide, inputs.w, inputs.start, inputs.cu_seqlens)
    return eager.outputs(inputs.u, *wide, sums).to(inputs.v.dtype), sums.final


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _run_weights(
    k: Tensor, z: Tensor, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    with _guard(impl, k) as usable:
        if usable:
            return _kernels().weights(k, z, cu_seqlens)
    c, g, after = _plain_weights(k, z, cu_seqlens)
    return c.contiguous(), g.contiguous(), after.clone()


def _run_weights_backward(
    k: Tensor,
    g: Tensor,
    z: Tensor,
    cu_seqlens: Tensor | None,
    dc: Tensor,
    dg: Tensor,
    dafter: Tensor | None,
    impl: str,
) -> list[Tensor]:
    """Gradients of k and z."""
    dc, dg = dc.contiguous(), dg.contiguous()
    dafter = None if dafter is None else dafter.contiguous()
    with _guard(impl, k) as usable:
        if usable:
            return [*_kernels().weights_backward(g, z, cu_seqlens, dc, dg, dafter)]
    plain = partial(_plain_weights, cu_seqlens=cu_seqlens)
    return plain_gradients(plain, (k, z), [dc, dg, dafter])


def _run_mean(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, the state after the last token, and what backward reads, of no elements unless `keep`."""
    inputs, (keep, impl) = MeanInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:]
    with _guard(impl, inputs.k) as usable:
        if usable:
            return _kernels().means(inputs, keep)
    wide = _widen(inputs.k), _widen(inputs.v)
    sums = eager.plain_sums(*wide, inputs.w, inputs.start, inputs.cu_seqlens)
    o = eager.outputs(inputs.u, *wide, sums).to(inputs.v.dtype)
    mean, z = (x.contiguous() if keep else x.new_empty(0) for x in sums.before.chunk(2, -1))
    return o.contiguous(), sums.final.clone(), wide[0] - z if keep else z, mean


def _run_mean_backward(*args: Any) -> list[Tensor]:
    """Gradients of k, v, w, u and start."""
    inputs, (*grads, impl) = MeanInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:]
    grads = [None if x is None else x.contiguous() for x in grads]
    with _guard(impl, inputs.k) as usable:
        if usable:
            return _kernels().means_backward(inputs, *grads)
    *differentiable, cu_seqlens = inputs

    def plain(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return _plain_mean(MeanInputs._make([*leaves, cu_seqlens]))

    return plain_gradients(plain, differentiable, grads[2:])


def _kernels() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.running_mean.triton import launch

    return launch


def _guard(impl: str, k: Tensor) -> Guard:
    return Guard(impl, k.device, lambda: _kind(k), lambda: _mismatch(k))


def _wide_like(x: Tensor, shape: Any) -> Tensor:
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _fake_mean(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, keep = MeanInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS]
    r, mean = (_wide_like(inputs.k, inputs.k.shape if keep else (0,)) for _ in range(2))
    v, start = inputs.v, inputs.start
    return v.new_empty(v.shape), start.new_empty(start.shape), r, mean


_TENSORS = schema_of(MeanInputs)
_weights = KernelOp(
    "running_weights",
    "(Tensor k, Tensor z, Tensor? cu_seqlens, str impl) -> (Tensor, Tensor, Tensor)",
    _run_weights,
    lambda k, z, *_: (k.new_empty(k.shape), _wide_like(k, k.shape), z.new_empty(z.shape)),
    replay=True,
)
_weights_backward = KernelOp(
    "running_weights_backward",
    "(Tensor k, Tensor g, Tensor z, Tensor? cu_seqlens, Tensor dc, Tensor dg, Tensor? dafter, "
    "str impl) -> Tensor[]",
    _run_weights_backward,
    lambda k, g, z, *_: [k.new_empty(k.shape), z.new_empty(z.shape)],
    replay=True,
)
_mean = KernelOp(
    "running_mean",
    f"({_TENSORS}, bool keep, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_mean,
    _fake_mean,
    replay=True,
)
_mean_backward = KernelOp(
    "running_mean_backward",
    f"({_TENSORS}, Tensor r, Tensor mean, Tensor do, Tensor? dafter, str impl) -> Tensor[]",
    _run_mean_backward,
    lambda *args: [x.new_empty(x.shape) for x in args[:5]],
    replay=True,
)
_Weights = autograd_function(_weights, _weights_backward, results="c g after", wrt="k z")
_Mean = autograd_function(
    _mean, _mean_backward, results="o after r mean", wrt="k v w u start", keep=True
)
