"""slipstream.integrations for engines: their calls beside the recurrence, and what registers them.

tests/support/serving_peers.py compares with the engines' own functions, out of their wheels.
"""

import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.integrations import sglang, vllm
from slipstream.integrations.serving import (
    packed,
    prefill,
    prefill_with_states,
    step_drafts,
    unpacked,
)
from slipstream.ops import chunk_gated_delta_rule, chunk_kda
from tests.support.serving_calls import HV, Call, K, N, T, V

KERNELS = {False: sglang.GDNKernel(), True: sglang.KDAKernel()}
kinds = pytest.mark.parametrize("is_kda", [False, True], ids=["gdn", "kda"])


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=2e-5, rtol=2e-5)


def expect_states(call: Call, states: list[list[Tensor]], before: Tensor) -> None:
    """The last state in each slot, and other slots as they were."""
    want = before.clone().double()
    for n, slot in enumerate(call.slots.tolist()):
        if slot != call.null:
            want[slot] = states[n][-1]
    near(call.states, want)


@kinds
def test_sglang_decode(is_kda: bool) -> None:
    for packed_call in (False, True):
        call = Call.decode(is_kda)
        (want, states), before = call.expected(), call.states.clone()
        given = call.sglang()
        if packed_call:
            q, k, v = (given.pop(n)[0].flatten(1) for n in ("q", "k", "v"))
            given.pop("query_start_loc")
            sizes = {"num_v_heads": HV, "head_v_dim": V, "scale": K**-0.5}
            got = KERNELS[is_kda].packed_decode(torch.cat([q, k, v], -1), **given, **sizes)
        else:
            got = KERNELS[is_kda].decode(**given)
        valid = call.valid_rows(N)
        near(got[:, valid], want[:, valid])
        expect_states(call, states, before)


def test_sglang_bounded_gates() -> None:
    call = Call.decode(True)
    want, _ = call.expected(-5.0)
    got = KERNELS[True].decode(**call.sglang(), lower_bound=-5.0)
    near(got[:, call.valid_rows(N)], want[:, call.valid_rows(N)])


@kinds
def test_sglang_verify(is_kda: bool) -> None:
    call = Call.verify(is_kda)
    (want, states), before = call.expected(), call.states.clone()
    got = KERNELS[is_kda].target_verify(**call.sglang(), **call.sglang_verify())
    near(got, want)
    assert torch.equal(call.states, before) and call.buffer is not None and call.rows is not None
    for n, row in enumerate(call.rows.tolist()):
        near(call.buffer[row], torch.stack(states[n][1:]))
    tree = {**call.sglang_verify(), "retrieve_parent_token": torch.zeros(N, T)}
    with pytest.raises(NotImplementedError, match="chain"):
        KERNELS[is_kda].target_verify(**call.sglang(), **tree)


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


@pytest.mark.parametrize("consistent", [False, True])
def test_states_on_the_way(consistent: bool) -> None:
    call = Call.prefill(False)
    (want, states), before = call.expected(), call.states.clone()
    given = call.sglang_prefill()
    if consistent:
        names = "q", "k", "v", "g", "beta"
        rule = partial(chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True, consistent=True)
        pool: dict[str, Any] = {"states": call.states, "slots": call.slots}
        tensors = [given[x] for x in names]
        o, h = prefill_with_states(
            rule, *tensors, **pool, cu_seqlens=call.offsets, every=64, count=2
        )
        left = call.states.clone()
        call.states.copy_(before)
        assert torch.equal(o, prefill(rule, *tensors, **pool, cu_seqlens=call.offsets))
        assert torch.equal(left, call.states)
    else:
        wanted: Any = {"num_state_checkpoints": 2, "state_checkpoint_every_n_tokens": 64}
        o, _, found = sglang.GDNKernel().extend(**given, **wanted)
        assert found is not None
        h = found[0]
    near(o, want)
    # of 70, 5 and 64 tokens
    near(h, torch.stack([states[0][64], states[2][64]]))
    expect_states(call, states, before)


def test_sglang_refuses_what_it_has_not() -> None:
    call = Call.prefill(True)
    with pytest.raises(NotImplementedError, match="return_intermediate_states"):
        KERNELS[True].extend(**call.sglang_prefill(), return_intermediate_states=True)
    with pytest.raises(ValueError, match="kind"):
        sglang.register(dict, [], "mamba")
    with pytest.raises(AttributeError):
        sglang.OtherBackend  # noqa: B018


def modules(monkeypatch: pytest.MonkeyPatch, **values: dict[str, Any]) -> None:
    """Modules of an engine that is not there; __ stands for a dot."""
    for name, members in values.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        module.__dict__.update(members)


