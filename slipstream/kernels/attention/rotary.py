"""Softmax attention of queries and keys that a rotary embedding turns, all heads in one tensor.

Forward turns queries and keys where they lie, so that nothing is kept but that tensor, o and lse.
In the backward, sm90's kernels turn gradients back as they store them, and store those of queries,
keys and values side by side; after other kernels elementwise/rotary.py does both.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.attention import op
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.elementwise import rotary
from slipstream.runtime import autograd, custom_op, dispatch, kernel_pair
from slipstream.runtime.guarded_launch import Guard, known_failure


def softmax_of_rotated(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    sizes: tuple[int, int, int],
    options: AttentionOptions,
    impl: str,
    in_place: bool,
) -> Tensor:
    """o [B, T, H, D] of qkv [B, T, H + 2 HKV, D], with its gradient; sizes: H, HKV, HKV.

    Args:
        cos, sin: [B or 1, T, R/2]. in_place: queries and keys in qkv may be overwritten.
    """
    return _SoftmaxOfRotated.apply(qkv, cos, sin, cu_seqlens, sizes, options, impl, in_place)


class _SoftmaxOfRotated(autograd.Function):
    operator = "slipstream::rotary_softmax"

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu_seqlens: Tensor | None,
        sizes: tuple[int, int, int],
        options: AttentionOptions,
        impl: str,
        in_place: bool,
    ) -> Tensor:
        qk, v = qkv.detach().split([sizes[0] + sizes[1], sizes[2]], 2)
        if in_place and qkv.is_contiguous():
            _call_rotation(qk, cos, sin)
        else:
            qk = rotary._call(
                qk, cos, sin, None, interleaved=False, back=False, impl=dispatch.TRITON_OR_EAGER
            )
        q, k = qk.split(sizes[:2], 2)
        terms = AttentionInputs(q, k, v, cu_q=cu_seqlens, cu_k=cu_seqlens)
        o, lse = op.call_forward(*terms, *options, impl=impl)
        autograd.save(ctx, q, k, v, cu_seqlens, o, lse, cos, sin)
        ctx.options = (*options, impl)
        return o

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_seqlens, o, lse, cos, sin = saved
        grad = _call_backward(q, k, v, cu_seqlens, o, lse, do, cos, sin, *ctx.options)
        return grad, *(None,) * 7


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Heads x [B, T, H, D] where they lie."""
    with Guard(
        dispatch.TRITON_OR_EAGER,
        x.device,
        lambda: rotary._kind(x, cos.shape[-1], False),
        lambda: rotary._mismatch(x, cos, False),
    ) as usable:
        if usable:
            from slipstream.kernels.elementwise.triton.rotary import rotate

            rotate(x, cos, sin, None, False, False, x)
            return
    x.copy_(rotary._eager(x, cos, sin, None, False, False))


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    cos: Tensor,
    sin: Tensor,
    *args: Any,
) -> Tensor:
    """args: the options and impl. Returns the gradient of qkv."""
    inputs = AttentionInputs(q, k, v, cu_q=cu_seqlens, cu_k=cu_seqlens)
    impl = args[-1]
    if impl.startswith("sm90") and _fits(q, cos):
        with Guard(impl, q.device, lambda: _kind(q), lambda: _mismatch(q)) as usable:
            if usable:
                from slipstream.kernels.attention.sm90 import launch

                options = AttentionOptions(*args[:-1])
                return launch.backward_of_rotated(inputs, options, o, lse, do, cos, sin)
    dq, dk, dv = op._backward(*inputs, o, lse, do, None, *args)
    return rotary._join.impl(dq, dk, dv, cos, sin, dispatch.TRITON_OR_EAGER)


def _fits(q: Tensor, cos: Tensor) -> bool:
    """Whether all features turn, by float32, and there is something to do."""
    D = q.shape[-1]
    # sm90's backward stores gradients of such heads so
    whole = D in (64, 128) and 2 * cos.shape[-1] == D and cos.dtype == torch.float32
    return whole and q.numel() > 0 and known_failure(lambda: _kind(q), q.device) is None


def _kind(q: Tensor) -> KernelKey:
    return ("attention.sm90", q.dtype, q.shape[-1], "rotated")


def _mismatch(q: Tensor) -> str | None:
    """The probe: two heads of queries and one of keys, causal."""
    D = q.shape[-1]
    angle = torch.randn(1, kernel_pair.TOKENS, D // 2, device=q.device)
    options = AttentionOptions(D**-0.5, -1, 0, 0.0, 0.0)

    def run(qkv: Tensor, impl: str) -> Tensor:
        args = angle.cos(), angle.sin(), None, (2, 1, 1), options
        return softmax_of_rotated(qkv, *args, impl, in_place=False)

    return kernel_pair.mismatch(
        lambda t: run(t["qkv"], "sm90|triton|eager"),
        lambda t: run(t["qkv"], "eager"),
        {"qkv": kernel_pair.random_like(q, 1, kernel_pair.TOKENS, 4, D)},
    )


_call_rotation = custom_op.DirectCall(_turn, written={0: "qkv"})
_call_backward = custom_op.DirectCall(_backward, replay=True)
