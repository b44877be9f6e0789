"""The Gluon kernels of the linear family in the emulator that rounds as a GPU does
(tests/gluon_emulator/rounding.py). Early rows keep their bits: later gates choose how chunks make
scores, and chunks that they make strong or weak may be made by another kernel, which has to round
alike."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import launches, threads
from tests.gluon_emulator.rounding import rounded
from tests.support import wants
from tests.support.causality import with_other_future
from tests.support.sm90_linear import (
    GATES,
    SCALE,
    C,
    backend,
    end_of,
    fused_by,
    in_dtype,
    inputs,
    mixed,
)

pytestmark = wants.compiler
SIZES = {"gla": (64, 1, 1, 128, 128), "dplr": (64, 1, 2, 64, 64)}
SIZES |= dict.fromkeys(("kda", "gdn2"), (64, 1, 2, 128, 64))
BF16, FP16 = torch.bfloat16, torch.float16
# gates of the chunk, and from a token on
CHANGES = {
    "gla": [
        ("weak", "to 5", 21), ("weak", "to 50", 40), ("weak", "half", 3), ("to 5", "weak", 40),
        ("to 5", "-5", 20), ("to 5", "to 50", 40), ("to 5", "half", 33), ("to 4", "resets", 33),
        ("to 4", "to 9", 25), ("half", "weak", 12), ("half", "to 5", 33), ("-5", "weak", 50),
        ("last -5", "to 5", 20), ("to 9", "to 5", 45), ("to 50", "weak", 21),
        ("mixed", "mixed", 40),
    ],
    "dplr": [
        ("weak", "to 50", 21), ("weak", "to 50", 40), ("weak", "resets", 40), ("to 50", "weak", 2),
        ("to 50", "weak", 21), ("-5", "weak", 12), ("-5", "weak", 50), ("-5", "to 50", 40),
        ("weak", "-5", 21), ("weak", "last -5", 10), ("last -5", "to 50", 50),
        ("to 9", "to 50", 60), ("mixed", "mixed", 40), ("weak", "-2", 21), ("above 0", "to 50", 60),
    ],
    "small": [
        ("half", "weak", 12), ("weak", "half", 3), ("weak", "to 50", 21), ("quarters", "weak", 40),
        ("between", "weak", 20), ("between", "quarters", 40), ("peaks", "weak", 12),
    ],
}  # fmt: skip


def made_small(terms: LinearInputs, small: int) -> LinearInputs:
    """Keys times 2^-small, of which no entry, nor what is erased of it, is below 2^-70 but 0."""
    made = {}
    for name in ("k", "b"):
        x = getattr(terms, name)
        if x is not None and small:
            x = x * 2.0**-small
            made[name] = torch.where(x.abs() < 2.0**-68, 0.0, x)
    if small and terms.erase is not None:
        made["erase"] = terms.erase.clamp_min(0.25)
    return terms._replace(**made)


def chunk(kind: str, gates: str, dtype: torch.dtype, seed: int, small: int = 0) -> LinearInputs:
    terms = inputs(kind, SIZES[kind], 1, gates, kind == "gla", seed)
    return made_small(in_dtype(terms, dtype), small)


def prepared(terms: LinearInputs) -> dict[str, Tensor]:
    """What does not need the state."""
    launch = backend("dplr").BACKEND
    intra = launch._empty_intra_chunk(terms, for_backward=True)
    launch.intra_chunk(terms, SCALE, intra, for_backward=True)
    return {n: x for n, x in intra._asdict().items() if x is not None}


def expect_equal_bits(
    monkeypatch: pytest.MonkeyPatch, kind: str, change: tuple, dtype: torch.dtype, small: int
) -> None:
    gates, later, cut = change
    terms, future = (chunk(kind, x, dtype, i, small) for i, x in enumerate((gates, later)))
    launches.as_numpy(monkeypatch, dtype, rounds=True)
    with rounded(dtype):
        want, got = (prepared(x) for x in (terms, mixed(terms, future, cut)))
    assert not torch.equal(want["strong"], got["strong"]) or want["strong"].min() >= 2
    for name in ("q", "w", "u", "qb", "qk", "ak", "r"):
        if name in want:
            x, y = (made[name].mT if name == "u" else made[name] for made in (want, got))
            x, y = x[:, :, :cut], y[:, :, :cut]
            # of what is less bf16 has fewer digits, or none
            x, y = (torch.where(z.abs() < 2.0**-112, 0.0, z) for z in (x, y))
            assert torch.equal(x, y), f"{name}: {(x != y).nonzero()[:3].tolist()}"


@pytest.mark.parametrize("change", CHANGES["dplr"], ids=str)
@pytest.mark.parametrize("kind", ["kda", "dplr", "gdn2"])
def test_later_gates_change_no_bit(
    kind: str, change: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_equal_bits(monkeypatch, kind, change, BF16, 0)
    if kind == "dplr" and change in CHANGES["dplr"][:4]:
        expect_equal_bits(monkeypatch, kind, change, FP16, 0)


@pytest.mark.parametrize("small", [24, 40, 60])
@pytest.mark.parametrize("change", CHANGES["small"], ids=str)
@pytest.mark.parametrize("kind", ["kda", "dplr", "gdn2"])
def test_later_gates_change_no_bit_of_small_keys(
    kind: str, change: tuple, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_equal_bits(monkeypatch, kind, change, BF16, small)


@pytest.mark.parametrize("small", [0, 40])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("change", CHANGES["gla"], ids=str)
def test_later_gates_change_no_bit_of_a_scan(
    change: tuple, before: bool, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates, later, cut = change
    terms, future = (chunk("gla", x, BF16, i, small) for i, x in enumerate((gates, later)))
    u = in_dtype(inputs("gla", SIZES["gla"], before=True)).u if before else None
    launches.as_numpy(monkeypatch, rounds=True)
    with rounded():
        want, got = (
            backend("gla").forward(x._replace(u=u), SCALE)[0]
            for x in (terms, mixed(terms, future, cut))
        )
    assert torch.equal(want[:, :cut], got[:, :cut])
    assert not torch.equal(want[:, cut:], got[:, cut:])


OF_SCANS = {gates for *pair, _ in CHANGES["gla"] for gates in pair}
OF_FUSED = ("to 0.1", "to 50", "a token of -200", "-200 and 0", "three of -inf", "-1", "-5", "-7")
OF_FUSED += ("-20", "-inf")
ERRORS = {f"gla, {gates}": ("gla", SIZES["gla"], 1, gates) for gates in sorted(OF_SCANS)}
ERRORS |= {
    f"{kind} fused, {gates}": (kind, (210, 1, 1, 128, 128), (64, 5, 0, 130), gates)
    for kind, gates in [("delta", ""), *((k, g) for k in ("kda", "delta") for g in OF_FUSED)]
}
ERRORS |= {
    f"kda fused, cut, {gates}": ("kda", (270, 1, 1, 128, 128), 1, gates)
    for gates in ("to 0.1", "own", "by blocks", "to 50")
}


@pytest.mark.parametrize("call", ERRORS.values(), ids=ERRORS)
def test_errors_are_those_of_bfloat16(call: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, (T, *_), *_ = call
    fused_by(C if T > 210 else None)(monkeypatch)
    launches.as_numpy(monkeypatch, rounds=True)
    for before in (False, True)[: 1 + (kind == "gla")]:
        terms = in_dtype(inputs(*call, before=before))
        end = end_of(terms)
        with rounded():
            o, final = backend(kind).forward(terms, SCALE)
        assert o[:, end:].isnan().all()
        wanted = linear_reference(terms.of_tokens(lambda x: x[:, :end]), SCALE)  # noqa: B023
        # with the diagonals of M and P in bf16 kda's o would be 4.0e-3 off and more
        limits = (5e-3, 5e-3) if kind == "gla" else (3.95e-3, 9e-3)
        for got, want, limit in zip((o[:, :end], final), wanted, limits):
            assert (got - want).norm() <= limit * want.norm().clamp(min=1e-30)


@pytest.mark.parametrize(
    ("gates", "cut", "strength"), [("to 0.1", 25, 2e4), ("-20", 21, 1e-3), ("to 50", 70, 1.0)]
)
@pytest.mark.parametrize("kind", ["kda", "kda cut", "delta"])
def test_fused_past_keeps_its_bits(
    kind: str, gates: str, cut: int, strength: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the future's tokens and gates; chunks change from weak to strong and back, and what
    is before a segment from what counts to what does not."""
    kind, tokens = kind.split()[0], C if "cut" in kind else None
    T = 140 if tokens is None else 270
    cut += T - 140
    terms = in_dtype(inputs(kind, (T, 1, 1, 128, 128), 1, gates))
    other = in_dtype(with_other_future(terms, cut, strength))
    fused_by(tokens)(monkeypatch)
    launches.as_numpy(monkeypatch, rounds=True)
    with rounded():
        want, got = (backend(kind).forward(x, SCALE)[0] for x in (terms, other))
    assert torch.equal(got[:, :cut], want[:, :cut])
    assert not torch.equal(got[:, cut:], want[:, cut:])


