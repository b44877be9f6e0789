"""slipstream.integrations.sglang in SGLang's own classes: dispatchers, backends and hooks of both
releases, as they are."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.integrations import report, sglang, usage
from tests.support.engine_plugins import everywhere, install, loader, warned
from tests.support.serving_calls import HV, Call, K, N, T, V
from tests.support.sglang_engine import NAMES, RELEASES, batch, built, engine_of, layer, mixed, near

pytestmark = pytest.mark.slow


@pytest.fixture(params=RELEASES)
def engine(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with engine_of(request.param) as found:
        yield found


def cases(release: str) -> list[tuple[str, float | None]]:
    """0.5.16 hands on a bound to the prefill alone."""
    return [("gdn", None), ("kda", None), *([("kda", -5.0)] if release != RELEASES[1] else [])]


def test_decode_by_a_built_backend(engine: SimpleNamespace) -> None:
    for kind, bound in cases(engine.release):
        call = Call.decode(kind == "kda")
        want, states = call.expected(bound)
        before = call.states.clone()
        backend = built(engine, call, getattr(sglang, NAMES[kind]))
        assert isinstance(backend, getattr(engine.modules[kind], NAMES[kind]))
        got = backend.forward_decode(layer(call, bound), batch(call), mixed(call), call.a, call.b)
        near(got[:, call.valid_rows(N)], want[:, call.valid_rows(N)])
        for n in (0, 2):
            near(call.states[call.slots[n]], states[n][-1])
            before[call.slots[n]] = call.states[call.slots[n]]
        assert torch.equal(call.states, before)


def test_verify_by_a_built_backend(engine: SimpleNamespace) -> None:
    for kind, bound in cases(engine.release):
        call = Call.verify(kind == "kda")
        want, states = call.expected(bound)
        before = call.states.clone()
        backend = built(engine, call, getattr(sglang, NAMES[kind]))
        backend.verify_intermediate_state_indices = call.rows
        backend._use_strided_target_verify_qkv = True
        got = backend.forward_extend(
            layer(call, bound), batch(call, is_target_verify=True), mixed(call), call.a, call.b
        )
        near(got, want)
        assert torch.equal(call.states, before) and call.buffer is not None
        for n, row in enumerate(call.rows.tolist()):
            near(call.buffer[row], torch.stack(states[n][1:]))


@pytest.mark.parametrize("draft_extend", [False, True])
def test_prefill_by_a_built_backend(engine: SimpleNamespace, draft_extend: bool) -> None:
    for kind, bound in cases(engine.release):
        call = Call.prefill(kind == "kda")
        want, states = call.expected(bound)
        backend = built(engine, call, getattr(sglang, NAMES[kind]))
        a, b = call.a, call.b
        if kind == "kda":
            a, b = a[None], b[None]
            if engine.release == RELEASES[1]:  # the model has made beta
                a, b = a.unflatten(-1, (HV, K)), b.sigmoid()
        mode = batch(call, is_draft_extend_v2=draft_extend)
        got = backend.forward_extend(layer(call, bound), mode, mixed(call), a, b)
        near(got, want)
        for n, slot in enumerate(call.slots.tolist()):
            near(call.states[slot], states[n][-1])


def test_prefix_tracking_by_a_built_backend(engine: SimpleNamespace) -> None:
    """With SGLang's "extra_buffer": the state at the last chunk's start, of sequences of 70, 5 and
    64 tokens, of which the last is taken from the pool."""
    for kind, bound in cases(engine.release):
        call = Call.prefill(kind == "kda")
        _, states = call.expected(bound)
        metadata = {
            "has_mamba_track_mask": True,
            "track_ssm_h_src": torch.tensor([1, 2]),
            "track_ssm_h_batch_src": torch.tensor([0, 1]),
            "track_chunk_idx": torch.tensor([1, 0, -1], dtype=torch.int32),
            "conv_states_mask_indices": torch.tensor([7]),
            "track_conv_indices": torch.tensor([[0, 1, 2]]),
        }
        backend = built(engine, call, getattr(sglang, NAMES[kind]), **metadata)
        a, b = (call.a[None], call.b[None]) if kind == "kda" else (call.a, call.b)
        if kind == "kda" and engine.release == RELEASES[1]:
            a, b = a.unflatten(-1, (HV, K)), b.sigmoid()
        if kind == "gdn":
            cache = backend.req_to_token_pool.mamba2_layer_cache(0)
            cache.conv = [cache.conv[0].mT]
        backend.forward_extend(layer(call, bound), batch(call), mixed(call), a, b)
        h, snapshot = backend.tracked
        if engine.release == RELEASES[0]:
            assert h is None
            found = snapshot[metadata["track_ssm_h_batch_src"]]
        else:
            assert snapshot is None
            found = h.squeeze(0)[metadata["track_ssm_h_src"]]
        near(found, torch.stack([states[0][64], states[1][0]]))


def test_flags_are_of_slipstreams_kernels(engine: SimpleNamespace) -> None:
    for kind in NAMES:
        call = Call.verify(kind == "kda")
        backend = built(engine, call, getattr(sglang, NAMES[kind]))
        dispatcher = backend.kernel_dispatcher
        kernels = [dispatcher.decode_kernel, dispatcher.extend_kernel, dispatcher.verify_kernel]
        assert {type(x).__module__ for x in kernels} == {sglang.__name__}
        assert dispatcher.supports_packed_decode and backend._fused_chain_verify_fn is None
        assert dispatcher.supports_packed_decode_safe_gate


RINGS = {"replayssm_d", "replayssm_k", "replayssm_g"}


@pytest.mark.parametrize("method", ["decode", "packed_decode", "extend", "target_verify"])
def test_refused_calls_go_to_sglangs_kernel(
    engine: SimpleNamespace, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings of ReplaySSM, trees of drafts, checkpoints: as they were given; nothing is written."""
    asks = {"decode": RINGS, "packed_decode": RINGS, "extend": {"num_state_checkpoints"}}
    asks["target_verify"] = {"cache_ring", "retrieve_parent_token"}
    for kind, name in NAMES.items():
        made = built(engine, Call.decode(False), getattr(engine.modules[kind], name))
        theirs, asked = type(made.kernel_dispatcher.decode_kernel), []
        assert theirs.__name__ == f"Triton{kind.upper()}Kernel"
        monkeypatch.setattr(
            theirs, method, lambda self, *given, asked=asked, **more: asked.append((given, more))
        )
        call = Call.verify(kind == "kda")
        backend = built(engine, call, getattr(sglang, name))
        kernel, before = backend.kernel_dispatcher.verify_kernel, call.states.clone()
        assert type(kernel).__module__ == sglang.__name__
        for argument in asks[method]:
            given = {**call.sglang(), argument: torch.ones(N, T)}
            if method == "extend":
                given = {**call.sglang_prefill(), argument: 2}
            if method == "target_verify":
                given |= {**call.sglang_verify(), argument: torch.ones(N, T)}
            if method == "packed_decode":
                packed = {"mixed_qkv": mixed(call), "num_v_heads": HV, "head_v_dim": V}
                given = {k: x for k, x in given.items() if k not in "qkv"} | packed
            getattr(kernel, method)(**given)
            assert asked.pop() == ((), given) and not asked
            (row,) = [
                x
                for x in report().rows
                if x.name == f"{name}.{method.removeprefix('packed_')}" and x.library == "sglang"
            ]
            assert any(why.startswith(f"{argument}:") for why in row.refused)
        assert torch.equal(call.states, before) and call.buffer is not None
        assert not call.buffer.any()


