"""Triton kernels of per-channel decay, and of free a and b, under Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels.linear.dplr import ChunkStates
from slipstream.kernels.linear.inputs import LinearInputs
from tests.support.interpreted import PARTS, interpreted
from tests.support.linear_interpreted import GATES, expect_all, expect_final_alone, inputs
from tests.support.operators import never_written, numbers_of_no_chunk

# B, T, H, HV, K, V, lengths of packed sequences
SIZES = {
    "one token": (1, 1, 1, 1, 1, 1, None),
    "short": (1, 15, 1, 1, 30, 64, None),
    "odd": (1, 63, 1, 1, 30, 20, None),
    "long": (1, 100, 1, 1, 10, 12, None),
    "wide": (1, 18, 1, 1, 100, 30, None),
    "grouped": (2, 19, 1, 2, 16, 24, None),
    "packed": (1, 61, 1, 1, 20, 17, (5, 0, 33, 16, 1, 6, 0)),
}
CHANNEL_GATES = {
    **GATES,
    "zero": lambda x: torch.zeros_like(x),
    "huge": lambda x: torch.where(x < 0.1, -1e4, -0.1 * x),
    "middling": lambda x: -4 * x,
    "even": lambda x: -4.0 + 0 * x,
    "some channels": lambda x: -torch.where(x[:, :, :, :1] < 0.3, 40 * x, 0.05 * x),
}
# transition, size, gate, dtype, states
CASES = {
    "sample": [
        *((kind, "one token", "weak", "float32", True) for kind in ("kda", "dplr")),
        ("dplr", "long", "weak", "float32", True),
        ("dplr", "packed", "some channels", "float32", True),
        *(("kda", "short", gate, "float32", False) for gate in ("zero", "mixed", "reset")),
        *(("dplr", "short", gate, "float32", False) for gate in ("weak", "strong", "mixed")),
        ("iplr", "odd", "none", "float32", True),
        ("scalar dplr", "short", "mixed", "float32", True),
        *((kind, "grouped", "weak", "float16", True) for kind in ("kda", "dplr")),
    ],
    "further": [
        ("kda", "long", "weak", "float32", True),
        *(("kda", "short", gate, "float32", False) for gate in ("weak", "strong")),
        *(("dplr", "short", gate, "float32", False) for gate in ("zero", "reset")),
        ("iplr", "grouped", "weak", "float16", True),
        ("kda", "short", "mixed", "float16", True),
        *((kind, "short", "huge", "float32", False) for kind in ("kda", "dplr")),
        ("kda", "packed", "some channels", "float32", True),
        *((kind, "odd", "mixed", "float32", True) for kind in ("kda", "dplr")),
        *((kind, "wide", "reset", "float32", True) for kind in ("kda", "dplr")),
        *((kind, "grouped", "mixed", "float32", True) for kind in ("kda", "dplr")),
        ("dplr", "short", "mixed", "float16", True),
    ],
}

# transition, size, gate, states, chunks of a segment
SEGMENTS = {
    "sample": [("kda", "packed", "weak", True, 2), ("dplr", "odd", "weak", False, 2)],
    "further": [
        ("kda", "wide", "reset", True, 1),
        ("iplr", "grouped", "none", True, 1),
        ("kda", "wide", "strong", True, 1),
        ("kda", "packed", "some channels", True, 1),
        ("dplr", "odd", "reset", False, 2),
    ],
}


def make(kind: str, size: str, gate: str, dtype: torch.dtype, state: bool) -> LinearInputs:
    """Keys of norm 1, some of them alike, and beta from 0 to 2; b = -r a with r from 0 to 1."""
    B, T, H, HV, K, *_ = SIZES[size]
    q, k, a = (torch.randn(B, T, H, K) for _ in range(3))
    k[:, 1::3] = k[:, :1]
    k, a = (F.normalize(x, dim=-1) for x in (k, a))
    beta = 2 * torch.rand(B, T, HV)
    beta[:, ::7] = 0
    beta[:, 1::7] = 2
    width = () if kind == "scalar dplr" else (K,)
    x = torch.rand(B, T, HV, *width)
    b = -torch.rand(B, T, H, 1) * (a + 0.1 * torch.randn(B, T, H, K))
    free = {} if kind == "kda" else {"a": a.to(dtype), "b": b.to(dtype)}
    return inputs(
        SIZES[size],
        dtype,
        state,
        q,
        k,
        g=CHANNEL_GATES[gate](x),
        beta=beta if kind == "kda" else None,
        **free,
    )


def check(
    kind: str, size: str, gate: str, dtype: torch.dtype, state: bool, times: float = 1.0
) -> None:
    """times: of the usual error, which is twice as much of a single number, a sum that cancels."""
    terms = make(kind, size, gate, dtype, state)
    times *= 2 if size == "one token" else 1
    expect_all("dplr", terms, f"{kind}, {size}, {gate}, {dtype}", times=times)


def check_shifted() -> None:
    """Blocks that decay further, with factors above 1, as bfloat16 has them."""
    from slipstream.kernels.linear.triton.dplr import tiles

    usual = tiles.RANGES[torch.float32]
    tiles.RANGES[torch.float32] = usual._replace(shift=usual.whole)
    for kind in ("kda", "dplr"):
        check(kind, "short", "mixed", torch.float32, True)
    # halves that are apart, and quarters of gradients, whose sums are rounded to 2^-14
    tiles.RANGES[torch.float32] = usual._replace(shift=usual.whole, apart=11.0)
    for gate in ("middling", "mixed", "even"):
        check("kda", "long", gate, torch.float32, True, times=20)
        check("dplr", "packed" if gate == "mixed" else "odd", gate, torch.float32, True, times=20)
    tiles.RANGES[torch.float32] = usual


def check_segments(part: str) -> None:
    """Cut into segments of one chunk, or two."""
    from slipstream.kernels.linear.triton.delta import plan
    from slipstream.kernels.linear.triton.dplr.backend import TritonDplr

    kept = plan.delta_tokens
    for kind, size, gate, state, chunks in SEGMENTS[part]:
        plan.delta_tokens = lambda programs, T, C, chunks=chunks: chunks * C
        assert (
            TritonDplr().choose_segments(make(kind, size, gate, torch.float32, state)) is not None
        )
        check(kind, size, gate, torch.float32, state)
    plan.delta_tokens = kept


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_dplr_matches_reference_when_interpreted(part: str) -> None:
    for kind, size, gate, dtype, state in CASES[part]:
        check(kind, size, gate, getattr(torch, dtype), state)
    if part == "sample":
        for kind in ("kda", "dplr"):
            expect_final_alone("dplr", make(kind, "odd", "weak", torch.float32, True), kind)
        check_shifted()
    check_segments(part)


@interpreted
def test_numbers_of_no_chunk_are_passed_over() -> None:
    from slipstream.kernels.linear.triton.dplr.backend import BACKEND

    for kind in ("kda", "dplr"):
        terms = make(kind, "packed", "weak", torch.float32, False)
        assert terms.cu_seqlens is not None
        without = numbers_of_no_chunk(terms.cu_seqlens, BACKEND.chunk(terms))
        intra = BACKEND._empty_intra_chunk(terms, for_backward=True)
        BACKEND.intra_chunk(terms, 1.0, intra, for_backward=True)
        assert without and never_written(intra.u) == never_written(intra.r) == without
        assert intra.strong is not None and (intra.strong[without] == -1).all()
        wide = intra.u.new_zeros(*intra.u.shape[:3], intra.w.shape[-1])
        states = ChunkStates(intra.u, torch.zeros_like(intra.u), wide, wide)
        do = torch.randn(terms.v.shape)
        made = BACKEND._empty_chunk_grads(terms, do, 1.0, states, intra)
        BACKEND.score_grads(terms, intra, made)
        assert never_written(made.scores.qb) == without
