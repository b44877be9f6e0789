"""slipstream.integrations for engines: their calls beside the recurrence, and what registers them.
tests/engines has them called by the engines' own classes, and beside the engines' own functions."""

import dataclasses
import sys
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.integrations import sglang, sglang_functions, vllm
from slipstream.integrations.serving import prefill, step_drafts
from slipstream.ops import chunk_gated_delta_rule, chunk_kda
from tests.support.engine_plugins import forget_vllm
from tests.support.serving_calls import HV, Call, K, V
from tests.support.serving_checks import CHECKS, KERNELS, expect_states, near, sglang_snapshots

kinds = pytest.mark.parametrize("is_kda", [False, True], ids=["gdn", "kda"])


@kinds
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_calls_match_recurrence(check: Callable[[bool], None], is_kda: bool) -> None:
    check(is_kda)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sglang_snapshots(is_kda: bool, dtype: torch.dtype) -> None:
    sglang_snapshots(is_kda, dtype)


@kinds
@pytest.mark.parametrize("raw", [False, True])
def test_sglang_prefill(is_kda: bool, raw: bool) -> None:
    call = Call.prefill(is_kda)
    (want, states), before = call.expected(), call.states.clone()
    given, options = call.sglang_prefill(), {}
    if raw and is_kda:
        given |= {"g": call.a[None], "beta": call.b[None], "beta_is_raw": True}
        options = {"A_log": call.A_log, "dt_bias": call.dt_bias}
    elif raw:
        options = {"inplace_update": False}
    found: Any = KERNELS[is_kda].extend(**given, **options)
    near(found if is_kda else found[0], want)
    if raw and not is_kda:
        assert torch.equal(call.states, before)
    else:
        expect_states(call, states, before)


RING = torch.zeros(1)
REFUSED = {
    "decode": ("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_write_pos"),
    "target_verify": (
        "cache_ring", "replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta",
        "fused_accept_state_indices", "fused_accept_num_accepted", "retrieve_parent_token",
    ),
    "extend": ("num_state_checkpoints", "state_checkpoint_indices", "an_argument_of_tomorrow"),
}  # fmt: skip


@kinds
@pytest.mark.parametrize("method", REFUSED)
def test_sglang_refuses_by_name(is_kda: bool, method: str) -> None:
    """What asks for nothing passes; nothing that asks for something is passed over."""
    call = Call.decode(is_kda) if method == "decode" else Call.verify(is_kda)
    given = call.sglang_prefill() if method == "extend" else call.sglang()
    if method == "target_verify":
        given |= call.sglang_verify()
    run = getattr(KERNELS[is_kda], method)
    for name in REFUSED[method]:
        for nothing in (None, False, 0):
            run(**{**given, name: nothing})
        before = call.states.clone()
        for something in (True, 2, RING):
            with pytest.raises(NotImplementedError, match=f"^{name}: "):
                run(**{**given, name: something})
        assert torch.equal(call.states, before)


def test_sglang_registers_known_kinds_alone() -> None:
    with pytest.raises(ValueError, match="kind"):
        sglang.register(dict, [], "mamba")
    with pytest.raises(AttributeError):
        sglang.OtherBackend  # noqa: B018


@pytest.mark.parametrize("drafts", [False, True])
def test_vllm_mamba_of_packed_tokens_is_its_steps(drafts: bool) -> None:
    """With drafts the state after each token goes to a block of its own, after those accepted."""
    offsets = torch.tensor([0, 3, 4, 4], dtype=torch.int32)
    source = torch.tensor([[5, 1, 2], [3, 4, 6], [0, 0, 0]], dtype=torch.int32)
    target = torch.tensor([[7, 1, 8], [3, 4, 6], [0, 0, 0]], dtype=torch.int32)
    accepted = torch.tensor([2, 1, 0], dtype=torch.int32) if drafts else None
    heads: dict[str, Any] = {
        "A": -torch.rand(HV, V, K),
        "D": torch.randn(HV, V),
        "dt_bias": torch.randn(HV, V),
    }
    heads["dt_softplus"] = True
    shapes = {"x": (HV, V), "dt": (HV, V), "z": (HV, V), "B": (HV, K), "C": (HV, K)}
    tokens = {name: torch.randn(4, *shape) for name, shape in shapes.items()}
    pool, out = torch.randn(9, HV, V, K), torch.zeros(4, HV, V)
    want, want_out, before = pool.clone(), out.clone(), pool.clone()
    blocks = {"state_batch_indices": source, "dst_state_batch_indices": target}
    given = {"num_accepted_tokens": accepted, "cu_seqlens": offsets, **blocks, **heads}
    vllm.selective_state_update(pool, **tokens, out=out, **given)
    for n, (begin, end) in enumerate(pairwise(offsets[:3].tolist())):
        # block 0 is of no state
        state = before[source[n, 0 if accepted is None else accepted[n] - 1]].expand(2, -1, -1, -1)
        state = state.clone()
        for t in range(begin, end):
            one = {name: x[t : t + 1] for name, x in tokens.items()}
            into, slot = want_out[t : t + 1], torch.tensor([1], dtype=torch.int32)
            vllm.selective_state_update(state, **one, **heads, out=into, state_batch_indices=slot)
            want[target[n, t - begin if drafts else 0]] = state[1]
    near(out, want_out)
    near(pool, want)