def test_hooks_reach_models_of_sglang(
    engine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """As the plugins are loaded: hooks first, then what imports the backends. Twice, silently."""
    registry = engine.hooks.HookRegistry
    theirs = {kind: getattr(engine.modules[kind], name) for kind, name in NAMES.items()}
    for _ in range(2):
        sglang.register_builtin()
        registry.apply_hooks()
    assert [x for x in caplog.records if x.levelname in ("WARNING", "ERROR")] == []
    for kind, name in NAMES.items():
        found = getattr(engine.modules[kind], name)
        assert found is getattr(sglang, name) and issubclass(found, theirs[kind])
        call = Call.decode(kind == "kda")
        backend, (want, _) = built(engine, call, found), call.expected()
        counted = usage.site("sglang", f"{name}.decode")
        before = counted.calls()
        got = backend.forward_decode(layer(call, None), batch(call), mixed(call), call.a, call.b)
        near(got[:, call.valid_rows(N)], want[:, call.valid_rows(N)])
        assert counted.calls() == before + 1


def test_registry_of_external_models(engine: SimpleNamespace) -> None:
    class Config:
        pass

    sglang.register(Config, ["Mine"], "kda", uses_mamba_radix_cache=False)
    spec = engine.registry.get_linear_attn_spec_by_arch("Mine")
    assert spec.config_class is Config and not spec.uses_mamba_radix_cache
    assert spec.backend_class_name == "slipstream.integrations.sglang.KDAAttnBackend"
    module, _, name = spec.backend_class_name.rpartition(".")
    assert module == sglang.__name__ and getattr(sglang, name) is sglang.KDAAttnBackend


@pytest.mark.parametrize("asked", [None, "1"])
def test_plugin_is_called(
    engine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: str | None,
    tmp_path: Path,
) -> None:
    install(monkeypatch, tmp_path)
    if asked is not None:
        monkeypatch.setenv("SLIPSTREAM_SGLANG", asked)
    modules, registry = engine.modules, engine.hooks.HookRegistry
    theirs = {kind: getattr(modules[kind], name) for kind, name in NAMES.items()}
    call = loader(engine.plugins, monkeypatch)
    found = everywhere(call, lambda: {k: getattr(modules[k], name) for k, name in NAMES.items()})
    if asked is None:
        assert found == theirs
    else:
        assert found == {k: getattr(sglang, name) for k, name in NAMES.items()}
        assert all(issubclass(found[k], theirs[k]) and found[k] is not theirs[k] for k in NAMES)
        assert [len(hooks) for hooks in registry._hooks.values()] == [1] * 7
    assert warned(caplog) == []


def test_release_without_a_class_keeps_its_own(
    engine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """Or a function; the other kinds are ours."""
    install(monkeypatch, tmp_path)
    monkeypatch.setenv("SLIPSTREAM_SGLANG", "1")
    monkeypatch.delattr(engine.modules["kda"], NAMES["kda"])
    monkeypatch.delattr("sglang.srt.layers.attention.mamba.mamba.selective_state_update")
    loader(engine.plugins, monkeypatch)()
    said, mamba = warned(caplog)
    assert re.search("sglang kda is not used: .*KDAAttnBackend", said)
    assert re.search("sglang mamba2 is not used: .*selective_state_update", mamba)
    assert any("KDAAttnBackend" in why for _, why in report().not_replaced)
    assert engine.modules["gdn"].GDNAttnBackend is sglang.GDNAttnBackend


def test_another_dispatcher_keeps_its_kernels(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, name in NAMES.items():
        theirs = getattr(engine.modules[kind], f"{kind.upper()}KernelDispatcher")
        made = theirs.__init__

        def renamed(self: Any, *args: Any, made: Any = made) -> None:
            made(self, *args)
            self.draft_kernel = self.__dict__.pop("verify_kernel")

        monkeypatch.setattr(theirs, "__init__", renamed)
        caplog.clear()
        backend = built(engine, Call.decode(kind == "kda"), getattr(sglang, name))
        kernel = backend.kernel_dispatcher.decode_kernel
        assert type(kernel).__name__ == f"Triton{kind.upper()}Kernel"
        (said,) = warned(caplog)
        assert said == f"slipstream: SGLang's own {name} runs: its dispatcher has no verify_kernel"
        assert ("sglang", f"{name}: its dispatcher has no verify_kernel") in report().not_replaced
