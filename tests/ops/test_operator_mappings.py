"""Each operator against the recurrence of its paper (tests/support/recurrences.py), and its
names."""

import pytest
import torch

from slipstream import ops
from tests.support.mappings import both, near
from tests.support.recurrences import (
    HV,
    MAPPINGS,
    NAMED,
    B,
    H,
    K,
    M,
    T,
    V,
    gla,
    log_decay,
    randn,
    slots,
    trace,
)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", MAPPINGS)
def test_operator_is_its_recurrence(name: str, scale: float | None) -> None:
    make, recurrence, extra = MAPPINGS[name]
    args, S = make(), randn(B, HV, K, V)
    want, want_state = trace(recurrence(**args, S=S))
    options = {} if scale is None else {"scale": scale}
    default = 1.0 if name == "rwkv7" else K**-0.5
    for fn in both(name):
        if fn is ops.fused_recurrent_gla:
            args["gk"] = args.pop("g")
        for small in ({}, {"chunk_size": 16}) if "chunk" in fn.__name__ else ({},):
            further = {**extra, **options, **small, "output_final_state": True}
            o, state = fn(**args, **further, initial_state=S)
            near(o, (scale or default) * want)
            near(state, want_state)


@pytest.mark.parametrize("name", MAPPINGS)
def test_operator_state_v_first_and_default_state(name: str) -> None:
    make, recurrence, extra = MAPPINGS[name]
    args, S = make(), randn(B, HV, K, V)
    if "gv" in args:
        args.pop("gv")
        recurrence = lambda S, **x: gla(**x, gv=torch.zeros(B, T, HV, V).double(), S=S)  # noqa: E731
    _, want = trace(recurrence(**args, S=S))
    _, from_zero = trace(recurrence(**args, S=torch.zeros_like(S)))
    for fn in both(name):
        if fn is ops.fused_recurrent_gla:
            args["gk"] = args.pop("g")
        options = {**args, **extra, "output_final_state": True, "state_v_first": True}
        near(fn(**options, initial_state=S.mT)[1].mT, want)
        near(fn(**options)[1].mT, from_zero)
        assert fn(**{**options, "output_final_state": False})[1] is None


@pytest.mark.parametrize("name", NAMED)
def test_operator_with_many_tensors_wants_them_named(name: str) -> None:
    args = MAPPINGS[name][0]()
    for fn in both(name):
        with pytest.raises(TypeError, match="positional"):
            fn(*args.values())


@pytest.mark.parametrize("name", [n for n in MAPPINGS if n not in NAMED])
def test_operator_wants_options_named(name: str) -> None:
    make, _, extra = MAPPINGS[name]
    args = list(make().values())[: 3 if name == "gla" else None]
    for fn in both(name):
        with pytest.raises(TypeError, match="positional"):
            fn(*args, *extra.values(), *[None] * 3, 0.5)


def test_operator_errors_name_arguments_as_the_caller_does() -> None:
    args = MAPPINGS["rwkv6"][0]()
    with pytest.raises(ValueError, match=r"^w: want 4 dimensions \[B, T, HV, K\]"):
        ops.chunk_rwkv6(**{**args, "w": args["w"][..., 0]})
    with pytest.raises(ValueError, match=r"^r: want 4 dimensions"):
        ops.chunk_rwkv6(**{**args, "r": args["r"][0]})
    with pytest.raises(ValueError, match=r"^w: want shape"):
        ops.chunk_rwkv7(**{**MAPPINGS["rwkv7"][0](), "w": args["w"][:, 1:]})
    args = MAPPINGS["dplr_delta_rule"][0]()
    with pytest.raises(ValueError, match=r"^gk: want shape"):
        ops.chunk_dplr_delta_rule(**{**args, "gk": args["gk"][..., 1:]})
    args = slots()
    with pytest.raises(ValueError, match=r"^s: want shape"):
        ops.chunk_gsa(**{**args, "s": args["s"][:, 1:]}, g=log_decay(B, T, H, M))