def test_sglang_registers_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dispatcher:
        decode_kernel = extend_kernel = verify_kernel = tree_verify_kernel = "triton"

    class KDAAttnBackend:
        def __init__(self, runner: str) -> None:
            self.runner, self.kernel_dispatcher = runner, Dispatcher()

    registry: list[Any] = []
    folder = "sglang__srt__layers__attention__linear__kda_backend"
    members = {"LinearAttnModelSpec": dict, "register_linear_attn_model": registry.append}
    modules(monkeypatch, **{folder: {"KDAAttnBackend": KDAAttnBackend}})
    module = ModuleType("sglang.srt.configs.linear_attn_model_registry")
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, "sglang.srt.configs", ModuleType("sglang.srt.configs"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sglang.register(dict, ["Mine"], "kda", uses_mamba_radix_cache=False)
    (spec,) = registry
    assert spec["backend_class_name"] == "slipstream.integrations.sglang.KDAAttnBackend"
    assert spec["arch_names"] == ["Mine"] and not spec["uses_mamba_radix_cache"]
    backend: Any = sglang.KDAAttnBackend("runner")
    assert isinstance(backend, KDAAttnBackend) and backend.runner == "runner"
    dispatcher: Any = backend.kernel_dispatcher
    assert isinstance(dispatcher.decode_kernel, sglang.KDAKernel)
    assert dispatcher.tree_verify_kernel == "triton" and dispatcher.supports_packed_decode


@kinds
def test_vllm_decode(is_kda: bool) -> None:
    call = Call.decode(is_kda, 1)
    (want, states), before = call.expected(), call.states.clone()
    got, pool = vllm.delta_rule_update(**call.vllm(), is_kda=is_kda)
    near(got[:, call.valid_rows(N)], want[:, call.valid_rows(N)])
    assert pool is call.states
    expect_states(call, states, before)


@kinds
def test_vllm_verify(is_kda: bool) -> None:
    call = Call.drafts(is_kda)
    want, states = call.expected()
    got, pool = vllm.delta_rule_update(**call.vllm(), is_kda=is_kda)
    near(got, want)
    for n, blocks in enumerate(call.slots.tolist()):
        for t, state in enumerate(states[n][1:]):
            near(pool[blocks[t]], state)


def test_vllm_prefill() -> None:
    call = Call.prefill(False)
    want, states = call.expected()
    given = call.sglang_prefill()
    tensors = [given[n] for n in ("q", "k", "v", "g", "beta")]
    room = torch.zeros(200, HV, V)
    o, final = vllm.chunk_gated_delta_rule(
        *tensors,
        initial_state=call.states[call.slots.long()],
        output_final_state=True,
        cu_seqlens=call.offsets,
        core_attn_out=room,
    )
    near(o, want)
    assert final is not None
    near(final, torch.stack([x[-1] for x in states]))
    assert torch.equal(room[: o.shape[1]], o[0])


def test_vllm_mamba_step() -> None:
    call, given = Call.mamba()
    x, out = given["x"], torch.zeros_like(given["x"])
    dt = torch.nn.functional.softplus(given["dt"] + given["dt_bias"])[..., 0]
    before, slots = call.states.clone(), given["state_batch_indices"]
    S = before[slots.long()] * (dt * given["A"][:, 0, 0]).exp()[..., None, None]
    S = S + (dt[..., None] * x)[..., None] * given["B"][:, :, None]
    want = (S * given["C"][:, :, None]).sum(-1) + given["D"] * x
    vllm.selective_state_update(**given, out=out)
    near(out[slots > 0], want[slots > 0])
    near(call.states[slots[slots > 0].long()], S[slots > 0])
    assert torch.equal(call.states[0], before[0])
    with pytest.raises(NotImplementedError, match="drafts"):
        vllm.selective_state_update(**given, out=out, num_accepted_tokens=torch.ones(N))


def test_vllm_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: dict[str, Any] = {}

    class CustomOp:
        @staticmethod
        def register_oot(name: str) -> Any:
            return lambda cls: layers.setdefault(name, cls)

    class MambaBackendEnum:
        TRITON = "triton"

    folder = "vllm__model_executor__layers__mamba__ops__ssu_dispatch"
    registry = {"triton": None}
    members: dict[str, Any] = {"MambaSSUBackend": object, "MambaBackendEnum": MambaBackendEnum}
    modules(monkeypatch, **{folder: {**members, "_BACKEND_REGISTRY": registry}})
    custom = ModuleType("vllm.model_executor.custom_op")
    custom.__dict__["CustomOp"] = CustomOp
    monkeypatch.setitem(sys.modules, custom.__name__, custom)
    vllm.register()
    call, given = Call.mamba()
    backend: Any = registry["triton"]
    out = torch.zeros_like(given["x"])
    backend()(**given, out=out)
    assert backend().name == "slipstream" and out.any() and call.states.isfinite().all()
    assert set(layers) == {"ChunkGatedDeltaRule"}
    given = Call.prefill(False).sglang_prefill()
    tensors = {n: given[n] for n in ("q", "k", "v", "g", "beta")}
    ends = {"initial_state": None, "output_final_state": False}
    o, final = layers["ChunkGatedDeltaRule"]().forward(
        **tensors, **ends, cu_seqlens=given["query_start_loc"]
    )
    assert o.shape == given["v"].shape and final is None


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


def test_prefill_gives_a_pool_no_gradient() -> None:
    """Outside of no_grad too: a pool would keep all calls' graphs, and refuse the next call."""
    q, k, v = torch.randn(3, 1, 9, 2, 16).unbind()
    states, slots, cu = torch.randn(3, 2, 16, 16), torch.tensor([2]), torch.tensor([0, 9])
    terms = [q.requires_grad_(), k, v, -torch.rand(1, 9, 2), torch.rand(1, 9, 2)]
    for _ in range(2):
        o = prefill(chunk_gated_delta_rule, *terms, states=states, slots=slots, cu_seqlens=cu)
        assert o.requires_grad and not states.requires_grad


def test_tokens_are_unpacked_and_packed() -> None:
    x, offsets = torch.randn(1, 6, 2), torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32)
    apart = unpacked(x, offsets, 3)
    assert apart.shape == (4, 3, 2) and torch.equal(apart[3, :2], x[0, 4:])
    assert torch.equal(packed(apart, offsets, 6), x)