def test_vllm_refuses_by_name() -> None:
    call = Call.decode(False, 1)
    for name, value in (("inplace_final_state", False), ("beta", 2.0), ("threshold", 1.0)):
        with pytest.raises(NotImplementedError, match=name):
            vllm.delta_rule_update(**{**call.vllm(), name: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[4, -1, 1], [-1, -1, -1]])
def test_prefill_reads_and_writes_slots_of_a_pool(dtype: torch.dtype, slots: list[int]) -> None:
    """Slot 0 holds NaN, which a sequence without a slot may not see."""
    q, k, v = (F.normalize(torch.randn(1, 74, 2, 16), dim=-1) for _ in range(3))
    g, beta = -torch.rand(1, 74, 2, 16), torch.rand(1, 74, 2)
    states, cu = torch.randn(6, 2, 16, 16).to(dtype), torch.tensor([0, 3, 73, 74])
    states[0] = float("nan")
    given = {"cu_seqlens": cu, "state_v_first": True, "output_final_state": True}
    rows = torch.stack([states[s].float() if s >= 0 else torch.zeros(2, 16, 16) for s in slots])
    want, final = chunk_kda(q, k, v, g, beta, initial_state=rows, **given)
    assert final is not None
    after = states.clone()
    for slot, state in zip(slots, final):
        if slot >= 0:
            after[slot] = state.to(dtype)
    at = torch.tensor(slots, dtype=torch.int32)
    o = prefill(chunk_kda, q, k, v, g, beta, states=states, slots=at, cu_seqlens=cu)
    assert torch.equal(o, want)
    torch.testing.assert_close(states, after, rtol=0, atol=0, equal_nan=True)


