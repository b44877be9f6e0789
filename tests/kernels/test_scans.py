"""Both scans in plain torch, against the recurrence token by token and the paper, and by the Triton
kernels under Triton's interpreter, on a CPU, against the float64 reference. What holds for every
operator is in tests/ops/test_properties.py and test_compile.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import linear_rows
from slipstream.kernels.gated_scan import eager as gated
from slipstream.kernels.selective_scan.inputs import CHUNK
from slipstream.ops import chunk_hgrn, selective_scan
from tests.support.interpreted import interpreted
from tests.support.operators import offsets, relative_error, scan_inputs

# tokens of a tile there
TILE = 8
# B, T, D, lengths of packed sequences
SIZES: dict[str, Any] = {
    "one token": (1, 1, 1, None),
    "one tile": (2, TILE, 6, None),
    "tiles": (2, 7 * TILE + 5, 18, None),
    "packed": (1, 76, 5, (5, 0, 52, 1, 0, TILE, 10, 0)),
    "packed in one": (1, 7, 5, (5, 0, 2)),
}
GATES = {
    "weak": lambda x: -0.1 * x,
    "mixed": lambda x: -torch.where(torch.rand_like(x) < 0.2, 50 * x, 0.1 * x),
    "reset": lambda x: torch.where(x < 0.1, -torch.inf, torch.where(x < 0.2, -1e4, -0.1 * x)),
}
CASES = [
    *((size, "mixed", torch.float32, True, False) for size in SIZES),
    ("packed", "reset", torch.float32, True, True),
    ("tiles", "weak", torch.float16, False, True),
]
# of the selective scan: B, T, D, N, G, lengths
SELECTIVE_SIZES: dict[str, Any] = {
    "one token": (1, 1, 1, 1, 1, None),
    "one tile": (2, TILE, 6, 2, 1, None),
    "tiles": (2, 2 * TILE + 5, 18, 2, 1, None),
    "groups": (1, TILE + 3, 6, 2, 2, None),
    "packed": (1, 36, 5, 2, 1, (5, 0, 2 * TILE + 1, 1, 0, TILE, 5, 0)),
}
OPTIONAL = ("D", "z", "delta_bias", "initial_state")
SELECTIVE_CASES = [
    *((size, torch.float32, OPTIONAL, True) for size in SELECTIVE_SIZES),
    ("tiles", torch.float16, OPTIONAL, True),
    *(("groups", torch.float32, (x,), False) for x in OPTIONAL),
]


def outcome(
    scan: Callable[..., Any], args: dict[str, Tensor], weights: list[Tensor], **options: Any
) -> dict[str, Tensor]:
    args = {n: x.detach().requires_grad_() for n, x in args.items()}
    y, final = scan(**args, output_final_state=True, **options)
    loss = sum((x * w.to(x.dtype)).double().sum() for x, w in zip((y, final), weights))
    grads = torch.autograd.grad(torch.as_tensor(loss), list(args.values()))
    return {"y": y.detach(), "final": final.detach(), **dict(zip(args, grads))}


def expect(
    scan: Callable[..., Any],
    args: dict[str, Tensor],
    weights: list[Tensor],
    case: str,
    half: float,
    **options: Any,
) -> None:
    """half: the limit of errors in float16."""
    got = outcome(scan, args, weights, impl="triton", **options)
    wide = {n: x.double() for n, x in args.items()}
    for name, x in outcome(scan, wide, weights, impl="reference", **options).items():
        error = relative_error(got[name], x)
        is_half = torch.float16 in {x.dtype for x in args.values()}
        assert error <= (half if is_half else 1e-6), f"{case}: {name} is off by {error:.1e}"
        assert got[name].dtype == (args[name].dtype if name in args else got[name].dtype)


def expect_only_final(scan: Callable[..., Any], args: dict[str, Tensor], **options: Any) -> None:
    """Without a gradient of y, and strides that are not those of a fresh tensor."""
    grads = []
    for impl in ("triton", "eager"):
        given = {n: x.detach().requires_grad_() for n, x in args.items()}
        _, final = scan(**given, output_final_state=True, impl=impl, **options)
        loss = final.square().sum()
        grads.append(torch.autograd.grad(loss, list(given.values()), materialize_grads=True))
    for got, want in zip(*grads):
        assert relative_error(got, want) <= 1e-6


def expect_alone_equals_packed(
    scan: Callable[..., Any], args: dict[str, Tensor], cuts: tuple[int, ...]
) -> None:
    """To the bit: where a sequence lies decides nothing."""
    packed, _ = scan(**args, cu_seqlens=torch.tensor(cuts), impl="triton")
    for begin, end in ((cuts[1], cuts[2]), (cuts[2], cuts[3])):
        alone = {n: x[:, begin:end] if x.dim() > 2 else x for n, x in args.items()}
        assert torch.equal(packed[:, begin:end], scan(**alone, impl="triton")[0])


def check(size: str, gate: str, dtype: torch.dtype, state: bool, reverse: bool) -> None:
    B, T, D, lengths = SIZES[size]
    N = B if lengths is None else len(lengths)
    args = {"x": torch.randn(B, T, D).to(dtype), "g": GATES[gate](torch.rand(B, T, D))}
    if state:
        args["initial_state"] = torch.randn(N, D)
    cu = None if lengths is None else offsets(lengths).int()
    weights = [torch.randn(B, T, D).to(dtype), torch.randn(N, D)]
    case, options = f"{size}, {gate}, {dtype}", {"reverse": reverse, "cu_seqlens": cu}
    expect(chunk_hgrn, args, weights, case, 1e-3, **options)


@interpreted
def test_scan_matches_reference_when_interpreted() -> None:
    for case in CASES:
        check(*case)
    turned = {"x": torch.randn(2, 6, 20).mT, "g": -torch.rand(2, 6, 20).mT}
    expect_only_final(chunk_hgrn, turned)
    args = {"x": torch.randn(1, 50, 5), "g": -torch.rand(1, 50, 5)}
    expect_alone_equals_packed(chunk_hgrn, args, (0, 3, 8, 35, 50))


def inputs(size: str, dtype: torch.dtype, given: tuple[str, ...]) -> dict[str, Tensor]:
    *sizes, lengths = SELECTIVE_SIZES[size]
    args = scan_inputs(*sizes, None if lengths is None else len(lengths))
    args = {n: x for n, x in args.items() if n in given or n not in OPTIONAL}
    args |= {"A": -2 * args["A"].abs(), "delta": args["delta"].abs()}
    return {x: y.to(dtype) if y.dim() > 2 and x in given else y for x, y in args.items()}


def check_selective(size: str, dtype: torch.dtype, given: tuple[str, ...], softplus: bool) -> None:
    B, T, D, N, _, lengths = SELECTIVE_SIZES[size]
    args = inputs(size, dtype, given)
    if "delta_bias" in given:
        args["delta_bias"] = args["delta_bias"].abs()
    cu = None if lengths is None else offsets(lengths).int()
    weights = [torch.randn(B, T, D), torch.randn(B if lengths is None else len(lengths), D, N)]
    case, options = f"{size}, {given}, {dtype}", {"delta_softplus": softplus, "cu_seqlens": cu}
    expect(selective_scan, args, weights, case, 2e-3, **options)


def check_neighbours() -> None:
    """A NaN of one sequence stays there, though its tokens follow on another's last tile."""
    args = inputs("tiles", torch.float32, ("z",))
    args["u"][1, 0], args["B"][1, 0] = torch.nan, torch.inf
    weights = [torch.ones(2, 21, 18), torch.ones(2, 18, 2)]
    got = outcome(selective_scan, args, weights, impl="triton")
    for name in ("y", "final", "u", "delta", "B", "C", "z"):
        assert got[name][0].isfinite().all(), name


