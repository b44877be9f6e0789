"""slipstream.integrations.vllm in vLLM's own classes: custom_op.py, the layers of Gated DeltaNet
and ssu_dispatch.py of both releases, as they are. Absent are the compiled parts, configuration,
platforms and distribution (tests/support/engines): what a layer does to find out which kernels it
may take."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.integrations import report, usage, vllm
from tests.support.engine_plugins import everywhere, forget_vllm, install, loader, warned
from tests.support.engines import loaded
from tests.support.serving_calls import HV, Call, K, V

pytestmark = pytest.mark.slow
RELEASES = ["vllm-0.33.0", "vllm-0.26.0"]
CLASSES = "slipstream.integrations.vllm_classes"
LAYERS = "vllm.model_executor.layers.mamba"
KINDS = SimpleNamespace(MAMBA1="mamba1", MAMBA2="mamba2")


@pytest.fixture(params=RELEASES)
def engine(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """A vLLM with which nothing is registered: its modules, and its settings."""
    import triton
    import triton.language as tl

    settings = SimpleNamespace(
        custom_ops=["none"], enabled_custom_ops=set(), disabled_custom_ops=set()
    )
    files = ["vllm.model_executor.custom_op", f"{LAYERS}.gdn.qwen_gdn_linear_attn"]
    files += [f"{LAYERS}.ops.ssu_dispatch", "vllm.config.mamba", "vllm.plugins"]
    files += [f"{LAYERS}.gdn.base"]
    given: dict[str, Any] = {
        "vllm__config": {"get_cached_compilation_config": lambda: settings},
        "vllm__triton_utils": {"triton": triton, "tl": tl},
        "vllm__v1__attention__backends__registry": {"MambaAttentionBackendEnum": KINDS},
        "vllm__v1__attention__backends__utils": {"NULL_BLOCK_ID": 0},
    }
    forget_vllm()
    with loaded(request.param, *files, **given) as (custom, gdn, dispatch, config, plugins, _):
        yield SimpleNamespace(
            custom=custom, gdn=gdn, dispatch=dispatch, config=config, settings=settings,
            plugins=plugins,
        )  # fmt: skip
    forget_vllm()


@pytest.mark.parametrize("custom_ops", ["none", "all"])
def test_registered_layer_is_a_module(engine: SimpleNamespace, custom_ops: str) -> None:
    engine.settings.custom_ops[:] = [custom_ops]
    vllm.register()
    before = usage.site("vllm", "ChunkGatedDeltaRule").calls()
    layer = engine.gdn.ChunkGatedDeltaRule()
    assert type(layer).__module__ == CLASSES
    assert isinstance(layer, engine.gdn.ChunkGatedDeltaRule)
    assert layer.gdn_prefill_backend == "slipstream"
    model = nn.Sequential(nn.Linear(2, 2), layer)
    assert [name for name, _ in model.named_modules()] == ["", "0", "1"]
    assert set(model.to(torch.bfloat16).eval().state_dict()) == {"0.weight", "0.bias"}
    assert list(layer.parameters()) == list(layer.buffers()) == [] and not layer.training
    assert type(copy.deepcopy(layer)) is type(layer) and "ChunkGatedDeltaRule" in repr(model)
    called = []
    layer.register_forward_hook(lambda *_: called.append(1))
    call = Call.prefill(False)
    want, states = call.expected()
    given = call.sglang_prefill()
    room = torch.full((200, HV, V), -1.0)
    # as QwenGatedDeltaNetAttention._forward_core calls it
    o, final = layer(
        **{n: given[n] for n in ("q", "k", "v", "g", "beta")},
        initial_state=call.states[call.slots.long()],
        output_final_state=True,
        cu_seqlens=call.offsets,
        chunk_indices=None,
        chunk_offsets=None,
        use_qk_l2norm_in_kernel=True,
        core_attn_out=room,
    )
    assert called == [1] and usage.site("vllm", "ChunkGatedDeltaRule").calls() == before + 1
    torch.testing.assert_close(o.double(), want, atol=2e-5, rtol=2e-5)
    final_states = torch.stack([x[-1] for x in states])
    torch.testing.assert_close(final.double(), final_states, atol=2e-5, rtol=2e-5)
    assert torch.equal(room[: o.shape[1]], o[0]) and bool((room[o.shape[1] :] == -1).all())


def test_another_plugins_layer_is_not_replaced(engine: SimpleNamespace) -> None:
    @engine.custom.CustomOp.register_oot(name="ChunkGatedDeltaRule")
    class Other(engine.gdn.ChunkGatedDeltaRule):
        pass

    for _ in range(2):
        with pytest.raises(AssertionError, match="Duplicate op name"):
            vllm.register()
    assert engine.custom.op_registry_oot["ChunkGatedDeltaRule"] is Other


def test_layers_of_your_own_stay(engine: SimpleNamespace) -> None:
    """By the name of vLLM's class, as docs/guides/serving.md says; ours is then refused."""
    name = "QwenGatedDeltaNetAttention"
    theirs = getattr(engine.gdn, name)

    @engine.custom.PluggableLayer.register_oot(name=name)
    class Mine(theirs):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    vllm.register()
    assert issubclass(theirs, engine.custom.PluggableLayer) and type(theirs()) is Mine
    assert (
        f"vllm {name}",
        f"AssertionError: Duplicate layer name: {name}",
    ) in report().not_replaced
    assert "ChunkGatedDeltaRule" in engine.custom.op_registry_oot


