"""Early rows of the Gluon kernels of per-channel decay keep their bits, in the emulator that rounds
(tests/gluon_emulator/rounding.py): chunks that later gates make strong or weak are made by another
kernel, which has to round alike."""

import functools
import importlib
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import threads
from tests.gluon_emulator.rounding import language, rounded
from tests.support.sm90_dplr import CASES, PARTS, inputs, kernels_in_float64, prepared

GATES = {
    "weak": lambda x: -0.1 * x,
    "all -5": lambda x: 0 * x - 5,
    "last -5": lambda x: torch.where(torch.arange(x.shape[-1]) < x.shape[-1] // 2, -0.1 * x, -5),
    "all -2": lambda x: 0 * x - 2,
    "to -9": lambda x: -9 * x,
    "strong": lambda x: -50 * x,
    "resets": lambda x: torch.where(x < 0.03, -torch.inf, -0.1 * x),
    "mixed": lambda x: torch.where(x < 0.2, -250 * x, -0.1 * x),
    # a half, or every other quarter, near 2^-160
    "half": lambda x: torch.where(torch.arange(64)[:, None, None] < 32, -3.4, -0.1 * x),
    "quarters": lambda x: torch.where(torch.arange(64)[:, None, None] % 32 < 16, -6.9, -0.1 * x),
    "between": lambda x: torch.where(torch.arange(64)[:, None, None] % 32 < 16, -0.1 * x, -6.9),
    # growth by 2^12 in the second half
    "above 0": lambda x: torch.where(torch.arange(64)[:, None, None] // 28 == 1, 0.3, -0.1 * x),
    "peaks": lambda x: torch.where(torch.arange(64)[:, None, None] % 7 == 3, -50.0, -0.1 * x),
}
# gates of the chunk, and from a token on
CHANGES = [
    ("weak", "strong", 21),
    ("weak", "strong", 40),
    ("weak", "resets", 40),
    ("strong", "weak", 2),
    ("strong", "weak", 21),
    ("all -5", "weak", 12),
    ("all -5", "weak", 50),
    ("all -5", "strong", 40),
    ("weak", "all -5", 21),
    ("weak", "last -5", 10),
    ("last -5", "strong", 50),
    ("to -9", "strong", 60),
    ("mixed", "mixed", 40),
    ("weak", "all -2", 21),
    ("above 0", "strong", 60),
]
OF_SMALL = [
    ("half", "weak", 12),
    ("weak", "half", 3),
    ("weak", "strong", 21),
    ("quarters", "weak", 40),
    ("between", "weak", 20),
    ("between", "quarters", 40),
    ("peaks", "weak", 12),
]


@functools.cache
def kernels() -> SimpleNamespace:
    with emulator.emulated():
        vars(sys.modules["slipstream.kernels.primitives.gluon_compat"].gl).update(language())
        names = ("dplr.wy", "dplr.intra_safe", "common.device")
        made = [importlib.import_module(PARTS + name) for name in names]
    return SimpleNamespace(
        weak=made[0].dplr_wy_sm90_kernel, strong=made[1].dplr_intra_safe_sm90_kernel, exp2=made[2]
    )


def chunk_of(case: str, gates: str, dtype: torch.dtype, seed: int) -> LinearInputs:
    """One chunk of numbers that dtype and, of gates, float32 have."""
    _, H, HV, K, V, _, *of = CASES[case]
    terms = inputs((64, H, HV, K, V, 1, *of), GATES[gates], seed)
    exact = {}
    for name, x in terms._asdict().items():
        if isinstance(x, Tensor):
            exact[name] = x.to(torch.float32 if name == "g" else dtype).double()
    return terms._replace(**exact)


@pytest.mark.parametrize(("gates", "later", "cut"), CHANGES)
@pytest.mark.parametrize("case", ["kda", "dplr", "gdn2"])
def test_later_gates_change_no_bit(case: str, gates: str, later: str, cut: int) -> None:
    check(case, gates, later, cut, torch.bfloat16)


@pytest.mark.parametrize(("gates", "later", "cut"), CHANGES[:4])
def test_later_gates_change_no_bit_of_float16(gates: str, later: str, cut: int) -> None:
    check("dplr", gates, later, cut, torch.float16)


@pytest.mark.parametrize("small", [24, 40, 60])
@pytest.mark.parametrize(("gates", "later", "cut"), OF_SMALL)
@pytest.mark.parametrize("case", ["kda", "dplr", "gdn2"])
def test_later_gates_change_no_bit_of_small_keys(
    case: str, gates: str, later: str, cut: int, small: int
) -> None:
    """Keys times 2^-small, of which no entry, nor what is erased of it, is below 2^-70 but 0."""
    check(case, gates, later, cut, torch.bfloat16, small)


def made_small(terms: LinearInputs, small: int) -> LinearInputs:
    made = {}
    for name in ("k", "b"):
        x = getattr(terms, name)
        if x is not None:
            x = x * 2.0**-small
            made[name] = torch.where(x.abs() < 2.0**-68, 0.0, x)
    if small and terms.erase is not None:
        made["erase"] = terms.erase.clamp_min(0.25)
    return terms._replace(**made)


def check(case: str, gates: str, later: str, cut: int, dtype: torch.dtype, small: int = 0) -> None:
    terms, future = chunk_of(case, gates, dtype, 0), chunk_of(case, later, dtype, 1)
    terms, future = made_small(terms, small), made_small(future, small)
    later_terms = future._asdict()
    changed = terms._replace(**{
        name: torch.cat([x[:, :cut], later_terms[name][:, cut:]], 1)
        for name, x in terms._asdict().items() if isinstance(x, Tensor)
    })  # fmt: skip
    limits = 80.0, 55.0
    if dtype == torch.float16:
        limits = 3.0, 0.0
    with rounded(dtype):
        want, got = (prepared(x, True, kernels(), limits) for x in (terms, changed))
    assert not torch.equal(want["strong"], got["strong"]) or want["strong"].min() >= 2
    for name in ("q", "w", "u", "qb", "qk", "ak", "r"):
        if want[name] is not None:
            x, y = (made[name].mT if name == "u" else made[name] for made in (want, got))
            x, y = x[:, :, :cut], y[:, :, :cut]
            # of what is less bf16 has fewer digits, or none
            x, y = (torch.where(z.abs() < 2.0**-112, 0.0, z) for z in (x, y))
            assert torch.equal(x, y), f"{name}: {(x != y).nonzero()[:3].tolist()}"


def test_exp2_and_its_inverse_have_the_bits_of_each() -> None:
    of = kernels().exp2
    with rounded():
        b = threads.tensor(np.arange(-124 * 2**12, 124 * 2**12 + 1) / 2**12)
        read, write = of.exp2_and_inverse(b)
        np.testing.assert_array_equal(read, of.exp2_by_parts(b))
        np.testing.assert_array_equal(write, of.exp2_by_parts(-b))
        whole = threads.tensor(np.arange(-125.0, 126.0))
        np.testing.assert_array_equal(of.exp2_of_whole(whole), of.exp2_by_parts(whole))
        with np.errstate(invalid="ignore"):
            assert np.isnan(of.exp2_and_inverse(threads.tensor(np.full(1, np.nan)))).all()


@pytest.mark.parametrize("case", ["kda", "dplr", "gdn2"])
def test_writes_of_a_quarter_outlive_its_decay(case: str) -> None:
    """The last ones, whose operands are the largest, of a quarter that decays by 2^-159, and what
    is left of them in 40 more: exp2 of the difference alone is below what float32 has."""
    of_quarters = torch.tensor([-20.0, -159.0, -25.0, -15.0]).repeat_interleave(16)
    _, H, HV, K, V, _, *of = CASES[case]
    gates = (of_quarters / 16 * math.log(2))[:, None, None]
    terms = inputs((64, H, HV, K, V, 1, *of), lambda x: 0 * x + gates)
    # small ones would make the quarter strong
    for name in ("q", "k", "a", "b", "erase"):
        x = getattr(terms, name)
        if x is not None:
            terms = terms._replace(**{name: torch.where(x.abs() < 2.0**-9, 2.0**-9, x)})
    with rounded(torch.bfloat16):
        made = prepared(terms, True, kernels())
    assert made["strong"].eq(2).all()  # by quarters
    assert terms.g is not None
    later = terms.g[0].flip(0)
    to_end = (later.cumsum(0) - later).flip(0).exp().transpose(0, 1)
    writes = {"b": terms.k if terms.b is None else terms.b, "k": terms.k}
    for name, x in writes.items():
        if made[name] is not None:
            want = to_end * x[0].transpose(0, 1)
            torch.testing.assert_close(made[name][0][:, 28:], want[:, 28:], rtol=2**-6, atol=0)


def test_scores_of_small_reads_have_digits_in_float16() -> None:
    """Of reads near 2^-9 where a half decays by 2^-6: relative to a place too far away they would
    be less than float16 has digits for."""
    _, H, HV, K, V, _ = CASES["dplr"][:6]
    terms = inputs((64, H, HV, K, V, 1, *CASES["dplr"][6:]), lambda x: 0 * x - 6 * math.log(2) / 32)
    exact = {
        name: x.to(torch.float32 if name == "g" else torch.float16).double()
        for name, x in terms._asdict().items()
        if isinstance(x, Tensor)
    }
    terms = terms._replace(**{**exact, "q": exact["q"] * 2.0**-9})
    want = prepared(terms, True, kernels_in_float64(), (3.0, 0.0))
    with rounded(torch.float16):
        got = prepared(terms, True, kernels(), (3.0, 0.0))
    for name in ("qb", "qk"):
        off = (got[name] - want[name]).norm(dim=-1) / want[name].norm(dim=-1).clamp(min=1e-30)
        assert off.max() <= 4e-3, name
