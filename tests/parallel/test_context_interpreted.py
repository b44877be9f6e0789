"""Exchanges between a back end's segments, under Triton's interpreter, against the reference; and
context_check.py in four and eight processes: uneven shards, and the same bits."""

import os
import subprocess
import sys

import pytest
import torch

from slipstream.kernels.linear import segments
from tests.support import wants
from tests.support.interpreted import PARTS, interpreted
from tests.support.linear_interpreted import context_terms, reference
from tests.support.lockstep import linear_on_ranks
from tests.support.operators import relative_error
from tests.support.scripts import ROOT

# Tokens of ranks, and of packed sequences: cut anywhere, or two rows through all ranks.
CUTS = {
    "rows": ((40, 50, 37), None),
    "packed": ((70, 33, 61), (11, 140, 0, 13)),
    "one empty": ((64, 0, 40), (104,)),
    "two ranks": ((90, 38), None),
}
# what is computed, cut, chunks of a segment: 0 leaves sequences whole, -1 is one more call of the
# sequence that goes on; whether the final state is wanted
CASES = {
    "sample": [
        ("simple_gla", "packed", 1, True),
        ("gla", "rows", 1, True),
        ("gv", "packed", 0, True),
        ("gated delta", "rows", 1, False),
        ("kda", "packed", 1, True),
        ("dplr", "two ranks", 0, True),
        ("simple_gla", "rows", -1, True),
    ],
    "further": [
        ("retention", "rows", 1, True),
        ("delta", "packed", 1, True),
        ("simple_gla", "one empty", 1, False),
        ("rwkv6", "packed", 1, True),
        ("gla", "one empty", 0, True),
        ("delta", "one empty", 1, True),
        ("delta", "rows", 0, True),
        ("gated delta", "packed", -1, True),
        ("kda", "two ranks", 1, False),
        ("kda", "rows", 0, True),
        ("dplr", "packed", 1, True),
        ("iplr", "rows", 1, True),
    ],
}

# The same bits for any number of ranks: tokens of ranks, which begin where segments do.
SEGMENT = 32
BITS_ROWS = {1: (128,), 2: (64, 64), 4: (32, 32, 0, 64)}
BITS_SEQUENCES = (40, 0, 70, 18)
BITS_PACKED = {1: (128,), 2: (72, 56), 4: (32, 40, 32, 24)}
BITS = {
    "sample": [("simple_gla", True), ("gla", False), ("gated delta", True), ("kda", False)],
    "further": [
        ("gla of values", True),
        *(("retention", False), ("gv", True), ("rwkv6", True), ("delta", False)),
        *(("kda", True), ("dplr", True), ("iplr", False), ("simple_gla", False)),
    ],
}


def make(kind: str, cut: str) -> tuple:
    lengths, sequences = CUTS[cut]
    return context_terms(kind, sum(lengths), sequences), lengths


def check(kind: str, cut: str, chunks: int, wants_final: bool) -> None:
    from slipstream.kernels.linear.context_states import _StateExchange
    from slipstream.kernels.linear.triton.delta import plan
    from slipstream.kernels.linear.triton.vector_decay import backend

    terms, lengths = make(kind, cut)
    asked: list[bool] = []
    choose = _StateExchange.segments

    def choose_segments(self, terms, chosen, chunk, unit=None, can_pass=True):
        found = choose(self, terms, chosen, chunk, unit, can_pass and chunks == 0)
        if chosen is None:
            asked.append(found is not None)
        return found

    kept = plan.delta_tokens, segments.scalar_decay_tokens, segments.ANCHOR_INTERVAL
    plan.delta_tokens = lambda programs, T, C: chunks * C if chunks > 0 else None
    tokens = plan.delta_tokens
    segments.ANCHOR_INTERVAL = backend.ANCHOR_INTERVAL = 1
    segments.scalar_decay_tokens = lambda *x: tokens(*x[:3])
    _StateExchange.segments = choose_segments
    try:
        do = torch.randn(terms.v.shape)
        dfinal = torch.randn(terms.state_shape) if wants_final else None
        scale = terms.q.shape[-1] ** -0.5
        got = linear_on_ranks(terms, do, dfinal, lengths, scale=scale, impl="triton")
    finally:
        plan.delta_tokens, segments.scalar_decay_tokens, segments.ANCHOR_INTERVAL = kept
        backend.ANCHOR_INTERVAL = kept[2]
        _StateExchange.segments = choose
    assert bool(asked) == (chunks <= 0), asked
    if chunks == 0 and cut != "packed":
        assert any(asked)
    want = reference(terms, scale, do, dfinal)
    if dfinal is None:
        del want["final"]
    for name, x in want.items():
        error = relative_error(got[name], x)
        assert error <= 4e-6, f"{kind}, {cut}, {chunks}: {name} is off by {error:.1e}"


def check_bits(kind: str, packed: bool) -> None:
    """Bits of 1, 2 and 4 ranks, in one call of the kernels a rank; and the reference's numbers."""
    lengths = BITS_PACKED if packed else BITS_ROWS
    sequences = BITS_SEQUENCES if packed else None
    rows = 2 if kind == "gla" else 1
    terms = context_terms(kind, sum(lengths[1]), sequences, rows)
    do, dfinal = torch.randn(terms.v.shape), torch.randn(terms.state_shape)
    scale = terms.q.shape[-1] ** -0.4  # no power of two
    options = {"scale": scale, "impl": "triton", "segment_tokens": SEGMENT}
    found = {n: linear_on_ranks(terms, do, dfinal, x, **options) for n, x in lengths.items()}
    for name, x in reference(terms, scale, do, dfinal).items():
        error = relative_error(found[1][name], x)
        assert error <= 4e-6, f"{kind}, {packed}: {name} is off by {error:.1e}"
        for ranks in (2, 4):
            if name == "u":  # a parameter's gradient is a sum over ranks
                torch.testing.assert_close(found[ranks][name], found[1][name])
            else:
                assert torch.equal(found[ranks][name], found[1][name]), (kind, name, ranks)


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_exchanges_match_reference_when_interpreted(part: str) -> None:
    assert segments.NUM_SMS
    for case in CASES[part]:
        check(*case)
    for case in BITS[part]:
        check_bits(*case)


@pytest.mark.slow
@wants.collectives
@pytest.mark.parametrize("ranks", [4, 8])
def test_results_and_bits_of_many_ranks(ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    found = subprocess.run(
        [*command, "tests/parallel/context_check.py", "--seeds", "1"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(f"checked on {ranks} ranks") >= 33
