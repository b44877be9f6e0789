"""The scan h_t = exp(g_t) h_{t-1} + x_t: its blocks and spans, packing, registration.

What holds for every operator is in tests/ops/test_properties.py and test_compile.py.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gated_scan import eager
from slipstream.kernels.gated_scan import op as scan_op
from slipstream.ops import chunk_hgrn

C = eager.BLOCK
# around one block, two, where blocks begin to be used, and with tokens past the last block
TOKENS = [1, 2, C - 1, C, 2 * C - 1, 2 * C, 3 * C, 3 * C + 1, 5 * C - 1]


def inputs(
    B: int = 2, T: int = 3 * C + 5, D: int = 6, N: int | None = None, dtype: Any = torch.float64
) -> dict[str, Any]:
    return {
        "x": torch.randn(B, T, D, dtype=dtype),
        "g": -torch.rand(B, T, D, dtype=dtype),
        "initial_state": torch.randn(B if N is None else N, D, dtype=dtype),
    }


def run(args: dict[str, Any], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """h and final state; gradients of x, g and initial_state for fixed weights of both."""
    args = {n: x.detach().clone().requires_grad_() for n, x in args.items()}
    h, final = chunk_hgrn(**args, output_final_state=True, **options)
    assert final is not None
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (h, final)]
    loss = (h * weights[0]).sum() + (final * weights[1]).sum()
    return [h.detach(), final.detach()], list(torch.autograd.grad(loss, list(args.values())))


def near(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    for pair in zip(got, want, strict=True):
        for x, y in zip(*pair, strict=True):
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[1 << 20, 24 * C], ids=["one span", "spans"])
def span(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 C elements are two blocks of 2 x 6 channels."""
    monkeypatch.setattr(eager, "BLOCK_ELEMENTS", request.param)


@pytest.mark.usefixtures("span")
@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("reverse", [False, True])
def test_hgrn_matches_reference(T: int, reverse: bool) -> None:
    args = inputs(T=T)
    near(run(args, reverse=reverse), run(args, reverse=reverse, impl="reference"))


@pytest.mark.usefixtures("span")
@pytest.mark.parametrize("lengths", [(40, 0, 3 * C, 1, C), (0, 0, 5 * C, 0), (2 * C, 2 * C)])
@pytest.mark.parametrize("reverse", [False, True])
def test_hgrn_packed_equals_separate(lengths: tuple[int, ...], reverse: bool) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    args = inputs(B=1, T=sum(lengths), N=len(lengths))
    got = run(args, cu_seqlens=cu_seqlens, reverse=reverse)
    near(got, run(args, cu_seqlens=cu_seqlens, reverse=reverse, impl="reference"))
    ends = cu_seqlens.tolist()
    for n, (begin, end) in enumerate(pairwise(ends)):
        cut = {name: args[name][:, begin:end] for name in ("x", "g")}
        state = args["initial_state"][n : n + 1]
        h, final = chunk_hgrn(**cut, initial_state=state, output_final_state=True, reverse=reverse)
        near([[h, final]], [[got[0][0][:, begin:end], got[0][1][n : n + 1]]])


def test_hgrn_packed_starts_from_zero_without_initial_state() -> None:
    lengths = (40, 0, 3 * C)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    args = inputs(B=1, T=sum(lengths), N=3)
    zero = {**args, "initial_state": torch.zeros_like(args["initial_state"])}
    args.pop("initial_state")
    (got, dgot), (want, dwant) = (run(x, cu_seqlens=cu_seqlens) for x in (args, zero))
    near([got, dgot], [want, dwant[:2]])


@pytest.mark.parametrize("part", [0, 1], ids=["h", "final state"])
def test_hgrn_takes_a_gradient_of_one_output_alone(part: int) -> None:
    args = [x.requires_grad_() for x in inputs(T=3 * C).values()]
    got, want = (
        torch.autograd.grad(
            chunk_hgrn(args[0], args[1], initial_state=args[2], output_final_state=True, impl=impl)[
                part
            ].sum(),
            args,
            allow_unused=True,
            materialize_grads=True,
        )
        for impl in (None, "reference")
    )
    near([got], [want])


@pytest.mark.parametrize("strength", [50.0, float("inf")])
def test_hgrn_survives_gates_that_forget_all(strength: float) -> None:
    args = inputs(dtype=torch.float32)
    args["g"] = torch.where(torch.rand_like(args["g"]) < 0.3, -strength, args["g"])
    got, want = run(args), run(args, impl="reference")
    assert not any(x.isnan().any() for part in got for x in part)
    near(got, want, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hgrn_in_16_bit_rounds_once(dtype: torch.dtype) -> None:
    args = inputs(dtype=torch.float32)
    low = {n: x.to(dtype) for n, x in args.items()}
    h, final = chunk_hgrn(**low, output_final_state=True)
    want, end = chunk_hgrn(**{n: x.double() for n, x in low.items()}, output_final_state=True)
    assert (h.dtype, final.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(h.double(), want, rtol=torch.finfo(dtype).eps / 1.9, atol=1e-5)
    torch.testing.assert_close(final.double(), end, rtol=1e-5, atol=1e-5)
    _, grads = run(low)
    assert all(x.dtype == dtype for x in grads)


def test_hgrn_takes_any_strides() -> None:
    args = inputs()
    want = run(args)
    turned = {n: x.mT.contiguous().mT if x.dim() == 3 else x for n, x in args.items()}
    before = {n: x.clone() for n, x in turned.items()}
    near([chunk_hgrn(**turned, output_final_state=True)], [want[0]])
    near([turned.values()], [before.values()], 0.0)
    wide = {**args, "g": args["g"][:, :1, :1].expand_as(args["g"])}
    dense = {**wide, "g": wide["g"].contiguous()}
    near([chunk_hgrn(**wide)[:1]], [chunk_hgrn(**dense)[:1]])


def test_hgrn_sequences_do_not_see_one_another() -> None:
    args = inputs(B=3)
    both, _ = chunk_hgrn(**args)
    for b in range(3):
        alone, _ = chunk_hgrn(**{n: x[b : b + 1] for n, x in args.items()})
        assert torch.equal(alone, both[b : b + 1])
    args["x"][1] = torch.nan
    h, _ = chunk_hgrn(**args)
    assert torch.equal(h[::2], both[::2])


@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
def test_hgrn_ops_pass_opcheck(is_packed: bool) -> None:
    cu_seqlens = torch.tensor([0, 9, 9, 150]) if is_packed else None
    args = inputs(B=1 if is_packed else 2, T=150, N=3 if is_packed else None, dtype=torch.float32)
    x, g, state = args.values()
    for given in (state, None):
        torch.library.opcheck(scan_op._call_forward.overload, (x, g, given, cu_seqlens, "eager"))
        for dh, dfinal in [(torch.randn_like(x), None), (None, torch.randn_like(state))]:
            torch.library.opcheck(
                scan_op._call_backward.overload, (g, x, given, cu_seqlens, dh, dfinal, "eager")
            )
