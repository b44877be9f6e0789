"""The forward of KDA and of the delta rule in one kernel each on sm_90: the oracle's numbers, equal
bits, at gates of any size."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.linear import segments
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.sm90.delta import backend as delta
from slipstream.kernels.linear.sm90.dplr import backend
from tests.gpu.delta_runs import BARS
from tests.gpu.sm90_runs import MARKS, SCALE, expect, gradients_of_results, offsets, reference
from tests.gpu.sm90_runs import run as both
from tests.support import sm90_linear
from tests.support.causality import with_other_future

pytestmark = MARKS
LENGTHS = (150, 64, 5, 0, 130)
GATES = {
    n: sm90_linear.GATES[n]
    for n in ("to 0.1", "to 50", "a token of -200", "-200 and 0", "three of -inf")
    + ("-1", "-5", "-7", "-20", "-inf", "by blocks")
}
# B, T, H, HV, lengths of packed sequences
ROWS, PACKED, MANY = (2, 150, 1, 2, None), (1, 349, 1, 2, LENGTHS), (2, 130, 35, 70, None)
# in segments of 128 tokens
CUT, PACKED_CUT = (2, 1290, 2, 4, None), (1, 1700, 1, 2, (1200, 0, 100, 400))


@pytest.fixture(autouse=True)
def _of_few_heads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(terms: LinearInputs) -> segments.Segments | None:
        return segments.split_into_segments(terms, 128 if terms.v.shape[1] > 1000 else None)

    monkeypatch.setattr(backend.segmentation, "uses_fused_fwd", lambda terms: True)
    monkeypatch.setattr(backend.segmentation, "fused_fwd_sm90", cut)
    monkeypatch.setattr(delta.Sm90Delta, "fuses", lambda self, terms: True)


def terms_of(size: tuple, gates: str) -> LinearInputs:
    torch.manual_seed(0)
    B, T, H, HV, lengths = size
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = (torch.randn(B, T, H, 128, **make) for _ in range(2))
    v, beta = torch.randn(B, T, HV, 128, **make), 2 * torch.rand(B, T, HV, device="cuda")
    g = GATES[gates](torch.rand(B, T, HV, 128, device="cuda"))
    state = torch.randn(len(lengths or range(B)), HV, 128, 128, device="cuda")
    terms = LinearInputs(q, F.normalize(k, dim=-1), v, g=g, beta=beta, initial_state=state)
    return terms._replace(cu_seqlens=offsets(lengths))


def of_tokens(terms: LinearInputs) -> LinearInputs:
    """With a channel's gates for the delta rule."""
    assert terms.g is not None
    return terms._replace(g=terms.g[..., 0].contiguous())


def run(terms: LinearInputs) -> dict[str, Tensor]:
    launch = backend if terms.decay == "channel" else delta
    return dict(zip(("o", "final"), launch.forward(terms, SCALE)))


def check(terms: LinearInputs) -> None:
    state = None if terms.initial_state is None else terms.initial_state.double()
    wide = terms.of_tokens(Tensor.double)._replace(initial_state=state)
    want = {n: x.cpu() for n, x in zip(("o", "final"), linear_reference(wide, SCALE))}
    expect(lambda: run(terms), want, {}, 5e-3)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize(
    "size", [ROWS, PACKED, MANY, CUT, PACKED_CUT], ids=["rows", "packed", "many", "cut", "both"]
)
def test_fused_kda_matches_reference(size: tuple, gates: str) -> None:
    check(terms_of(size, gates))
    check(of_tokens(terms_of(size, gates)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_kda_without_state_and_of_any_beta(dtype: torch.dtype) -> None:
    terms = terms_of(PACKED, "-1")._replace(initial_state=None)
    assert terms.beta is not None
    for beta in (0 * terms.beta, 0 * terms.beta + 1, terms.beta):
        check(terms._replace(beta=beta.to(dtype)))
        check(of_tokens(terms)._replace(beta=beta.to(dtype)))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize(
    ("size", "cuts"), [(ROWS, (5, 21, 70, 140)), (CUT, (70, 300, 1000))], ids=["rows", "cut"]
)
def test_fused_kda_past_keeps_its_bits(size: tuple, cuts: tuple, gates: str) -> None:
    both = terms_of(size, gates), of_tokens(terms_of(size, gates))
    for terms, cut, strength in itertools.product(both, cuts, (1e-3, 1.0, 90.0)):
        want, got = (run(x)["o"] for x in (terms, with_other_future(terms, cut, strength)))
        assert torch.equal(got[:, :cut], want[:, :cut]), (cut, strength)


@pytest.mark.parametrize(("size", "gates"), [(ROWS, "to 50"), (PACKED, "-1")])
def test_fused_kda_gradients_match_reference(size: tuple, gates: str) -> None:
    terms = terms_of(size, gates)
    ends = gradients_of_results(terms)
    expect(lambda: both(backend, terms, *ends), reference(terms, *ends), BARS, 8e-3)
