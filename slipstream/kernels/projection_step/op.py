"""Linear layers of a step: checks, choice, call, and plain torch. They have no gradient.

slipstream::_projection_step is one launch; _projection_norm_step has the residual and the norm
behind them, too. Of few rows and of many they are other launches: takes() says of how many this is
one.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import inputs
from slipstream.kernels.projection_step.inputs import ProjectionInputs
from slipstream.runtime import autograd, backends, consistent, guarded_launch
from slipstream.runtime.compile_ahead import resized
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.dispatch import PLAIN, TRITON_OR_EAGER, choose, triton_or_eager
from slipstream.runtime.kernel_pair import Given, guarded, mismatch, random_like


def projection_step(t: ProjectionInputs) -> Tensor:
    x = t.x
    if t.norm is not None and not t.normed:
        x = normed(x, t.norm_weight, t.norm)
    return _projection_step(t, x)


def reference(t: ProjectionInputs) -> Tensor:
    """In float64, rounded once."""
    wide = t._replace(
        x=t.x.double(),
        weights=[w.double() for w in t.weights],
        biases=[None if b is None else b.double() for b in t.biases],
        norm_weight=None if t.norm_weight is None else t.norm_weight.double(),
        residual=None if t.residual is None else t.residual.double(),
    )
    return projection_step(wide).to(t.out_dtype)


def normed(x: Tensor, weight: Tensor | None, n: NormOptions) -> Tensor:
    """In float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    x = x * (x.square().mean(-1, keepdim=True) + n.eps).rsqrt()
    factor = n.factor(weight, wide)
    return x if factor is None else x * factor


def _projection_step(t: ProjectionInputs, x: Tensor) -> Tensor:
    x = x.to(t.weights[0].dtype)
    ys = [F.linear(x, w, None if b is None else b.to(w.dtype)) for w, b in zip(t.weights, t.biases)]
    if t.glu:
        y = F.silu(ys[0]) * ys[1]
    else:
        y = ys[0] if len(ys) == 1 else torch.cat(ys, 1)
    return y if t.residual is None else t.residual + y.to(t.residual.dtype)


_PLAIN_NORM = NormOptions(0.0)
LAUNCH = "slipstream.kernels.projection_step.triton_kernels"
# rows at which another tile begins (triton_kernels.py: tile_of), or wgmma
_ROWS = (1, 2, 17, inputs.MMA_ROWS + 1)
# a row more, and each weight would be read twice
MAX_ROWS = 64


def unsupported_reason(t: ProjectionInputs) -> str | None:
    """Why the Triton kernel can't take this call, or None if it can."""
    if reason := backends.triton_unsupported(t.weights[0], "weights"):
        return reason
    rows = t.x.shape[0]
    if rows > MAX_ROWS:
        return f"it takes at most {MAX_ROWS} rows"
    if rows > 1 and t.normalises:
        return "it takes a norm of one row alone"
    operands = [t.norm_weight, *t.weights, *t.biases]
    if not all(x is None or x.is_contiguous() for x in operands):
        return "a weight or bias is not contiguous"
    if any(x is not None and x.stride(1) != 1 for x in (t.x, t.residual)):
        return "rows of x or residual are not contiguous"
    if any(b is not None and b.dtype != t.weights[0].dtype for b in t.biases):
        return "a bias has another dtype than its weight"
    return guarded_launch.known_failure(lambda: _kind(t), t.x.device)


_CANDIDATES = triton_or_eager(unsupported_reason, asks_interpreter=True)


def run(t: ProjectionInputs, impl: str | None) -> Tensor:
    """y [M, N]."""
    _check(t)
    autograd.refuse_gradients(
        "projection_step", t.x, *t.weights, *t.biases, t.norm_weight, t.residual
    )
    impls = choose(_CANDIDATES, (t,), impl, "projection_step", t.x).impls
    return _call(*_flat(t), impl=impls)


def _flat(t: ProjectionInputs) -> tuple[Any, ...]:
    """Without lists, so that calls can be replayed (runtime/call_replay.py). eps None: no norm."""
    missing = [None] * (inputs.MAX_WEIGHTS - len(t.weights))
    norm = (None, *_PLAIN_NORM[1:]) if t.norm is None else t.norm
    weights = (*t.weights, *missing, *t.biases, *missing)
    return (t.x, *weights, t.norm_weight, t.residual, *norm, t.glu, t.consistent, t.normed)


