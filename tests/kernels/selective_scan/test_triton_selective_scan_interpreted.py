"""The selective scan's Triton kernels under Triton's interpreter, against the float64 reference."""

import torch
from torch import Tensor

from slipstream.ops import selective_scan
from tests.support.interpreted import interpreted
from tests.support.operators import offsets, relative_error

# tokens of a tile there
TILE = 8
# B, T, D, N, G, lengths of packed sequences
SIZES = {
    "one token": (1, 1, 1, 1, 1, None), "one tile": (2, TILE, 6, 2, 1, None),
    "tiles": (2, 2 * TILE + 5, 18, 2, 1, None), "groups": (1, TILE + 3, 6, 2, 2, None),
    "packed": (1, 36, 5, 2, 1, (5, 0, 2 * TILE + 1, 1, 0, TILE, 5, 0)),
}  # fmt: skip
OPTIONAL = ("D", "z", "delta_bias", "initial_state")
CASES = [
    *((size, torch.float32, OPTIONAL, True) for size in SIZES),
    ("tiles", torch.float16, OPTIONAL, True),
    *(("groups", torch.float32, (x,), False) for x in OPTIONAL),
]


def outcome(args: dict[str, Tensor], weights: list[Tensor], **options) -> dict[str, Tensor]:
    args = {n: x.detach().requires_grad_() for n, x in args.items()}
    y, final = selective_scan(**args, output_final_state=True, **options)
    assert final is not None
    loss = sum((x * w.to(x.dtype)).double().sum() for x, w in zip((y, final), weights))
    grads = torch.autograd.grad(torch.as_tensor(loss), list(args.values()))
    return {"y": y.detach(), "final": final.detach(), **dict(zip(args, grads))}


def inputs(size: str, dtype: torch.dtype, given: tuple[str, ...]) -> dict[str, Tensor]:
    B, T, D, N, G, lengths = SIZES[size]
    shapes = {
        "u": (B, T, D), "delta": (B, T, D), "A": (D, N), "B": (B, T, G, N), "C": (B, T, G, N),
        "D": (D,), "z": (B, T, D), "delta_bias": (D,),
        "initial_state": (B if lengths is None else len(lengths), D, N),
    }  # fmt: skip
    args = {x: torch.randn(shape) for x, shape in shapes.items() if x in given or x not in OPTIONAL}
    args |= {"A": -2 * args["A"].abs(), "delta": args["delta"].abs()}
    return {x: y.to(dtype) if y.dim() > 2 and x in given else y for x, y in args.items()}


def check(size: str, dtype: torch.dtype, given: tuple[str, ...], softplus: bool) -> None:
    B, T, D, N, _, lengths = SIZES[size]
    args = inputs(size, dtype, given)
    if "delta_bias" in given:
        args["delta_bias"] = args["delta_bias"].abs()
    cu = None if lengths is None else offsets(lengths).int()
    weights = [torch.randn(B, T, D), torch.randn(B if lengths is None else len(lengths), D, N)]
    options = {"delta_softplus": softplus, "cu_seqlens": cu}
    got = outcome(args, weights, impl="triton", **options)
    wide = {n: x.double() for n, x in args.items()}
    want = outcome(wide, weights, impl="reference", **options)
    for name, x in want.items():
        error = relative_error(got[name], x)
        limit = 1e-6 if dtype == torch.float32 else 2e-3
        assert error <= limit, f"{size}, {given}, {dtype}: {name} is off by {error:.1e}"
        assert got[name].dtype == (args[name].dtype if name in args else got[name].dtype)


def check_only_final() -> None:
    """Without a gradient of y, and strides that are not those of a fresh tensor."""
    args = inputs("one tile", torch.float32, OPTIONAL)
    args |= {n: x.mT.contiguous().mT for n, x in args.items() if x.dim() > 2}
    args["z"] = torch.randn(2, TILE, 12)[..., 6:]
    args["delta"] = torch.randn(2, 1, 6).expand(2, TILE, 6)
    grads = []
    for impl in ("triton", "eager"):
        given = {n: x.detach().requires_grad_() for n, x in args.items()}
        _, final = selective_scan(**given, delta_softplus=True, output_final_state=True, impl=impl)
        assert final is not None
        loss = final.square().sum()
        grads.append(torch.autograd.grad(loss, list(given.values()), materialize_grads=True))
    for got, want in zip(*grads):
        assert relative_error(got, want) <= 1e-6


def check_alone_equals_packed() -> None:
    """To the bit: where a sequence lies decides nothing."""
    args = inputs("packed", torch.float32, ("z",))
    cuts = (0, 3, 8, 30, 36)
    packed, _ = selective_scan(**args, cu_seqlens=torch.tensor(cuts), impl="triton")
    for begin, end in ((3, 8), (8, 30)):
        alone = {n: x[:, begin:end] if x.dim() > 2 else x for n, x in args.items()}
        assert torch.equal(packed[:, begin:end], selective_scan(**alone, impl="triton")[0])


def check_neighbours() -> None:
    """A NaN of one sequence stays there, though its tokens follow on another's last tile."""
    args = inputs("tiles", torch.float32, ("z",))
    args["u"][1, 0], args["B"][1, 0] = torch.nan, torch.inf
    got = outcome(args, [torch.ones(2, 21, 18), torch.ones(2, 18, 2)], impl="triton")
    for name in ("y", "final", "u", "delta", "B", "C", "z"):
        assert got[name][0].isfinite().all(), name


@interpreted
def test_selective_scan_matches_reference_when_interpreted() -> None:
    for case in CASES:
        check(*case)
    check_only_final()
    check_alone_equals_packed()
    check_neighbours()
