"""The Triton kernels under Triton's interpreter, on a CPU, against the float64 reference. bfloat16
products are wrong in the interpreter: float32 and float16 only."""

import dataclasses

import pytest
import torch

from slipstream.kernels.linear.inputs import LinearInputs
from tests.support.interpreted import PARTS, interpreted
from tests.support.linear_interpreted import GATES, expect, expect_all, inputs

# B, T, H, HV, K, V, lengths of packed sequences
SIZES = {
    "one token": (1, 1, 1, 1, 1, 1, None),
    "odd": (1, 37, 1, 1, 30, 60, None),
    "grouped": (2, 35, 2, 4, 16, 24, None),
    "spans": (1, 275, 1, 1, 17, 20, None),
    "packed": (1, 315, 1, 2, 30, 12, (5, 0, 33, 260, 1, 16, 0)),
    "split": (1, 530, 1, 1, 16, 24, None),
    "split, packed": (1, 531, 1, 1, 17, 20, (5, 0, 513, 1, 12, 0)),
}
SHORT = [size for size in SIZES if "split" not in size]
# size, gate, dtype, states
CASES = {
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


def make(size: str, gate: str, dtype: torch.dtype, state: bool) -> LinearInputs:
    B, T, H, HV, K, *_ = SIZES[size]
    q, k = (torch.randn(B, T, H, K) for _ in range(2))
    return inputs(SIZES[size], dtype, state, q, k, g=GATES[gate](torch.rand(B, T, HV)))


def check(size: str, gate: str, dtype: torch.dtype, state: bool) -> None:
    # dg is a difference of sums, strong gates' of sums a million times what may be left of them
    absolute = {"g": 1e-5} if gate == "strong" else {}
    limits = {"g": 4e-3} if dtype == torch.float16 else {}
    terms, case = make(size, gate, dtype, state), f"{size}, {gate}, {dtype}"
    expect_all("scalar_decay", terms, case, limits=limits, absolute=absolute)


def check_descriptors() -> None:
    """Rows of a multiple of 16 bytes by tensor descriptors, as on sm_90."""
    from slipstream.kernels.linear.triton.scalar_decay import backend, tiles

    for bytes_each in (2, 4):
        row = "interpreter", bytes_each, 64
        tiles.TILES[row] = dataclasses.replace(tiles.TILES[row], tma=True)
    backend._tile.cache_clear()
    for size, dtype in (("grouped", torch.float32), ("split", torch.float16)):
        check(size, "mixed", dtype, True)


def check_nothing_but_final() -> None:
    """Without a gradient of o, and with a scale of 0, the other paths still count."""
    from slipstream.kernels.linear.triton.scalar_decay.backend import backward

    terms = make("odd", "weak", torch.float32, True)
    dfinal, do = torch.randn(terms.state_shape), torch.randn(terms.v.shape)
    expect("scalar_decay", terms, None, dfinal, 0.5, "without do")
    expect("scalar_decay", terms, do, dfinal, 0.0, "scale 0")
    assert "g" not in backward(terms, do, dfinal, 0.5, gate_gradient=False)


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_scan_matches_reference_when_interpreted(part: str) -> None:
    for size, gate, dtype, state in CASES[part]:
        check(size, gate, getattr(torch, dtype), state)
    if part == "sample":
        check_nothing_but_final()
        check_descriptors()