def updated(engine: SimpleNamespace, *args: Any, **options: Any) -> None:
    """By vLLM's function that its layers call, with the backend that it takes from its registry."""
    vllm.register()
    config = SimpleNamespace(
        backend=engine.config.MambaBackendEnum.TRITON, enable_stochastic_rounding=False
    )
    spec = engine.dispatch.MambaSpec()
    spec.mamba_type = KINDS.MAMBA2
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    engine.dispatch.initialize_mamba_ssu_backend(config, groups)
    assert engine.dispatch.get_mamba_ssu_backend().name == "slipstream"
    before = usage.site("vllm", "MambaSSUBackend").calls()
    engine.dispatch.selective_state_update(*args, **options)
    assert usage.site("vllm", "MambaSSUBackend").calls() == before + 1


def recurrence(
    state: Tensor, terms: tuple[Tensor, ...], z: Tensor | None, n: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """y and states in float64 after the tokens n of one sequence, from a state [H, P, S]."""
    x, dt, A, B, C, D, bias = (t.double() for t in terms)
    outputs, states = [], []
    for t in n:
        step = F.softplus(dt[t] + bias)
        each = state.shape[0] // B.shape[1]
        b, c = (i[t].repeat_interleave(each, 0)[:, None] for i in (B, C))
        state = state * (step[..., None] * A).exp() + (step * x[t])[..., None] * b
        y = (state * c).sum(-1) + D * x[t]
        outputs.append(y if z is None else y * F.silu(z[t].double()))
        states.append(state)
    return torch.stack(outputs), states


def mamba_terms(tokens: int, expanded: bool) -> tuple[Tensor, ...]:
    """x, dt, A, B, C, D, dt_bias of 4 heads, 2 groups; dt, A, D a number a head in Mamba-2."""
    wide = (1,) if expanded else (V,)
    dt, bias, D = torch.randn(tokens, 4, *wide), torch.randn(4, *wide), torch.randn(4, *wide)
    A = -torch.rand(4, *wide, 1 if expanded else K)
    B, C = torch.randn(2, tokens, 2, K).unbind()
    x = torch.randn(tokens, 4, V)
    return x, dt.expand_as(x), A.expand(4, V, K), B, C, D.expand(4, V), bias.expand(4, V)


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mamba_step_reads_and_writes_blocks(
    engine: SimpleNamespace, expanded: bool, elsewhere: bool, dtype: torch.dtype
) -> None:
    """As MambaMixer2 without drafts: the same tensor of blocks twice, or other blocks to write.
    With drafts, in tests/integrations/test_serving.py."""
    terms, pool = mamba_terms(3, expanded), torch.randn(9, 2, 4, V, K)[:, 0].to(dtype)
    source = torch.tensor([5, 0, 2], dtype=torch.int32)
    target = torch.tensor([7, 3, 2], dtype=torch.int32) if elsewhere else source
    z, out, before = torch.randn(3, 4, V), torch.zeros(3, 4, V), pool.clone()
    blocks = {"state_batch_indices": source, "dst_state_batch_indices": target}
    updated(engine, pool, *terms, z=z, dt_softplus=True, **blocks, out=out)
    want = before.clone()
    for n in (0, 2):  # the second has no block: nothing is written
        y, states = recurrence(before[source[n]].double(), terms, z, [n])
        torch.testing.assert_close(out[n].double(), y[0], atol=2e-5, rtol=2e-5)
        want[target[n]] = states[0].to(dtype)
    torch.testing.assert_close(pool, want, atol=2e-5, rtol=2e-5 if dtype == torch.float32 else 1e-2)


def test_mamba1_step(engine: SimpleNamespace) -> None:
    """As MambaMixer: no heads, [N, D] and states [blocks, D, S]."""
    D, S = 6, 4
    pool, slots = torch.randn(5, D, S), torch.tensor([3, 1])
    x, dt, z = torch.randn(3, 2, D).unbind()
    A, B, C = -torch.rand(D, S), torch.randn(2, S), torch.randn(2, S)
    skip, bias, out, before = torch.randn(D), torch.randn(D), torch.zeros(2, D), pool.clone()
    blocks = {"state_batch_indices": slots, "dst_state_batch_indices": slots}
    updated(engine, pool, x, dt, A, B, C, skip, bias, z=z, dt_softplus=True, **blocks, out=out)
    terms = x[:, None], dt[:, None], A[None], B[:, None], C[:, None], skip[None], bias[None]
    for n in range(2):
        y, states = recurrence(before[slots[n], None].double(), terms, z[:, None], [n])
        torch.testing.assert_close(out[n].double(), y[0, 0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(pool[slots[n]].double(), states[0][0], atol=2e-5, rtol=2e-5)
        before[slots[n]] = pool[slots[n]]
    assert torch.equal(pool, before)


def test_stochastic_rounding_is_refused(engine: SimpleNamespace) -> None:
    vllm.register()
    cls = engine.dispatch._BACKEND_REGISTRY[engine.config.MambaBackendEnum.TRITON]
    with pytest.raises(NotImplementedError, match="enable_stochastic_rounding"):
        cls(SimpleNamespace(enable_stochastic_rounding=True))


@pytest.mark.parametrize("asked", [None, "0", "1", "yes"])
def test_plugin_is_called(
    engine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: str | None,
    tmp_path: Path,
) -> None:
    install(monkeypatch, tmp_path)
    if asked is not None:
        monkeypatch.setenv("SLIPSTREAM_VLLM", asked)
    call, gdn = loader(engine.plugins, monkeypatch), engine.gdn
    tables = engine.custom.op_registry_oot, engine.dispatch._BACKEND_REGISTRY
    layers, backends = everywhere(call, lambda: [dict(x) for x in tables])
    assert bool(layers) == (asked == "1")
    assert all(x.__module__.startswith("slipstream.") for x in layers.values())
    assert [x.__module__ for x in backends.values()].count(CLASSES) == (asked == "1")
    if asked == "1":
        assert type(gdn.ChunkGatedDeltaRule()) is layers["ChunkGatedDeltaRule"]
    said = set(warned(caplog))
    assert len(said) == (asked == "yes") and all("SLIPSTREAM_VLLM" in x for x in said)


MISSING = {
    "gdn": ("gdn", "ChunkGatedDeltaRule"),
    "backend": ("dispatch", "MambaSSUBackend"),
    "table": ("dispatch", "_BACKEND_REGISTRY"),
}


@pytest.mark.parametrize("what", [*MISSING, "arguments", "another plugin"])
def test_another_release_keeps_its_own(
    engine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
    tmp_path: Path,
) -> None:
    install(monkeypatch, tmp_path)
    monkeypatch.setenv("SLIPSTREAM_VLLM", "1")
    registered = engine.custom.op_registry_oot
    names = "Duplicate op name"
    if what in MISSING:
        module, names = MISSING[what]
        monkeypatch.delattr(getattr(engine, module), names)
    elif what == "arguments":
        names = "forward_native: .*'decay'"

        def forward_native(self: Any, q: Any, k: Any, v: Any, decay: Any) -> None: ...

        rule: Any = engine.gdn.ChunkGatedDeltaRule
        monkeypatch.setattr(rule, "forward_native", forward_native)
    else:
        monkeypatch.setitem(registered, "ChunkGatedDeltaRule", engine.gdn.ChunkGatedDeltaRule)
    table = getattr(engine.dispatch, "_BACKEND_REGISTRY", {})
    before = dict(registered), dict(table)
    call = loader(engine.plugins, monkeypatch)
    for _ in range(2):
        caplog.clear()
        call()
        assert (registered, table) == before
        (said,) = warned(caplog)
        assert re.search(f"slipstream.integrations.vllm is not used: .*{names}", said)
        assert [x for x in report().not_replaced if re.search(names, x[1])]
