"""slipstream's layers in vLLM's place: vLLM's own classes of both releases, with metadata that
vLLM's own builders make of random batches, against float64, token by token. Absent are the
projections and what vLLM has compiled. The convolution of a single token stays vLLM's, here by what
its kernel does (tests/support/vllm_steps)."""

import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.integrations import report, vllm, vllm_calls
from tests.support.engine_plugins import forget_vllm
from tests.support.engines import loaded, signatures
from tests.support.vllm_layers import HV, KINDS, D, DeltaAttention, DeltaNet, H, K, Kind, V
from tests.support.vllm_steps import Row, Scheduler, Sequence, W, common_metadata, conv_update

pytestmark = pytest.mark.slow
RELEASES = ["vllm-0.33.0", "vllm-0.26.0"]
LAYERS, BACKENDS = "vllm.model_executor.layers.mamba", "vllm.v1.attention.backends"
MODULES = [f"gdn.{x}_gdn_linear_attn" for x in ("qwen", "olmo", "kimi")]
MODULES += ["mamba_mixer", "mamba_mixer2", "short_conv"]
MODULES += [f"linear.{x}_linear_attn" for x in ("minimax", "bailing")]
# whose functions the layers call, on CUDA
OF_LAYERS = re.compile("layers/mamba/(?!ops/cpu)|flash_linear_attention|kimi_k3/nvidia")
DRAFTS = 7
# 10,000 of them were right with 0.33.0, 4,000 with 0.26.0 (Qwen, drafts of 0 to 7),
# and 10,000 of KDA with 0.33.0 and of Mamba-2 with both
STEPS = int(os.environ.get("ENGINE_STEPS", "50"))
ROWS = 64


def refused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("vLLM's own function was called")


def prepared(
    conv_output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool,
    output_g_exp: bool,
) -> tuple[torch.Tensor, ...]:
    """vLLM's fused_post_conv_prep."""
    keys = num_k_heads * head_k_dim
    q, k, v = conv_output.split([keys, keys, conv_output.shape[1] - 2 * keys], -1)
    q, k = (F.normalize(x.unflatten(-1, (-1, head_k_dim)), dim=-1, eps=1e-6) for x in (q, k))
    g = -A_log.exp() * F.softplus(a + dt_bias)
    return q, k, v.unflatten(-1, (-1, head_v_dim)), g, b.sigmoid()


def gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, doubled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's fused_olmo_hybrid_gdn_gating."""
    beta = b.sigmoid() * (2 if doubled else 1)
    return (-A_log.exp() * F.softplus(a + dt_bias))[None], beta[None]


def gathered(state: torch.Tensor, indices: torch.Tensor, has: torch.Tensor) -> torch.Tensor:
    return torch.where(has[:, None, None, None], state[indices], 0)


