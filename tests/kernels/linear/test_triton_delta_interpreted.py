"""The delta rule's Triton kernels under Triton's interpreter, against the float64 reference."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels.linear.inputs import LinearInputs
from tests.support.interpreted import PARTS, interpreted
from tests.support.linear_interpreted import GATES, expect_all, expect_final_alone, inputs

# B, T, H, HV, K, V, lengths of packed sequences
SIZES = {
    "one token": (1, 1, 1, 1, 1, 1, None),
    "odd": (1, 71, 1, 1, 30, 20, None),
    "grouped": (2, 35, 2, 4, 16, 24, None),
    "packed": (1, 122, 1, 2, 20, 17, (5, 0, 33, 64, 1, 19, 0)),
    "long": (2, 167, 1, 2, 20, 24, None),
    "long packed": (1, 260, 1, 1, 17, 12, (5, 0, 130, 64, 61)),
}
# size, gate, p, dtype, states
CASES = {
    "sample": [
        ("one token", "none", False, "float32", True),
        ("odd", "none", False, "float32", True),
        *((size, "mixed", False, "float32", True) for size in ("grouped", "packed")),
        *(("odd", gate, True, "float32", False) for gate in ("strong", "reset", "per head")),
        ("odd", "weak", True, "float16", True),
    ],
    "further": [
        *((size, "none", False, "float32", True) for size in ("grouped", "packed")),
        *((size, "mixed", False, "float32", True) for size in ("one token", "odd")),
        *(("odd", gate, True, "float32", False) for gate in ("none", "weak", "mixed")),
        ("packed", "weak", True, "float32", True),
        ("grouped", "weak", True, "float16", True),
    ],
}
# of two chunks each: size, gate, p, states
SEGMENTS = {
    "sample": [("long packed", "weak", False, True)],
    "further": [("long", "none", False, True), ("long", "mixed", True, False)],
}
# size, gate, p
SPLIT_BF16 = {
    "sample": [("odd", "weak", True)],
    "further": [("odd", "none", False), ("grouped", "weak", True)],
}


def make(size: str, gate: str, has_p: bool, dtype: torch.dtype, state: bool) -> LinearInputs:
    """Keys of norm 1, some of them alike, and beta from 0 to 2."""
    B, T, H, HV, K, *_ = SIZES[size]
    q, k, p = (torch.randn(B, T, H, K) for _ in range(3))
    k[:, 1::3] = k[:, :1]
    k, p = (F.normalize(x, dim=-1) for x in (k, p))
    beta = 2 * torch.rand(B, T, HV)
    beta[:, ::7] = 0
    beta[:, 1::7] = 2
    return inputs(
        SIZES[size],
        dtype,
        state,
        q,
        k,
        g=GATES[gate](torch.rand(B, T, HV)),
        beta=beta,
        p=(0.7 * k + 0.3 * p).to(dtype) if has_p else None,
    )


def check(size: str, gate: str, has_p: bool, dtype: torch.dtype, state: bool) -> None:
    expect_all("delta", make(size, gate, has_p, dtype, state), f"{size}, {gate}, {dtype}")


def check_descriptors() -> None:
    """Rows of a multiple of 16 bytes by tensor descriptors, as on sm_90."""
    from slipstream.kernels.linear.triton.delta import plan

    choose = plan._tile

    def with_descriptors(*args):
        tile, BK = choose(*args)
        return dataclasses.replace(tile, tma=True), BK

    plan._tile = with_descriptors
    check("grouped", "weak", True, torch.float32, True)
    plan._tile = choose


def check_segments(part: str) -> None:
    """Cut into segments of two chunks."""
    from slipstream.kernels.linear.triton.delta import plan

    kept = plan.delta_tokens
    plan.delta_tokens = lambda programs, T, C: 2 * C
    for size, gate, has_p, state in SEGMENTS[part]:
        check(size, gate, has_p, torch.float32, state)
    plan.delta_tokens = kept


def check_fine(part: str) -> None:
    """Products of pairs, of float16 here, for the interpreter gets bfloat16 wrong."""
    from slipstream.kernels.linear.triton.delta import backend

    kept = backend.plan.uses_split_bf16
    backend.plan.uses_split_bf16 = lambda terms: terms.q.dtype == torch.float16
    for size, gate, has_p in SPLIT_BF16[part]:
        check(size, gate, has_p, torch.float16, True)
    backend.plan.uses_split_bf16 = kept


def check_inverse() -> None:
    """The inverse of 64 rows, where keys alike and a beta of 2 make 2 below the diagonal."""
    from slipstream.kernels.linear.triton.delta.solve_tril import delta_solve_tril_kernel

    k = torch.ones(1, 64, 1, 1)
    beta, r = torch.full((1, 64, 1), 2.0), torch.empty(1, 64, 1, 64)
    flags = {"HAS_P": False, "HAS_GATE": False, "PACKED": False, "FP32": True, "PRECISION": "ieee"}
    shape = {"K": 1, "BK": 16, "C": 64, "LEVELS": 2, "INNER": "ieee"}
    delta_solve_tril_kernel[(1,)](
        k, None, None, beta, r, torch.empty(64), None, 64, 1, 1, 1, **shape, **flags
    )
    lower = torch.eye(64) + 2 * torch.ones(64, 64).tril(-1)
    assert (r[0, :, 0] @ lower - torch.eye(64)).abs().max() <= 1e-5


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_delta_matches_reference_when_interpreted(part: str) -> None:
    for size, gate, has_p, dtype, state in CASES[part]:
        check(size, gate, has_p, getattr(torch, dtype), state)
    check_segments(part)
    check_fine(part)
    if part == "sample":
        check_inverse()
        expect_final_alone("delta", make("odd", "weak", False, torch.float32, True), "odd")
        check_descriptors()
