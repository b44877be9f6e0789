"""The modes of a call: their order, what each undoes, and the pairs that exclude each other; the
interface by which op.py calls all launches; the numeric probe, silent where kernels are right."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.common.varlen import ChunkMap, chunk_map
from slipstream.compiler.trace import trace
from slipstream.kernels.linear import dispatch, gated_delta_product, op, probe
from slipstream.kernels.linear.backend import SavedWY
from slipstream.kernels.linear.dispatch import FORBIDDEN, MODES, Asked, make_plan
from slipstream.kernels.linear.eager import recurrent
from slipstream.kernels.linear.eager.recurrent import recurrent_backward
from slipstream.kernels.linear.inputs import (
    NUM_TERMS,
    BackwardCall,
    ForwardCall,
    LinearInputs,
    contiguous,
)
from slipstream.kernels.linear.modes import prefix_states
from slipstream.kernels.linear.modes.call import LinearOptions, Results
from slipstream.kernels.linear.modes.transforms import Autocast, Reverse, VFirst
from slipstream.kernels.linear.modes.wide_heads import WideHeads
from slipstream.kernels.linear.plan import kind
from slipstream.runtime.compile_ahead import AtSizes
from slipstream.tools.samples import FILL, Making
from tests.support import wants
from tests.support.memory import make

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


def terms_probe(dtype: torch.dtype, packed: bool) -> LinearInputs:
    q, k = torch.randn(2, 1, 9, 2, 16, dtype=dtype)
    v = torch.randn(1, 9, 4, 24, dtype=dtype)
    g, beta = -torch.rand(2, 1, 9, 4)
    cu = torch.tensor([0, 4, 9]) if packed else None
    state = torch.randn(2 if packed else 1, 4, 16, 24)
    return LinearInputs(q, k, v, g=g, beta=-beta, initial_state=state, cu_seqlens=cu)


def planted(wrong: str | None) -> Callable:
    """The operator, with one gradient of its Triton path made wrong."""

    def linear(terms_probe: LinearInputs, how: ForwardCall) -> Any:
        o, final = op.linear(terms_probe, how._replace(impl="eager"))
        if wrong is not None and how.impl != "eager":
            getattr(terms_probe, wrong).register_hook(lambda grad: grad * 1.2)
        return o, final

    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_probe_accepts_rounding_and_nothing_else(dtype: torch.dtype, packed: bool) -> None:
    given = terms_probe(dtype, packed)
    for by_token in (False, True):
        assert probe.mismatch(given, "triton", by_token, planted(None)) is None
    for wrong in ("k", "g", "beta", "initial_state"):
        found = probe.mismatch(given, "triton", False, planted(wrong))
        assert f"gradient of {wrong} is off" in str(found)
    assert probe.like(given).q.dtype == dtype
    assert kind(given) == kind(terms_probe(dtype, packed)) == kind(probe.like(given))
    assert kind(given) != kind(given._replace(g=None))


def test_states_of_samples_are_small_beside_products() -> None:
    """So that an error of either shows."""
    making, cpu = Making(*[None] * 3, torch.device("cpu")), torch.device("cpu")  # pyright: ignore
    for x in (probe._VALUES["state"]([9999], cpu), FILL["state"](making, [9999])):
        assert abs(x.mean()) < 0.01 and 0.09 < x.std() < 0.11
    one = FILL["one"](making, [9999])
    assert 0.99 < one.mean() < 1.01 and 0.09 < one.std() < 0.11


@wants.compiler
@pytest.mark.parametrize("kind", ["delta_rule", "gated"])
def test_portable_backward_after_gluon_forward(kind: str) -> None:
    def call(device: torch.device) -> None:
        terms = make(kind, (8192,), 32, device)
        save = op.Extras(save=True)
        o, _, *saved = op.forward_impl(*terms, 0.1, 64, "sm90", False, extras=save)
        assert len(saved) == len(SavedWY._fields)
        call = BackwardCall(o, None, 0.1, 64, "triton", gate_gradient=terms.g is not None)
        grads = op.by_name(terms, True, op.backward_impl(*terms, *call, *saved))
        assert grads["q"].shape == terms.q.shape

    names = [x.name for x in trace(call, "sm_90", backward=False)]
    assert any("sm90" in x for x in names) and "delta_chunk_dstate_kernel" in names


@wants.compiler
def test_gates_far_apart_are_laid_side_by_side() -> None:
    """The portable scan counts a gate's place in 32 bits."""
    x = torch.empty(64, 8192, 8, 64, device="meta")
    g = torch.empty(64, 8192, 8192, device="meta")[..., :8]
    assert contiguous(LinearInputs(x, x, x, g=g)).g.is_contiguous()  # pyright: ignore
    near = torch.empty(2, 8192, 8192, device="meta")[..., :8]
    assert contiguous(LinearInputs(x[:2], x[:2], x[:2], g=near)).g is near


