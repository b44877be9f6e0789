"""The Triton kernels of the delta rule and of scalar decays under Triton's interpreter, on a CPU,
against the float64 reference. bfloat16 products are wrong in the interpreter: float32 and float16
only."""

import dataclasses

import pytest
import torch

from slipstream.kernels.linear.inputs import LinearInputs
from tests.support.interpreted import PARTS, interpreted
from tests.support.linear_interpreted import (
    GATES,
    erasing,
    expect,
    expect_all,
    expect_final_alone,
    inputs,
)

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
    B, T, _, HV, *_ = SIZES[size]
    q, k, p, beta = erasing(SIZES[size])
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


# B, T, H, HV, K, V, lengths of packed sequences
SCALAR_SIZES = {
    "one token": (1, 1, 1, 1, 1, 1, None),
    "odd": (1, 37, 1, 1, 30, 60, None),
    "grouped": (2, 35, 2, 4, 16, 24, None),
    "spans": (1, 275, 1, 1, 17, 20, None),
    "packed": (1, 315, 1, 2, 30, 12, (5, 0, 33, 260, 1, 16, 0)),
    "split": (1, 530, 1, 1, 16, 24, None),
    "split, packed": (1, 531, 1, 1, 17, 20, (5, 0, 513, 1, 12, 0)),
}
SHORT = [size for size in SCALAR_SIZES if "split" not in size]
# size, gate, dtype, states
SCALAR_CASES = {
    "sample": [
        ("one token", "mixed", "float32", True),
        *(("odd", gate, "float32", True) for gate in ("none", "mixed", "reset", "per head")),
        ("grouped", "per head", "float16", False),
        ("packed", "weak", "float16", True),
        ("split, packed", "mixed", "float32", True),
    ],
    "further": [
        ("one token", "none", "float32", True),
        *(("odd", gate, "float32", True) for gate in ("weak", "strong")),
        ("spans", "reset", "float32", False),
        ("split", "none", "float32", False),
        *((size, "none", "float32", True) for size in SHORT if size != "one token"),
        *((size, "mixed", "float32", True) for size in ("grouped", "spans", "packed", "split")),
        ("spans", "weak", "float32", False),
        ("grouped", "per head", "float32", False),
    ],
}


def make_scalar(size: str, gate: str, dtype: torch.dtype, state: bool) -> LinearInputs:
    B, T, H, HV, K, *_ = SCALAR_SIZES[size]
    q, k = (torch.randn(B, T, H, K) for _ in range(2))
    return inputs(SCALAR_SIZES[size], dtype, state, q, k, g=GATES[gate](torch.rand(B, T, HV)))


def check_scalar(size: str, gate: str, dtype: torch.dtype, state: bool) -> None:
    # dg is a difference of sums, strong gates' of sums a million times what may be left of them
    absolute = {"g": 1e-5} if gate == "strong" else {}
    limits = {"g": 4e-3} if dtype == torch.float16 else {}
    terms, case = make_scalar(size, gate, dtype, state), f"{size}, {gate}, {dtype}"
    expect_all("scalar_decay", terms, case, limits=limits, absolute=absolute)


def check_scalar_descriptors() -> None:
    """Rows of a multiple of 16 bytes by tensor descriptors, as on sm_90."""
    from slipstream.kernels.linear.triton.scalar_decay import backend, tiles

    for bytes_each in (2, 4):
        row = "interpreter", bytes_each, 64
        tiles.TILES[row] = dataclasses.replace(tiles.TILES[row], tma=True)
    backend._tile.cache_clear()
    for size, dtype in (("grouped", torch.float32), ("split", torch.float16)):
        check_scalar(size, "mixed", dtype, True)


def check_nothing_but_final() -> None:
    """Without a gradient of o, and with a scale of 0, the other paths still count."""
    from slipstream.kernels.linear.triton.scalar_decay.backend import backward

    terms = make_scalar("odd", "weak", torch.float32, True)
    dfinal, do = torch.randn(terms.state_shape), torch.randn(terms.v.shape)
    expect("scalar_decay", terms, None, dfinal, 0.5, "without do")
    expect("scalar_decay", terms, do, dfinal, 0.0, "scale 0")
    assert "g" not in backward(terms, do, dfinal, 0.5, gate_gradient=False)


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_scan_matches_reference_when_interpreted(part: str) -> None:
    for size, gate, dtype, state in SCALAR_CASES[part]:
        check_scalar(size, gate, getattr(torch, dtype), state)
    if part == "sample":
        check_nothing_but_final()
        check_scalar_descriptors()
