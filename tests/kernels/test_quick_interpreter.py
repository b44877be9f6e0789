"""What tests/support/quick_interpreter.py changes in Triton's interpreter, numpy's numbers, and
what tests/support/in_order.py looks for."""

import numpy as np
import pytest
import torch

from slipstream.runtime.backends import INTERPRETED
from tests.support.by_shape import product
from tests.support.interpreted import interpreted

if INTERPRETED:
    import triton
    import triton.language as tl

    @triton.jit
    def _two_sums(a, b, c, d):
        return a + c, b - d

    @triton.jit
    def _decayed(a, b, c, d):
        return a * c, b * c + d

    @triton.jit
    def _kernel(x_ptr, y_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, REVERSE: tl.constexpr):
        at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
        x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
        row, column = tl.arange(0, M), tl.arange(0, N)
        a, b = tl.reduce((x, y), 1, _two_sums)
        tl.store(out_ptr + row, a)
        tl.store(out_ptr + M + row, b)
        c, d = tl.reduce((x, y), 0, _two_sums, keep_dims=True)
        tl.store(out_ptr + 2 * M + column[None, :], c)
        tl.store(out_ptr + 2 * M + N + column[None, :], d)
        e, f = tl.reduce((a, b), 0, _two_sums)
        tl.store(out_ptr + 2 * (M + N), e)
        tl.store(out_ptr + 2 * (M + N) + 1, f)
        out_ptr += 2 * (M + N) + 2
        g, h = tl.associative_scan((x, y), 0, _decayed, REVERSE)
        tl.store(out_ptr + at, g + row[:, None])
        tl.store(out_ptr + M * N + at, tl.where(x > 2, 0, h))

    @triton.jit
    def _mixed_kernel(x_ptr, out_ptr, N: tl.constexpr, HALF: tl.constexpr):
        at = tl.arange(0, N)
        x, step = tl.load(x_ptr + at), N + tl.program_id(0)
        tl.store(out_ptr + at, 3 - x * 2)
        tl.store(out_ptr + step + at, x + at)
        tl.store(out_ptr + 2 * step + at, (at // 2) * 2.5)
        tl.store(out_ptr + 3 * step + at, (x.to(HALF) * 0.1 + 1).to(tl.float32))
        tl.store(out_ptr + 4 * step + at, tl.where(x[:, None] > x[None, :], 1.0, 0).sum(1))
        tl.store(out_ptr + 5 * step + at, -1 + (at.to(tl.int8) * True) % 3 / 2)

    @triton.jit
    def _product_kernel(x_ptr, y_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
        m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :])
        y = tl.load(y_ptr + k[:, None] * N + n[None, :])
        tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(x, y, input_precision="ieee"))

    @triton.jit
    def _turning_kernel(x_ptr, N: tl.constexpr, WAITS: tl.constexpr):
        at = tl.arange(0, N)
        tl.store(x_ptr + at, at.to(tl.float32))
        if WAITS:
            tl.debug_barrier()
        tl.store(x_ptr + N + at, tl.load(x_ptr + N - 1 - at))

    @triton.jit
    def _moving_kernel(x_ptr, N: tl.constexpr, WAITS: tl.constexpr):
        at = tl.arange(0, N)
        x = tl.load(x_ptr + 1 + at)
        if WAITS:
            tl.debug_barrier()
        tl.store(x_ptr + at, x)

    @triton.jit
    def _storing_kernel(x_ptr, N: tl.constexpr, EACH: tl.constexpr, LATER: tl.constexpr):
        at = tl.arange(0, N)
        tl.store(x_ptr + at // EACH, at)
        tl.store(x_ptr + LATER + at, at)


def scanned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    products, sums = [x[0]], [y[0]]
    for a, b in zip(x[1:], y[1:]):
        products.append(products[-1] * a)
        sums.append(sums[-1] * a + b)
    return np.stack(products), np.stack(sums)


def subtracted(y: np.ndarray) -> np.ndarray:
    total = y[0]
    for row in y[1:]:
        total = total - row
    return total


def check(dtype: torch.dtype, reverse: bool) -> None:
    M, N = 8, 4
    x, y = torch.randn(M, N, dtype=dtype), torch.randn(M, N, dtype=dtype)
    out = torch.full((2 * (M + N) + 2 + 2 * M * N,), torch.nan, dtype=dtype)
    _kernel[(1,)](x_ptr=x, y_ptr=y, out_ptr=out, M=M, N=N, REVERSE=reverse)
    x, y = x.numpy(), y.numpy()
    by_row, by_column = (x.sum(1), subtracted(y.T)), (x.sum(0), subtracted(y))
    step = -1 if reverse else 1
    g, h = (z[::step] for z in scanned(x[::step], y[::step]))
    want = [*by_row, *by_column, by_row[0].sum(), subtracted(by_row[1])]
    want += [g + np.arange(M)[:, None], np.where(x > 2, 0, h)]
    flat = np.concatenate([np.ravel(z) for z in want])
    np.testing.assert_allclose(out.numpy(), flat, rtol=1e-5, atol=1e-5)


def check_mixed() -> None:
    """Numbers, scalars and tensors of several dtypes and shapes beside each other."""
    N = 8
    x, out = torch.randn(N), torch.full((6, N), torch.nan)
    _mixed_kernel[(1,)](x_ptr=x, out_ptr=out, N=N, HALF=tl.float16)
    at, half = torch.arange(N), (x.half() * torch.tensor(0.1).half() + 1).float()
    order = (x[:, None] > x).sum(1)
    want = torch.stack([3 - x * 2, x + at, at // 2 * 2.5, half, order, -1 + at % 3 / 2])
    torch.testing.assert_close(out, want, rtol=0, atol=0)


def check_product() -> None:
    """A row of tl.dot has the bits that it has alone: BLAS, which gives it others on some
    processors, has no part in it."""
    M, N, K = 64, 32, 128
    x, y, out = torch.randn(M, K), torch.randn(K, N), torch.full((M, N), torch.nan)
    _product_kernel[(1,)](x_ptr=x, y_ptr=y, out_ptr=out, M=M, N=N, K=K)
    for i in range(M):
        assert np.array_equal(out[i : i + 1].numpy(), product(x[i : i + 1].numpy(), y.numpy()))


@pytest.mark.parametrize("sizes", [(64, 16, 16), (37, 64, 5), (16, 128, 1), (3, 1, 64)], ids=str)
def test_product_of_a_row_has_the_same_bits_anywhere(sizes: tuple[int, int, int]) -> None:
    M, K, N = sizes
    a, b = torch.randn(M, K).numpy(), torch.randn(K, N).numpy()
    whole = product(a, b)
    np.testing.assert_allclose(whole, a.astype(np.float64) @ b, atol=1e-4)
    assert np.array_equal(product(np.stack([a[::-1], a]), b)[1], whole)
    for i in range(M):
        assert np.array_equal(product(a[i : i + 1], np.asfortranarray(b))[0], whole[i])
        assert np.array_equal(product(np.asfortranarray(a[i // 2 :]), b)[i - i // 2], whole[i])


@interpreted
def test_combine_functions_and_broadcasts() -> None:
    for dtype in (torch.float32, torch.float64):
        for reverse in (False, True):
            check(dtype, reverse)
    check_mixed()
    check_product()


@interpreted
def test_threads_see_each_other_behind_a_barrier() -> None:
    N = 8
    for waits in (False, True):
        x = torch.zeros(2 * N)
        _turning_kernel[(1,)](x_ptr=x, N=N, WAITS=waits)
        want = torch.arange(N - 1.0, -1.0, -1.0) if waits else torch.full((N,), torch.nan)
        torch.testing.assert_close(x[N:], want, equal_nan=True)
    _moving_kernel[(1,)](x_ptr=x, N=N, WAITS=True)
    assert x[:N].tolist() == [*range(1, N), N - 1]
    with pytest.raises(Exception, match="are overwritten that other threads may still load"):
        _moving_kernel[(1,)](x_ptr=x, N=N, WAITS=False)
    _storing_kernel[(1,)](x_ptr=x, N=N, EACH=1, LATER=0)
    with pytest.raises(Exception, match="elements of a block are stored at one address"):
        _storing_kernel[(1,)](x_ptr=x, N=N, EACH=2, LATER=0)
    with pytest.raises(Exception, match="7 elements are stored twice, by other threads"):
        _storing_kernel[(1,)](x_ptr=x, N=N, EACH=1, LATER=1)
