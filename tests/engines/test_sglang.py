"""slipstream.integrations.sglang in SGLang's own classes: dispatchers, backends and hooks of both
releases, as they are.

Given here are the base of its backends, which holds the pools, and the convolution, which leaves
its input. Absent is what asks about devices and settings, and whatever else these files import.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.integrations import report, sglang, usage
from tests.support.engine_plugins import everywhere, install, loader, warned
from tests.support.engines import Absent, loaded
from tests.support.serving_calls import HV, SLOTS, Call, H, K, N, T, V

pytestmark = pytest.mark.slow
RELEASES = ["sglang-0.5.23", "sglang-0.5.16"]
FOLDER = "sglang.srt.layers.attention.linear"
NAMES = {"gdn": "GDNAttnBackend", "kda": "KDAAttnBackend"}
WIDTH = 3  # tokens that the convolution keeps


class Base:
    """In the place of MambaAttnBackendBase."""

    accept_lens_pool = None
    tracked: Any = None

    def __init__(self, runner: Any) -> None:
        self.req_to_token_pool, self.device = runner.req_to_token_pool, "cpu"

    def _track_mamba_state_decode(self, *args: Any) -> None:
        pass

    def _track_mamba_state_extend(
        self, batch: Any, h: Any, states: Tensor, metadata: Any, *, h_track_buf: Any = None
    ) -> None:
        self.tracked = h, h_track_buf


def convolved(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return x


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """SGLang's fused_gdn_gating."""
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    return g[None], b.sigmoid()[None]


class Speculative:
    """A layer's caches: MambaPool.SpeculativeState, or the ones without drafts."""

    replayssm_d = replayssm_k = replayssm_g = replayssm_rawv = None

    def __init__(self, call: Call) -> None:
        self.conv = [torch.zeros(SLOTS, WIDTH, 2 * H * K + HV * V)]
        self.temporal, self.intermediate_ssm = call.states, call.buffer
        self.intermediate_conv_window = [torch.zeros(SLOTS, T, WIDTH, 2 * H * K + HV * V)]


