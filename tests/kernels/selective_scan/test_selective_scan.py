"""selective_scan in plain torch against the recurrence token by token, and against the paper."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.selective_scan import eager
from slipstream.kernels.selective_scan import op as scan_op
from slipstream.kernels.selective_scan.inputs import CHUNK
from slipstream.ops import selective_scan

TOKENS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 7)
OPTIONAL = ("D", "z", "delta_bias", "initial_state")


def inputs(
    B: int = 2,
    T: int = 2 * CHUNK + 5,
    D: int = 6,
    N: int = 3,
    G: int = 2,
    S: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    shapes = {
        "u": (B, T, D),
        "delta": (B, T, D),
        "A": (D, N),
        "B": (B, T, G, N),
        "C": (B, T, G, N),
        "D": (D,),
        "z": (B, T, D),
        "delta_bias": (D,),
        "initial_state": (B if S is None else S, D, N),
    }
    args = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return {**args, "A": -args["A"].abs()}


def run(args: dict[str, Tensor], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of both and of each alone."""
    args = {name: x.detach().requires_grad_() for name, x in args.items()}
    options = {"delta_softplus": True, "output_final_state": True, **options}
    outputs = selective_scan(**args, **options)
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
    for some, others in zip(got, want, strict=True):
        torch.testing.assert_close(some, others, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[1, 1 << 20], ids=["chunks", "one segment"])
def segment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "SEGMENT_ELEMENTS_CPU", request.param)


def test_selective_scan_is_the_papers_sum() -> None:
    """Unrolled: y_t = sum_{s <= t} C_t exp(A sum_{s < r <= t} dt_r) dt_s B_s u_s, and no state."""
    args = inputs(B=1, T=9, G=1)
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


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("T", TOKENS)
def test_selective_scan_matches_reference(T: int) -> None:
    args = inputs(T=T)
    near(run(args), run(args, impl="reference"))


@pytest.mark.parametrize("absent", [*OPTIONAL, OPTIONAL])
def test_selective_scan_without(absent: Any) -> None:
    args = inputs()
    for name in (absent,) if isinstance(absent, str) else absent:
        del args[name]
    near(run(args), run(args, impl="reference"))


def test_selective_scan_without_softplus_and_groups() -> None:
    args = inputs(G=1)
    args |= {"delta": args["delta"].abs(), "delta_bias": args["delta_bias"].abs()}
    want = run(args, delta_softplus=False, impl="reference")
    near(run(args, delta_softplus=False), want)
    flat = {**args, "B": args["B"][:, :, 0], "C": args["C"][:, :, 0]}
    near(run(flat, delta_softplus=False)[:1], want[:1])


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("lengths", [(CHUNK + 8, 0, 3 * CHUNK, 1, CHUNK), (0, 0, 70, 0)])
def test_selective_scan_packed_equals_separate(lengths: tuple[int, ...]) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    args = inputs(B=1, T=sum(lengths), S=len(lengths))
    got = run(args, cu_seqlens=cu_seqlens)
    near(got, run(args, cu_seqlens=cu_seqlens, impl="reference"))
    for s, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        cut = {n: x[:, begin:end] if x.dim() > 2 else x for n, x in args.items()}
        cut["initial_state"] = args["initial_state"][s : s + 1]
        y, final = selective_scan(**cut, delta_softplus=True, output_final_state=True)
        near([[y, final]], [[got[0][0][:, begin:end], got[0][1][s : s + 1]]])


@pytest.mark.parametrize("cut", [1, CHUNK, CHUNK + 9])
def test_selective_scan_split_equals_whole(cut: int) -> None:
    args = inputs()
    options = {"delta_softplus": True, "output_final_state": True}
    whole = selective_scan(**args, **options)
    head = {n: x[:, :cut] if x.dim() > 2 and n != "initial_state" else x for n, x in args.items()}
    tail = {n: x[:, cut:] if x.dim() > 2 and n != "initial_state" else x for n, x in args.items()}
    first, state = selective_scan(**head, **options)
    second, state = selective_scan(**{**tail, "initial_state": state}, **options)
    near([[torch.cat([first, second], dim=1), state]], [whole])


