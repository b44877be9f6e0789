"""The matmul as a torch.library operator: the choice of its kernel, its gradient, plain torch.

    dz = dout * scale_a * scale_b       da = dz b^T     db = a^T dz     dbias = sum of dout's rows

The gradient is made of the same operator, so it has gradients too. An activation that is
differentiated is applied to z outside of the kernel, for its derivative wants z. In plain torch
float32 products have the precision that torch is set to; float8 ones are taken to float32.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from slipstream.common.checks import cast, wide_dtype
from slipstream.compiler import arch as arches
from slipstream.compiler import known_bugs
from slipstream.kernels.matmul import config as configs
from slipstream.kernels.matmul.config import FP8, MatmulConfig, MatmulInputs, activated, scaled
from slipstream.runtime import autograd, custom_op, kernel_pair
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED, device_of, sm90_unsupported
from slipstream.runtime.compile_ahead import resized
from slipstream.runtime.dispatch import PLAIN, Candidate, Selection, choose
from slipstream.runtime.guarded_launch import Guard, known_failure


def plain_matmul(t: MatmulInputs) -> Tensor:
    """out [M, N], by the library's product and float32 after it."""
    if t.a.dtype in FP8 or t.a.dtype == torch.float64:
        return matmul_reference(t)
    plain = (t.scale_a, t.scale_b, t.bias, t.residual) == (None,) * 4 and not t.activation
    z = torch.mm(t.a, t.b)
    if plain:
        return cast(z, t.out_dtype)
    z = scaled(z.float(), t.scale_a, t.scale_b)
    z = activated(z if t.bias is None else z.add_(t.bias), t.activation)
    return cast(z if t.residual is None else z.add_(t.residual), t.out_dtype)


def matmul_reference(t: MatmulInputs) -> Tensor:
    """out [M, N], the oracle of the tests: each factor is taken to float64 or float32 first."""
    compute_dtype = torch.float64 if torch.float64 in (t.a.dtype, t.out_dtype) else torch.float32
    z = scaled(t.a.to(compute_dtype) @ t.b.to(compute_dtype), t.scale_a, t.scale_b)
    z = activated(z if t.bias is None else z + t.bias.to(compute_dtype), t.activation)
    return (z if t.residual is None else z + t.residual.to(compute_dtype)).to(t.out_dtype)


# Rows between which and beyond which no other tile is chosen; with one more a number is odd.
_ROWS = [n for power in range(4, 18) for n in (1 << power, 3 << power - 1)]
# and whether an implementation was named
Call = tuple[MatmulInputs, MatmulConfig | None, bool]


def matmul(t: MatmulInputs, config: MatmulConfig | None, impl: str | None) -> Tensor:
    """out [M, N], differentiable by all but the scales."""
    others = () if config is None else config.pack(), impl or ""
    if autograd.needs_autograd(t.a, t.b, t.bias, t.residual):
        return _with_gradient(t, *others)
    return _CALL(*t, *others)


def _with_gradient(t: MatmulInputs, *others: Any) -> Tensor:
    if not t.activation:
        return _Matmul.apply(*t[:6], t.precision, t.out_dtype, *others)
    z = _Matmul.apply(*t[:3], None, *t[4:6], t.precision, t.out_dtype, *others)
    y = activated(z, t.activation)
    return y if t.residual is None else (y + t.residual).to(t.out_dtype)


class _Matmul(autograd.Function):
    operator = "slipstream::matmul"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        a, b, bias, residual, scale_a, scale_b, precision, out_dtype, packed, impl = args
        autograd.save(ctx, a, b, scale_a, scale_b)
        ctx.dtypes = tuple(None if x is None else x.dtype for x in (bias, residual))
        # sm90 and a tile may refuse the other two products
        ctx.precision, ctx.impl = precision, None if impl == "sm90" else impl or None
        return _CALL(
            *args[:6],
            activation="",
            precision=precision,
            out_dtype=out_dtype,
            config=packed,
            impl=impl,
        )

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale_a, scale_b = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dz = cast(scaled(dout, scale_a, scale_b), a.dtype)
        bias_dtype, residual_dtype = ctx.dtypes

        def product(x: Tensor, y: Tensor) -> Tensor:
            t = MatmulInputs(x, y, None, None, None, None, "", ctx.precision, x.dtype)
            return matmul(t, None, ctx.impl)

        return (
            product(dz, b.t()) if needs[0] else None,
            product(a.t(), dz) if needs[1] else None,
            dout.sum(0, dtype=wide_dtype(dout)).to(bias_dtype) if needs[2] else None,
            dout.to(residual_dtype) if needs[3] else None,
            None, None, None, None, None, None,
        )  # fmt: skip


