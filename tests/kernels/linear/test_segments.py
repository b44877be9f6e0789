"""In how many segments kda, rwkv7, dplr and iplr are computed on sm_90, by shapes alone; the
schedule of the delta rule's backward there (sm90/delta/bwd_schedule.py)."""

from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import Segments
from tests.support import wants

pytestmark = wants.triton

# programs, tiles for E and M, chunks, segments
RULE = [
    (1, 2, 16, 1),  # too short
    (1, 2, 64, 8),  # these cost as much as none, and less where states decay
    (1, 2, 128, 10),
    (16, 2, 32, 1),
    (16, 2, 64, 4),
    (4, 2, 512, 16),
    (8, 2, 512, 8),  # of 16, E and M would be two rounds of all multiprocessors
    (16, 2, 512, 8),
    (32, 2, 512, 4),
    (48, 2, 512, 1),  # two segments, whose E and M take as long as o
    (132, 2, 2048, 1),
    (500, 2, 2048, 1),
]


@pytest.mark.parametrize("case", RULE, ids=str)
def test_segments_by_shapes(case: tuple[int, int, int, int]) -> None:
    from slipstream.kernels.linear.segments import num_dplr_sm90

    *shape, n = case
    assert num_dplr_sm90(*shape) == n


# heads, packed sequences and chunks of all; chunks of a segment backward, and whether the delta
# rule's forward takes one tile of V a program, of two
PACKED = [
    (8, 18, 128, 8, True),
    (8, 29, 512, 16, True),
    (11, 29, 512, 0, False),
    (8, 43, 512, 0, True),
    (8, 44, 512, 0, False),
    (1, 64, 512, 8, True),
    (1, 65, 512, 8, False),
    (16, 32, 128, 0, False),  # a multiprocessor's share of all tokens is more than the longest has
    (32, 4, 256, 0, False),
    (8, 1, 128, 8, True),
    (0, 1, 0, 0, True),
]


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences_by_shapes(case: tuple[int, int, int, int, bool]) -> None:
    from slipstream.kernels.linear import segments

    heads, sequences, chunks, segment, one_tile = case
    assert segments._packed_bwd_chunks(heads, sequences, chunks) == segment
    assert segments._waits_for_longest(2 * heads, sequences) == one_tile


# function, arguments that are just enough for a cut, tokens of its segments, and (value, place) of
# one argument in turn with which there is none
CUTS = [
    ("_scalar_decay_tokens", (88, 16 * 64, 2, 64, 4), 512, [(89, 0), (15 * 64, 1), (3, 2)]),
    ("_scalar_decay_tokens", (44, 32 * 64, 4, 64, 4), 512, [(45, 0), (31 * 64, 1), (5, 2)]),
    ("_scalar_decay_tokens", (88, 32 * 64, 2, 64, 16), 1024, [(89, 0), (31 * 64, 1), (17, 4)]),
    ("_vector_decay_tokens", (44, 24), 512, [(45, 0), (23, 1)]),
    ("_vector_decay_tokens", (16, 64), 512, [(15, 0), (63, 1)]),
    ("_delta_tokens", (52, 64, 64), 13 * 64, [(53, 0), (63, 1)]),
    ("_delta_sm90_tokens", (66, 35), 18 * 64, [(67, 0), (34, 1)]),
]


@pytest.mark.parametrize("case", CUTS, ids=str)
def test_cut_begins_at_its_bounds(case: tuple[str, tuple[int, ...], int, list]) -> None:
    from slipstream.kernels.linear import segments

    name, least, tokens, less = case
    asked = getattr(segments, name)
    assert asked(*least) == tokens
    for value, at in less:
        assert asked(*least[:at], value, *least[at + 1 :]) is None


