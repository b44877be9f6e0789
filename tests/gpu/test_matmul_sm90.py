"""Products by the kernels for sm_90."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.matmul import op
from slipstream.kernels.matmul.config import ACTIVATIONS, MatmulInputs
from slipstream.ops.matmul import matmul
from tests.gpu.waiting import waiting_is_an_error
from tests.support.operators import relative_error

# ---- The matmul on sm_90, by both of its kernels: every dtype, precision and order in memory,
# strides that TMA takes and those that it does not, what follows the product, odd sizes; the same
# bits twice; without a host sync. What may be read of memory that nobody has written is NaN.


SM_90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.skipif(not SM_90, reason="needs an sm_90 device"),
    pytest.mark.filterwarnings("ignore:glu runs in plain torch"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# dtype, precision, relative RMS error
KINDS = [
    (BF16, "tf32x3", 3e-3), (FP16, "tf32x3", 4e-4), (FP32, "tf32", 1.2e-3), (FP32, "tf32x3", 3e-6),
    (FP32, "ieee", 3e-6), (E4M3, "tf32x3", 5e-3), (E5M2, "tf32x3", 5e-3),
]  # fmt: skip
ODD = [(1000, 776, 328), (129, 264, 4096), (257, 33, 79), (37, 48, 1)]
LAYOUTS = ["nn", "nt", "tn", "tt"]
every_kind = pytest.mark.parametrize(
    ("dtype", "precision", "limit"), KINDS, ids=lambda x: str(x).removeprefix("torch.")
)


def drawn(rows: int, columns: int, dtype: torch.dtype, turned: bool) -> Tensor:
    """Row by row, or if turned column by column."""
    shape = (columns, rows) if turned else (rows, columns)
    x = torch.randn(shape, device="cuda").to(dtype)
    return x.t() if turned else x


def names_for(a: Tensor, b: Tensor, precision: str, layout: str) -> list[str | None]:
    """The implementations that take a call, and None, whatever is chosen; of the portable one not
    each layout with each dtype, for every one is a kernel to compile."""
    out = BF16 if a.element_size() == 1 else a.dtype
    t = MatmulInputs(a, b, None, None, None, None, "", precision, out)
    taken: list[str | None] = ["sm90"] if op.tma_unsupported_reason(t) is None else []
    return taken + ([None, "triton"] if a.dtype == BF16 or layout in ("nn", "tt") else [])


@every_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matmul_matches_float64(
    dtype: torch.dtype, precision: str, limit: float, layout: str
) -> None:
    seen = set()
    for M, N, K in ODD:
        a, b = drawn(M, K, dtype, layout[0] == "t"), drawn(K, N, dtype, layout[1] == "t")
        want = a.double() @ b.double()
        for impl in names_for(a, b, precision, layout):
            seen.add(impl)
            got = matmul(a, b, precision=precision, impl=impl)
            assert relative_error(got, want) <= limit, (M, N, K, impl)
            for _ in range(2):  # recorded, then played
                assert torch.equal(got, matmul(a, b, precision=precision, impl=impl)), (M, N, K)
    assert ("sm90" in seen) == (dtype != FP32 or precision == "tf32")


@pytest.mark.parametrize("dtype", [BF16, FP32, E4M3], ids=str)
def test_matmul_takes_strides_that_tma_does_not(dtype: torch.dtype) -> None:
    limit = {BF16: 3e-3, FP32: 3e-6, E4M3: 5e-3}[dtype]
    wide, tall = drawn(130, 403, dtype, False), drawn(403, 150, dtype, False)
    cases = {
        "rows of 200 bytes": (drawn(130, 100, dtype, False), drawn(100, 150, dtype, True)),
        "part of a row": (wide[:, 1:101], tall[3:103, 1:145]),
        "every second column": (wide[:, :200:2], tall[:100, ::3]),
        "every second row": (wide[::2, :112], tall[:224:2, :144]),
        "one row again and again": (wide[:1, :96].expand(70, 96), tall[:96, :48]),
        "one column again and again": (wide[:, :64], tall[:64, :1].expand(64, 80)),
        "begins at an odd place": (wide.flatten()[1 : 1 + 96 * 64].view(96, 64), tall[:64, :64]),
    }
    for what, (a, b) in cases.items():
        want = a.double() @ b.double()
        for impl in (None, "triton"):
            assert relative_error(matmul(a, b, impl=impl), want) <= limit, (what, impl)


@pytest.mark.parametrize("impl", ["sm90", "triton"])
@pytest.mark.parametrize("dtype", [BF16, FP32, E4M3], ids=str)
def test_matmul_goes_on_with_what_follows(impl: str, dtype: torch.dtype) -> None:
    """float32 of factors by rows, which the sm_90 kernel takes as the transpose."""
    M, N, K = 700, 264, 320
    a, b = drawn(M, K, dtype, False), drawn(K, N, dtype, dtype != FP32)
    out = BF16 if dtype == E4M3 else dtype
    bias, residual = drawn(1, N, out, False)[0], drawn(M, N, out, False)
    whole: dict[str, Any] = {"bias": bias, "residual": residual}
    rows: dict[str, Any] = {"scale_a": torch.rand(M, device="cuda") / 20}
    rows["scale_b"] = torch.rand(N, device="cuda") + 0.5
    one: dict[str, Any] = {"scale_a": torch.full((), 0.05, device="cuda")}
    turned: dict[str, Any] = {"residual": drawn(M, N, out, True)}
    limit = 3e-3 if out == BF16 else 1.2e-3
    for options in (
        {},
        rows,
        {**one, **turned},
        {**one, "bias": bias, "out_dtype": torch.float16},
        *(
            {**whole, **rows, "activation": f}
            for f in (ACTIVATIONS if dtype == BF16 else ("silu",))
        ),
    ):
        given = options.items()
        wide: dict[str, Any] = {n: x.double() if isinstance(x, Tensor) else x for n, x in given}
        wide.pop("out_dtype", None)
        want = matmul(a.double(), b.double(), **wide, impl="reference")
        got = matmul(a, b, **options, precision="tf32", impl=impl)
        assert got.dtype == options.get("out_dtype", out)
        assert relative_error(got, want) <= limit, list(options)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_matmul_has_gradients(dtype: torch.dtype, layout: str) -> None:
    a, b = drawn(520, 328, dtype, layout[0] == "t"), drawn(328, 264, dtype, layout[1] == "t")
    bias, residual = drawn(1, 264, dtype, False)[0], drawn(520, 264, dtype, False)
    leaves = [x.requires_grad_() for x in (a, b, bias, residual)]
    dy = drawn(520, 264, dtype, False)
    grads = torch.autograd.grad(matmul(a, b, bias=bias, residual=residual), leaves, dy)
    wide = dy.double()
    want = wide @ b.double().t(), a.double().t() @ wide, wide.sum(0), wide
    for got, good in zip(grads, want, strict=True):
        assert relative_error(got, good) <= (3e-3 if dtype == BF16 else 3e-6)


@every_kind
def test_matmul_never_waits_for_the_device(
    dtype: torch.dtype, precision: str, limit: float
) -> None:
    for K in (1024, 328):
        a, b = drawn(129, K, dtype, False), drawn(K, 264, dtype, False)
        bias = drawn(1, 264, BF16, False)[0]
        matmul(a, b, precision=precision, bias=bias)
        with waiting_is_an_error():
            for _ in range(3):
                matmul(a, b, precision=precision, bias=bias)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_matmul_of_more_than_2_to_31_elements(dtype: torch.dtype) -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    a, b = drawn(1 << 21, 64, dtype, False), drawn(64, 1032, dtype, True)
    got = matmul(a, b)[-300:]
    assert relative_error(got, a[-300:].double() @ b.double()) <= 5e-3
    del got, a
    torch.cuda.empty_cache()