@wants.compiler
def test_tokens_that_no_sequence_has_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a place for each of them, as on a GPU, where offsets are not checked before; it was past
    all states."""

    def on_device(cu: Tensor, tokens: int, chunk: int) -> ChunkMap:
        found, none = chunk_map(cu, tokens, chunk), torch.tensor([False, False])
        past = torch.full((2,), cu.shape[0] - 1)
        return found._replace(
            sequence=torch.cat([found.sequence, past]),
            first=torch.cat([found.first, none]),
            last=torch.cat([found.last, none]),
        )

    monkeypatch.setattr(recurrent.varlen, "check_cu_seqlens_values", lambda *args: None)
    x = torch.rand(1, 9, 2, 4, dtype=torch.float64)
    state = torch.rand(2, 2, 4, 4, dtype=torch.float64)
    cu = torch.tensor([0, 4, 7], dtype=torch.int32)
    terms = LinearInputs(x, x, x, beta=x[..., 0], initial_state=state, cu_seqlens=cu)
    short = terms._replace(q=x[:, :7], k=x[:, :7], v=x[:, :7], beta=x[:, :7, :, 0])
    want = recurrent.recurrent_forward(short, 0.5)
    wanted = recurrent_backward(short, x[:, :7], state, 0.5)
    monkeypatch.setattr(recurrent.varlen, "chunk_map", on_device)
    o, final = recurrent.recurrent_forward(terms, 0.5)
    assert torch.equal(o[:, :7], want[0])
    assert torch.equal(final, want[1])
    grads = recurrent_backward(terms, x, state, 0.5)
    for name, y in wanted.items():
        assert torch.equal(grads[name] if name == "initial_state" else grads[name][:, :7], y), name


def test_other_sizes_have_the_steps_of_each_token() -> None:
    """Of gated_delta_product, whose k, v and beta have n times the tokens of q and g."""
    q, k = torch.empty(2, 5, 2, 8), torch.empty(2, 15, 2, 8)
    given = gated_delta_product.Steps(q, k, k, k[..., 0])
    sizes = AtSizes(tokens=(0, 4), states=(5,), heads=2)
    others = gated_delta_product._at_sizes((*given, 0.5, 64, "triton"), sizes)
    found = [gated_delta_product.Steps(*x[: len(given)]) for x in others]
    assert len({x.q.shape for x in found}) > 3
    assert all(x.k.shape[:2] == (x.q.shape[0], 3 * x.q.shape[1]) for x in found)


def test_inverse_of_16_bits_is_rounded_once_more() -> None:
    """Its products may be of TF32, which takes a third of the time."""

    def call(device: torch.device) -> None:
        x = torch.empty(1, 128, 2, 64, dtype=torch.bfloat16, device=device)
        ops.chunk_delta_rule(x, x, x, x[..., 0])

    found = [job.constants.get("INNER") for job in trace(call, "sm_80", backward=False)]
    assert {*found} == {None, "tf32"}
