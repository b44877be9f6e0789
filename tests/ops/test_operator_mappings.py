"""Each operator against the recurrence of its paper (tests/support/recurrences.py), and its
names."""

from typing import Any
from unittest import mock

import pytest
import torch

from slipstream.kernels.linear import dispatch
from slipstream.runtime.dispatch import ValidationCache
from slipstream.tools.catalog import Sample, family
from tests.support import recurrences
from tests.support.mappings import near
from tests.support.operators import LINEAR
from tests.support.recurrences import ROWS, SIZE, K, trace

every_row = pytest.mark.parametrize("op", ROWS, ids=lambda op: op.name)


@every_row
@pytest.mark.parametrize("scale", [None, 0.3])
def test_operator_is_its_recurrence(op: Sample, scale: float | None) -> None:
    args = op.inputs(SIZE)
    S = args.pop("initial_state")
    want, want_state = trace(getattr(recurrences, family(op.op))(**args, S=S))
    options = {} if scale is None else {"scale": scale}
    default = 1.0 if family(op.op) == "rwkv7" else K**-0.5
    ways: list[dict] = [{}, {"impl": "reference"}]
    if op.op.startswith("chunk_"):
        ways.append({"chunk_size": 32 if "kda" in op.op else 16})
    for way in ways:
        o, state = op({**args, "initial_state": S}, **options, **way)
        near(o, (scale or default) * want)
        near(state, want_state)


@every_row
def test_operator_state_v_first_and_default_state(op: Sample) -> None:
    args = op.inputs(SIZE)
    if op.variant == "values":
        args.pop("gv")
    S = args.pop("initial_state")
    recurrence = getattr(recurrences, family(op.op))
    _, want = trace(recurrence(**args, S=S))
    _, from_zero = trace(recurrence(**args, S=torch.zeros_like(S)))
    near(op({**args, "initial_state": S.mT}, state_v_first=True)[1].mT, want)
    near(op(args, state_v_first=True)[1].mT, from_zero)
    assert op(args, state_v_first=True, output_final_state=False)[1] is None


# hgrn and rwkv4 have a scan of their own, which is the same for both
@pytest.mark.parametrize(
    "op", [x for x in LINEAR if family(x.op) not in ("hgrn", "rwkv4")], ids=lambda op: op.name
)
def test_operator_runs_by_chunks_or_tokens(op: Sample) -> None:
    """As it is called: the numbers are the same but for rounding."""
    seen: set[bool] = set()
    make_plan = dispatch.make_plan

    def make(terms: Any, names: Any, options: Any, recurrent: bool, asked: Any) -> Any:
        seen.add(recurrent)
        return make_plan(terms, names, options, recurrent, asked)

    with (
        mock.patch.object(ValidationCache, "get", lambda self, key, make, *_: make()),
        mock.patch.object(dispatch, "make_plan", make),
    ):
        op(op.inputs(SIZE))
    assert seen == {op.op.startswith("fused_recurrent_")}