def test_exp2_and_its_inverse_have_the_bits_of_each() -> None:
    launches.module("slipstream.kernels.linear.sm90.dplr.wy", True)
    of = launches.module("slipstream.kernels.linear.sm90.common", True)
    with rounded():
        b = threads.tensor(np.arange(-124 * 2**12, 124 * 2**12 + 1) / 2**12)
        read, write = of.exp2_and_inverse(b)
        np.testing.assert_array_equal(read, of.exp2_by_parts(b))
        np.testing.assert_array_equal(write, of.exp2_by_parts(-b))
        whole = threads.tensor(np.arange(-125.0, 126.0))
        np.testing.assert_array_equal(of.exp2_of_whole(whole), of.exp2_by_parts(whole))
        with np.errstate(invalid="ignore"):
            assert np.isnan(of.exp2_and_inverse(threads.tensor(np.full(1, np.nan)))).all()


@pytest.mark.parametrize("kind", ["kda", "dplr", "gdn2"])
def test_writes_of_a_quarter_outlive_its_decay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones, whose operands are the largest, of a quarter that decays by 2^-159, and what
    is left of them in 40 more: exp2 of the difference alone is below what float32 has."""
    of_quarters = torch.tensor([-20.0, -159.0, -25.0, -15.0]).repeat_interleave(16)
    gates = (of_quarters / 16 * math.log(2))[:, None, None]
    monkeypatch.setitem(GATES, "quarters apart", lambda x: 0 * x + gates)
    terms = inputs(kind, SIZES[kind], 1, "quarters apart", False)
    # small ones would make the quarter strong
    for name in ("q", "k", "a", "b", "erase"):
        x = getattr(terms, name)
        if x is not None:
            terms = terms._replace(**{name: torch.where(x.abs() < 2.0**-9, 2.0**-9, x)})
    launches.as_numpy(monkeypatch, rounds=True)
    with rounded():
        made = prepared(terms)
    assert made["strong"].eq(2).all()  # by quarters
    assert terms.g is not None
    later = terms.g[0].flip(0)
    to_end = (later.cumsum(0) - later).flip(0).exp().transpose(0, 1)
    writes = {"b": terms.k if terms.b is None else terms.b, "k": terms.k}
    for name, x in writes.items():
        if name in made:
            want = to_end * x[0].transpose(0, 1)
            torch.testing.assert_close(made[name][0][:, 28:], want[:, 28:], rtol=2**-6, atol=0)


def test_scores_of_small_reads_have_digits_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of reads near 2^-9 where a half decays by 2^-6: relative to a place too far away they would
    be less than float16 has digits for."""
    monkeypatch.setitem(GATES, "of a half", lambda x: 0 * x - 6 * math.log(2) / 32)
    terms = in_dtype(inputs("dplr", SIZES["dplr"], 1, "of a half", False), FP16)
    terms = terms._replace(q=terms.q * 2.0**-9)
    with monkeypatch.context() as exactly:
        launches.as_numpy(exactly, FP16)
        want = prepared(terms)
    launches.as_numpy(monkeypatch, FP16, rounds=True)
    with rounded(FP16):
        got = prepared(terms)
    for name in ("qb", "qk"):
        off = (got[name] - want[name]).norm(dim=-1) / want[name].norm(dim=-1).clamp(min=1e-30)
        assert off.max() <= 4e-3, name


@pytest.mark.parametrize("gates", ["weak", "to 50", "resets"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_diagonals_of_scores_are_those_of_one_token(
    dtype: torch.dtype, gates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its gates, and whichever kernel makes them."""
    terms = chunk("dplr", gates, dtype, 0)
    launches.as_numpy(monkeypatch, dtype)
    made = prepared(terms)
    for name, x in (("qb", terms.b), ("qk", terms.k)):
        assert x is not None
        want = SCALE * (terms.q * x).double().sum(-1)[0].mT
        got = made[name][0].diagonal(dim1=-2, dim2=-1).double()
        torch.testing.assert_close(got, want.expand(2, 64), rtol=1e-6, atol=1e-9)
