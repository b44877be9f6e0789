"""Steps of decoding on a GPU, one kernel each; Mamba's states by block, also in a CUDA graph, and
SGLang's and vLLM's calls as tests/integrations has them."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.integrations import vllm
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import op
from slipstream.kernels.projection_step.inputs import NormedInputs
from slipstream.layers import RWKV7
from slipstream.layers import rwkv7 as layers
from slipstream.ops import mixer_step, projection_step, rwkv7_step, token_mix_step
from slipstream.runtime.consistent import consistent
from tests.gpu.waiting import graph_of
from tests.support import rwkv7_steps as steps
from tests.support.decode_pool import HV, INDICES, KINDS, SLOTS, TOKENS, K, V, expected, make, step
from tests.support.mixer_steps import INDICES as MIXER_INDICES
from tests.support.mixer_steps import KINDS as MIXER_KINDS
from tests.support.mixer_steps import POOLS, Sizes, check, check_drafts_leave_no_trace
from tests.support.mixer_steps import expected as mixer_expected
from tests.support.mixer_steps import make as make_mixer
from tests.support.operators import relative_error
from tests.support.projections import SIZES, formula, inputs
from tests.support.rwkv7_steps import Sizes as Rwkv7Sizes
from tests.support.serving_checks import CHECKS, sglang_snapshots
from tests.support.serving_peers import mamba_calls

# ---- The step kernel on a device: the oracle's numbers, in the pool and out of it, compiled too.
# What it computes under Triton's interpreter is in
# tests/kernels/linear/test_triton_decode.py.


DEVICE, IMPL = "cuda", "triton"
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def pool_of(v_first: bool, padded: bool) -> Tensor:
    """Slots of [HV, K, V] as they lie, apart by more than a state if padded."""
    row = HV * K * V
    rows = torch.randn(SLOTS, row + (77 if padded else 0))[:, :row]
    return rows.unflatten(1, (HV, V, K) if v_first else (HV, K, V))


@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_step_is_the_reference(kind: str, dtype: torch.dtype, v_first: bool) -> None:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        for tokens in TOKENS:
            terms, state = make(kind, tokens, dtype), pool_of(v_first, padded=tokens == 1)
            pool = (state.mT if v_first else state).clone()
            want, after = expected(terms, pool, INDICES)
            slots: dict[str, Any] = {"state_indices": torch.tensor(INDICES)}
            options = {**slots, "scale": 0.3, "impl": IMPL, "state_v_first": v_first}
            before = state.clone()
            again = step(terms, state.clone(), **options)
            o = step(terms, state, **options)
            assert torch.equal(o, again), tokens
            assert relative_error(o, want) <= LIMITS[dtype], tokens
            got = state.mT if v_first else state
            assert relative_error(got, after) <= LIMITS[torch.float32], tokens
            others = [i for i in range(SLOTS) if i not in INDICES]
            assert torch.equal(state[others], before[others]), tokens


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_step_takes_states_of_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        terms, pool = make("gated_delta_rule", 1, dtype), pool_of(False, True).to(dtype)
        want, after = expected(terms, pool, INDICES)
        o = step(terms, pool, state_indices=torch.tensor(INDICES), scale=0.3, impl=IMPL)
    assert o.dtype == pool.dtype == dtype
    assert relative_error(o, want) <= LIMITS[dtype]
    assert relative_error(pool, after) <= LIMITS[dtype]


def test_step_of_no_slot_leaves_the_pool() -> None:
    with torch.device(DEVICE):
        for tokens in (1, (1, 1, 1)):
            terms, pool = make("gated_delta_rule", tokens), pool_of(False, False)
            terms.v.fill_(torch.nan)
            before = pool.clone()
            o = step(terms, pool, state_indices=torch.full((3,), -1), impl=IMPL)
            assert torch.equal(pool, before)
            assert not o.any()


@pytest.mark.parametrize("kind", ["gated_delta_rule", "rwkv7"])
def test_step_compiles_fullgraph(kind: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.device(DEVICE):
        terms, state, at = make(kind, 1), pool_of(False, False), torch.tensor(INDICES)
    want, after = expected(terms, state.clone(), INDICES)
    o = compiled(terms, state, state_indices=at, scale=0.3)
    assert relative_error(o, want) <= LIMITS[torch.float32]
    assert relative_error(state, after) <= LIMITS[torch.float32]


# ---- mixer_step on a GPU: every kind against the formula, shared windows, and graphs.


MIXER_SIZES = (Sizes(), Sizes(K=128, V=128, H=2, HV=4), Sizes(T=5, K=64, V=64, pending=2))
# exp and log of a GPU are approximations
LIMIT = 1e-5


@pytest.mark.parametrize("kind", MIXER_KINDS)
@pytest.mark.parametrize("size", MIXER_SIZES, ids=["odd", "128", "drafts"])
def test_step_matches_the_formula(kind: str, size: Sizes) -> None:
    with torch.device("cuda"), torch.no_grad():
        check(kind, "triton", size, limit=LIMIT)
        check(kind, "triton", size, v_first=True, limit=LIMIT)


@pytest.mark.parametrize("kind", ["gated_deltanet", "delta_net", "retention"])
@pytest.mark.parametrize(
    ("K", "V", "T", "pending", "v_first"),
    [(128, 128, 8, 4, False), (128, 128, 8, 4, True), (64, 64, 9, 8, True), (64, 128, 5, 1, False)],
)
def test_drafts_in_16_bits(kind: str, K: int, V: int, T: int, pending: int, v_first: bool) -> None:
    """y to its rounding, and states to float32 in three products of bfloat16."""
    dtype, pool_dtype = torch.bfloat16, torch.float32
    if K < V:
        dtype, pool_dtype = torch.float16, torch.bfloat16
    n = Sizes(HV=4, K=K, V=V, T=T, pending=pending, short=K == 64, dtype=dtype)
    n = replace(n, pool_dtype=pool_dtype)
    pool_limit = 1e-4 if pool_dtype == torch.float32 else 4e-3
    with torch.device("cuda"), torch.no_grad():
        for strength in (0.0, 1.0, 1e3):
            check(kind, "triton", n, v_first, limit=4e-3, strength=strength, pool_limit=pool_limit)


def test_drafts_of_nan_leave_no_trace() -> None:
    with torch.device("cuda"), torch.no_grad():
        n = Sizes(H=2, HV=4, K=128, V=128, T=8, pending=4, dtype=torch.bfloat16)
        check_drafts_leave_no_trace("triton", n)


@pytest.mark.parametrize("kind", ["gated_deltanet", "mamba2"])
def test_programs_share_windows_and_norms(kind: str) -> None:
    """Many sequences and steps: windows are the last inputs, and two runs have the same bits."""
    n, steps = 96, 40
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        with torch.device("cuda"), torch.no_grad():
            args, options = make_mixer(MIXER_KINDS[kind], Sizes(H=2, HV=8, K=64, V=64))
            args = {m: x.repeat(n // 3, 1, 1, 1) if m in "qkvz" else x for m, x in args.items()}
            for name in ("g", "beta"):
                if name in args:
                    args[name] = args[name].repeat(n // 3, 1, 1)
            for name in POOLS:
                args[name] = args[name][:1].repeat(n, *[1] * (args[name].dim() - 1))
            at = torch.randperm(n)
            tokens = torch.randn(steps, *args["q"].shape)
            ys = [
                mixer_step(**{**args, "q": q}, **options, state_indices=at, impl="triton")
                for q in tokens
            ]
        runs.append((torch.stack(ys), args["state"], args["conv_state"]))
    assert all(map(torch.equal, *runs))
    window = args["conv_state"][at]
    keys = args["q"][0].numel()
    window = window[:, -keys:] if kind == "mamba2" else window[:, :keys]
    assert torch.equal(window, tokens[-4:, :, 0].flatten(2).permute(1, 2, 0))


def test_captured_step_takes_other_slots() -> None:
    with torch.device("cuda"), torch.no_grad():
        args, options = make_mixer(MIXER_KINDS["gated_deltanet"], Sizes(K=64, V=64))
        at = torch.tensor(MIXER_INDICES)
        other = torch.tensor((5, 6, -1))
        want = mixer_expected(args, options, other)
        before = {name: args[name].clone() for name in POOLS}
        options |= {"state_indices": at, "impl": "triton"}
        graph, y = graph_of(lambda: mixer_step(**args, **options))
        for name in POOLS:
            args[name].copy_(before[name])
        at.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
    assert relative_error(y, want["out"]) <= LIMIT
    for name in POOLS:
        assert relative_error(args[name], want[name]) <= LIMIT


# ---- projection_step on a GPU: every form beside the formula, alone and in a graph.


PROJECTION_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
WIDE = [(1, 1024, (3072, 1024, 16)), (64, 1024, (3072, 1024, 16)), (33, 2752, (1024,))]


@pytest.mark.parametrize("dtype", PROJECTION_LIMITS)
@pytest.mark.parametrize("size", [*SIZES, *WIDE])
def test_matches_the_formula(size: tuple, dtype: torch.dtype) -> None:
    for biases, residual in itertools.product((False, True), repeat=2):
        with torch.device("cuda"):
            args = inputs(*size, dtype, norm=size[0] == 1, biases=biases, residual=residual)
        y = projection_step(**args, impl="triton")
        assert relative_error(y, formula(**args)) <= PROJECTION_LIMITS[dtype]


@pytest.mark.parametrize("rows", [33, 64])
@pytest.mark.parametrize("K", [1024, 2752])
@pytest.mark.parametrize("dtype", PROJECTION_LIMITS)
def test_sums_of_shares_and_their_norm_match_the_formula(
    dtype: torch.dtype, K: int, rows: int
) -> None:
    """Of a residual of that dtype; called twice with equal bits."""
    with torch.device("cuda"):
        args = inputs(rows, K, (1024,), torch.bfloat16, biases=True)
        residual, weight = torch.randn(rows, 1024).to(dtype), torch.rand(1024).bfloat16()
    given = args["x"], args["weights"][0], args["biases"][0], residual, weight
    t, n = NormedInputs(*given), NormOptions(1e-5)
    h, y = op.run_norm(t, n, "triton")
    assert (
        relative_error(h, formula(**args, residual=residual)) <= PROJECTION_LIMITS[torch.bfloat16]
    )
    normed = torch.rms_norm(h.double(), (1024,), weight.double(), 1e-5)
    assert relative_error(y, normed) <= PROJECTION_LIMITS[torch.bfloat16]
    assert all(map(torch.equal, op.run_norm(t, n, "triton"), (h, y)))


@pytest.mark.parametrize("rows", [33, 64])
def test_consistent_rows_have_the_bits_of_two(rows: int) -> None:
    """Also where the default mode takes another tile."""
    with torch.device("cuda"):
        args = inputs(rows, 1024, (2048, 16), torch.bfloat16)
    with consistent():
        every = projection_step(**args, impl="triton")
        args["x"] = args["x"][:2]
        assert torch.equal(projection_step(**args, impl="triton"), every[:2])


@pytest.mark.parametrize("rows", [1, 20, 40])
def test_captured_call_reads_what_is_there_then(rows: int) -> None:
    with torch.device("cuda"):
        args = inputs(rows, 256, (96, 96), torch.bfloat16, residual=False)
    args["activation"] = "swiglu"
    graph, y = graph_of(lambda: projection_step(**args, impl="triton"))
    args["x"].copy_(torch.randn_like(args["x"]))
    graph.replay()
    assert relative_error(y, formula(**args)) <= PROJECTION_LIMITS[torch.bfloat16]


# ---- RWKV-7's decoding step on a GPU: its operators beside float64, in a graph, and in a layer.


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "K"), [(32, 64), (3, 128), (3, 20), (1, 200)])
def test_rwkv7_step_matches_the_formula(H: int, K: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        for pool_dtype in {torch.float32, dtype}:
            steps.check(Rwkv7Sizes(H, K, dtype=dtype, pool_dtype=pool_dtype), "triton")
        steps.check(Rwkv7Sizes(H, K, first=True, dtype=dtype), "triton", strength=20.0)
        steps.check_nobody_lives("triton")


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixes_and_low_rank_products_match_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        for rows in (2, 65):
            for D, M in ((2048, 6), (600, 1)):
                steps.check_mixes(rows, D, M, dtype, dtype, "triton")
                steps.check_mixes(rows, D, M, dtype, torch.float32, "triton")
            steps.check_low_rank(rows, 2048, (96, 96, 256, 64), dtype, "triton")
            steps.check_low_rank(rows, 72, (5, 133, 32), dtype, "triton")


def test_captured_calls_read_what_is_there_then() -> None:
    """Slots too, of which some are none."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        args, at = steps.make(Rwkv7Sizes(K=64)), torch.tensor(steps.INDICES)
        x, mu, last = torch.randn(3, 64), torch.randn(6, 64), torch.randn(steps.SLOTS, 64)
    before = args["state"].clone(), last.clone()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        y = rwkv7_step(**args, state_indices=at, norm_eps=steps.EPS)
        return y, token_mix_step(x, mu, state=last, state_indices=at)

    graph, (y, mixes) = graph_of(call)
    args["state"].copy_(before[0])
    last.copy_(before[1])
    args["k"].copy_(torch.randn_like(args["k"]))
    at.copy_(torch.tensor([-1, 4, 1]))
    graph.replay()
    want, pool = steps.formula({**args, "state": before[0]}, (-1, 4, 1))
    assert relative_error(y, want) < 1e-5 and relative_error(args["state"], pool) < 1e-5
    assert torch.equal(last[[4, 1]], x[1:]) and torch.equal(last[[0, 2, 3]], before[1][[0, 2, 3]])
    assert not mixes[:, 0].any() and mixes[:, 1:].any()


