"""The Triton short convolution under Triton's interpreter: widths, packing, tiles, the update."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.ops.conv import short_convolution, short_convolution_update
from slipstream.runtime.backends import HAVE_TRITON
from tests.support.interpreted import error, run


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_triton_convolution_matches_reference() -> None:
    run("short_convolution")


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
@pytest.mark.slow
def test_triton_convolution_matches_reference_in_small_tiles() -> None:
    run(script="tests.kernels.conv.test_triton_interpreted")


def check(B: int, T: int, D: int, W: int, lengths: tuple[int, ...], extras: bool) -> None:
    N = len(lengths) or B
    cu = torch.tensor([0, *lengths]).cumsum(0).int() if lengths else None
    given = {"x": torch.randn(B, T, D), "weight": torch.randn(D, W)}
    if extras:
        given |= {"bias": torch.randn(D), "residual": torch.randn(B, T, D)}
        given |= {"initial_state": torch.randn(N, D, W)}
    found = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
        y, state = short_convolution(
            **leaves,
            activation="silu" if extras else None,
            cu_seqlens=cu,
            output_final_state=True,
            impl=impl,
        )
        assert state is not None
        dy = torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y).sin()
        grads = torch.autograd.grad((y * dy).sum() + state.square().sum(), list(leaves.values()))
        found.append([y.detach(), state.detach(), *grads])
    for i, (x, y) in enumerate(zip(*found, strict=True)):
        e = error(x, y)
        assert e < 2e-5, (B, T, D, W, lengths, extras, i, e)


def check_neighbours() -> None:
    """No number of a packed sequence reaches another, not even NaN."""
    x, weight = torch.randn(1, 90, 6), torch.randn(6, 4)
    cu = torch.tensor([0, 40, 45, 90])
    x[:, 40:45] = torch.nan
    x.requires_grad_()
    y, _ = short_convolution(x, weight, activation="silu", cu_seqlens=cu, impl="triton")
    assert y[:, :40].isfinite().all()
    assert y[:, 45:].isfinite().all()
    dy = torch.ones_like(y)
    dy[:, 40:45] = torch.nan
    (dx,) = torch.autograd.grad(y, x, dy)
    assert dx[:, :40].isfinite().all()
    assert dx[:, 45:].isfinite().all()


def check_offsets_past_the_end() -> None:
    """On a GPU nobody looks at them before; what is behind the last token is NaN here."""
    from slipstream.kernels.conv.triton.conv import conv_state_bwd_kernel

    launch: Any = conv_state_bwd_kernel
    T, D, W, found = 9, 6, 4, []
    dy, x, state, weight = (torch.randn(n, D) for n in (T + 8, T + 8, 2 * W, W))
    dy[T:] = x[T:] = torch.nan
    for end in (T, T + 5):
        ds, cu = torch.empty(2, D, W), torch.tensor([0, T - 1, end])
        launch[(1, 2)](dy, x, weight, None, state, cu, ds, T, D, D, W, 128, True)
        found.append(ds)
    assert found[0].isfinite().all()
    assert torch.equal(*found)


def check_apart(W: int, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Channels in tensors of their own: the bits of those in one."""
    from slipstream.kernels.conv import op
    from slipstream.kernels.conv.inputs import ConvInputs

    B, T, sizes = (1, sum(lengths), (24, 8, 16)) if lengths else (2, 21, (8, 40))
    D, N = sum(sizes), len(lengths) or B
    cu = torch.tensor([0, *lengths]).cumsum(0) if lengths else None
    x, dy = torch.randn(B, T, D).to(dtype), torch.randn(B, T, D).to(dtype)
    inputs = [x, torch.randn(D, W), torch.randn(D), torch.randn(N, D, W).to(dtype)]
    found: list[list[Tensor]] = []
    for apart in (None, sizes):
        x, weight, bias, state = (t.clone().requires_grad_() for t in inputs)
        call = ConvInputs(x, weight, bias, None, state, cu), True, "triton", apart
        ys = op.convolution(*call)
        assert all(y.is_contiguous() for y in ys)
        with torch.no_grad():
            again = op.convolution(*call)
        dys = dy.split([y.shape[-1] for y in ys], -1)
        grads = torch.autograd.grad(ys, [x, weight, bias, state], dys)
        found.append([torch.cat(ys, -1), torch.cat(again, -1), *grads])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def check_unit(W: int, T: int, dtype: torch.dtype, bias: bool) -> None:
    """Heads that are normalised within the convolution, against l2_norm after it."""
    from slipstream.kernels.conv import fallback, op
    from slipstream.kernels.conv.inputs import ConvInputs

    sizes, unit = (64, 128, 24), 64
    assert op.normalises(sizes, unit, None, None)
    D = sum(sizes)
    inputs = [torch.randn(2, T, D).to(dtype), torch.randn(D, W)]
    inputs += [torch.randn(D)] if bias else []
    dy, found = torch.randn(2, T, D).to(dtype), []
    for kernels in (True, False):
        leaves = [t.to(dtype if kernels and t.dim() > 2 else t.dtype) for t in inputs]
        leaves = [(t if kernels else t.double()).clone().requires_grad_() for t in leaves]
        x, weight, b = (*leaves, None)[:3]
        assert x is not None
        assert weight is not None
        call = ConvInputs(x, weight, b, None, None, None)
        if kernels:
            ys = op.convolution(call, True, "triton", sizes, unit)
            with torch.no_grad():
                again = op.convolution(call, True, "triton", sizes, unit)
            assert all(torch.equal(y, z) for y, z in zip(ys, again, strict=True))
        else:
            y = fallback.convolution(call, True)
            ys = fallback.normalised(y, sizes, unit)
        dys = [t.to(y.dtype) for y, t in zip(ys, dy.split(sizes, -1))]
        found.append([*ys, *torch.autograd.grad(ys, leaves, dys)])
    for got, want in zip(*found, strict=True):
        assert error(got, want) < (2e-5 if dtype == torch.float32 else 8e-3)


