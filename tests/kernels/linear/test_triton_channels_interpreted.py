"""Triton kernels of per-channel decay, and of free a and b, under Triton's interpreter, against the
float64 reference."""

from itertools import pairwise

import pytest
import torch

from slipstream.kernels.linear.dplr import ChunkStates
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime.backends import INTERPRETED
from tests.support import linear_interpreted
from tests.support.interpreted import PARTS, interpreted
from tests.support.linear_interpreted import CHANNEL_GATES, FORMS, GATES, erasing, inputs
from tests.support.operators import never_written, numbers_of_no_chunk, relative_error

if INTERPRETED:
    import triton
    import triton.language as tl

    from slipstream.kernels.linear.triton.vector_decay.chunk import longest_first

    @triton.jit
    def _order_kernel(cu_ptr, out_ptr, N, MAX_N: tl.constexpr):
        i = tl.program_id(0)
        tl.store(out_ptr + i, longest_first(cu_ptr, i, N, MAX_N, True))


# B, T, H, HV, K, V, lengths of packed sequences
SIZES = {
    "one token": (1, 1, 1, 1, 1, 1, None),
    "short": (1, 15, 1, 1, 30, 64, None),
    "odd": (1, 63, 1, 1, 34, 30, None),
    "wide": (1, 20, 1, 1, 100, 30, None),
    "long": (1, 100, 1, 1, 20, 17, None),
    "grouped": (2, 35, 2, 4, 16, 24, None),
    "packed": (1, 58, 1, 2, 20, 17, (5, 0, 33, 1, 19, 0)),
    "split": (2, 150, 1, 1, 20, 17, None),
    "split, packed": (1, 233, 1, 2, 17, 20, (5, 0, 190, 1, 37, 0)),
}
# form, size, gate, dtype, states
CASES = {
    "sample": [
        *(("g", size, "mixed", "float32", True) for size in ("one token", "short", "odd", "wide")),
        *((form, "odd", "mixed", "float32", True) for form in ("u", "gv")),
        ("u", "packed", "mixed", "float32", True),
        *(("g", "long", gate, "float32", False) for gate in ("reset", "bfloat16", "blocks")),
        ("gv", "grouped", "weak", "float16", True),
        ("u, no g", "short", "zero", "float32", True),
        ("u, g a token", "grouped", "weak", "float32", True),
    ],
    "further": [
        *(("g", "long", gate, "float32", False) for gate in ("weak", "huge", "per token")),
        *(("g", "long", gate, "float32", False) for gate in ("zero", "strong")),
        ("gv", "long", "reset", "float32", False),
        ("g", "grouped", "weak", "float16", True),
        *((form, "long", "weak", "float32", False) for form in ("u", "gv")),
        *(("g", size, "mixed", "float32", True) for size in ("long", "grouped", "packed")),
        ("gv", "packed", "mixed", "float32", True),
        ("u", "long", "reset", "float32", False),
        ("u", "grouped", "weak", "float16", True),
    ],
}
# size, gate
WIDE = {"sample": [("grouped", "zero")], "further": [("long", "weak"), ("packed", "mixed")]}
# form, size, gate
SPLIT = {
    "sample": [("gv", "split, packed", "weak")],
    "further": [
        ("g", "split", "mixed"),
        *((form, "split, packed", "mixed") for form in ("u", "gv")),
    ],
}


def make(form: str, size: str, gate: str, dtype: torch.dtype, state: bool) -> LinearInputs:
    B, T, H, HV, K, V, _ = SIZES[size]
    q, k = (torch.randn(B, T, H, K) for _ in range(2))
    wide = CHANNEL_GATES[gate](torch.rand(B, T, HV, V if form == "gv" else K))
    gates = {"gv": wide} if form == "gv" else {"g": wide}
    if form != "g" and form != "gv":
        gates = {"u, no g": {}, "u, g a token": {"g": wide[..., 0]}}.get(form, gates)
        gates["u"] = torch.randn(HV, K)
    return inputs(SIZES[size], dtype, state, q, k, **gates)


