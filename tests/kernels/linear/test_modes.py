"""The modes of a call: their order, what each undoes, and the pairs that exclude each other."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from slipstream import ops
from slipstream.kernels.linear import dispatch, op
from slipstream.kernels.linear.dispatch import FORBIDDEN, MODES, Asked, make_plan
from slipstream.kernels.linear.inputs import NUM_TERMS, ForwardCall, LinearInputs
from slipstream.kernels.linear.modes import prefix_states
from slipstream.kernels.linear.modes.call import LinearOptions, Results
from slipstream.kernels.linear.modes.transforms import Autocast, Reverse, VFirst
from slipstream.kernels.linear.modes.wide_heads import WideHeads

H, HV, K, V = 2, 4, 16, 24


def inputs(
    B: int, T: int, lengths: tuple[int, ...] = (), dtype: Any = torch.float64
) -> dict[str, Any]:
    """Arguments of chunk_kda."""
    q, k = (torch.randn(B, T, H, K, dtype=dtype) for _ in range(2))
    given = {"q": q, "k": torch.nn.functional.normalize(k, dim=-1)}
    given |= {"v": torch.randn(B, T, HV, V, dtype=dtype), "beta": torch.rand(B, T, HV).to(dtype)}
    given |= {"g": -torch.rand(B, T, HV, K).to(dtype)}
    given["initial_state"] = torch.randn(len(lengths) or B, HV, K, V, dtype=dtype)
    if lengths:
        given["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return given


def by_hand(given: dict[str, Any], v_first: bool, reverse: bool) -> Results:
    """The operator without options, of inputs that are changed before and results after it."""
    given, state = dict(given), given["initial_state"]
    state = state.mT if v_first else state
    cu = given.get("cu_seqlens")
    if reverse:
        given |= {n: x.flip(1) for n, x in given.items() if n in ("q", "k", "v", "g", "beta")}
        if cu is not None:
            given["cu_seqlens"], state = cu[-1] - cu.flip(0), state.flip(0)
    given["initial_state"] = state
    o, final = ops.chunk_kda(**given, output_final_state=True)
    assert final is not None
    if reverse:
        o, final = o.flip(1), final if cu is None else final.flip(0)
    return o, final.mT if v_first else final


@pytest.mark.parametrize("lengths", [(), (20, 0, 17)], ids=["rows", "packed"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_modes_together_are_each_by_hand(
    v_first: bool, reverse: bool, lengths: tuple[int, ...]
) -> None:
    given = inputs(1 if lengths else 2, sum(lengths) or 37, lengths)
    if v_first:
        given["initial_state"] = given["initial_state"].mT.contiguous()
    options: dict[str, Any] = {"state_v_first": v_first, "reverse": reverse}
    got = ops.chunk_kda(**given, output_final_state=True, **options)
    for x, y in zip(got, by_hand(given, v_first, reverse), strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


def test_modes_nest_by_their_order() -> None:
    given = inputs(2, 9, dtype=torch.float32)
    wide = 2 * 256 + 16
    given |= {"v": torch.randn(2, 9, HV, wide), "initial_state": torch.randn(2, HV, wide, K)}
    seen: list[tuple[str, str]] = []

    def watched(mode: Any, way: str) -> Any:
        whole = getattr(mode, way)

        def run(self: Any, *args: Any) -> Any:
            seen.append((mode.__name__, way))
            return whole(self, *args)

        return mock.patch.object(mode, way, run)

    options: dict[str, Any] = {"state_v_first": True, "reverse": True}
    options["output_final_state"] = True
    dispatch._PLANS.clear()
    with ExitStack() as stack:
        for mode in (VFirst, Autocast, Reverse, WideHeads):
            for way in ("into", "out"):
                stack.enter_context(watched(mode, way))
        # plain torch takes heads as they are
        stack.enter_context(mock.patch.object(dispatch, "PLAIN", ()))
        stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        ops.chunk_kda(**given, **options)
    dispatch._PLANS.clear()
    wanted = [x.__name__ for x in MODES if x in (VFirst, Autocast, Reverse, WideHeads)]
    assert seen == [*((x, "into") for x in wanted), *((x, "out") for x in wanted[::-1])]


def terms() -> LinearInputs:
    given = inputs(1, 8)
    return LinearInputs(**given)


@pytest.mark.parametrize(("one", "other", "text"), FORBIDDEN, ids=lambda x: x[:20])
def test_pairs_exclude_each_other(one: str, other: str, text: str) -> None:
    ways: dict[str, Any] = {"context": (False, None)}
    asked = Asked(**{x: ways.get(x, True) for x in (one, other) if x in Asked._fields})
    options = LinearOptions(impl="reference" if other == "reference" else None)
    with (
        mock.patch.object(dispatch, "is_compiling", return_value=other == "compiling"),
        pytest.raises(NotImplementedError) as error,
    ):
        make_plan(terms(), {}, options, False, asked)
    assert str(error.value) == text
    alone: dict[str, Any] = {one: True}
    make_plan(terms(), {}, LinearOptions(), False, Asked(**alone))


@pytest.mark.parametrize("module", [op, prefix_states], ids=["plain", "prefix states"])
def test_other_sizes_choose_their_back_end(module: Any) -> None:
    """For each size, out of the arguments as the operator gets them."""
    how = ForwardCall(0.5, 64, "triton|eager")
    prefix = [torch.zeros(1), torch.zeros(2, 1)] if module is prefix_states else []
    given = (*LinearInputs(**inputs(2, 70)), *how, *prefix)
    with mock.patch.object(op, "impls_at", lambda terms, impl: f"{terms.q.shape[1]} {impl}"):
        found = [ForwardCall(*x[NUM_TERMS:][: len(how)]) for x in module._at_sizes(given)]
        tokens = [x[0].shape[1] for x in module._at_sizes(given)]
    assert len(found) > 3
    assert found == [how._replace(impl=f"{T} {how.impl}") for T in tokens]