@pytest.fixture(params=RELEASES)
def engine(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    conv = {"causal_conv1d_fn": convolved, "causal_conv1d_update": convolved}
    gating = {"fused_gdn_gating": gates}
    attention = "sglang__kernels__ops__attention"
    srt = "sglang__srt__layers__attention"
    given: dict[str, Any] = {
        "sglang__kernels__ops__mamba__causal_conv1d_triton": conv,
        f"{attention}__fla__fused_gdn_gating": gating,
        f"{attention}__linear__fused_gdn_gating": gating,
        f"{attention}__fla__chunk_delta_h": {"CHUNK_SIZE": 64},
        f"{srt}__hybrid_linear_attn_backend": {"MambaAttnBackendBase": Base},
        "sglang__srt__mem_cache__memory_pool": {
            "MambaPool": SimpleNamespace(SpeculativeState=Speculative)
        },
        "sglang__srt__utils__common": {"get_eager_max_batch_size": lambda size: size},
    }
    files = [f"{FOLDER}.{x}" for x in ("gdn_backend", "kda_backend", "utils", "kernels")]
    files += ["sglang.srt.plugins.hook_registry", "sglang.srt.configs.linear_attn_model_registry"]
    files += ["sglang.srt.plugins"]
    sglang._backend.cache_clear()
    with loaded(request.param, *files, **given) as found:
        gdn, kda, utils, _, hooks, registry, plugins = found
        triton = utils.LinearAttnKernelBackend.TRITON
        for name in ("decode", "prefill"):  # 0.5.16 asks for the command line's
            for module in (gdn, kda):
                setattr(module, f"get_linear_attn_{name}_backend", lambda: triton)
        yield SimpleNamespace(
            release=request.param,
            modules={"gdn": gdn, "kda": kda},
            hooks=hooks,
            plugins=plugins,
            registry=registry,
            backends=SimpleNamespace(decode=triton, prefill=triton, verify=triton),
        )
    sglang._backend.cache_clear()


def runner(engine: SimpleNamespace, cache: Speculative) -> Any:
    conv = [cache.conv[0].mT]
    pool = SimpleNamespace(
        size=SLOTS,
        mamba_pool=SimpleNamespace(mamba_cache=SimpleNamespace(conv=conv)),
        mamba2_layer_cache=lambda layer: cache,
    )
    return SimpleNamespace(
        req_to_token_pool=pool,
        linear_attn_backends=engine.backends,
        device="cpu",
        server_args=Absent(),
    )


def built(engine: SimpleNamespace, call: Call, cls: Any, **metadata: Any) -> Any:
    """A backend for a call, with the metadata of its batch."""
    backend = cls(runner(engine, Speculative(call)))
    none = dict.fromkeys(
        ("replayssm_write_pos", "replayssm_force_flush", "retrieve_next_token", "track_chunk_idx",
         "retrieve_next_sibling", "retrieve_parent_token", "logical_num_tokens",
         "state_checkpoint_cu_starts", "state_checkpoint_indices", "track_ssm_h_batch_src",
         "track_ssm_h_src", "conv_block_table"), None
    )  # fmt: skip
    none |= {"num_state_checkpoints": 0, "state_checkpoint_every_n_tokens": 0}
    none |= {"query_start_loc": call.offsets, "mamba_cache_indices": call.slots}
    backend.forward_metadata = SimpleNamespace(
        **{**none, "has_mamba_track_mask": False, **metadata}
    )
    backend.enable_mis = False
    return backend


def layer(call: Call, lower_bound: float | None) -> SimpleNamespace:
    weight = torch.zeros(2 * H * K + HV * V, WIDTH + 1)
    return SimpleNamespace(
        layer_id=0, A_log=call.A_log, dt_bias=call.dt_bias, lower_bound=lower_bound,
        q_dim=H * K, k_dim=H * K, v_dim=HV * V, head_q_dim=K, head_k_dim=K, head_v_dim=V,
        num_q_heads=H, num_k_heads=H, num_v_heads=HV, bias=None, activation="silu",
        conv_weights=weight, q_conv_weights=weight, k_conv_weights=weight, v_conv_weights=weight,
    )  # fmt: skip


def mixed(call: Call) -> Tensor:
    """What the convolution is given: q, k and v [tokens, 2 H K + HV V]."""
    return torch.cat([x[0].flatten(1) for x in (call.q, call.k, call.v)], -1)


def batch(call: Call, **mode: bool) -> SimpleNamespace:
    modes = {"is_target_verify": False, "is_draft_extend_v2": False, **mode}
    return SimpleNamespace(
        forward_mode=SimpleNamespace(**{k: (lambda v=v: v) for k, v in modes.items()}),
        spec_info=SimpleNamespace(draft_token_num=T, ragged_verify_layout=None),
        batch_size=N,
        req_pool_indices=torch.arange(N),
        extend_prefix_lens=torch.zeros(N),
        extend_seq_lens_cpu=call.offsets.diff().tolist(),
    )


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=2e-5, rtol=2e-5)


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


def test_trees_of_drafts_stay_with_sglang(engine: SimpleNamespace) -> None:
    for kind in NAMES:
        call = Call.verify(kind == "kda")
        backend = built(engine, call, getattr(sglang, NAMES[kind]))
        dispatcher, parents = backend.kernel_dispatcher, torch.zeros(N, T)
        asked = []
        trees = getattr(dispatcher, "tree_verify_kernel", None)
        trees = dispatcher.verify_kernel.trees if trees is None else trees
        assert type(trees).__name__ == f"Triton{kind.upper()}Kernel"
        trees.target_verify = lambda asked=asked, **given: asked.append(given)
        given = {**call.sglang(), **call.sglang_verify()}
        dispatcher.target_verify(**{**given, "retrieve_parent_token": parents})
        assert asked[0]["retrieve_parent_token"] is parents
        near(dispatcher.target_verify(**given), call.expected()[0])  # states stay


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
        assert [len(hooks) for hooks in registry._hooks.values()] == [1, 1]
    assert warned(caplog) == []


def test_release_without_a_class_keeps_its_own(
    engine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """The other kind is ours."""
    install(monkeypatch, tmp_path)
    monkeypatch.setenv("SLIPSTREAM_SGLANG", "1")
    monkeypatch.delattr(engine.modules["kda"], NAMES["kda"])
    loader(engine.plugins, monkeypatch)()
    (said,) = warned(caplog)
    assert re.search("sglang kda is not used: .*KDAAttnBackend", said)
    assert any("KDAAttnBackend" in why for _, why in report().not_replaced)
    assert engine.modules["gdn"].GDNAttnBackend is sglang.GDNAttnBackend


def test_another_dispatcher_keeps_its_kernels(
    engine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
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
