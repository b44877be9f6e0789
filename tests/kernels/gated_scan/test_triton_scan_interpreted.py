"""The scan's Triton kernels under Triton's interpreter, on a CPU, against the float64 reference."""

import torch
from torch import Tensor

from slipstream.ops import chunk_hgrn
from tests.support.interpreted import interpreted
from tests.support.operators import offsets, relative_error

# rows of a tile there
TILE = 8
# B, T, D, lengths of packed sequences
SIZES = {
    "one token": (1, 1, 1, None), "one tile": (2, TILE, 6, None),
    "tiles": (2, 7 * TILE + 5, 18, None),
    "packed": (1, 76, 5, (5, 0, 52, 1, 0, TILE, 10, 0)), "packed in one": (1, 7, 5, (5, 0, 2)),
}  # fmt: skip
GATES = {
    "weak": lambda x: -0.1 * x,
    "strong": lambda x: -50 * x,
    "mixed": lambda x: -torch.where(torch.rand_like(x) < 0.2, 50 * x, 0.1 * x),
    "reset": lambda x: torch.where(x < 0.1, -torch.inf, torch.where(x < 0.2, -1e4, -0.1 * x)),
}
CASES = [
    *((size, "mixed", torch.float32, True, False) for size in SIZES),
    ("packed", "reset", torch.float32, True, True),
    ("tiles", "weak", torch.float16, False, True),
]


def outcome(args: dict[str, Tensor], weights: list[Tensor], **options) -> dict[str, Tensor]:
    args = {n: x.detach().requires_grad_() for n, x in args.items()}
    h, final = chunk_hgrn(**args, output_final_state=True, **options)
    assert final is not None
    loss = sum((x * w.to(x.dtype)).double().sum() for x, w in zip((h, final), weights))
    grads = torch.autograd.grad(torch.as_tensor(loss), list(args.values()))
    return {"h": h.detach(), "final": final.detach(), **dict(zip(args, grads))}


def check(size: str, gate: str, dtype: torch.dtype, state: bool, reverse: bool) -> None:
    B, T, D, lengths = SIZES[size]
    N = B if lengths is None else len(lengths)
    args = {"x": torch.randn(B, T, D).to(dtype), "g": GATES[gate](torch.rand(B, T, D))}
    if state:
        args["initial_state"] = torch.randn(N, D)
    cu = None if lengths is None else offsets(lengths).int()
    weights = [torch.randn(B, T, D).to(dtype), torch.randn(N, D)]
    got = outcome(args, weights, impl="triton", reverse=reverse, cu_seqlens=cu)
    wide = {n: x.double() for n, x in args.items()}
    want = outcome(wide, weights, impl="reference", reverse=reverse, cu_seqlens=cu)
    for name, x in want.items():
        error = relative_error(got[name], x)
        limit = 1e-6 if dtype == torch.float32 else 1e-3
        assert error <= limit, f"{size}, {gate}, {dtype}: {name} is off by {error:.1e}"
        assert got[name].dtype == (args[name].dtype if name in args else got[name].dtype)


def check_only_final() -> None:
    """Without a gradient of h, and strides that are not those of a fresh tensor."""
    x, g = torch.randn(2, 6, 20).mT, -torch.rand(2, 6, 20).mT
    grads = []
    for impl in ("triton", "eager"):
        given = [y.detach().requires_grad_() for y in (x, g)]
        _, final = chunk_hgrn(*given, output_final_state=True, impl=impl)
        assert final is not None
        grads.append(torch.autograd.grad(final.square().sum(), given))
    for got, want in zip(*grads):
        assert relative_error(got, want) <= 1e-6


def check_alone_equals_packed() -> None:
    """To the bit: where a sequence lies decides nothing."""
    x, g = torch.randn(1, 50, 5), -torch.rand(1, 50, 5)
    packed, _ = chunk_hgrn(x, g, cu_seqlens=offsets((3, 5, 27, 15)), impl="triton")
    alone, _ = chunk_hgrn(x[:, 8:35], g[:, 8:35], impl="triton")
    short, _ = chunk_hgrn(x[:, 3:8], g[:, 3:8], impl="triton")
    assert torch.equal(packed[:, 8:35], alone)
    assert torch.equal(packed[:, 3:8], short)


@interpreted
def test_scan_matches_reference_when_interpreted() -> None:
    for case in CASES:
        check(*case)
    check_only_final()
    check_alone_equals_packed()
