"""Rotary position embedding: pairs of features turn by an angle that grows with the position.

    out1 = x1 cos - x2 sin        out2 = x2 cos + x1 sin

The pair is (i, i + R/2) of the first R features, or (2i, 2i + 1) if interleaved. The gradient is
the same turn backwards, so nothing is kept but cos and sin.

slipstream::_rotary is the operator of the Triton kernel, and its own gradient.
slipstream::_split_rotary_backward joins the gradients of queries, keys and values.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, guarded_launch, kernel_pair, token_ids
from slipstream.runtime.custom_op import KernelOp
from slipstream.runtime.dispatch import TRITON_OR_EAGER


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, T, H, D]; cos, sin [B or 1, T, 1, R/2] with R <= D."""
    half = cos.shape[-1]
    x1, x2 = _pairs(x, half, interleaved)
    rotated = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    head = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([head, x[..., 2 * half :]], dim=-1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As the reference, without a gradient for cos and sin."""
    if autograd.by_operation():
        return rotary_reference(x, cos, sin, interleaved)
    return _Rotary.apply(x, cos, sin, interleaved)


class _Rotary(autograd.Function):
    operator = "slipstream::rotary"

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        autograd.save(ctx, cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, 1)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dy: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = saved
        return _rotate(dy, cos, sin, ctx.interleaved, -1), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    half = cos.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x1, x2 = _pairs(x, half, interleaved)
    y1, y2 = _pairs(y, half, interleaved)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin, value=sign)
    y[..., 2 * half :] = x[..., 2 * half :]
    return y


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def table_rows(table: Tensor, x: Tensor, positions: Tensor | None) -> Tensor:
    """[S, R/2] or [B or 1, T, R/2] -> [B or 1, T, R/2]"""
    if table.dim() == 3:
        return table
    return table[None, : x.shape[1]] if positions is None else table[positions]


def rotary_by_table(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, impl: str
) -> Tensor:
    """x [B, T, H, D]; cos, sin [S, R/2] and positions [1 or B, T], or [B or 1, T, R/2]; impl is
    triton, or triton|eager."""
    if autograd.needs_autograd(x):
        return _RotaryByTable.apply(x, cos, sin, positions, interleaved, False, impl)
    return _call(x, cos, sin, positions, interleaved=interleaved, back=False, impl=impl)


def split_rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int, int], impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of queries and keys of qkv [B, T, H, D], turned, and those of values, sizes[i] of each;
    cos, sin [B or 1, T, R/2]. Backward writes their gradients side by side at once."""
    return _SplitRotary.apply(qkv, cos, sin, sizes, impl)


class _SplitRotary(autograd.Function):
    operator = "slipstream::rotary"

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int, int], impl: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        autograd.save(ctx, cos, sin)
        ctx.impl = impl
        qk, v = qkv.split([sizes[0] + sizes[1], sizes[2]], 2)
        q, k = _call(qk, cos, sin, None, interleaved=False, back=False, impl=impl).split(
            sizes[:2], 2
        )
        return autograd.as_base(q), autograd.as_base(k), v.detach()

    @staticmethod
    @autograd.once_differentiable
    def backward(
        ctx: Any, saved: autograd.Saved, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor | None, ...]:
        return _join(dq, dk, dv, *saved, impl=ctx.impl), None, None, None, None


def _eager_join(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As the kernel is called."""
    return torch.cat([*(_eager(dy, cos, sin, None, False, True) for dy in (dq, dk)), dv], 2)


def _eager(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, back: bool
) -> Tensor:
    """As the kernel is called; no gradients."""
    compute_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if positions is not None:
        positions = positions.clamp(0, cos.shape[0] - 1)
    c, s = (table_rows(table, x, positions).to(compute_dtype)[:, :, None] for table in (cos, sin))
    return _rotate(x.to(compute_dtype), c, s, interleaved, -1 if back else 1).to(x.dtype)


def _kind(x: Tensor, half: int, interleaved: bool) -> KernelKey:
    return ("rotary.triton", x.dtype, x.shape[-1], half, interleaved and "interleaved")


def _mismatch(x: Tensor, cos: Tensor, interleaved: bool) -> str | None:
    """The probe: a few tokens at other positions than their own."""
    angle = torch.randn(40, cos.shape[-1], device=x.device)
    tables = angle.cos().to(cos.dtype), angle.sin().to(cos.dtype)
    positions = torch.randint(0, 40, (1, 19), device=x.device)
    rows = [y.float()[positions][:, :, None] for y in tables]
    probe_inputs = {"x": kernel_pair.random_like(x, 1, 19, 3, x.shape[-1])}
    return kernel_pair.mismatch(
        lambda t: rotary_by_table(t["x"], *tables, positions, interleaved, TRITON_OR_EAGER),
        lambda t: rotary(t["x"], *rows, interleaved=interleaved),
        probe_inputs,
    )


def unsupported_reason(x: Tensor, half: int, interleaved: bool = False) -> str | None:
    """Why the Triton kernel can't take a call, or None if it can."""
    if half == 0:
        return "no features turn"
    return guarded_launch.known_failure(lambda: _kind(x, half, interleaved), x.device)


_LAUNCH = "slipstream.kernels.elementwise.triton.rotary"
_call = KernelOp(
    "rotary",
    "(Tensor x, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, bool back, str impl) "
    "-> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
    kernel=f"{_LAUNCH}:rotate",
    plain=_eager,
    kind=lambda x, cos, interleaved: _kind(x, cos.shape[-1], interleaved),
    probe=_mismatch,
    replay=not token_ids.SYNC,
)
_RotaryByTable = autograd.autograd_function(_call, _call, results="y", wrt="x", inverse="back")
_join = KernelOp(
    "split_rotary_backward",
    "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, str impl) -> Tensor",
    kernel=f"{_LAUNCH}:join_backward",
    plain=_eager_join,
    kind=lambda dq, cos: _kind(dq, cos.shape[-1], False),
    probe=lambda dq, cos: _mismatch(dq, cos, False),
    replay=True,
)
