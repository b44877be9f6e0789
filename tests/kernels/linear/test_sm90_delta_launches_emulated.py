"""The delta rule's launches on sm_90 from forward to gradients, with kernels as numpy.

As test_sm90_delta_emulated.py has the kernels; what Triton compiles, state_passing.py, is written
out.
Fresh memory is NaN, and float64 where it would be float32.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.backend import SavedWY
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.gluon_emulator import threads
from tests.gluon_emulator.linear import Descriptor, Pointer
from tests.support.sm90_delta import inputs, kernels, wanted

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, which launches import"
)
SCALE = 0.3
COMPILERS = ("num_warps", "maxnreg", "num_stages")  # arguments that no kernel has
NAMES = {
    "solve_tril": "solve", "chunk_fwd": "scan", "chunk_fwd_2tile": "wide", "chunk_dstate": "back",
    "dqkg": "grads", "chunk_bwd": "fused", "segment_transition": "ends",
}  # fmt: skip


def state_passing(
    e_ptr: Tensor, m_ptr: Tensor, m_is_zero_ptr: Tensor, s_in_ptr: Tensor | None,
    entry_ptr: Tensor, s_out_ptr: Tensor | None, cu_ptr: Tensor | None, BACK: bool, **sizes: int,
) -> None:  # fmt: skip
    """As the kernel of this name, which Triton compiles."""
    T, N, segment = sizes["T"], sizes["N"], sizes["segment"]
    cu = [0, T] if cu_ptr is None else cu_ptr.tolist()
    for n in range(N):
        begin, length = (0, T) if cu_ptr is None else (cu[n], cu[n + 1] - cu[n])
        count = -(-length // segment)
        first = n * count if cu_ptr is None else begin // segment + n
        order = list(range(first, first + count))
        S = torch.zeros_like(entry_ptr[0]) if s_in_ptr is None else s_in_ptr[n]
        if not order:  # a slot of a sequence without tokens
            entry_ptr[first] = S
        for i in order[::-1] if BACK else order:
            entry_ptr[i], M = S, m_ptr[i].mT if BACK else m_ptr[i]
            S = torch.where(m_is_zero_ptr[i, :, None, None] > 0, e_ptr[i], M @ S + e_ptr[i])
        if s_out_ptr is not None:
            s_out_ptr[n] = S


def as_numpy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has launches run the kernels as numpy; names of those that ran, by and by."""
    from slipstream.kernels.linear.sm90.common import tma
    from slipstream.kernels.linear.sm90.delta import backend, segment_launch

    ran: list[str] = []

    def cached(kernel: Any) -> Any:
        name = kernel.__name__.removeprefix("delta_").removesuffix("_sm90_kernel")

        def on(grid: tuple[int, ...], *args: Any, **flags: Any) -> None:
            # dE of segments, which chunk_dstate makes without dv
            ran.append("dE" if flags.get("dv_desc", kernel) is None else name)
            if name == "state_passing":
                state_passing(**flags)
                return
            given = tuple(Pointer(x) if isinstance(x, Tensor) else x for x in args)
            flags = {
                n: Pointer(x) if isinstance(x, Tensor) else x
                for n, x in flags.items()
                if n not in COMPILERS
            }
            threads.launch(getattr(kernels(), NAMES[name]), grid[0], given, **flags)

        class Launch:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args, **flags: on(grid, *args, **flags)

        return Launch()

    def empty(x: Tensor, *shape: Any, **options: Any) -> Tensor:
        made = new_empty(x, *shape, **options)
        return made.double().fill_(torch.nan) if made.is_floating_point() else made

    def descriptor(x: Tensor | None, *sizes: int | None) -> Descriptor | None:
        return None if x is None else Descriptor(x, *sizes[:3])

    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", empty)
    for module in (backend, segment_launch):
        monkeypatch.setattr(module, "cached", cached)
    for module in (backend, tma):
        monkeypatch.setattr(module, "tma_descriptor", descriptor)
    return ran


def two_kernels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    return {"solve_tril", "chunk_fwd", "chunk_dstate", "dqkg"}