def check(
    form: str, size: str, gate: str, dtype: torch.dtype, state: bool, times: float = 1.0
) -> None:
    """times: of the usual error."""
    terms = make(form, size, gate, dtype, state)
    linear_interpreted.expect_all(
        "vector_decay", terms, f"{form}, {size}, {gate}, {dtype}", times=times
    )


def check_nothing_but_final() -> None:
    """Without a gradient of o, and with a scale of 0, the other paths still count."""
    for form in FORMS:
        terms = make(form, "short", "weak", torch.float32, True)
        dfinal, do = torch.randn(terms.state_shape), torch.randn(terms.v.shape)
        linear_interpreted.expect("vector_decay", terms, None, dfinal, 0.5, f"{form} without do")
        linear_interpreted.expect("vector_decay", terms, do, dfinal, 0.0, f"{form} with scale 0")


def check_wide(size: str, gate: str) -> None:
    """o in float32 of 16 bits with a gate a column: nothing on the way to it is rounded to 16."""
    from slipstream.kernels.linear.triton.vector_decay.backend import forward

    terms = make("gv", size, gate, torch.float16, True)
    got = forward(terms, 0.3, torch.float32)
    want = linear_interpreted.reference(terms, 0.3, torch.zeros(terms.v.shape), None)
    for name, x in zip(("o", "final"), got, strict=True):
        error = relative_error(x, want[name])
        assert error <= 1e-6, f"{size}, {gate}: {name} is off by {error:.1e}"


def check_split(part: str) -> None:
    """Sequences in segments; with short spans, so that short ones are cut."""
    from slipstream.kernels.linear import segments
    from slipstream.kernels.linear.triton.vector_decay import backend

    kept = segments.MIN_CUT_CHUNKS, segments.ANCHOR_INTERVAL, segments.FORWARD_UNIT
    segments.MIN_CUT_CHUNKS, segments.ANCHOR_INTERVAL, segments.FORWARD_UNIT = 2, 2, 1
    backend.ANCHOR_INTERVAL = 2
    for form, size, gate in SPLIT[part]:
        terms = make(form, size, gate, torch.float32, True)
        assert backend.BACKEND.choose_segments(terms, 1) is not None
        check(form, size, gate, torch.float32, True)
    if part == "sample":
        check_wide("split, packed", "mixed")
    segments.MIN_CUT_CHUNKS, segments.ANCHOR_INTERVAL, segments.FORWARD_UNIT = kept
    backend.ANCHOR_INTERVAL = kept[1]


def check_shifted() -> None:
    """Blocks that decay further, with factors above 1, as bfloat16 has them."""
    from slipstream.kernels.linear.triton.vector_decay import backend

    usual = backend.RANGES[torch.float16]
    backend.RANGES[torch.float16] = usual._replace(bound=3.0, shift=3.0)
    for form in FORMS:
        check(form, "odd", "per token", torch.float16, True)
    backend.RANGES[torch.float16] = usual


def check_apart() -> None:
    """Chunks whose halves take the place of one block, as bfloat16 has them, or quarters in
    gradients ("even"); sums of gates are multiples of 2^-14 there."""
    from slipstream.kernels.linear.triton.vector_decay import backend

    usual = backend.RANGES[torch.float32]
    backend.RANGES[torch.float32] = usual._replace(apart=55.0)
    gates = [(form, gate) for form in FORMS for gate in ("middling", "even")]
    for form, gate in (*gates, ("g", "mixed"), ("gv", "reset"), ("g", "late")):
        # what a read has of the token before it does not decay, and cancels in dg; in dgv it is
        # small: 4e-7 from whole sums, 7.5e-5 at most from these, of 30 seeds
        times = {"u": 500, "gv": 60}.get(form, 20) if gate == "even" else 20
        check(form, "long", gate, torch.float32, True, times=times)
    backend.RANGES[torch.float32] = usual