@interpreted
def test_selective_scan_matches_reference_when_interpreted() -> None:
    for case in SELECTIVE_CASES:
        check_selective(*case)
    args = inputs("one tile", torch.float32, OPTIONAL)
    args |= {n: x.mT.contiguous().mT for n, x in args.items() if x.dim() > 2}
    args["z"] = torch.randn(2, TILE, 12)[..., 6:]
    args["delta"] = torch.randn(2, 1, 6).expand(2, TILE, 6)
    expect_only_final(selective_scan, args, delta_softplus=True)
    packed = inputs("packed", torch.float32, ("z",))
    expect_alone_equals_packed(selective_scan, packed, (0, 3, 8, 30, 36))
    check_neighbours()


TOKENS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 7)
C = gated.BLOCK
# around one block, two, where blocks begin to be used, and with tokens past the last block
BLOCK_TOKENS = [1, 2, C - 1, C, 2 * C - 1, 2 * C, 3 * C, 3 * C + 1, 5 * C - 1]


def gated_inputs(B: int = 2, T: int = 3 * C + 5, D: int = 6) -> dict[str, Tensor]:
    x, g = torch.randn(B, T, D).double(), -torch.rand(B, T, D).double()
    return {"x": x, "g": g, "initial_state": torch.randn(B, D).double()}