def _nested(args: tuple[Any, ...]) -> ProjectionInputs:
    x, weights, rest = args[0], args[1 : 1 + inputs.MAX_WEIGHTS], args[1 + inputs.MAX_WEIGHTS :]
    weights = [w for w in weights if w is not None]
    biases, rest = [*rest[: len(weights)]], rest[inputs.MAX_WEIGHTS :]
    options, flags = rest[2 : 2 + len(_PLAIN_NORM)], rest[2 + len(_PLAIN_NORM) :]
    norm = None if options[0] is None else NormOptions(*options)
    return ProjectionInputs(x, weights, biases, rest[0], rest[1], norm, *flags)


def _check(t: ProjectionInputs) -> None:
    checks.expect_rank("x", t.x, 2, "[M, K]")
    M, K = t.x.shape
    if not 1 <= len(t.weights) <= inputs.MAX_WEIGHTS:
        raise ValueError(f"weights: want 1 to {inputs.MAX_WEIGHTS}, got {len(t.weights)}")
    if len(t.biases) != len(t.weights):
        raise ValueError(f"biases: want {len(t.weights)}, one a weight, got {len(t.biases)}")
    named: dict[str, Tensor | None] = {"x": t.x}
    for i, (w, b) in enumerate(zip(t.weights, t.biases)):
        checks.expect_rank(f"weights[{i}]", w, 2, "[N, K]")
        checks.expect_shape(f"weights[{i}]", w, (w.shape[0], K))
        named |= {f"weights[{i}]": w, f"biases[{i}]": b}
        if b is not None:
            checks.expect_shape(f"biases[{i}]", b, w.shape[:1])
    if t.glu and (len(t.weights) != 2 or t.weights[0].shape != t.weights[1].shape):
        raise ValueError("activation: swiglu wants two weights of one shape")
    if t.norm_weight is not None:
        checks.expect_shape("norm_weight", t.norm_weight, (K,))
        if t.norm is None:
            raise ValueError("norm_weight: wants norm_eps too")
    if t.residual is not None:
        checks.expect_shape("residual", t.residual, (M, t.size))
    named |= {"norm_weight": t.norm_weight, "residual": t.residual}
    checks.expect_floating(named)
    checks.expect_one_device(named)
    checks.expect_one_dtype({n: x for n, x in named.items() if n.startswith("weights")})


def _kind(t: ProjectionInputs) -> KernelKey:
    """The calls that share a verdict on the kernel."""
    M = t.x.shape[0]
    rows = 1 if M == 1 else inputs.MMA_ROWS if M <= inputs.MMA_ROWS or t.consistent else MAX_ROWS
    wide = "wide" if t.is_wide else None
    terms = (t.glu, t.normalises, t.residual is not None, rows, wide)
    return ("projection_step.triton", t.x.dtype, t.weights[0].dtype, t.x.shape[1], *terms)


def _impl(*args: Any) -> Tensor:
    t, impl = _nested(args[:-1]), args[-1]
    if t.x.numel() == 0 or t.size == 0 or (t.is_long and impl == TRITON_OR_EAGER):
        return projection_step(t)
    if impl == "reference":
        return reference(t)
    kernel, plain = f"{LAUNCH}:projection_step", projection_step
    kind, mismatch = partial(_kind, t), partial(_mismatch, t)
    return guarded(impl, t.x.device, kernel, plain, (t,), kind, mismatch)


def _mismatch(like: ProjectionInputs) -> str | None:
    """The probe: one row or three, or all where that decides about the tile; two weights where
    there may be several."""
    rows, K = like.x.shape
    rows = rows if rows > inputs.MMA_ROWS else min(rows, 3)
    N = inputs.WGMMA_COLUMNS if like.is_wide else 40
    sizes = (N, N) if like.glu else (N, 24) if like.residual is None else (N,)
    x = like.x
    tensors = {f"w{i}": random_like(like.weights[0], n, K) for i, n in enumerate(sizes)}
    tensors = {name: w * K**-0.5 for name, w in tensors.items()}
    tensors["x"] = torch.randn(rows, K, device=x.device).to(x.dtype)
    if like.norm_weight is not None:
        tensors["norm_weight"] = random_like(like.norm_weight, K)
    if like.residual is not None:
        tensors["residual"] = random_like(like.residual, rows, N)

    def call(impl: str, t: Given) -> Tensor:
        weights = [t[f"w{i}"] for i in range(len(sizes))]
        terms = t.get("norm_weight"), t.get("residual")
        inputs = ProjectionInputs(t["x"], weights, [None] * len(sizes), *terms, *like[5:])
        return _call(*_flat(inputs), impl=impl)

    return mismatch(
        lambda t: call("triton|eager", t), lambda t: call(PLAIN[0], t), tensors, gradients=False
    )


