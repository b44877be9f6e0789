"""The Triton short convolution under Triton's interpreter: widths, packing, tiles, the update."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.conv import eager, op
from slipstream.kernels.conv.inputs import ConvInputs, GradInputs
from slipstream.ops.conv import short_convolution, short_convolution_update
from tests.support.in_bounds import in_bounds
from tests.support.interpreted import error, interpreted


@interpreted
def test_triton_convolution_matches_reference_for_short_sequences() -> None:
    check_short_sequences()
    for lengths in ((7, 1), (1,) * 9, (17, 1, 1, 0, 5), (8, 0, 8), (3, 4, 9, 0)):
        for extras in (False, True):
            check_bounds(lengths, extras)
    check_offsets_past_the_end()


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
    from slipstream.kernels.conv import triton_launch as launch

    T, D, W = 9, 6, 4
    weight, state = torch.randn(D, W), torch.randn(2, D, W)
    x, dy = torch.randn(2, 1, T + 8, D)
    x[:, T:] = dy[:, T:] = torch.nan
    x, dy, found = x[:, :T], dy[:, :T], []
    for end in (T, T + 5):
        cu = torch.tensor([0, T - 1, end])
        ys = launch.forward(ConvInputs(x, weight, None, None, state, cu), None, 0, True)
        found.append(
            [*ys, *launch.backward(GradInputs(dy, None, None, x, weight, None, state, cu), 0, True)]
        )
    for got, want in zip(*found, strict=True):
        assert want.isfinite().all()
        assert torch.equal(got, want)
    # those that no sequences have: memory of others is neither read nor written
    for wrong in ((0, -100, T), (0, T + 90, 3), (9, 2, 1), (5, 2, 1), (-9, -8, -7)):
        cu = torch.tensor(wrong)
        with in_bounds():
            launch.forward(ConvInputs(x, weight, None, None, state, cu), None, 0, True)
            launch.backward(GradInputs(dy, None, None, x, weight, None, state, cu), 0, True)


def check_apart(W: int, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Channels in tensors of their own: the bits of those in one."""
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
    torch.testing.assert_close(*found, rtol=0, atol=0)


def check_unit(W: int, T: int, dtype: torch.dtype, bias: bool, packed: bool = False) -> None:
    """Heads that are normalised within the convolution, against l2_norm after it. packed: four
    sequences, one of them empty, that begin with states."""
    sizes, unit = (64, 128, 24), 64
    assert op.normalises(sizes, unit)
    D, B = sum(sizes), 1 if packed else 2
    cu = torch.tensor([0, T // 2, T // 2, T - 1, T]) if packed else None
    inputs = [torch.randn(B, T, D).to(dtype), torch.randn(D, W)]
    inputs += [torch.randn(D)] if bias else []
    inputs += [torch.randn(4, D, W)] if packed else []
    dy, found = torch.randn(B, T, D).to(dtype), []
    for kernels in (True, False):
        leaves = [t.to(dtype if kernels and t.dim() > 2 else t.dtype) for t in inputs]
        leaves = [(t if kernels else t.double()).clone().requires_grad_() for t in leaves]
        x, weight, *others = leaves
        state = others.pop() if packed else None
        call = ConvInputs(x, weight, others[0] if bias else None, None, state, cu)
        if kernels:
            ys = op.convolution(call, True, "triton", sizes, unit)
            with torch.no_grad():
                again = op.convolution(call, True, "triton", sizes, unit)
            assert all(torch.equal(y, z) for y, z in zip(ys, again, strict=True))
        else:
            y = eager.convolution(call, True)
            ys = eager.normalised(y, sizes, unit)
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


def check_short_sequences() -> None:
    """Tiles with few of their rows, where dx of the last ones needs no rows of a next tile."""
    for W in (3, 4):
        for lengths in ((1,) * 12, (1, 2, 3, 4, 5, 0, 5, 4, 3, 2, 1, 1)):
            for extras in (False, True):
                check(1, sum(lengths), 5, W, lengths, extras)
    check(1, 59, 5, 4, (5, 6, 7, 8, 9, 0, 0, 16, 8), True)


def check_bounds(lengths: tuple[int, ...], extras: bool) -> None:
    """However few tiles a program has, also where its first one has no tokens and begins past all
    of them, it reads nothing outside of a tensor, and y, dx and a state's gradient are the same."""
    from slipstream.kernels.conv import triton_launch as launch

    T, D, W, found = sum(lengths), 5, 4, []
    x, dy, residual = torch.randn(3, 1, T + 16, D)[:, :, :T]
    weight, cu = torch.randn(D, W), torch.tensor([0, *lengths]).cumsum(0)
    bias, state = (torch.randn(D), torch.randn(len(lengths), D, W)) if extras else (None, None)
    inputs = ConvInputs(x, weight, bias, residual if extras else None, state, cu)
    forward, backward = launch.FORWARD, launch.BACKWARD
    for programs in (1, 2, 1000):
        launch.FORWARD = launch.Tile(8, 32, 1, programs)
        launch.BACKWARD = launch.Tile(8, 32, 1, programs)
        with in_bounds():
            (y,) = launch.forward(inputs, None, 0, True)
            dx, *others = launch.backward(
                GradInputs(dy, None, None, x, weight, bias, state, cu), 0, True
            )
        found.append([y, dx, *others[2:]])
        for got, want in zip(found[-1], found[0], strict=True):
            assert torch.equal(got, want), (lengths, programs)
    launch.FORWARD, launch.BACKWARD = forward, backward


@interpreted
@pytest.mark.slow
def test_triton_convolution_matches_reference_in_small_tiles() -> None:
    from slipstream.kernels.conv import triton_launch as launch

    lengths = (3, 0, 33, 1, 2, 26, 0)
    for W in (1, 3, 4, 8):
        check(1, 40, 6, W, (), True)
    for W in (1, 3, 4):  # 8 below, in small tiles
        check(1, sum(lengths), 6, W, lengths, W == 4)
    launch.FORWARD, launch.BACKWARD = launch.Tile(4, 16, 1, 1), launch.Tile(8, 16, 1, 1)
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
    check_unit(4, 21, torch.float32, True, True)
    check_unit(3, 40, torch.float16, False, True)
    check_neighbours()
    check_offsets_past_the_end()
    for W in (1, 2, 3, 4):
        check_update(W, torch.float32)
    check_update(4, torch.float16)
