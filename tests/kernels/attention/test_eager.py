"""The plain torch path, its two ways through lengths, its gradients, the registered operators."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slipstream.kernels.attention import eager
from slipstream.ops.attention import attention
from tests.support.attention_calls import CALLS, Call, check, got, incoming, want

every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)


@every_call
@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths on a device"])
def test_eager_matches_reference(call: Call, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "ROWS", 32)
    if not known:
        monkeypatch.setattr(eager, "by_sequence", lambda terms: False)
    # sums of gates reach 1e5, of which float64 keeps 1e-11
    exact = 1e-13 if "g" not in call.has else 1e-11
    for dtype, limit in ((torch.float64, exact), (torch.float32, 5e-6)):
        terms = call.terms(dtype)
        do, dlse = incoming(terms)
        right = want(terms, call.options, do, dlse)
        check(got(eager, terms, call.options, do, dlse), right, limit, call.name)


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths on a device"])
@pytest.mark.parametrize("call", [x for x in CALLS if x.used], ids=lambda call: call.name)
def test_padding_may_be_nan(call: Call, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        monkeypatch.setattr(eager, "by_sequence", lambda terms: False)
    terms = call.terms()
    do, dlse = incoming(terms)
    right = want(terms, call.options, do, dlse)

    def spoiled(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.clone()
        for n, length in enumerate(call.used or ()):
            if terms.cu_k is None:
                x[n, max(length, 0) :] = torch.nan
            else:
                begin, end = terms.cu_k[n : n + 2].tolist()
                x[0, begin + max(length, 0) : end] = torch.nan
        return x

    terms = terms._replace(k=spoiled(terms.k), v=spoiled(terms.v), g=spoiled(terms.g))
    check(got(eager, terms, call.options, do, dlse), right, 5e-6, "nan")


def most_bytes(run: Callable[[], Any]) -> int:
    """The peak of allocated bytes beyond those before the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    profiler: Any = found.profiler
    events = [x for x in profiler.kineto_results.events() if x.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


FEATURES: dict[str, dict[str, Any]] = {
    "causal, by torch": {}, "lse": {"return_lse": True}, "window": {"window_size": 300},
    "softcap, full": {"softcap": 3.0, "causal": False}, "gate": {"g": True},
    "packed": {"cu_seqlens": True, "sinks": torch.zeros(2)},
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_memory_is_linear_in_length(name: str) -> None:
    def peak(T: int) -> int:
        options = dict(FEATURES[name])
        if "g" in options:
            options["g"] = -torch.rand(1, T, 2)
        if "cu_seqlens" in options:
            options["cu_seqlens"] = torch.tensor([0, T // 4, T])
        q, k, v = (torch.randn(1, T, 2, 16).requires_grad_() for _ in range(3))

        def both() -> None:
            found = attention(q, k, v, **options)
            o = found if isinstance(found, Tensor) else found[0]
            torch.autograd.grad(o.sum(), (q, k, v))

        return most_bytes(both)

    short, long = peak(1024), peak(2048)
    assert short > 0 and long < 2.2 * short, f"{short} bytes, then {long}"


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (0, 0), (2, 0), (0, 1)])
def test_keys_that_no_query_sees_are_left_out(
    left: int, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "ROWS", 4)
    of: Any = SimpleNamespace
    block = of(q=torch.empty(1, 1, 1, 8, 1), k=torch.empty(1, 1, 11, 1), bounded=True)
    found = [(x.start, x.stop) for _, x in eager._blocks(block, of(left=left, right=right))]
    low, high = (0, 0) if left < 0 else (3 - left, 7 - left), (11, 11) if right < 0 else (7, 11)
    assert found == [(max(a, 0), min(b + max(right, 0), 11)) for a, b in zip(low, high)]