def random_inputs(
    B: int = 2,
    T: int = 2 * CHUNK + 5,
    G: int = 2,
    S: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    args = {name: x.to(dtype) for name, x in scan_inputs(B, T, 6, 3, G, S).items()}
    return {**args, "A": -args["A"].abs()}


def run(
    scan: Callable[..., Any], args: dict[str, Tensor], **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the random_inputs for fixed weights of both, and of each alone."""
    args = {name: x.detach().clone().requires_grad_() for name, x in args.items()}
    options |= {"delta_softplus": True} if scan is selective_scan else {}
    outputs = scan(**args, output_final_state=True, **options)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    parts = [(x * w).sum() for x, w in zip(outputs, weights)]
    grads = []
    for loss in (sum(parts), *parts):
        grads += torch.autograd.grad(
            loss, list(args.values()), retain_graph=True, materialize_grads=True
        )
    return [x.detach() for x in outputs], grads


def near(got: Any, want: Any, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[True, False], ids=["parts", "whole"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gated scan's spans of 24 C elements are two blocks of 2 x 6 channels; the other's
    segments are chunks."""
    monkeypatch.setitem(linear_rows.CHUNK_ELEMENTS, "cpu", 24 * C if request.param else 1 << 20)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("T", BLOCK_TOKENS)
@pytest.mark.parametrize("reverse", [False, True])
def test_hgrn_matches_reference(T: int, reverse: bool) -> None:
    args = gated_inputs(T=T)
    want = run(chunk_hgrn, args, reverse=reverse, impl="reference")
    near(run(chunk_hgrn, args, reverse=reverse), want, 1e-12)


def test_selective_scan_is_the_papers_sum() -> None:
    """Unrolled: y_t = sum_{s <= t} C_t exp(A sum_{s < r <= t} dt_r) dt_s B_s u_s, and no state."""
    args = random_inputs(B=1, T=9, G=1)
    u, delta, A, B, C = (args[x] for x in ("u", "delta", "A", "B", "C"))
    dt = F.softplus(delta)
    sums = dt.cumsum(1)
    want = torch.zeros_like(u)
    for t in range(9):
        for s in range(t + 1):
            decay = ((sums[:, t] - sums[:, s])[..., None] * A).exp()
            part = C[:, t] * decay * B[:, s]
            want[:, t] += part.sum(-1) * dt[:, s] * u[:, s]
    got, _ = selective_scan(u, delta, A, B, C, delta_softplus=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("T", TOKENS)
def test_selective_scan_matches_reference(T: int) -> None:
    args = random_inputs(T=T)
    near(run(selective_scan, args), run(selective_scan, args, impl="reference"))


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("lengths", [(CHUNK + 8, 0, 3 * CHUNK, 1, CHUNK), (0, 0, 70, 0)])
def test_packed_selective_scan_matches_reference(lengths: tuple[int, ...]) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    args = random_inputs(B=1, T=sum(lengths), S=len(lengths))
    want = run(selective_scan, args, cu_seqlens=cu_seqlens, impl="reference")
    near(run(selective_scan, args, cu_seqlens=cu_seqlens), want)


def test_selective_scan_survives_steps_that_forget_all() -> None:
    args = random_inputs(dtype=torch.float32)
    args["delta"] = torch.where(torch.rand_like(args["delta"]) < 0.3, 1e3, args["delta"])
    args["A"] = args["A"] - 1
    got, want = run(selective_scan, args), run(selective_scan, args, impl="reference")
    assert not any(x.isnan().any() for part in got for x in part)
    near(got, want, 1e-4)