def arch_of(device: torch.device) -> arches.Arch:
    """The interpreter has the limits of sm_90."""
    if device.type != "cuda":
        return arches.named("sm_90")
    return arches.of(torch.cuda.get_device_capability(device), bool(torch.version.hip))


def problem(t: MatmulInputs) -> configs.Problem:
    residual = None if t.residual is None else t.residual.dtype
    columns = t.a.stride(1) != 1, t.b.stride(1) != 1
    return configs.Problem(
        t.a.dtype, t.out_dtype, t.precision, *columns, configs.tma_swaps(t), residual
    )


def _kind(name: str, t: MatmulInputs) -> known_bugs.KernelKey:
    """The calls that share a verdict on the kernels."""
    return (f"matmul.{name}", t.a.dtype, t.precision)


def _triton_unsupported_reason(call: Call) -> str | None:
    t, config, _ = call
    if reason := _unsupported_operands(t):
        return reason
    if config is not None and config.kernel != "pointer":
        return "the configuration is another kernel's"
    return known_failure(lambda: _kind("triton", t), t.a.device)


def _unsupported_operands(t: MatmulInputs) -> str | None:
    """Why no kernel can multiply these."""
    if not HAVE_TRITON:
        return "Triton is not installed"
    if not (t.a.is_cuda or INTERPRETED):
        return f"it runs on CUDA devices, and the tensors are on {t.a.device.type}"
    if t.a.dtype == torch.float64 or t.out_dtype == torch.float64:
        return "it computes in float32"
    if 0 in (*t.a.shape, *t.b.shape):
        return "there is nothing to multiply"
    arch = arch_of(t.a.device)
    if t.a.dtype in FP8 and "fp8e5" not in arch.dots:
        return f"{arch.name} has no products of float8"
    if t.a.dtype == torch.float32 and t.precision not in arch.precisions:
        return f"{arch.name} has no {t.precision} products"
    return None


def sm90_unsupported_reason(call: Call) -> str | None:
    t, config, named = call
    if config is not None and config.kernel != "tma":
        return "the configuration is the portable kernel's"
    if reason := sm90_unsupported(t.a) or _unsupported_operands(t) or tma_unsupported_reason(t):
        return reason
    if (
        config is None
        and not named
        and configs.uses_split_k(arch_of(t.a.device), t.a.shape[0], *t.b.shape[::-1])
    ):
        return "there are few tiles, of which the portable kernel's programs share each"
    return known_failure(lambda: _kind("sm90", t), t.a.device)


def tma_unsupported_reason(t: MatmulInputs) -> str | None:
    """The dtype or stride that rules out TMA and wgmma for a call."""
    if t.a.dtype == torch.float32 and t.precision != "tf32":
        return f"wgmma multiplies float32 as tf32, not as {t.precision}"
    K, N = t.b.shape
    size = t.a.element_size()
    swaps = configs.tma_swaps(t)
    for name, x, may_transpose in (
        ("a", t.a, size in (2, 4) and not swaps),
        ("b", t.b.t(), size == 2 or swaps),
    ):
        transposed = may_transpose and configs.row_by_row(x.t())
        if not (configs.row_by_row(x) or transposed or K * size % 16 == 0):
            return f"TMA wants rows of {name} at multiples of 16 bytes, they are {K * size} long"
    if N * t.out_dtype.itemsize % 16:
        return f"TMA wants rows of the result at multiples of 16 bytes, they have {N} elements"
    return None


CANDIDATES = (
    Candidate("sm90", "TMA and wgmma, on sm_90", sm90_unsupported_reason),
    Candidate("triton", "the portable Triton kernel, on CUDA", _triton_unsupported_reason),
    Candidate(
        "eager",
        "plain torch, on any device",
        lambda call: None if call[1] is None else "it has no configurations",
    ),
    Candidate("reference", "the formula, the oracle of the tests", by_name_only=True),
)


def plan_for(t: MatmulInputs, config: MatmulConfig | None, impl: str | None) -> Selection:
    return choose(CANDIDATES, (t, config, impl is not None), impl, "matmul", t.a)


def _impl(*args: Any) -> Tensor:
    *tensors, packed, impl = args
    t, config = MatmulInputs(*tensors), configs.unpack(packed) if packed else None
    # such a call makes only what is added, whatever the kernel
    if config is not None and 0 not in (*t.a.shape, *t.b.shape):
        configs.check(config, problem(t), arch_of(t.a.device))
    elif config is not None:
        config = None
    return _run(plan_for(t, config, impl or None).impls, t, config)