def _fake(*args: Any) -> Tensor:
    t = _nested(args[:-1])
    return t.x.new_empty(t.x.shape[0], t.size, dtype=t.out_dtype)


def _at_sizes(args: tuple) -> Iterator[tuple]:
    t = _nested(args[:-1])
    for rows in _ROWS:
        of_rows = {"x": resized(t.x, rows), "residual": resized(t.residual, rows)}
        yield (*_flat(t._replace(**of_rows, normed=rows > 1)), args[-1])


_call = KernelOp(
    "projection_step",
    "(Tensor x, Tensor weight, Tensor? weight1, Tensor? weight2, Tensor? weight3, "
    "Tensor? weight4, Tensor? bias, Tensor? bias1, Tensor? bias2, Tensor? bias3, Tensor? bias4, "
    f"Tensor? norm_weight, Tensor? residual, {schema_of(NormOptions, eps='float?')}, bool glu, "
    "bool consistent, bool normed, str impl) -> Tensor",
    _impl,
    _fake,
    replay=True,
    at_sizes=_at_sizes,
)


def takes(rows: int, device: torch.device) -> bool:
    """Whether shares of K are faster for so many rows; consistent models want one order of sums
    whatever the rows."""
    return (
        inputs.MMA_ROWS < rows <= MAX_ROWS
        and not consistent.consistent_scope.on
        and backends.supports_pdl(device)
    )


def _norm_unsupported(t: inputs.NormedInputs) -> str | None:
    if reason := unsupported_reason(t.product):
        return reason
    if not t.x.dtype == t.weight.dtype == t.norm_weight.dtype or t.x.dtype.itemsize != 2:
        return "it takes x and weights of one dtype of 16 bits"
    if t.residual.stride(1) != 1 or not t.norm_weight.is_contiguous():
        return "rows of the residual, or the norm's weight, are not contiguous"
    return None


def run_norm(
    t: inputs.NormedInputs, n: NormOptions, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """h = residual + x W^T + b [M, N] and its norm n, of rows, in the weight's dtype."""
    impls = choose(_NORM_CANDIDATES, (t,), impl, "projection_norm_step", t.x).impls
    return _call_norm(*t, *n, impl=impls)


def _norm_eager(t: inputs.NormedInputs, n: NormOptions) -> tuple[Tensor, Tensor]:
    h = t.residual + torch.nn.functional.linear(t.x, t.weight, t.bias).to(t.residual.dtype)
    y = normed(h.to(t.weight.dtype), t.norm_weight, n)
    return h, y.to(t.weight.dtype)


def _norm_kind(t: inputs.NormedInputs) -> KernelKey:
    """The calls that share a verdict on the kernels."""
    dtypes = t.x.dtype, t.residual.dtype
    return ("projection_norm_step.triton", *dtypes, *t.weight.shape, t.bias is not None)


_call_norm = KernelOp(
    "projection_norm_step",
    f"({schema_of(inputs.NormedInputs)}, {schema_of(NormOptions)}, str impl) -> (Tensor, Tensor)",
    kernel=f"{LAUNCH}:projection_norm",
    plain=_norm_eager,
    kind=_norm_kind,
    packed={"t": inputs.NormedInputs, "n": NormOptions},
    in_torch_if=lambda x, residual: 0 in (x.numel(), residual.numel()),
    # of as many rows: they decide about the launches
    probe={"weight": lambda weight: random_like(weight, *weight.shape) * weight.shape[1] ** -0.5},
    replay=True,
)
_NORM_CANDIDATES = _call_norm.candidates(_norm_unsupported, asks_interpreter=True)
