"""slipstream.integrations.report(): what runs on slipstream, and that what it says is what ran."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.compiler.compiler_state import CompilerState, KernelDisabledWarning
from slipstream.integrations import report, usage
from slipstream.runtime import dispatch, guarded_launch
from tests.support.interpreted import interpreted

MODULE = "transformers.models.qwen3_next.modeling_qwen3_next"


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_sites", "_not_replaced"):
        monkeypatch.setattr(usage, name, {})
    monkeypatch.setattr(dispatch, "reported", {})


def calls(library: str = "transformers") -> dict[str, int]:
    rows = [x for x in report().rows if x.library == library]
    return {x.name.rpartition(".")[2]: x.calls for x in rows}


def test_counts_are_of_all_threads() -> None:
    @usage.counted("mine", "f")
    def f(x: int) -> int:
        if x < 0:
            raise ValueError(f"x: want 0 or more, got {x}")
        return x

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(f, range(4000))) == sum(range(4000))
    for x in (-1, -1, -2):
        with pytest.raises(ValueError, match="got -"):
            f(x)
    assert torch.compile(f, backend="eager")(3) == 3
    for _ in range(2):
        (row,) = report().rows
        assert row.calls == 4000
        assert row.refused == Counter(
            {"x: want 0 or more, got -1": 2, "x: want 0 or more, got -2": 1}
        )
    at = usage.site("mine", "f")
    count, at.count = at.count, lambda: (time.sleep(0.01), count())[1]  # readers meet
    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(lambda _: at.calls(), range(4))} == {4000}
    usage.refuse("theirs", AttributeError("no such class"))
    dispatch.reported["kind", "it dies"] = None
    assert str(report()).splitlines() == [
        "mine f: 4000 calls",
        "  not ours, 2 times: x: want 0 or more, got -1",
        "  not ours, 1 times: x: want 0 or more, got -2",
        "theirs: not replaced: AttributeError: no such class",
        "plain torch instead of kind: it dies",
    ]


def test_reasons_with_sizes_in_them_are_bounded() -> None:
    """A service refuses calls of ever new sizes for weeks."""
    for size in range(3 * usage.MAX_REASONS):
        usage.site("theirs", "f").refuse(f"x: got {size} rows")
        usage.refuse("theirs", f"x: got {size} rows")
        usage.site("theirs", "f").refuse("x: got 1 rows")
    (row,), rest = report().rows, dict.fromkeys(report().not_replaced)
    assert row.refused[usage.OTHERS] == 2 * usage.MAX_REASONS
    assert row.refused["x: got 1 rows"] == 1 + 3 * usage.MAX_REASONS
    assert (
        len(row.refused) == len(rest) == usage.MAX_REASONS + 1 and ("theirs", usage.OTHERS) in rest
    )


def test_refused_calls_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    from slipstream.integrations import patching

    def ours(x: int) -> int:
        raise ValueError(f"x: want less, got {x}")

    def theirs(x: int, unread: bool = False) -> int:
        return x

    call = patching.replacement_of(ours, theirs, "theirs.f")
    with caplog.at_level("WARNING", logger=patching.__name__):
        for x in [*range(3 * usage.MAX_REASONS)] * 2:
            assert call(x) == call(x, unread=True) == x
    assert len(caplog.records) == usage.MAX_REASONS + 1
    assert sum("unread: ours does not read it" in x for x in caplog.messages) == 1
    assert sum(usage.site("transformers", "theirs.f").refused.values()) == 12 * usage.MAX_REASONS


def test_names_of_fla_are_counted() -> None:
    from slipstream.compat.fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, g = torch.randn(1, 4, 2, 8), torch.zeros(1, 4, 2)
    chunk_gated_delta_rule(q, q, q, g, g)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        chunk_gated_delta_rule(q, q, q, g, g, output_attentions=True)
    assert calls("fla") == {"chunk_gated_delta_rule": 1}
    assert [list(x.refused) for x in report().rows] != [[]]


def test_patched_calls_are_counted() -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    from slipstream.integrations.transformers import patch, unpatch

    patch()
    try:
        names = {"causal_conv1d_fn", "torch_chunk_gated_delta_rule", "Qwen3NextRMSNormGated"}
        assert names <= set(calls()) and set(calls().values()) == {0}
        assert not [x for x in calls() if "inner" in x or "split" in x]  # not_fused
        x, weight = torch.randn(2, 4, 6), torch.randn(4, 3)
        theirs.causal_conv1d_fn(x, weight)
        theirs.causal_conv1d_fn(x, weight, None, "gelu")  # transformers' own
        theirs.Qwen3NextRMSNormGated(8)(x[..., :1].expand(2, 4, 8), torch.ones(2, 4, 8))
        found = {x.name: x for x in report().rows}
        assert found[f"{MODULE}.causal_conv1d_fn"].calls == 1
        assert found[f"{MODULE}.Qwen3NextRMSNormGated"].calls == 1
        ((why, n),) = found[f"{MODULE}.causal_conv1d_fn"].refused.items()
        assert "activation" in why and n == 1 and sum(x.calls for x in found.values()) == 2
    finally:
        unpatch()
    assert report().rows == ()


@interpreted
def test_report_and_results_follow_a_broken_kernel() -> None:
    """A wrong factor is in the results of a patched function, which is counted; where the guard
    finds it the results are right again, and the report has the kernel and why."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    from slipstream.integrations.transformers import patch, unpatch
    from slipstream.kernels.linear import op

    q, k, v = torch.randn(3, 1, 70, 2, 16).unbind()
    g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
    options = {"use_qk_l2norm_in_kernel": True}
    name, kernels, factor = "torch_chunk_gated_delta_rule", op._backend, 1.0
    want = theirs.torch_chunk_gated_delta_rule(q, k, v, g, beta, **options)[0]

    def broken(*which: Any) -> Any:
        backend = kernels(*which)

        def forward(*args: Any, **given: Any) -> Any:
            o, *rest = backend.forward(*args, **given)
            return factor * o, *rest

        return SimpleNamespace(**{**vars(backend), "forward": forward})

    def off() -> float:
        o = theirs.torch_chunk_gated_delta_rule(q, k, v, g, beta, **options)[0]
        return float((o - factor * want).abs().max() / want.abs().max())

    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(op, "_backend", broken)
        patch()
        try:
            assert off() < 1e-4
            factor = 1.5
            assert off() < 1e-4 and calls()[name] == 2 and report().kernels == ()
            state = CompilerState("sm_90", "3.6.0", "1.2.3", remembers=False)
            planted.setattr(state, "_learn", lambda *found: None)
            planted.setattr(guarded_launch, "compiler_state", lambda device: state)
            with pytest.warns(KernelDisabledWarning, match="wrong result"):
                found = off()
            factor = 1.0
            assert found > 0.1 and off() < 1e-4 and calls()[name] == 4
            ((kind, why),) = report().kernels
            assert kind.startswith("linear.triton") and "wrong result" in why
        finally:
            unpatch()
    assert report().rows == ()