@pytest.mark.parametrize("lengths", [None, (20000, 0, 12768)], ids=["whole", "packed"])
def test_segments_cover_every_sequence(lengths: tuple | None) -> None:
    from slipstream.kernels.linear.segments import dplr_sm90

    T = 32768
    cu = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int()
    x = torch.empty(1, T, 4, 128, device="meta")
    split = dplr_sm90(LinearInputs(x, x, x, g=x, cu_seqlens=cu))
    assert split is not None and split.tokens % 64 == 0
    wanted = sum(-(-n // split.tokens) for n in lengths or (T,))
    assert wanted <= split.count <= wanted + len(lengths or ())


@pytest.mark.parametrize("form", ["gla", "kda", "gated_deltanet", "simple_gla"])
def test_no_batch_has_a_plan(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On sm_90 too, where what cuts segments divides by the heads of all sequences."""
    from slipstream.kernels.linear import plan

    monkeypatch.setattr(plan.backends, "sm90_unsupported", lambda x: None)
    terms = LinearInputs(*(torch.empty(0, 4096, 4, 128, dtype=torch.bfloat16) for _ in "qkv"))
    by_token = terms.q[..., 0]
    terms = terms._replace(
        g=terms.q if form in ("gla", "kda") else by_token,
        beta=by_token if form in ("kda", "gated_deltanet") else None,
    )
    assert plan.sm90_unsupported_reason(terms) == "there are no tokens"


@pytest.mark.parametrize(("K", "asked"), [(64, [4]), (128, [4]), (256, [])])
def test_one_scan_of_states_is_not_of_wide_keys(
    K: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a scalar decay; V and the numbers of heads do not matter."""
    from slipstream.kernels.linear.sm90.scalar_decay import backend

    found: list[int] = []
    monkeypatch.setattr(backend, "scanned_sm90", lambda terms, programs: found.append(programs))
    for H, V in ((2, 64), (4, 256)):
        q, v = torch.empty(1, 64, H, K, device="meta"), torch.empty(1, 64, 4, V, device="meta")
        chunks: Any = object()
        same, segments = backend.BACKEND.states_of_one_scan(chunks, LinearInputs(q, q, v))
        assert same is chunks and segments is None
    assert found == 2 * asked


B, T, H, HV, K, V = 3, 512, 2, 6, 64, 192
# the module and function that choose segments, what these ask for them, and the first arguments of
# that: programs of a scan of V by tiles of K // 8 columns, and what else the rule counts
SCANS = {
    "triton.scalar_decay.backend": ("segments.scalar_decay_tokens", (24 * HV, 64, 4)),
    "triton.vector_decay.backend": ("segments.scalar_decay_tokens", (24 * HV, 64, 4)),
    "triton.delta.backend": ("triton.delta.plan.delta_tokens", (24 * HV * B, T, 64)),
    "triton.dplr.backend": ("triton.delta.plan.delta_tokens", (3 * HV * B, T, 64)),
    "sm90.delta.backend": ("segments._delta_sm90_tokens", (3 * HV * B, T // 64)),
    "sm90.dplr.backend": ("segments.num_dplr_sm90", (HV * B, 2, T // 64)),
    "sm90.vector_decay.backend": ("segments._vector_decay_tokens", (HV * B, T // 64)),
}


@pytest.mark.parametrize("module", SCANS)
def test_segments_are_of_the_programs_of_a_scan(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, want = SCANS[module]
    folder = "slipstream.kernels.linear"
    made, asked = import_module(f"{folder}.{module}"), []
    no_cut = 1 if "num" in rule else None

    def tile(device: torch.device, K: int, *_: int) -> tuple[Any, int]:
        return SimpleNamespace(C=64, BX=K // 8, fwd=SimpleNamespace(B=K // 8)), K

    for place in (
        "scalar_decay.backend._tile",
        "delta.plan._tile",
        "vector_decay.backend._chunk_tile",
    ):
        monkeypatch.setattr(f"{folder}.triton.{place}", tile)
    monkeypatch.setattr(f"{folder}.triton.vector_decay.backend._tile", lambda *_: tile(*_)[0])
    monkeypatch.setattr(f"{folder}.triton.dplr.backend.tile_of", lambda _: tile(q.device, K))
    monkeypatch.setattr(f"{folder}.{rule}", lambda *args: asked.append(args) or no_cut)
    q, v = torch.empty(B, T, H, K), torch.empty(B, T, HV, V)
    terms = LinearInputs(q, q, v, beta=v[..., 0])
    assert made.BACKEND.choose_segments(terms, *([4] if "decay" in module else [])) is None
    ((*got,),) = asked
    assert (*(x for x in got if x is not terms),) == want


@pytest.mark.parametrize(("tokens", "can_pass"), [(127, True), (128, True), (128, False)])
def test_half_of_a_sequence_is_worth_a_segment(tokens: int, can_pass: bool) -> None:
    """Of its own rank's calls: below, states of ranks are added up call by call."""
    from slipstream.kernels.linear.context_states import _StateExchange

    asked: list[str] = []
    rank: Any = SimpleNamespace(piece=lambda: (0, tokens), by_calls=lambda: asked.append("calls"))
    x = torch.empty(1, 256, 2, 8, device="meta")
    cut = _StateExchange.segments(rank, LinearInputs(x, x, x), None, 64, can_pass=can_pass)
    assert (cut is None) == bool(asked) == (tokens < 128 or not can_pass)


@pytest.mark.parametrize("others", [False, True], ids=["what segments add", "others"])
def test_states_pass_twice_from_what_segments_add(others: bool) -> None:
    """Before the exchange for what is sent, and after it."""
    from slipstream.kernels.linear import backend

    states, began, wanted = torch.zeros(2, 3), [], []
    exchange = mock.Mock(sends=True, receives=True)

    def run(x: Tensor, sums: Tensor | None) -> None:
        began.append(x.clone())
        wanted.append(sums)
        x += 1

    terms: Any = SimpleNamespace(state_shape=(5,))
    backend.pass_states(run, states, None, terms, Segments(64, 2), mock.Mock(), exchange, others)
    assert [int(x[0, 0]) for x in began] == [0, int(others)]
    assert wanted[0].shape == (5,) and wanted[1] is None
    assert exchange.call_args.args[0] is wanted[0]


CHUNK, KEYS = 64, 128
# B, T, H, HV, and how many packed sequences
SHAPES = [
    (1, 8192, 16, 64, 0),
    (1, 32768, 2, 8, 0),
    (3, 4097, 4, 20, 0),
    (1, 3001, 64, 64, 0),
    (2, 5000, 16, 96, 0),
    (1, 9000, 2, 32, 3),
    (1, 20001, 8, 8, 5),
    (1, 8192, 8, 24, 8),
    (1, 30000, 16, 64, 7),
    (1, 32768, 8, 8, 29),
]


def terms(shape: tuple[int, int, int, int, int], V: int = 128) -> LinearInputs:
    B, T, H, HV, N = shape
    make = {"dtype": torch.bfloat16, "device": "meta"}
    q, v = torch.empty(B, T, H, KEYS, **make), torch.empty(B, T, HV, V, **make)
    beta = torch.empty(B, T, HV, device="meta")
    cu = torch.empty(N + 1, dtype=torch.int32, device="meta") if N else None
    return LinearInputs(q, q, v, g=beta, beta=beta, cu_seqlens=cu)


def packings(T: int, N: int) -> list[list[int]]:
    """Offsets: even ones, all in one sequence, and at random."""
    drawn = torch.randint(T + 1, (20, N - 1)).sort().values.tolist()
    even = [n * T // N for n in range(N + 1)]
    return [even, [0] * N + [T], [0] + [T] * N, *([0, *x, T] for x in drawn)]


@wants.compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_schedule_has_room_for_segments(shape: tuple[int, int, int, int, int]) -> None:
    from slipstream.kernels.linear.sm90.delta.bwd_schedule import choose_schedule

    B, T, _, HV, N = shape
    given = terms(shape)
    cut = choose_schedule(given)
    assert cut is not None
    part, (segment, count, *_) = cut.interval * CHUNK, cut.segments or (T, 0)
    assert count == 0 or segment % part == 0
    assert cut.programs(given) == HV * (count or given.sequences)
    if not N:
        assert cut.checkpoints == B * -(-T // part)
        assert count in (0, B * -(-T // segment))
    for offsets in packings(T, N) if N else []:
        for tokens, room in ((part, cut.checkpoints), (segment, count))[: 1 + bool(count)]:
            taken = [
                a // tokens + n + i
                for n, (a, b) in enumerate(pairwise(offsets))
                for i in range(-(-(b - a) // tokens))
            ]
            assert len(set(taken)) == len(taken)
            assert max(taken) < room


@wants.compiler
def test_segments_follow_multiprocessors() -> None:
    """And no longer than that for the sake of parts."""
    from slipstream.kernels.linear import segments
    from slipstream.kernels.linear.sm90.delta import bwd_schedule

    for T in range(9000, 40000, 1111):
        for HV in (8, 24, 32, 40, 64):
            given = terms((1, T, 8, HV, 0))
            cut = bwd_schedule.choose_schedule(given)
            assert cut is not None and cut.segments is not None
            assert cut.programs(given) <= segments.NUM_SMS
            wanted = -(-T // CHUNK) / segments.num_fused_bwd(given)
            assert cut.segments.tokens // CHUNK < -(-wanted // 1) + cut.interval


@wants.compiler
def test_long_row_of_documents_is_cut() -> None:
    from slipstream.kernels.linear.sm90.delta.bwd_schedule import choose_schedule

    tokens = []
    for T, heads, N in ((32768, 8, 29), (32768, 32, 29), (8192, 32, 8), (8192, 16, 32)):
        cut = choose_schedule(terms((1, T, heads, heads, N)))
        assert cut is not None
        tokens.append(cut.segments and cut.segments.tokens)
    assert tokens == [16 * CHUNK, None, None, None]
