"""Early rows of the Gluon scan with a decay per channel keep their bits, in the emulator that
rounds (tests/gluon_emulator/rounding.py): later gates choose how strong chunks make scores."""

import functools
import importlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import rounding
from tests.support import sm90_vector_decay

GATES = {
    "weak": lambda x: -0.1 * x,
    "to -4": lambda x: -4 * x,
    "to -5": lambda x: -5 * x,  # halves near 2^-115, the strongest near 2^-150
    "all -5": lambda x: 0 * x - 5,
    "last -5": lambda x: torch.where(torch.arange(x.shape[-1]) < x.shape[-1] // 2, -0.1 * x, -5),
    "to -9": lambda x: -9 * x,
    "strong": lambda x: -50 * x,
    "resets": lambda x: torch.where(x < 0.03, -torch.inf, -0.1 * x),
    "mixed": lambda x: torch.where(x < 0.2, -250 * x, -0.1 * x),
    # a half near 2^-160
    "half": lambda x: torch.where(torch.arange(64)[:, None, None] < 32, -3.4, -0.1 * x),
}
# gates of the chunk, and from a token on
CHANGES = [
    ("weak", "to -5", 21),
    ("weak", "strong", 40),
    ("weak", "half", 3),
    ("to -5", "weak", 40),
    ("to -5", "all -5", 20),
    ("to -5", "strong", 40),
    ("to -5", "half", 33),
    ("to -4", "resets", 33),
    ("to -4", "to -9", 25),
    ("half", "weak", 12),
    ("half", "to -5", 33),
    ("all -5", "weak", 50),
    ("last -5", "to -5", 20),
    ("to -9", "to -5", 45),
    ("strong", "weak", 21),
    ("mixed", "mixed", 40),
]


@functools.cache
def kernel() -> Any:
    with emulator.emulated():
        language = vars(sys.modules["slipstream.kernels.primitives.gluon_compat"].gl)
        language.update(rounding.language())
        module = importlib.import_module("slipstream.kernels.linear.sm90.vector_decay.chunk_fwd")
    return module.vector_decay_chunk_fwd_sm90_kernel


def chunk_of(gates: str, before: bool, seed: int, small: int = 0) -> LinearInputs:
    """One chunk of numbers that bfloat16 has; keys times 2^-small."""
    terms = sm90_vector_decay.inputs((64, 1, 1, 1, "weak", before, True))
    torch.manual_seed(seed)
    drawn = {"q": terms.q, "k": terms.k * 2.0**-small, "v": terms.v}
    drawn = {n: x * (1 + 0.1 * seed * torch.rand_like(x)) for n, x in drawn.items()}
    drawn["g"] = GATES[gates](torch.rand(64, 1, 128, dtype=torch.float64))[None]
    return terms._replace(**{n: x.bfloat16().double() for n, x in drawn.items()})


def scan(terms: LinearInputs) -> tuple[Tensor, Tensor]:
    final = torch.empty(*terms.state_shape, dtype=torch.float64)
    with rounding.rounded():
        o = sm90_vector_decay.scan(kernel(), terms, terms.v, terms.initial_state, final)
    return o, final


@pytest.mark.parametrize("small", [0, 40])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("gates", "later", "cut"), CHANGES)
def test_later_gates_change_no_bit(
    gates: str, later: str, cut: int, before: bool, small: int
) -> None:
    terms, future = (chunk_of(x, before, i, small) for i, x in enumerate((gates, later)))
    names = ("q", "k", "v", "g")
    changed = terms._replace(**{
        x: torch.cat([getattr(terms, x)[:, :cut], getattr(future, x)[:, cut:]], 1) for x in names
    })  # fmt: skip
    (want, _), (got, _) = scan(terms), scan(changed)
    assert torch.equal(want[:, :cut], got[:, :cut])
    assert not torch.equal(want[:, cut:], got[:, cut:])


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("gates", GATES)
def test_errors_are_those_of_bfloat16(gates: str, before: bool) -> None:
    terms = chunk_of(gates, before, 0)
    for got, want in zip(scan(terms), linear_reference(terms, sm90_vector_decay.SCALE)):
        assert (got - want).norm() < 5e-3 * want.norm()
