"""Decoding by the Triton kernels of the linear family: under Triton's interpreter, on pools of
states, and compiled for GPUs that need not be there: registers, spills, wide accesses."""

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.compiler.trace import trace
from slipstream.kernels.linear import dispatch
from slipstream.kernels.linear import op as linear_op
from slipstream.kernels.linear.inputs import ForwardCall, LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from slipstream.runtime.dispatch import Candidate
from slipstream.tools.catalog import Sample, flat
from tests.support import decode_pool, wants
from tests.support.decode_pool import HV, INDICES, KINDS, SLOTS, TOKENS, K, V, expected, make, step
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


def check_kind(kind: str, impl: str, orders: tuple[bool, ...] = (False, True)) -> None:
    for tokens in TOKENS:
        for v_first in orders:
            terms, pool = make(kind, tokens), torch.randn(SLOTS, HV, K, V)
            want, after = expected(terms, pool, INDICES)
            state = pool.mT.contiguous() if v_first else pool.clone()
            options = {"scale": 0.3, "impl": impl, "state_v_first": v_first}
            o = step(terms, state, state_indices=torch.tensor(INDICES), **options)
            got = state.mT if v_first else state
            assert relative_error(o, want) <= 2e-6, (kind, tokens, v_first)
            assert relative_error(got, after) <= 2e-6, (kind, tokens, v_first)
            untouched = [i for i in range(SLOTS) if i not in INDICES]
            assert torch.equal(got[untouched], pool[untouched])


def check_padded_pool(impl: str) -> None:
    """Slots may be apart by more than a state, as where a layer's states lie beside another's."""
    terms, wide = make("gated_delta_rule", 1), torch.randn(SLOTS, 3 * HV * K * V + 5)
    before = wide.clone()
    state = wide[:, : HV * K * V].unflatten(1, (HV, K, V))
    want, after = expected(terms, state.clone(), INDICES)
    o = step(terms, state, state_indices=torch.tensor(INDICES).int(), scale=0.3, impl=impl)
    assert relative_error(o, want) <= 2e-6
    assert relative_error(state, after) <= 2e-6
    assert torch.equal(wide[:, HV * K * V :], before[:, HV * K * V :])


def check_without_indices(impl: str) -> None:
    terms, pool = make("kda", 1), torch.randn(decode_pool.B, HV, K, V)
    want, after = expected(terms, pool, (0, 1, 2))
    o = step(terms, pool, scale=0.3, impl=impl)
    assert relative_error(o, want) <= 2e-6
    assert relative_error(pool, after) <= 2e-6


def check_nobody_lives(impl: str) -> None:
    for tokens in (1, (1, 1, 1)):
        terms, pool = make("gated_delta_rule", tokens), torch.randn(SLOTS, HV, K, V)
        terms.v.fill_(torch.nan)
        before = pool.clone()
        o = step(terms, pool, state_indices=torch.full((3,), -1), impl=impl)
        assert torch.equal(pool, before)
        assert not o.any()


def check_16_bits(impl: str) -> None:
    """Activations and states of 16 bits: one rounding of each."""
    terms = make("gated_delta_rule", 1, torch.float16)
    pool = torch.randn(SLOTS, HV, K, V).half()
    want, after = expected(terms, pool, INDICES)
    o = step(terms, pool, state_indices=torch.tensor(INDICES), scale=0.3, impl=impl)
    assert o.dtype == pool.dtype == torch.float16
    assert relative_error(o, want) <= 1e-3
    assert relative_error(pool, after) <= 1e-3


def check_l2_norm(impl: str) -> None:
    terms, pool = make("comba", 2), torch.randn(SLOTS, HV, K, V)
    unit = {x: getattr(terms, x) for x in "qkp"}
    unit = {n: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for n, x in unit.items()}
    want, after = expected(terms._replace(**unit), pool, INDICES)
    options = {"state_indices": torch.tensor(INDICES), "scale": 0.3, "impl": impl}
    o = step(terms, pool, use_qk_l2norm_in_kernel=True, **options)
    assert relative_error(o, want) <= 2e-6
    assert relative_error(pool, after) <= 2e-6