def rearranged(x: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    """einops.rearrange for heads and channels of the last dimension, apart or together."""
    before, after = (x.strip() for x in pattern.split("->"))
    if "(h d)" in before:
        y = x.unflatten(-1, (-1, sizes["d"]))
        return y[None] if after.startswith("1 ") else y
    y = x[0] if before.startswith("1 ") else x
    return (y.transpose(0, 1) if before == "h n d" else y).flatten(-2)


def kda_gate(
    g: torch.Tensor, A_log: torch.Tensor, head_dim: int, g_bias: torch.Tensor
) -> torch.Tensor:
    g = (g + g_bias).unflatten(-1, (-1, head_dim))
    return -A_log.reshape(-1, 1).exp() * F.softplus(g)


class Engine:
    """A release of vLLM with our layers. context: what get_forward_context returns."""

    def __init__(self, release: str, context: Any) -> None:
        self.release, self.context = release, context
        self.custom = sys.modules["vllm.model_executor.custom_op"]
        self.gdn = sys.modules[f"{LAYERS}.gdn.qwen_gdn_linear_attn"]
        self.backend = sys.modules["vllm.v1.attention.backend"]

    def metadata(self, kind: Kind, rows: list[Row]) -> Any:
        """By the builder of the kind's backend, as for a graph of decoding."""
        module, name = kind.metadata
        module = import_module(f"{BACKENDS}.{module}")
        builder_class = getattr(module, f"{name}Builder")
        builder = builder_class.__new__(builder_class)
        index = partial(torch.full, fill_value=-9, dtype=torch.int32)
        mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
        builder.__dict__.update(
            kv_cache_spec=None, speculative_config=None, device=torch.device("cpu"),
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none")),
            compilation_config=SimpleNamespace(cudagraph_mode=mode),
            num_spec=kind.drafts, num_spec_tokens=kind.drafts, use_spec_decode=kind.drafts > 0,
            use_replayssm=False, use_flashinfer_replayssm=False, chunk_size=16,
            checkpoint_builder=SimpleNamespace(build=lambda *_: None),
            gdn_prefill_backend="flashinfer", plan_flashinfer_checkpoints=False,
            use_full_cuda_graph=True, decode_cudagraph_max_bs=ROWS,
            reorder_batch_threshold=1 + kind.drafts, metadata_cls=getattr(module, name),
            spec_state_indices_tensor=index((ROWS, kind.drafts + 1)),
            non_spec_state_indices_tensor=index((ROWS,)),
            state_indices_tensor_d=index((ROWS, kind.drafts + 1)),
            spec_sequence_masks=torch.zeros(ROWS, dtype=torch.bool),
            spec_token_indx=index((ROWS * 8,)), non_spec_token_indx=index((ROWS * 8,)),
            spec_query_start_loc=index((ROWS + 1,)), non_spec_query_start_loc=index((ROWS + 1,)),
            num_accepted_tokens=index((ROWS,)), decode_num_accepted_tokens=index((ROWS,)),
            decode_state_indices_tensor=index((ROWS, kind.drafts + 1)),
            decode_legacy_state_indices_tensor=index((ROWS,)),
            decode_query_start_loc=index((ROWS + 1,)),
        )  # fmt: skip
        given = {}
        if kind.drafts:
            sequences = [x.sequence for x in rows]
            accepted = [1 if x is None else x.accepted for x in sequences]
            given["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32)
            given["num_decode_draft_tokens_cpu"] = torch.tensor([x.drafts for x in rows])
        return builder.build(0, common_metadata(self.backend, rows, kind.drafts), **given)

    def steps(self, kind: Kind, count: int, seed: int = 0) -> Scheduler:
        """Runs that number of batches, asserts that all tokens are right; returns the scheduler."""
        scheduler = Scheduler(kind.pools, kind.drafts, seed, kind.least)
        wrong = 0
        for _ in range(count):
            rows = scheduler.step()
            if not rows:
                continue
            metadata = self.metadata(kind, rows)
            self.context.attn_metadata = {"layer": metadata}
            tokens = sum(x.tokens or 1 for x in rows)
            inputs = kind.inputs(tokens)
            outputs = kind.run({n: x.clone() for n, x in inputs.items()}, tokens)
            wrong += scheduler.check(rows, outputs, inputs, kind.oracle)
        assert wrong == 0
        return scheduler


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    import triton
    import triton.language as tl

    release, context = request.param, SimpleNamespace(attn_metadata=None)
    files = ["vllm.model_executor.custom_op", LAYERS, BACKENDS, "vllm.v1.attention.backend"]
    files += ["vllm.config.mamba"]
    if release == "vllm-0.33.0":
        files.append("vllm.model_executor.models.bailing_moe_v3")
    kimi = "vllm__models__kimi_k3__nvidia__ops__third_party__kda"
    fla = "vllm__third_party__flash_linear_attention__ops"
    functions = dict.fromkeys(("chunk_kda_with_fused_gate", "fused_recurrent_kda"), refused)
    delta = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    settings = SimpleNamespace(
        custom_ops=["none"], enabled_custom_ops=set(), disabled_custom_ops=set()
    )
    given: dict[str, Any] = {
        "vllm__config": {"get_cached_compilation_config": lambda: settings},
        "vllm__triton_utils": {"triton": triton, "tl": tl},
        "vllm__forward_context": {"get_forward_context": lambda: context},
        "vllm__utils__torch_utils": {
            "async_tensor_h2d": lambda x, device=None, dtype=None: torch.as_tensor(x, dtype=dtype),
            "np_to_pinned_tensor": torch.from_numpy,
            "PIN_MEMORY": False,
        },
        "einops": {"rearrange": rearranged},
        f"{fla}__index": dict.fromkeys(
            ("prepare_chunk_indices", "prepare_chunk_offsets"), lambda *_: torch.zeros(0)
        ),
        "vllm__utils__math_utils": {"cdiv": lambda a, b: -(-a // b)},
        "vllm__compilation__breakable_cudagraph": {"eager_break_during_capture": lambda f: f},
        kimi: {**functions, "fused_recurrent_kda_packed_decode": refused},
        f"{fla}__kda": {
            **functions,
            **dict.fromkeys(("chunk_kda", "fused_recurrent_kda_fwd"), refused),
            "fused_kda_gate": kda_gate,
        },
        fla: {**dict.fromkeys(delta, refused), "fused_post_conv_prep": prepared},
    }
    stand_ins = {
        "causal_conv1d_update": conv_update,
        "fused_olmo_hybrid_gdn_gating": gating,
        "gather_initial_states": gathered,
    }
    forget_vllm()
    with loaded(release, *files, **given):
        for name in MODULES:
            module = import_module(f"{LAYERS}.{name}")
            for function, stand_in in stand_ins.items():
                if hasattr(module, function):
                    setattr(module, function, stand_in)
        if release == "vllm-0.33.0":
            bailing: Any = sys.modules[files[-1]]
            bailing.causal_conv1d_update = conv_update
        vllm.register()
        dispatch: Any = import_module(f"{LAYERS}.ops.ssu_dispatch")
        config = SimpleNamespace(enable_stochastic_rounding=False)
        triton_backend = dispatch._BACKEND_REGISTRY[dispatch.MambaBackendEnum.TRITON]
        dispatch._mamba_ssu_backend = triton_backend(config)
        yield Engine(release, context)
    forget_vllm()


def refusals() -> dict[str, dict[str, int]]:
    return {x.name: x.refused for x in report().rows if x.refused}


CASES = [(release, kind) for release in RELEASES for kind in KINDS if release in kind.releases]
DRAFTING = [(release, kind) for release, kind in CASES if release in kind.drafts_of]


def named(case: Any) -> str:
    return getattr(case, "__name__", str(case))


@pytest.mark.parametrize(("engine", "kind"), CASES, indirect=["engine"], ids=named)
def test_random_batches(engine: Engine, kind: type[Kind]) -> None:
    """Prompts in chunks, prefixes that hit, decoding, padded rows, sequences begun again."""
    scheduler = engine.steps(kind(engine), STEPS)
    assert all(scheduler.counts[x] for x in ("prefix", "lost", "padding", "prompts"))
    assert not refusals()


@pytest.mark.parametrize(("engine", "kind"), DRAFTING, indirect=["engine"], ids=named)
def test_random_drafts(engine: Engine, kind: type[Kind]) -> None:
    """Up to seven drafts, of which as many are accepted as come."""
    scheduler = engine.steps(kind(engine, DRAFTS), STEPS)
    assert scheduler.counts["drafts"] > 50 and not refusals()


@pytest.mark.parametrize("engine", RELEASES, indirect=True)
def test_interleaved_heads_are_ordered(engine: Engine) -> None:
    """Qwen3-Next's projections, whose heads lie in turns, as vLLM's method takes them apart."""
    layer: Any = DeltaNet(engine).layer
    layer.gqa_interleaved_layout = True
    qkvz, ba = torch.randn(5, 2 * (H * K + HV * V)), torch.randn(5, 2 * HV)
    *parts, b, a = layer.fix_query_key_value_ordering(qkvz, ba)
    wants = torch.cat([x.flatten(1) for x in parts], -1), b, a
    for got, want in zip(layer._ordered(qkvz, ba), wants, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("engine", RELEASES, indirect=True)
def test_rows_without_a_token_are_zero(engine: Engine) -> None:
    """Of a batch that decodes in a padded graph, and of a run without a batch."""
    kind = DeltaNet(engine)
    rows = [Row(Sequence([block], 9, 20, done=9), 1) for block in (3, 5)]
    kind.pools.windows.zero_()
    kind.pools.states.zero_()
    x = kind.inputs(4)
    qkvz, ba = x["qkvz"], torch.cat([x["b"], x["a"]], -1)
    for metadata, filled in (({"layer": engine.metadata(kind, rows)}, 2), (None, 0)):
        engine.context.attn_metadata = metadata
        kind.layer._prefill_kernels_warmed_up = True
        out = torch.full((4, HV, V), torch.nan)
        kind.layer._forward_core_rocm(qkvz, ba, ba, out)
        assert torch.isfinite(out).all() and out[:filled].any() == (filled > 0)
        assert not out[filled:].any()


@pytest.mark.parametrize("engine", ["vllm-0.26.0"], indirect=True)
def test_kimis_whole_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward hands on the gates of the norm in the operator's output."""
    kind = DeltaAttention(engine)
    layer, x = kind.layer, kind.inputs(2)
    rows = [Row(Sequence([block], 9, 20, done=9), 1) for block in (3, 5)]
    engine.context.attn_metadata = {"layer": engine.metadata(kind, rows)}
    projected = dict(zip(("q", "k", "v"), x["qkv"].split(HV * K, -1), strict=True))
    projected |= {"b": x["beta"], "f_b": x["g"], "g_b": x["z"]}
    for name, y in projected.items():
        setattr(layer, f"{name}_proj", lambda _, y=y: (y.clone(), None))
    layer.f_a_proj = layer.g_a_proj = layer.o_proj = lambda y: (y, None)

    def operator(*given: torch.Tensor) -> None:
        names = *(f"{n}_proj_states" for n in "qkv"), "g1", "beta", "core_attn_out"
        layer._forward(**dict(zip(names, given[:6], strict=True)))

    monkeypatch.setattr(torch.ops, "vllm", SimpleNamespace(kda_attention=operator), raising=False)
    wants, o = [], torch.full((2, HV * K), torch.nan)
    for run in (lambda: kind.run(x, 2).flatten(1), *[lambda: layer.forward(o, o, o) or o] * 2):
        torch.manual_seed(0), kind.pools.windows.normal_(), kind.pools.states.normal_()
        wants.append(run().clone())
        if len(wants) == 2:  # what decodes, and the step refuses
            monkeypatch.setattr("slipstream.integrations.vllm_steps.stepped", lambda *_, **__: 0)
    assert torch.equal(*wants[:2])
    torch.testing.assert_close(wants[2], wants[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["vllm-0.26.0"], indirect=True)
def test_kimis_convolutions_are_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are loaded later are those of the step, which copies none."""
    from slipstream.integrations import vllm_steps

    made: Any = type(DeltaAttention(engine).layer)

    def begin(self: Any) -> None:
        torch.nn.Module.__init__(self)
        for name in "qkv":
            weight = torch.nn.Parameter(torch.randn(D, 1, W), requires_grad=False)
            setattr(self, f"{name}_conv1d", SimpleNamespace(weight=weight))

    monkeypatch.setattr(made.__mro__[1], "__init__", begin)
    layer = made.__new__(made)
    layer.__init__()
    weights = [getattr(layer, f"{name}_conv1d").weight for name in "qkv"]
    whole = vllm_steps._behind_each_other(weights)
    weights[1].data.copy_(torch.ones(D, 1, W))
    assert torch.equal(whole, torch.cat(weights)[:, 0])
    assert whole.data_ptr() == weights[0].data_ptr()
    apart = [x.clone() for x in weights]
    assert torch.equal(vllm_steps._behind_each_other(apart), whole)


@pytest.mark.parametrize("engine", RELEASES, indirect=True)
def test_nothing_warms_up_before_pools_are_there(engine: Engine) -> None:
    """vLLM runs its layers without batches, to see how much memory is left."""
    from slipstream.integrations import vllm_steps

    layer = DeltaNet(engine).layer
    engine.context.attn_metadata = None
    del layer.kv_cache
    vllm_steps.warm_up(layer, refused, torch.zeros(8, 4))


@pytest.mark.parametrize("engine", RELEASES, indirect=True)
def test_failed_warm_up_is_reported(engine: Engine) -> None:
    from slipstream.integrations import vllm_steps

    kind = DeltaNet(engine)
    rows = [Row(Sequence([block], 9, 20, done=9), 1) for block in (3, 5)]
    before = engine.context.attn_metadata = {"layer": engine.metadata(kind, rows)}
    vllm_steps.warm_up(kind.layer, refused, torch.zeros(2, 4))
    assert engine.context.attn_metadata is before
    assert any("ahead of requests" in str(x) for x in report().not_replaced)


@pytest.mark.parametrize(("engine", "kind"), CASES, indirect=["engine"], ids=named)
def test_decoding_warms_prompts_up(engine: Engine, kind: type[Kind]) -> None:
    """A first batch that decodes, as before graphs are captured, calls what prompts will call, and
    touches no block but its own and the one that is nobody's."""
    layer = kind(engine)
    if f"{layer.name}.decode" not in {x.name for x in report().rows}:
        pytest.skip("it decodes as vLLM does")
    rows = [Row(Sequence([block], 9, 20, done=9), 1) for block in (3, 5)]
    engine.context.attn_metadata = {"layer": engine.metadata(layer, rows)}
    layer.pools.windows.zero_()
    layer.pools.states.fill_(2.0)
    for _ in range(2):
        layer.run(layer.inputs(2), 2)
    calls = {x.name: x.calls for x in report().rows if x.calls}
    assert calls[f"{layer.name}.decode"] == 2
    # with and without a state before them
    rules = [n for n in calls if re.search("(?i)chunk|recurrent", n)]
    assert rules and not any(calls[n] % 2 for n in calls if n in rules or "causal_conv1d" in n)
    untouched = [x for x in range(1, layer.pools.states.shape[0]) if x not in (3, 5)]
    assert bool((layer.pools.states[untouched] == 2.0).all())
    assert not layer.pools.windows[untouched].any()


@pytest.mark.parametrize("engine", RELEASES, indirect=True)
def test_checkpoints_of_a_prompt(engine: Engine) -> None:
    """The states on the way, which vLLM 0.33 stores for prefixes, where FlashInfer's would lie."""
    if not hasattr(engine.gdn, "MambaPrefillCheckpointExporter"):
        pytest.skip(f"{engine.release} splits prompts in the place of checkpoints")
    kind, exported = DeltaNet(engine), {}
    rows = [Row(Sequence([4], 200, 300), 200), Row(Sequence([7], 130, 200), 130)]
    metadata = engine.metadata(kind, rows)
    plan = SimpleNamespace(
        every_n_tokens=64, num_checkpoints=5, cu_starts=torch.tensor([0, 3, 5]), rows=None
    )
    metadata.checkpoint = metadata.flashinfer_checkpoint_plan = plan
    engine.context.attn_metadata = {"layer": metadata}
    buffer = torch.full((6, HV, V, K), -1.0)
    kind.layer._checkpoint_buffer_spec = None
    kind.layer._checkpoint_exporter = SimpleNamespace(export=lambda *_, **x: exported.update(x))
    manager = SimpleNamespace(get_simultaneous=lambda *_: (buffer,))
    core = type(kind.layer).__mro__[1]._forward_core
    core.__globals__["current_workspace_manager"] = lambda: manager
    inputs = kind.inputs(330)
    outputs = kind.run({n: x.clone() for n, x in inputs.items()}, 330)
    scheduler = Scheduler(kind.pools, 0, 0, 2)
    scheduler.running = [x.sequence for x in rows if x.sequence]
    states, ends = [], [63, 127, 191, 200 + 63, 200 + 127]

    def oracle(memory: Any, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        y, memory = kind.oracle(memory, x)
        states.append(memory[1])
        return y, memory

    assert scheduler.check(rows, outputs, inputs, oracle) == 0
    want = torch.stack([states[t] for t in ends])
    torch.testing.assert_close(buffer[:5].double(), want, atol=1e-5, rtol=1e-4)
    assert bool((buffer[5] == -1).all()) and exported["recurrent_checkpoint"].shape[0] == 5
    assert not refusals()


@pytest.mark.parametrize("engine", RELEASES[:1], indirect=True)
def test_refused_call_is_vllms(engine: Engine) -> None:
    """What we do not take, vLLM's function gets, and the report has the reason."""
    seen = []

    def theirs(x: torch.Tensor, *_: Any, **__: Any) -> None:
        seen.append(tuple(x.shape))

    ours = vllm_layers()._or_theirs(vllm_calls.causal_conv1d_fn, theirs, "site")
    x, weight, pool = torch.zeros(D, 5), torch.zeros(D, W), torch.zeros(4, D, W - 1)
    ours(x, weight, None, pool, query_start_loc=torch.tensor([0, 5]), cache_indices=None)
    assert seen == [(D, 5)]
    assert refusals() == {"site": {"cache_indices: want blocks of a pool, got None": 1}}


@pytest.mark.parametrize("engine", RELEASES[:1], indirect=True)
def test_another_argument_is_refused(engine: Engine) -> None:
    def theirs(x: Any, weight: Any, dilation: int = 1) -> None: ...

    def swapped(weight: Any, x: Any) -> None: ...

    layers = vllm_layers()
    with pytest.raises(NotImplementedError, match="without dilation"):
        layers._or_theirs(vllm_calls.causal_conv1d_fn, theirs, "site")
    with pytest.raises(NotImplementedError, match="another order"):
        layers._or_theirs(vllm_calls.causal_conv1d_fn, swapped, "site")


@pytest.mark.parametrize("engine", RELEASES, indirect=True)
def test_arguments_of_each_function(engine: Engine) -> None:
    """Ours have those of vLLM's functions, in their order: these are stand-ins elsewhere."""
    layers, checked = vllm_layers(), set()
    called = {x.name for x in report().rows}
    for layer in layers.LAYERS:
        of_kimi = layer.name.startswith("Kimi") and engine.release == "vllm-0.33.0"
        for name in [x for x in layer.calls if f"{layer.name}.{x}" in called]:
            for file, signature in signatures(engine.release, name).items():
                if OF_LAYERS.search(file) is None or of_kimi != ("kimi_k3" in file):
                    continue

                def theirs() -> None: ...

                theirs.__signature__ = signature  # type: ignore[attr-defined]
                layers._or_theirs(layer.calls[name], theirs, f"{layer.name}.{name}")
                checked.add(f"{layer.name}.{name}")
    of_functions = {x for x in called if "." in x and not x.endswith(".decode")}
    # Kimi's layer has the convolution of all
    assert of_functions - checked <= {"KimiGatedDeltaNetAttention.causal_conv1d_fn"}


def vllm_layers() -> Any:
    return import_module("slipstream.integrations.vllm_layers")
