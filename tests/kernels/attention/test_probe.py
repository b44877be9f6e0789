"""The probe of attention's kernels, with plain torch in the place of the kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import eager, op, probe
from slipstream.kernels.attention.cache import Cache
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.runtime import kernel_pair

OFFSETS = torch.tensor([0, 20, 300], dtype=torch.int32)
LENGTHS = torch.tensor([300, 7], dtype=torch.int32)
ROWS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "lengths": {"lengths": LENGTHS},
    "packed": {"cu_q": OFFSETS, "cu_k": OFFSETS},
    "caches": {"cu_q": OFFSETS, "lengths": LENGTHS},
}
TERMS: dict[str, dict[str, Tensor]] = {
    "": {},
    "sinks": {"sinks": torch.zeros(4)},
    "gate": {"g": torch.zeros(2, 300, 4)},
    "slopes": {"slopes": torch.zeros(4)},
}
CALLS = {
    f"{rows} {terms}".strip(): {**ROWS[rows], **TERMS[terms]} for rows in ROWS for terms in TERMS
}


def terms_of(name: str) -> AttentionInputs:
    k = torch.zeros(2, 300, 2, 16)
    q = torch.zeros(1, 300, 4, 16) if "cu_q" in CALLS[name] else torch.zeros(2, 300, 4, 16)
    return AttentionInputs(q, k, k, **CALLS[name])


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths on a device"])
@pytest.mark.parametrize("options", [AttentionOptions(0.1), AttentionOptions(0.1, -1, 0)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_mismatch_equal_results(
    name: str, options: AttentionOptions, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing differs, also where queries see no key and their log-sum-exp is -inf: kernels were
    taken for wrong there on every compiler that is not verified."""
    if not known:  # plain torch's way on a GPU
        monkeypatch.setattr(eager, "by_sequence", lambda terms: False)

    def plain(terms: AttentionInputs, options: AttentionOptions, *impls: str) -> tuple:
        return op.softmax(terms, options, "eager")

    assert probe.mismatch(terms_of(name), options, "triton", plain, "triton") is None


@pytest.mark.parametrize("options", [AttentionOptions(0.1), AttentionOptions(0.1, -1, 0)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_mismatch_wrong_results(name: str, options: AttentionOptions) -> None:
    def wrong(terms: AttentionInputs, options: AttentionOptions, *impls: str) -> tuple:
        o, lse = op.softmax(terms, options, "eager")
        return (o, lse) if impls[0] == "eager" else (1.2 * o, lse)

    said = probe.mismatch(terms_of(name), options, "triton", wrong, "triton")
    assert said is not None and "output 0 is off by 2.0e-01" in said


@pytest.mark.parametrize("name", CALLS)
def test_probes_heads_are_one_of_keys_and_its_queries(name: str) -> None:
    fresh = probe.like(terms_of(name))
    assert (fresh.q.shape[2], fresh.k.shape[2], fresh.v.shape[2]) == (2, 1, 1)
    assert all(x is None or x.shape[-1] == 2 for x in (fresh.g, fresh.sinks, fresh.slopes))
    if "cu_q" not in CALLS[name]:
        q, k, v = terms_of(name)[:3]
        seen = []

        def decode(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
            seen.append((q.shape[2], k.shape[2]))
            return q, q.sum(-1)

        assert probe.mismatch_of_cache(Cache(q, k, v), AttentionOptions(0.1), decode) is None
        assert {*seen} == {(2, 1)}


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1.0, -torch.inf], [1.0, -torch.inf], 0.0),
        ([1.5, -torch.inf], [1.0, -torch.inf], 0.5),
        ([1.0, torch.inf], [1.0, -torch.inf], torch.nan),
        ([1.0, 0.0], [1.0, -torch.inf], torch.nan),
        ([torch.nan, 1.0], [1.0, 1.0], torch.nan),
    ],
)
def test_relative_error(got: list[float], want: list[float], error: float) -> None:
    found = torch.tensor(kernel_pair.relative_error(*map(torch.tensor, (got, want))))
    wanted: Tensor = torch.tensor(error)
    if wanted.isnan():
        assert not found <= 1e9  # no bar admits it
    else:
        torch.testing.assert_close(found, wanted)