CHECKS = (check_padded_pool, check_without_indices, check_nobody_lives, check_16_bits)
CHECKS += (check_l2_norm,)


@pytest.mark.parametrize("kind", KINDS)
def test_step_updates_the_pool(kind: str) -> None:
    check_kind(kind, "eager")


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__[6:])
def test_step(check: Any) -> None:
    check("eager")


def test_step_rejects_what_does_not_fit() -> None:
    terms, pool = make("gated_delta_rule", 1), torch.randn(SLOTS, HV, K, V)
    at = torch.tensor(INDICES)
    faults: dict[str, dict[str, Any]] = {
        r"state: want shape \(3, 2, 20, 33\)": {"state": pool},
        r"state: want shape \(7, 2, 33, 20\)": {"state": pool, "state_indices": at, "v": True},
        r"state_indices: want shape \(3,\)": {"state": pool, "state_indices": at[:2]},
        r"state_indices: want less than the 7 slots, got 7": {
            "state": pool,
            "state_indices": at + 3,
        },
        r"state_indices: want each slot at most once": {"state": pool, "state_indices": at * 0},
    }
    for fault, given in faults.items():
        options: dict[str, Any] = {"state_v_first": True} if given.pop("v", False) else {}
        with pytest.raises(ValueError, match=fault):
            step(terms, **given, **options)
    with pytest.raises(TypeError, match="state_indices: want int32 or int64"):
        step(terms, pool, state_indices=at.float())
    with pytest.raises(ValueError, match="p: wants beta too"):
        step(make("retention", 1)._replace(p=terms.q), pool, state_indices=at)
    with pytest.raises(NotImplementedError, match="no gradients"):
        step(terms._replace(q=terms.q.clone().requires_grad_()), pool, state_indices=at)
    with pytest.raises(NotImplementedError, match="impl='triton'"):
        step(terms, pool, state_indices=at, impl="triton")


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_step_updates_the_pool_when_interpreted(part: str) -> None:
    for i, kind in enumerate(KINDS):
        if (kind in ("retention", "gla both", "rwkv7", "all")) == (part == "sample"):
            check_kind(kind, "triton", (i % 2 == 0,))
    for check in CHECKS if part == "sample" else ():
        check("triton")


@wants.triton
@pytest.mark.parametrize("kind", ["linear_attn", "gated_delta_rule", "rwkv7", "all"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("width", [16, 128, 256])
@pytest.mark.sample(which=lambda kind, width, arch, v_first: (arch == "sm_90") == v_first)
def test_step_compiles(kind: str, width: int, arch: str, v_first: bool) -> None:
    with mock.patch.multiple(decode_pool, K=width, V=width):
        terms = make(kind, 1, torch.bfloat16)

    def call(device: torch.device) -> None:
        given = {
            name: torch.empty(x.shape, dtype=x.dtype, device=device)
            for name, x in terms._asdict().items()
            if x is not None
        }
        state = torch.empty(SLOTS, HV, width, width, device=device)
        at = torch.empty(decode_pool.B, dtype=torch.int32, device=device)
        options: dict[str, Any] = {"state_v_first": v_first, "impl": "triton"}
        options["use_qk_l2norm_in_kernel"] = kind != "all"
        step(LinearInputs(**given), state, state_indices=at, **options)

    (job,) = (x for x in trace(call, arch, backward=False) if x.name == "linear_decode_kernel")
    got = job.compile()
    assert got.stack == 0, f"{got.stack} bytes spilled"
    assert got.registers <= 200
    # the state in accesses of 16 bytes, and never from one layout of threads to another
    numbers = width * min(32, width) // 32  # a lane of one warp
    assert len(re.findall(r"ld\.global\.v4", got.ptx)) >= min(numbers, 32) // 4
    assert not re.search(rf"convert_layout .*tensor<{width}x\d+xf32", got.asm["ttgir"])