def many_programs(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    from slipstream.kernels.linear.sm90.delta import backend

    monkeypatch.setattr(backend, "NUM_SMS", 1)
    return {"solve_tril", "chunk_fwd_2tile", "chunk_dstate", "dqkg"}


def in_segments(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    from slipstream.kernels.linear import segments

    monkeypatch.setattr(segments, "MIN_SEGMENT_CHUNKS", 1)
    monkeypatch.setattr(segments, "MIN_CHUNKS_SAVED", 1)
    anew = vars(segments._delta_sm90_tokens)["__wrapped__"]  # answers are remembered by sizes
    monkeypatch.setattr(segments, "_delta_sm90_tokens", anew)
    return {"solve_tril", "chunk_fwd", "segment_transition", "dE", "chunk_dstate", "dqkg"}


def states_scanned(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """As with consistent=True, in segments of a chunk."""
    from slipstream.kernels.linear import segments
    from slipstream.runtime.consistent import consistent_scope

    monkeypatch.setattr(segments, "MIN_SCANNED_SEGMENTS", 1)
    monkeypatch.setattr(segments, "MIN_CUT_CHUNKS", 1)
    monkeypatch.setattr(consistent_scope, "on", True)
    return two_kernels(monkeypatch) | {"segment_transition"}


def one_scan(every: int, parts: int = 0, forward: str = "chunk_fwd") -> Callable[..., set[str]]:
    """In parts of `every` chunks; parts: of a segment, where there are any."""

    def chosen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
        from slipstream.kernels.linear.sm90.delta import backend
        from slipstream.kernels.linear.sm90.delta.bwd_schedule import make_schedule

        monkeypatch.setattr(
            backend.bwd_schedule,
            "choose_schedule",
            lambda terms: make_schedule(terms, every, parts),
        )
        monkeypatch.setattr(backend, "MAX_WORKSPACES", 3)
        ends = {"segment_transition", "dE"} if parts else set()
        return {"solve_tril", forward, "chunk_bwd"} | ends

    return chosen


def one_wide_scan(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    many_programs(monkeypatch)
    return one_scan(2, forward="chunk_fwd_2tile")(monkeypatch)


def both_in_segments(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    in_segments(monkeypatch)
    return one_scan(1, 2)(monkeypatch)


PACKED = (5, 0, 200, 1)
WAYS = {  # and T, H, HV, K, V, batch or lengths of packed sequences, gated, initial state
    "two kernels": (two_kernels, (150, 1, 2, 64, 128, 2, True, True)),
    "two kernels, packed": (two_kernels, (220, 1, 1, 64, 64, PACKED, True, False)),
    "many programs": (many_programs, (220, 1, 2, 64, 128, PACKED, True, True)),
    "segments": (in_segments, (320, 1, 2, 64, 64, 1, False, True)),
    "packed segments": (in_segments, (330, 1, 1, 64, 64, (5, 320), True, False)),
    "states scanned": (states_scanned, (320, 1, 2, 64, 128, 2, True, True)),
    "packed, states scanned": (states_scanned, (330, 1, 2, 64, 64, (5, 0, 320), True, False)),
    "one scan": (one_scan(3), (130, 1, 2, 64, 128, 1, False, True)),
    "parts": (one_scan(1), (130, 1, 2, 64, 64, 2, True, True)),
    "packed parts": (one_scan(2), (220, 1, 2, 64, 128, PACKED, True, True)),
    "wide scan, packed parts": (one_wide_scan, (220, 1, 2, 64, 128, PACKED, True, False)),
    "segments in parts": (one_scan(1, 2), (290, 1, 2, 64, 128, 1, True, True)),
    "segments of a batch": (one_scan(2, 1), (150, 2, 2, 64, 128, 2, False, True)),
    "packed segments in parts": (one_scan(1, 2), (330, 1, 2, 64, 128, (5, 0, 200, 65), True, True)),
    "packed segments of a part": (one_scan(1, 1), (220, 1, 1, 64, 128, PACKED, True, False)),
    "segments, forward and back": (both_in_segments, (320, 1, 2, 64, 128, 1, True, True)),
}


@pytest.mark.parametrize("keeps", [False, True], ids=["again", "saved"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.sample(which=lambda way, keeps: keeps or way[1][5] == PACKED)
def test_launches_lead_from_inputs_to_gradients(
    way: tuple, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.kernels.linear.sm90.delta import backend

    chosen, size = way
    terms = inputs(size)
    T, lengths = size[0], size[5]
    end = sum(lengths) if isinstance(lengths, tuple) else T
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    do[:, end:] = torch.nan
    want = wanted(terms, do, dfinal, end)
    named, ran = chosen(monkeypatch), as_numpy(monkeypatch)
    o, final, *saved = backend.forward(terms, SCALE, save=True)
    left = {"saved": SavedWY(*saved)} if keeps else {}
    found = backend.backward(terms, do, dfinal, SCALE, **left) | {"o": o, "final": final}
    assert set(ran) - {"state_passing"} == named
    assert ran.count("solve_tril") == 2 - keeps
    if terms.initial_state is None:
        del want["initial_state"]
    for name, x in want.items():
        got = found[name] if x.shape == found[name].shape else found[name][:, :end]
        bar = 1e-6 if name in ("beta", "g") else 1e-8  # those are in float32
        torch.testing.assert_close(got.double(), x.detach(), rtol=bar, atol=bar)
    assert o[:, end:].isnan().all() and found["v"][:, end:].isnan().all()


def test_sequences_that_begin_past_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In segments, of which those before the first sequence's beginning are nobody's."""
    from slipstream.kernels.linear.sm90.delta import backend

    terms = inputs((320, 1, 1, 64, 64, (0, 250), True, True))
    in_segments(monkeypatch)
    as_numpy(monkeypatch)
    want = backend.forward(terms, SCALE, save=True)[:2]
    cu = torch.tensor([70, 70, 320], dtype=torch.int32)
    moved = {n: getattr(terms, n).nan_to_num().roll(70, 1) for n in ("q", "k", "v", "g", "beta")}
    o, final = backend.forward(terms._replace(**moved, cu_seqlens=cu), SCALE)
    torch.testing.assert_close(final, want[1], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(o[:, 70:], want[0][:, :250], rtol=1e-8, atol=1e-8)


# how, tokens of ranks, and T, H, HV, K, V, batch or lengths of packed sequences, gated, state
EXCHANGES = {
    "segments": (both_in_segments, (160, 150, 80), (390, 1, 1, 64, 128, 1, False, True)),
    "packed segments": (in_segments, (100, 140, 90), (330, 1, 1, 64, 64, (5, 325), True, False)),
    "whole sequences": (two_kernels, (70, 80, 70), (220, 1, 2, 64, 64, 1, True, True)),
    "whole in one scan": (one_scan(2), (140, 80), (220, 1, 1, 64, 128, (40, 180), True, True)),
}


@pytest.mark.parametrize("way", EXCHANGES.values(), ids=EXCHANGES)
def test_exchanges_of_ranks(way: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of ranks for their parts of sequences, put together, are those of one for all."""
    from tests.support.lockstep import linear_on_ranks

    chosen, lengths, size = way
    terms = inputs(size)
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    want = wanted(terms, do, dfinal, size[0])
    chosen(monkeypatch)
    ran = as_numpy(monkeypatch)
    found = linear_on_ranks(terms, do, dfinal, lengths, scale=SCALE, impl="sm90")
    assert {"segment_transition", "dE"} <= set(ran)
    if terms.initial_state is None:
        del want["initial_state"]
    for name, x in want.items():
        bar = 1e-6 if name in ("beta", "g") else 1e-8  # those are in float32
        torch.testing.assert_close(found[name].double(), x.detach(), rtol=bar, atol=bar)


# Tokens of one rank, of two and of three, and rows or packed sequences.
BITS = {
    "rows": ((384,), (256, 128), (128, 0, 256), 2),
    "packed": ((430,), (168, 262), (40, 128, 262), (40, 390)),
}


@pytest.mark.parametrize("V", [64, 128], ids=["two kernels", "one"])
@pytest.mark.parametrize("cuts", BITS.values(), ids=BITS)
def test_bits_do_not_depend_on_the_ranks(
    cuts: tuple, V: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.lockstep import linear_on_ranks

    *lengths, batch = cuts
    terms = inputs((sum(lengths[0]), 1, 1, 64, V, batch, True, True))
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    ran = as_numpy(monkeypatch)
    options: dict[str, Any] = {"scale": SCALE, "impl": "sm90", "segment_tokens": 128}
    whole, *others = [linear_on_ranks(terms, do, dfinal, x, **options) for x in lengths]
    assert ("chunk_bwd" in ran) == (V == 128)
    for name, x in wanted(terms, do, dfinal, sum(lengths[0])).items():
        bar = 1e-6 if name in ("beta", "g") else 1e-8  # those are in float32
        torch.testing.assert_close(whole[name].double(), x.detach(), rtol=bar, atol=bar)
        assert all(torch.equal(found[name], whole[name]) for found in others), name
