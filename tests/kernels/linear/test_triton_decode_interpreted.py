"""The step kernel under Triton's interpreter: every operator and state, against the reference."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear import dispatch
from slipstream.kernels.linear import op as linear_op
from slipstream.kernels.linear.inputs import ForwardCall, LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from slipstream.runtime.dispatch import Candidate
from slipstream.tools.catalog import Sample, flat
from tests.support.interpreted import PARTS, interpreted
from tests.support.operators import LINEAR, Size, cast, leaves, packed, relative_error

SIZES = {
    "one token": Size(B=2, T=1, H=2, HV=4, K=20, V=40),
    "three": Size(B=1, T=3, H=1, HV=1, K=16, V=70),
    "seventeen": Size(B=1, T=17, H=1, HV=2, K=33, V=12),
    "packed": packed(Size(H=1, HV=1, K=30, V=12), 3, 0, 7, 1, 2, 0),
}
RECURRENT = [op for op in LINEAR if "recurrent" in op.name and "hgrn" not in op.name]
GATED = next(op for op in RECURRENT if op.name == "fused_recurrent_gated_delta_rule")
# Whatever the chunk kernels refuse: up to STEP_TOKENS tokens the step kernel takes it all.
ANY_TERMS = (Candidate("triton", "of any terms"), Candidate("reference", "the oracle"))


def run_forward(op: Sample, args: Any, impl: str) -> list[Tensor]:
    with torch.no_grad():
        return flat(op(args, impl=impl))


def check_operators(labels: tuple[str, ...]) -> None:
    for op in RECURRENT:
        for label in labels:
            size = SIZES[label]
            args = op.inputs(replace(size, gate="mixed", state=label != "three"))
            want = run_forward(op, cast(args, torch.float64), "reference")
            with mock.patch.object(dispatch, "CANDIDATES", ANY_TERMS):
                got = run_forward(op, args, "triton")
            for i, (x, y) in enumerate(zip(got, want, strict=True)):
                error = relative_error(x, y)
                assert error <= 2e-6, f"{op.name}, {label}: {i} is off by {error:.1e}"
        print(op.name, "ok", flush=True)


def check_v_first() -> None:
    """States that come with their columns in a row are read as they lie."""
    args = GATED.inputs(SIZES["seventeen"])
    want = run_forward(GATED, args, "reference")
    args["initial_state"] = args["initial_state"].mT.contiguous()
    with torch.no_grad():
        o, final = GATED(args, impl="triton", state_v_first=True)
    assert relative_error(o, want[0]) <= 2e-6
    assert relative_error(final.mT, want[1]) <= 2e-6


def check_gradients() -> None:
    """Forward by tokens, backward by chunks, or by tokens where chunks have no form."""
    for op in RECURRENT:
        if op.name not in (
            "fused_recurrent_retention",
            "fused_recurrent_gla-values",
            f"{GATED.name}-all",
        ):
            continue
        args, inputs = leaves(op.inputs(SIZES["seventeen"]))
        got = flat(op(args, impl="triton"))
        wide, wide_inputs = leaves(cast(args, torch.float64))
        want = flat(op(wide, impl="reference"))
        weights = [torch.randn(x.shape) for x in want]
        loss = torch.stack([(x * w).sum() for x, w in zip(got, weights)]).sum()
        wide_loss = torch.stack([(x * w.double()).sum() for x, w in zip(want, weights)]).sum()
        grads = torch.autograd.grad(loss, inputs)
        for x, y in zip(grads, torch.autograd.grad(wide_loss, wide_inputs), strict=True):
            error = relative_error(x, y)
            assert error <= 1e-5, f"{op.name}: a gradient is off by {error:.1e}"
        print(op.name, "gradients ok", flush=True)


def check_boundary() -> None:
    """Tokens up to STEP_TOKENS are stepped through, more are scanned in chunks."""
    from slipstream.kernels.linear.triton import decode as decode_launch
    from slipstream.kernels.linear.triton.scalar_decay import backend

    q, v = torch.randn(1, 80, 1, 16), torch.randn(1, 80, 1, 16)
    with (
        mock.patch.object(decode_launch, "forward", wraps=decode_launch.forward) as stepped,
        mock.patch.object(backend, "forward", wraps=backend.forward) as scanned,
    ):
        for T in (1, linear_op.MAX_STEP_TOKENS, linear_op.MAX_STEP_TOKENS + 1):
            linear_op.linear(
                LinearInputs(q[:, :T], q[:, :T], v[:, :T]), ForwardCall(1.0, 0, "triton")
            )
        linear_op.linear(LinearInputs(q[:, :1], q[:, :1], v[:, :1]), ForwardCall(1.0, 32, "triton"))
    assert (stepped.call_count, scanned.call_count) == (2, 2)


def check_strides() -> None:
    """q, k and v cut from one projection, gates from another, a gate that every token shares."""
    B, H, K = 2, 2, 16
    for T in (1, 5):
        q, k, v = torch.randn(B, T, 3 * H * K).unflatten(-1, (3, H, K)).unbind(2)
        beta, g = torch.rand(B, T, 2 * H).chunk(2, -1)
        for gate in (-g, -torch.rand(H).expand(B, T, H), -torch.rand(T, B, H).transpose(0, 1)):
            terms = LinearInputs(q, k, v, g=gate, beta=beta)
            want, _ = linear_reference(terms, 0.25)
            got, _ = linear_op.linear(terms, ForwardCall(0.25, 0, "triton"))
            assert relative_error(got, want) <= 2e-6


def check_float16() -> None:
    args = GATED.inputs(replace(SIZES["seventeen"], dtype=torch.float16))
    want = run_forward(GATED, cast(args, torch.float64), "reference")
    for x, y in zip(run_forward(GATED, args, "triton"), want):
        assert relative_error(x, y) <= 1e-3


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_step_matches_reference_when_interpreted(part: str) -> None:
    if part == "further":
        check_operators(("one token", "seventeen"))
    else:
        check_operators(("three", "packed"))
        check_v_first()
        check_strides()
        check_float16()
        check_boundary()
        check_gradients()