def test_slots_past_the_pool_are_refused() -> None:
    q, k, v = torch.randn(3, 2, 1, 2, 16).unbind()
    states, none, far = torch.randn(3, 2, 16, 16), torch.tensor([-1, 1]), torch.tensor([-1, 3])
    terms = [x.view(1, 2, 2, 16) for x in (q, k, v)] + [-torch.rand(1, 2, 2), torch.rand(1, 2, 2)]
    before, cu = states.clone(), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="slots: want less than the 3 states of the pool, got 3"):
        prefill(chunk_gated_delta_rule, *terms, states=states, slots=far, cu_seqlens=cu)
    tokens = [q, k, v, torch.rand(2, 1, 2), torch.rand(2, 1, 2)]
    options: dict[str, Any] = {"A_log": torch.zeros(2), "dt_bias": None, "states": states}
    for name, slots, into in (("slots", far, none), ("into_slots", none, far)):
        with pytest.raises(ValueError, match=f"^{name}: want less than the 3 states of the pool"):
            step_drafts(tokens, slots=slots, into=states, into_slots=into[:, None], **options)
    assert torch.equal(states, before)


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize(("tokens", "way"), [(2, "_lightning_step"), (4, "_lightning_prompts")])
def test_lightning_tells_prompts_from_tokens_alone(
    tokens: int, way: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, ran = torch.empty(tokens, heads, 8), []
    for name in ("_lightning_step", "_lightning_prompts"):
        call = lambda *x, name=name, **_: ran.append(name) or x[0]  # noqa: E731
        monkeypatch.setattr(sglang_functions, name, call)
    meta = SimpleNamespace(mask=None, batch_size=2, s_offsets=torch.tensor([1, 0]))
    sglang_functions.seg_la_fwd(q, q, q, torch.empty(3, heads, 8, 8), torch.ones(heads), meta)
    assert ran == [way]


@pytest.mark.parametrize("has_state", [False, True])
def test_lightning_prompts_are_their_tokens(has_state: bool) -> None:
    q, k, v = torch.randn(3, 5, 2, 8).unbind()
    pool, decay = torch.randn(3, 2, 8, 8), torch.rand(2)
    slots, offsets = torch.tensor([2, 0]), torch.tensor([0, 3, 5], dtype=torch.int32)
    has = torch.full((2,), float(has_state))
    meta = SimpleNamespace(
        mask=None, batch_size=2, s_offsets=slots, q_offsets=offsets, s_scales=has
    )
    want, states = [], pool.clone()
    for slot, (begin, end) in zip(slots.tolist(), pairwise(offsets.tolist())):
        states[slot] *= has_state
        for t in range(begin, end):
            states[slot] *= (-decay).exp()[:, None, None]
            states[slot] += k[t, :, :, None] * v[t, :, None]
            want.append(0.5 * torch.einsum("hk,hkv->hv", q[t], states[slot]))
    y = sglang_functions.seg_la_fwd(q, k, v, pool, decay, meta, softmax_scale=0.5)
    near(y, torch.stack(want))
    near(pool, states)


def without_vllm(monkeypatch: pytest.MonkeyPatch, **context: Any) -> None:
    """Modules of vLLM that ours import; forget_vllm() ends it."""
    utils = "model_executor.layers.mamba.mamba_utils"
    for name in ("forward_context", "model_executor.custom_op", utils):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", SimpleNamespace(**context))
    forget_vllm()


def test_vllm_methods_call_ours_under_names_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its module and imported late, in its own code and in that of its functions."""
    without_vllm(monkeypatch)
    module = SimpleNamespace(late=lambda x: ("their late", x), kept=lambda x: ("kept late", x))
    monkeypatch.setitem(sys.modules, "some_engine", module)
    scope: dict[str, Any] = {x: (lambda y, x=x: (x, y)) for x in ("one", "two", "kept", "unused")}
    code = """def method(x):
    from some_engine import late, kept as other
    assert __import__("math", {}, {}).pi > 3
    return one(x), kept(x), late(x), other(x), (lambda: two(x))()"""
    exec(code, scope)
    calls: Any = {x: (lambda y, x=x: ("our " + x, y)) for x in ("one", "two", "late", "nowhere")}
    try:
        from slipstream.integrations import vllm_layers

        assert vllm_layers._called_by(scope["method"], calls) == {"one", "two", "late"}
        got = vllm_layers._rebound(scope["method"], calls, "Site")(5)
    finally:
        forget_vllm()
    assert [x for x, _ in got] == ["our one", "kept", "our late", "kept late", "our two"]


def test_vllm_layers_are_warmed_once_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """By prompts of a batch that decodes, with and without states; its metadata is there again."""

    @dataclasses.dataclass
    class Metadata:
        num_prefills: int
        num_decodes: int
        prep_initial_states: bool = False
        num_accepted_tokens: None = None

    class Other(SimpleNamespace): ...

    decoding = {"it": Metadata(0, 2), "other": None}
    context = SimpleNamespace(attn_metadata=decoding)
    without_vllm(monkeypatch, get_forward_context=lambda: context)
    seen: list[Any] = []

    def method(x: Tensor, y: Tensor | None, out: Tensor) -> None:
        batch = context.attn_metadata["it"]
        seen.append((batch.num_prefills, batch.prep_initial_states, x.shape, y, out.shape))

    given = torch.ones(2, 3), None, torch.ones(1, 2, 5)
    try:
        from slipstream.integrations import vllm_steps

        kinds: Any = (SimpleNamespace, 3, None), (SimpleNamespace, 5, None), (Other, 3, None)
        for blocks in (4, 9):
            for kind, width, dtype in (*kinds, (SimpleNamespace, 3, torch.float16)):
                cache = [torch.zeros(blocks, width, dtype=dtype)]
                vllm_steps.warm_up(kind(prefix="it", kv_cache=cache), method, *given)
        unknown: Any = SimpleNamespace(prefix="other", kv_cache=[torch.zeros(4, 9)])
        vllm_steps.warm_up(unknown, method, *given)
    finally:
        forget_vllm()
    tokens = 2 * 64
    of_kind = [(2, x, (tokens, 3), None, (1, tokens, 5)) for x in (False, True)]
    assert seen == of_kind * 4 and context.attn_metadata is decoding