def test_selective_scan_survives_steps_that_forget_all() -> None:
    args = inputs(dtype=torch.float32)
    args["delta"] = torch.where(torch.rand_like(args["delta"]) < 0.3, 1e3, args["delta"])
    args["A"] = args["A"] - 1
    got, want = run(args), run(args, impl="reference")
    assert not any(x.isnan().any() for part in got for x in part)
    near(got, want, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_selective_scan_in_16_bit_rounds_once(dtype: torch.dtype) -> None:
    args = inputs(dtype=torch.float32)
    low = {n: x.to(dtype) for n, x in args.items()}
    options = {"delta_softplus": True, "output_final_state": True}
    y, final = selective_scan(**low, **options)
    want, end = selective_scan(**{n: x.double() for n, x in low.items()}, **options)
    assert (y.dtype, final.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(y.double(), want, rtol=torch.finfo(dtype).eps / 1.9, atol=1e-5)
    torch.testing.assert_close(final.double(), end, rtol=1e-5, atol=1e-5)


def test_selective_scan_sequences_do_not_see_one_another() -> None:
    args = inputs(B=3)
    rows = [n for n, x in args.items() if x.shape[0] == 3]
    y, _ = selective_scan(**args, delta_softplus=True)
    for b in range(3):
        alone = {n: x[b : b + 1] if n in rows else x for n, x in args.items()}
        near([selective_scan(**alone, delta_softplus=True)[:1]], [[y[b : b + 1]]], 1e-13)
    args["B"][1] = torch.nan
    beside_nan, _ = selective_scan(**args, delta_softplus=True)
    assert torch.equal(beside_nan[::2], y[::2])


@pytest.mark.parametrize("sizes", [(2, 0, 4, 3), (0, 4, 4, 3), (2, 4, 0, 3), (2, 4, 4, 0)])
def test_selective_scan_takes_nothing(sizes: tuple[int, int, int, int]) -> None:
    args = inputs(*sizes)
    (y, final), grads = run(args)
    near([[y, final]], [run(args, impl="reference")[0]])
    assert [x.shape for x in grads] == 3 * [x.shape for x in args.values()]


@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
def test_selective_scan_ops_pass_opcheck(is_packed: bool) -> None:
    cu_seqlens = torch.tensor([0, 9, 9, 70]) if is_packed else None
    args = inputs(B=1 if is_packed else 2, T=70, S=3 if is_packed else None, dtype=torch.float32)
    for given in (args, {**args, **dict.fromkeys(OPTIONAL)}):
        tensors = (*given.values(), cu_seqlens)
        torch.library.opcheck(scan_op._call_forward.overload, (*tensors, True, True, "eager"))
        y, final, states = scan_op._call_forward(*tensors, True, True, "eager")
        for dy, dfinal in [(torch.randn_like(y), None), (None, torch.randn_like(final))]:
            torch.library.opcheck(
                scan_op._call_backward.overload, (*tensors, states, dy, dfinal, True, "eager")
            )


def test_selective_scan_rejects_what_does_not_fit() -> None:
    args = inputs()

    def refused(error: type[Exception], words: str, **changed: Any) -> None:
        with pytest.raises(error, match=words):
            selective_scan(**{**args, **changed})

    refused(ValueError, "C: want shape", C=args["C"][:, :, :1])
    four = {x: torch.ones(*args["B"].shape[:2], 4, 3) for x in ("B", "C")}
    refused(ValueError, "channels of u: want a multiple of groups of B = 4", **four)
    refused(TypeError, "A: want a floating dtype", A=args["A"].long())
    cu_seqlens = torch.tensor([0, args["u"].shape[1]])
    refused(ValueError, r"cu_seqlens: .* batch size 1, got 2", cu_seqlens=cu_seqlens)
