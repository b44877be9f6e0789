"""The road of an attention call: its plan, its modes, and the pairs that exclude each other."""

from typing import Any

import pytest
import torch

from slipstream.kernels.attention import run
from slipstream.kernels.attention.inputs import Asked, AttentionInputs, AttentionOptions
from slipstream.kernels.attention.run import FORBIDDEN, MODES, Plan, make_plan
from slipstream.ops.attention import attention
from slipstream.runtime.consistent import BLOCK

CAUSAL = AttentionOptions(0.1, right=0)


def inputs(T: int = 3) -> AttentionInputs:
    return AttentionInputs(*(torch.randn(2, T, 4, 8) for _ in range(3)))


def plan(terms: AttentionInputs, same_bits: bool = False, **asked: Any) -> Plan:
    return make_plan(terms, CAUSAL, Asked(**asked), same_bits, None)


def test_modes_come_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "has_gradients", lambda impl, terms: False)
    monkeypatch.setattr(run, "_call_of", lambda *args: run.softmax)
    with torch.autocast("cpu", torch.bfloat16):
        assert plan(inputs(), True).modes == MODES[1:]
        assert plan(inputs(BLOCK + 1), True).modes == (run.AUTOCAST, run.OTHER_GRADIENTS)
    assert plan(inputs(), False).modes == (run.OTHER_GRADIENTS,)


def test_packed_rows_give_what_rows_give() -> None:
    terms = inputs()
    call = run.Call(terms, CAUSAL, "eager", run.softmax, Asked(lse=True), None)
    o, lse = run.softmax(terms, CAUSAL, "eager")
    got = run._through_modes(call, Plan("eager", run.softmax, (run.PACKED_ROWS,)))
    torch.testing.assert_close(got, (o, lse))


def test_plan_tells_one_tensor_of_offsets_from_two() -> None:
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    offsets, others = torch.tensor([0, 4, 9]), torch.tensor([0, 6, 9])
    attention(q, k, v, cu_seqlens=offsets, cu_seqlens_k=offsets)
    got = attention(q, k, v, cu_seqlens=offsets, cu_seqlens_k=others)
    want = [attention(q[:, :4], k[:, :6], v[:, :6]), attention(q[:, 4:], k[:, 6:], v[:, 6:])]
    torch.testing.assert_close(got, torch.cat(want, 1))


_GIVEN = {
    "acausal": (CAUSAL._replace(right=-1), Asked()),
    "later": (CAUSAL._replace(right=2), Asked()),
    "dropout": (CAUSAL._replace(dropout=0.5), Asked()), "reference": (CAUSAL, Asked("reference")),
    "compiling": (CAUSAL, Asked()), "context": (CAUSAL, Asked()),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other", "text"), FORBIDDEN, ids=lambda x: x[:20])
def test_forbidden_pair_raises(
    monkeypatch: pytest.MonkeyPatch, one: str, other: str, text: str
) -> None:
    monkeypatch.setattr(run, "is_compiling", lambda: other == "compiling")
    options, asked = _GIVEN[other]
    given = options, asked, one == "consistent", "context" in (one, other)
    with pytest.raises(NotImplementedError, match="^" + text.partition("{")[0]):
        run._expect_allowed(*given)
    if other != "compiling":
        run._expect_allowed(options, asked, False, False)