@pytest.mark.parametrize("rows", [1, 3, 130])
@torch.no_grad()
def test_layer_by_them_and_by_its_parts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors beside the layer in float64 are at most 1.5 times those of the parts."""
    torch.manual_seed(0)
    layer: Any = RWKV7(256, 4, layer_idx=1, num_layers=2).cuda().bfloat16().eval()
    for parameter in layer.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    x, first = (torch.randn(rows, n, 256, device="cuda").bfloat16() for n in (7, 7))
    calls: list[int] = []
    step = layers.rwkv7_step
    monkeypatch.setattr(layers, "rwkv7_step", lambda *a, **b: calls.append(1) or step(*a, **b))
    found, fused = [], RWKV7._fused_step
    for kind in ("wide", "parts", "one"):
        if kind != "one":
            monkeypatch.setattr(RWKV7, "_fused_step", lambda *args: None)
        else:
            monkeypatch.setattr(RWKV7, "_fused_step", fused)
        to = ("cpu", torch.float64) if kind == "wide" else ("cuda", torch.bfloat16)
        layer, y, v = layer.to(*to), x.to(*to), first.to(*to)
        _, state = layer(y[:, :5], use_cache=True, first_value=v[:, :5])
        outs = [layer.step(y[:, t : t + 1], state, first_value=v[:, t : t + 1]) for t in (5, 6)]
        found.append([*outs, *state.values()])
    assert len(calls) == 2
    for want, parts, one in zip(*found, strict=True):
        assert relative_error(one.cpu(), want) <= 1.5 * relative_error(parts.cpu(), want)


@pytest.fixture
def on_cuda() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def on_device(x: Any) -> Any:
    """A tensor on the GPU, expanded as it was."""
    if not isinstance(x, torch.Tensor):
        return x
    once = x
    for d in range(x.dim()):
        once = once if x.stride(d) else once.narrow(d, 0, 1)
    return once.cuda().expand(x.shape)


@pytest.mark.parametrize("index", range(5))
def test_mamba_states_in_a_graph(index: int) -> None:
    _, terms, options = mamba_calls()[index]
    cpu = {name: x.clone() for name, x in terms.items()}
    want = torch.zeros_like(cpu["x"])
    vllm.selective_state_update(**cpu, **options, out=want)
    given = {name: on_device(x) for name, x in {**terms, **options}.items()}
    pool, got = given["state"].clone(), torch.zeros_like(want, device="cuda")
    vllm.selective_state_update(**given, out=got)
    torch.testing.assert_close(got.cpu(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(given["state"].cpu(), cpu["state"], atol=2e-5, rtol=2e-5)
    first, left = got.clone(), given["state"].clone()
    graph, _ = graph_of(lambda: vllm.selective_state_update(**given, out=got))
    given["state"].copy_(pool)
    graph.replay()
    assert torch.equal(got, first) and torch.equal(given["state"], left)


@pytest.mark.parametrize("is_kda", [False, True])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_calls_of_engines(check: Callable[[bool], None], is_kda: bool, on_cuda: None) -> None:
    check(is_kda)


@pytest.mark.parametrize("is_kda", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapshots(is_kda: bool, dtype: torch.dtype, on_cuda: None) -> None:
    sglang_snapshots(is_kda, dtype)