def check_update(W: int, dtype: torch.dtype) -> None:
    N, D = 5, 7
    x, bias = torch.randn(N, 1, D).to(dtype), torch.randn(D)
    weight, residual = torch.randn(D, W), torch.randn(N, 1, D)
    for indices in (None, torch.tensor([3, -1, 0, 6, 2]), torch.tensor([6, 5, 4, -7, -1]).int()):
        pool = torch.randn(N if indices is None else 8, W, D).to(dtype)
        outputs: list[tuple[Tensor, Tensor]] = []
        for impl in ("triton", "eager"):
            state = pool.clone().mT  # a channel's inputs are not adjacent
            y = short_convolution_update(
                x, state, weight, bias,
                activation="silu", residual=residual, state_indices=indices, impl=impl,
            )  # fmt: skip
            outputs.append((y, state))
        (y, state), (want, moved) = outputs
        assert error(y, want) < (2e-5 if dtype == torch.float32 else 4e-3)
        assert torch.equal(state, moved)


def main() -> None:
    from slipstream.kernels.conv.triton import launch

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    lengths = (3, 0, 33, 1, 2, 26, 0)
    for W in (1, 3, 4, 8):
        check(1, 40, 6, W, (), True)
    for W in (1, 3, 4):  # 8 below, in small tiles
        check(1, sum(lengths), 6, W, lengths, W == 4)
    for name, BT in (("FORWARD", 4), ("BACKWARD", 4), ("BACKWARD_ROLLING", 8)):
        setattr(launch, name, launch.Tile(BT, 16, 1, 1))
    lengths = (3, 0, 18, 1, 2, 9, 0)
    for W in (2, 5, 8):
        check(1, 17, 20, W, (), False)
        check(2, 18, 20, W, (), True)
        check(1, sum(lengths), 20, W, lengths, True)
    check_apart(4, (), torch.float32)
    check_apart(3, lengths, torch.float16)
    check_unit(4, 21, torch.float32, True)
    check_unit(3, 8, torch.float16, False)
    check_unit(4, 1, torch.float32, False)
    check_neighbours()
    check_offsets_past_the_end()
    for W in (1, 2, 3, 4):
        check_update(W, torch.float32)
    check_update(4, torch.float16)


if __name__ == "__main__":
    main()