def _run(impl: str, t: MatmulInputs, config: MatmulConfig | None) -> Tensor:
    """By the first of the implementations at which this machine's compilers do not fail."""
    name, _, others = impl.partition("|")
    kind, probe, device = partial(_kind, name, t), partial(_probe, name, t), t.a.device
    with Guard(impl, device, kind, probe) as usable, device_of(device):
        if usable:
            return _launch(name, t, config)
    if name in PLAIN:
        return matmul_reference(t) if name == "reference" else plain_matmul(t)
    return _run(others, t, config)


def _tile_of(t: MatmulInputs, impls: str) -> MatmulConfig:
    shape = t.a.shape[0], t.b.shape[1], t.a.shape[1]
    return configs.choose(problem(t), arch_of(t.a.device), *shape, impls.startswith("sm90"))


def _launch(name: str, t: MatmulInputs, config: MatmulConfig | None) -> Tensor:
    """Triton and Gluon are imported only here, once they are wanted."""
    config = config or _tile_of(t, name)
    assert config.kernel == configs.KERNELS[name == "triton"]
    return import_module(f"slipstream.kernels.matmul.{name}_kernels").matmul(t, config)


def _probe(name: str, like: MatmulInputs) -> str | None:
    """A small product with edges in every direction; float8 is not random enough to compare."""
    if like.a.dtype in FP8:
        return None
    tensors = {
        "a": torch.randn(200, 168, device=like.a.device).to(like.a.dtype),
        "b": torch.randn(168, 144, device=like.a.device).to(like.a.dtype) / 13,
    }

    def run(tensors: kernel_pair.Given, impl: str) -> Tensor:
        a, b = tensors["a"], tensors["b"]
        assert a is not None and b is not None
        return matmul(
            MatmulInputs(a, b, None, None, None, None, "", like.precision, a.dtype),
            None,
            impl,
        )

    # tf32 keeps 10 bits, which is not what is looked for
    if like.a.dtype == torch.float32 and like.precision == "tf32":
        tensors = {n: x.bfloat16().float() for n, x in tensors.items()}
    return kernel_pair.mismatch(lambda g: run(g, name), lambda g: run(g, "reference"), tensors)


def _fake(*args: Any) -> Tensor:
    a, b, out_dtype = args[0], args[1], args[8]
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


def _at_sizes(args: tuple) -> Iterator[tuple]:
    """Of other numbers of rows, or of columns where a lies column by column, as a gradient's does:
    one for each kernel and tile, and for multiples of 16 and others."""
    *tensors, packed, impl = args
    inputs, config = MatmulInputs(*tensors), configs.unpack(packed) if packed else None
    by_rows = inputs.a.stride(1) == 1
    known: set[Any] = set()
    for n in (1, *(m for rows in _ROWS for m in (rows, rows + 1))):
        t = _with_rows(inputs, n) if by_rows else _with_columns(inputs, n)
        impls = plan_for(t, config, impl or None).impls
        tile = config or _tile_of(t, impls)
        kind = impls, replace(tile, split_k=min(tile.split_k, 2)), n % 16 == 0
        if kind not in known:
            known.add(kind)
            yield (*t, packed, impl)


def _with_rows(t: MatmulInputs, n: int) -> MatmulInputs:
    scale = t.scale_a if t.scale_a is None or not t.scale_a.dim() else resized(t.scale_a, n)
    return t._replace(a=resized(t.a, n), residual=resized(t.residual, n), scale_a=scale)


def _with_columns(t: MatmulInputs, n: int) -> MatmulInputs:
    a, b = resized(t.a.t(), n), resized(t.b, n)
    assert a is not None
    return t._replace(a=a.t(), b=b)


_CALL = custom_op.KernelOp(
    "matmul",
    "(Tensor a, Tensor b, Tensor? bias, Tensor? residual, Tensor? scale_a, Tensor? scale_b, "
    "str activation, str precision, ScalarType out_dtype, int[] config, str impl) -> Tensor",
    _impl,
    _fake,
    replay=True,
    at_sizes=_at_sizes,
)


def _of_operator(*args: Any) -> Tensor:
    """As slipstream::_matmul is called."""
    *tensors, packed, impl = args
    return _with_gradient(MatmulInputs(*tensors), packed, impl)


_CALL.set_gradient(_of_operator)