def check_operators() -> None:
    """The operators of the forms take impl="triton", with gradients."""
    from slipstream.ops import chunk_gla, chunk_gsa, chunk_rwkv6

    B, T, H, K, V, M = 1, 20, 1, 20, 24, 17
    q, k, v = (torch.randn(B, T, H, n) for n in (K, K, V))
    s, g, u = torch.randn(B, T, H, M), -torch.rand(B, T, H, K), torch.randn(H, K)
    slots = -torch.rand(B, T, H, M)
    for fn in (
        lambda q, impl: chunk_gla(q, k, v, g, impl=impl)[0],
        lambda q, impl: chunk_rwkv6(r=q, k=k, v=v, w=g, u=u, impl=impl)[0],
        lambda q, impl: chunk_gsa(q, k, v, s, slots, impl=impl)[0],
    ):
        results = []
        for impl in ("triton", "reference"):
            x = q.clone().requires_grad_()
            o = fn(x, impl)
            results += [o.detach(), *torch.autograd.grad(o.square().sum(), x)]
        torch.testing.assert_close(results[:2], results[2:], rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_channel_kernels_match_reference_when_interpreted(part: str) -> None:
    for form, size, gate, dtype, state in CASES[part]:
        check(form, size, gate, getattr(torch, dtype), state)
    for size, gate in WIDE[part]:
        check_wide(size, gate)
    check_split(part)
    if part == "sample":
        check_nothing_but_final()
        check_shifted()
        check_apart()
        check_operators()


@interpreted
def test_numbers_of_no_chunk_are_passed_over() -> None:
    """Nothing is made of them but what says that they are not strong, and that u has none."""
    from slipstream.kernels.linear.triton.vector_decay.backend import BACKEND, RANGES

    usual = RANGES[torch.float32]
    for form, apart in (("g", 55.0), ("u", 0.0)):
        RANGES[torch.float32] = usual._replace(apart=apart)
        terms = BACKEND.to_kernel_layout(make(form, "packed", "weak", torch.float32, False))
        problem = BACKEND._problem(terms, torch.randn(terms.v.shape), None)
        intra, p = BACKEND.intra_chunk(problem), BACKEND.chunk_pairs(problem)
        assert terms.cu_seqlens is not None and intra.a is not None and intra.decay is not None
        without = numbers_of_no_chunk(terms.cu_seqlens, problem.C)
        assert without and never_written(intra.a) == never_written(p) == without
        assert (intra.decay[without] == 1).all()
        assert intra.strong is None or (intra.strong[without] == 0).all()
        du = torch.full_like(intra.decay, torch.nan) if terms.u is not None else None
        grads = {name: torch.zeros_like(problem.g) for name in ("dqs", "dke", "dq", "dk", "dg")}
        z = torch.zeros_like(intra.decay)
        BACKEND.chunk_grads(problem, intra, p, 1.0, **grads, z=z, du=du)
        assert du is None or (du[without] == 0).all()
    RANGES[torch.float32] = usual


@interpreted
def test_longest_first_gives_each_sequence_once_by_length() -> None:
    # with equal and empty ones, one that ends before it begins, and more than are sorted
    for offsets in ([0, 9], [0, 5, 5, 20, 25, 25, 26], [0, 40, 3, 60, 61], [*range(0, 20, 2), 99]):
        N = len(offsets) - 1
        out = torch.full((N,), -1, dtype=torch.int32)
        _order_kernel[(N,)](torch.tensor(offsets, dtype=torch.int32), out, N, 8)
        lengths = [max(0, b - a) for a, b in pairwise(offsets)]
        want = sorted(range(N), key=lambda n: -lengths[n]) if N <= 8 else [*range(N)]
        assert out.tolist() == want, offsets


# B, T, H, HV, K, V, lengths of packed sequences
DPLR_SIZES = {
    "one token": (1, 1, 1, 1, 1, 1, None),
    "short": (1, 15, 1, 1, 30, 64, None),
    "odd": (1, 63, 1, 1, 30, 20, None),
    "long": (1, 100, 1, 1, 10, 12, None),
    "wide": (1, 18, 1, 1, 100, 30, None),
    "grouped": (2, 19, 1, 2, 16, 24, None),
    "packed": (1, 61, 1, 1, 20, 17, (5, 0, 33, 16, 1, 6, 0)),
}
DPLR_GATES = {
    **(GATES | CHANNEL_GATES),
    "middling": lambda x: -4 * x,
    "even": lambda x: -4.0 + 0 * x,
    "some channels": lambda x: -torch.where(x[:, :, :, :1] < 0.3, 40 * x, 0.05 * x),
}
# transition, size, gate, dtype, states
DPLR_CASES = {
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


def make_dplr(kind: str, size: str, gate: str, dtype: torch.dtype, state: bool) -> LinearInputs:
    """b = -r a with r from 0 to 1."""
    B, T, H, HV, K, *_ = DPLR_SIZES[size]
    q, k, a, beta = erasing(DPLR_SIZES[size])
    width = () if kind == "scalar dplr" else (K,)
    x = torch.rand(B, T, HV, *width)
    b = -torch.rand(B, T, H, 1) * (a + 0.1 * torch.randn(B, T, H, K))
    free = {} if kind == "kda" else {"a": a.to(dtype), "b": b.to(dtype)}
    return inputs(
        DPLR_SIZES[size],
        dtype,
        state,
        q,
        k,
        g=DPLR_GATES[gate](x),
        beta=beta if kind == "kda" else None,
        **free,
    )


def check_dplr(
    kind: str, size: str, gate: str, dtype: torch.dtype, state: bool, times: float = 1.0
) -> None:
    """times: of the usual error, which is twice as much of a single number, a sum that cancels."""
    terms = make_dplr(kind, size, gate, dtype, state)
    times *= 2 if size == "one token" else 1
    linear_interpreted.expect_all("dplr", terms, f"{kind}, {size}, {gate}, {dtype}", times=times)


def check_dplr_shifted() -> None:
    """Blocks that decay further, with factors above 1, as bfloat16 has them."""
    from slipstream.kernels.linear.triton.dplr import tiles

    usual = tiles.RANGES[torch.float32]
    tiles.RANGES[torch.float32] = usual._replace(shift=usual.whole)
    for kind in ("kda", "dplr"):
        check_dplr(kind, "short", "mixed", torch.float32, True)
    # halves that are apart, and quarters of gradients, whose sums are rounded to 2^-14
    tiles.RANGES[torch.float32] = usual._replace(shift=usual.whole, apart=11.0)
    for gate in ("middling", "mixed", "even"):
        check_dplr("kda", "long", gate, torch.float32, True, times=20)
        check_dplr(
            "dplr", "packed" if gate == "mixed" else "odd", gate, torch.float32, True, times=20
        )
    tiles.RANGES[torch.float32] = usual


def check_segments(part: str) -> None:
    """Cut into segments of one chunk, or two."""
    from slipstream.kernels.linear.triton.delta import plan
    from slipstream.kernels.linear.triton.dplr.backend import TritonDplr

    kept = plan.delta_tokens
    for kind, size, gate, state, chunks in SEGMENTS[part]:
        plan.delta_tokens = lambda programs, T, C, chunks=chunks: chunks * C
        assert (
            TritonDplr().choose_segments(make_dplr(kind, size, gate, torch.float32, state))
            is not None
        )
        check_dplr(kind, size, gate, torch.float32, state)
    plan.delta_tokens = kept


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_dplr_matches_reference_when_interpreted(part: str) -> None:
    for kind, size, gate, dtype, state in DPLR_CASES[part]:
        check_dplr(kind, size, gate, getattr(torch, dtype), state)
    if part == "sample":
        for kind in ("kda", "dplr"):
            linear_interpreted.expect_final_alone(
                "dplr", make_dplr(kind, "odd", "weak", torch.float32, True), kind
            )
        check_dplr_shifted()
    check_segments(part)


@interpreted
def test_dplr_passes_numbers_of_no_chunk_over() -> None:
    from slipstream.kernels.linear.triton.dplr.backend import BACKEND

    for kind in ("kda", "dplr"):
        terms = make_dplr(kind, "packed", "weak", torch.float32, False)
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
