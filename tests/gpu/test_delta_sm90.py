"""The delta rule's scans in Gluon on sm_90: the oracle's numbers, twice the same bits."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear import segments
from slipstream.kernels.linear.backend import SavedWY
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import CHUNK, TILE_V
from slipstream.kernels.linear.sm90 import plan
from tests.gpu.delta_runs import BARS, LIMIT, SIZES, channels, inputs
from tests.gpu.sm90_runs import LENGTHS, MARKS, SCALE, expect, gradients_of_results, reference, run

pytestmark = MARKS


def scans(terms: LinearInputs, do: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
    from slipstream.kernels.linear.sm90.delta.backend import Sm90Delta
    from slipstream.kernels.linear.triton.delta.backend import TritonDelta

    class Wide(Sm90Delta):
        def _use_2tile(self, terms: LinearInputs) -> bool:
            return True

    wy = TritonDelta().solve_tril(terms)
    delta = Sm90Delta()
    o, dv = torch.empty_like(do), torch.empty_like(do)
    final, dinitial = torch.empty_like(dfinal), torch.empty_like(dfinal)
    (HV, V), K = do.shape[2:], terms.q.shape[-1]
    dstates = do.new_empty(do.shape[0] * do.shape[1] // CHUNK + 8, HV, V, K)
    delta.chunk_fwd(terms, wy, SCALE, o, s_in=terms.initial_state, s_out=final)
    ends = {"s_in": dfinal, "s_out": dinitial, "segments": None}
    delta.chunk_dstate(terms, do, wy, SCALE, dv, dstates, **ends)
    made = {"o": o, "final": final, "dv": dv, "dinitial": dinitial}
    if V % (2 * TILE_V) == 0:
        made |= {"wide o": torch.empty_like(o), "wide final": torch.empty_like(final)}
        ends = {"s_in": terms.initial_state, "s_out": made["wide final"]}
        Wide().chunk_fwd(terms, wy, SCALE, made["wide o"], **ends)
    return made


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_delta_scans_match_reference(size: tuple, gated: bool) -> None:
    torch.manual_seed(0)
    terms = inputs(size, gated)
    assert plan.unsupported_reason(terms) is None
    do, dfinal = gradients_of_results(terms)
    want = reference(terms, do, dfinal)
    want |= {"dv": want["v"], "dinitial": want["initial_state"]}
    want |= {"wide o": want["o"], "wide final": want["final"]}
    expect(lambda: scans(terms, do, dfinal), want, {}, LIMIT)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_delta_rule_of_more_programs_than_multiprocessors(gated: bool) -> None:
    """The scan of two tiles of V a program: every head as it is alone, the same bits twice."""
    from slipstream.kernels.linear.sm90.delta import backend

    torch.manual_seed(0)
    terms = inputs((2, 200, 40, 40, 128, 128, None), gated)
    assert backend.Sm90Delta()._use_2tile(terms)
    do, dfinal = gradients_of_results(terms)

    def both(given: LinearInputs, heads: slice) -> dict[str, Tensor]:
        o, final, *left = backend.forward(given, SCALE, save=True)
        solved = SavedWY(*left)
        dout, dend = do[:, :, heads].contiguous(), dfinal[:, heads].contiguous()
        return {
            "o": o, "final": final, **backend.backward(given, dout, dend, SCALE, saved=solved)
        }  # fmt: skip

    got, again = both(terms, slice(None)), both(terms, slice(None))
    few = slice(7, 9)
    alone = terms._replace(
        initial_state=terms.initial_state[:, few].contiguous(),
        **{
            name: x[:, :, few].contiguous()
            for name in ("q", "k", "v", "g", "beta")
            if (x := getattr(terms, name)) is not None
        },
    )
    assert not backend.Sm90Delta()._use_2tile(alone)
    for name, want in both(alone, few).items():
        assert torch.equal(got[name], again[name]), name
        heads = got[name][:, few] if want.shape[1] == 2 else got[name][:, :, few]
        error = (heads.double() - want.double()).norm() / want.double().norm()
        assert error <= 2 * LIMIT, (name, error)


SPLITS = {  # how strong gates are, and what cuts T
    "faint": (0.001, None),
    "weak": (0.1, None),
    "strong": (2.0, None),
    "packed": (0.05, (5, 475)),
    "a slot more than segments": (0.05, (100, 0, 380)),
}


@pytest.mark.parametrize("kept", [False, True], ids=["anew", "kept"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_delta_segments_match_reference(
    split: tuple, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.kernels.linear.sm90.delta import backend

    monkeypatch.setattr(segments, "MIN_SEGMENT_CHUNKS", 1)
    monkeypatch.setattr(segments, "MIN_CHUNKS_SAVED", 1)
    torch.manual_seed(0)
    strength, lengths = split
    terms = inputs((1, 480, 1, 2, 128, 128, lengths), False)
    g = -strength * torch.rand(1, 480, 2, device="cuda")
    terms = terms._replace(g=g)
    assert segments.delta_sm90(terms) is not None
    do, dfinal = gradients_of_results(terms)

    def both() -> dict[str, Tensor]:
        o, final, *left = backend.forward(terms, SCALE, save=True)
        given = SavedWY(*left) if kept else None
        return {"o": o, "final": final, **backend.backward(terms, do, dfinal, SCALE, saved=given)}

    expect(both, reference(terms, do, dfinal), {}, 2 * LIMIT)


@pytest.mark.parametrize(("heads", "together"), [(3, 3), (4, 4), (6, 3)])
def test_gradients_of_shared_heads_match_reference(heads: int, together: int) -> None:
    """Three and four add theirs up by TMA; of six so do three and three, and a kernel the rest."""
    from slipstream.kernels.linear.sm90.delta import backend

    torch.manual_seed(0)
    terms = inputs((1, 270, 2, 2 * heads, 128, 128, LENGTHS), False)
    terms = terms._replace(g=-0.3 * torch.rand(1, 270, 2 * heads, device="cuda"))
    assert backend.Sm90Delta().heads_per_sum(terms) == together
    do, dfinal = gradients_of_results(terms)
    expect(lambda: run(backend, terms, do, dfinal), reference(terms, do, dfinal), {}, 2 * LIMIT)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gates", ["weak", "middling", "strong"])
@pytest.mark.parametrize("kind", ["kda", "dplr", "gdn2"])
def test_gates_a_channel_match_reference(
    kind: str, gates: str, dtype: torch.dtype, lengths: tuple | None
) -> None:
    from slipstream.kernels.linear.sm90.dplr import backend

    torch.manual_seed(0)
    terms = channels(kind, gates, dtype, lengths)
    do, dfinal = gradients_of_results(terms)
    assert plan.unsupported_reason(terms) is None
    assert backend.supports_dqkg(terms, do)
    want = reference(terms, do, dfinal)
    got = expect(lambda: run(backend, terms, do, dfinal), want, BARS, 8e-3)
    assert got["g"].dtype == dtype
