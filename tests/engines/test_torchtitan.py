"""slipstream's overrides of torchtitan's Qwen3.5 in the model of its own files, whole and on two
ranks, and slipstream.compat.install("fla") for that model."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream import ops
from slipstream.compat import install
from slipstream.integrations import report
from tests.support import torchtitan_qwen
from tests.support.engines import folder, loaded
from tests.support.processes import in_processes

pytestmark = pytest.mark.slow
TORCHTITAN = torchtitan_qwen.RELEASE
OVERRIDES = ("gated_delta_net", "attention", "norm")
CALLS = {
    "GatedDeltaKernel": 3,
    "OffsetRMSNorm": 11,
    "RMSNormGated": 3,
    "attention": 1,
    "short_convolution": 9,
}


@pytest.fixture
def titan() -> Iterator[SimpleNamespace]:
    with torchtitan_qwen.torchtitan() as found:
        yield found


def model_of(titan: SimpleNamespace, overrides: tuple[str, ...] = ()) -> Any:
    """Of the same weights with overrides or without."""
    spec = torchtitan_qwen.config_of(titan)
    if overrides:
        torchtitan_qwen.overridden(titan, spec, overrides)
    return torchtitan_qwen.initialised(spec.model.build())


def results(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss = torchtitan_qwen.loss_of(model)
    loss.backward()
    return float(loss.detach()), torchtitan_qwen.whole_gradients(model)


def near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert (got[name] - grad).norm() <= 5e-5 * grad.norm() + 1e-6, name


def calls() -> dict[str, int]:
    return {x.name: x.calls for x in report().rows if x.library == "torchtitan"}


def test_overrides_compute_what_torchtitan_does(titan: SimpleNamespace) -> None:
    want, grads = results(model_of(titan))
    ours = model_of(titan, OVERRIDES)
    before = calls()
    got, ours_grads = results(ours)
    assert got == pytest.approx(want, rel=1e-5)
    near(ours_grads, grads)
    assert {name: n - before[name] for name, n in calls().items()} == CALLS


@pytest.mark.parametrize("name", OVERRIDES)
def test_each_override_alone(titan: SimpleNamespace, name: str) -> None:
    """And a broken operator of it changes the loss."""
    want, _ = results(model_of(titan))
    ours = model_of(titan, (name,))
    got, _ = results(ours)
    assert got == pytest.approx(want, rel=1e-5)
    broken = {"gated_delta_net": "_gated_delta", "attention": "_attention", "norm": "_norm"}[name]
    module = sys.modules[torchtitan_qwen.OURS]
    right = getattr(module, broken)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, broken, lambda *given: 2 * right(*given))
        wrong, _ = results(ours)
    assert wrong != pytest.approx(want, rel=1e-4)


def test_flavours_have_all_overrides(
    titan: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--module slipstream.integrations.torchtitan --config of torchtitan's."""
    model_of(titan, ("norm",))  # imports it
    module = sys.modules[torchtitan_qwen.OURS]
    made = SimpleNamespace(override=titan.override.OverrideConfig(imports=["mine.rope"]))
    flavours = SimpleNamespace(qwen35_0_8b=lambda: made)
    monkeypatch.setitem(sys.modules, module._CONFIGS, flavours)
    imports = module.qwen35_0_8b().override.imports
    assert imports == ["mine.rope", *(f"{module.__name__}.{x}" for x in OVERRIDES)]
    with pytest.raises(AttributeError, match="qwen35_none"):
        assert module.qwen35_none


def test_attention_with_a_window_is_refused(titan: SimpleNamespace) -> None:
    spec = torchtitan_qwen.config_of(titan)
    windowed = titan.attention.VarlenAttention.Config(window_size=(7, 0))
    spec.model.layers[3].attention.inner_attention = windowed
    with pytest.raises(NotImplementedError, match=r"inner_attention.*window_size"):
        torchtitan_qwen.overridden(titan, spec, ("attention",))


def test_prompts_have_equal_bits_in_any_batch(titan: SimpleNamespace) -> None:
    assert torchtitan_qwen.has_parity(titan, model_of(titan, OVERRIDES))


@pytest.mark.parametrize("backend", ["partial_dtensor", "spmd_types"])
@pytest.mark.parametrize("way", ["sharded", "by heads"])
def test_two_ranks_have_gradients_of_one(
    titan: SimpleNamespace, tmp_path: Path, way: str, backend: str
) -> None:
    """FSDP2 and tensor parallelism as torchtitan applies them, with checkpointed blocks."""
    # of torch 2.14, whose FSDP2 looks for that package when it is imported
    knows = getattr(torch.distributed, "_is_spmd_types_available", lambda: False)
    if backend == "spmd_types" and not knows():
        pytest.skip("FSDP2 of this torch has no spmd_types")
    theirs = model_of(titan)
    weights = tmp_path / "weights"
    torch.save(theirs.state_dict(), weights)
    want, grads = results(theirs)
    degrees = (2, 1) if way == "sharded" else (1, 2)
    given = (*degrees, backend, str(weights))
    ((total, called, equal),) = in_processes(2, tmp_path, torchtitan_qwen.on_a_rank, *given)
    assert total == pytest.approx(want, rel=1e-5) and equal
    near(torch.load(f"{weights}.gradients"), grads)
    assert called.keys() == CALLS.keys() and all(n >= CALLS[x] for x, n in called.items())


def test_gated_delta_net_of_torchtitan() -> None:
    q, k, v = torch.randn(1, 12, 1, 8), torch.randn(1, 12, 1, 8), torch.randn(1, 12, 2, 8)
    g, beta = F.logsigmoid(torch.randn(1, 12, 2)), torch.rand(1, 12, 2)
    offsets, x, weight = torch.tensor([0, 5, 12]), torch.randn(1, 12, 6), torch.randn(6, 1, 4)
    packed: dict[str, Any] = {"cu_seqlens": offsets, "cu_seqlens_cpu": offsets}
    with install("fla"), loaded(TORCHTITAN, "torchtitan.models.qwen3_5.model") as (model,):
        for name in ("ChunkGatedDeltaRuleFunction", "FusedRecurrentFunction"):
            assert getattr(model, name).__module__.startswith("slipstream.compat.fla")
        y = model._causal_conv1d_varlen(x, weight, offsets, offsets)
        expected = ops.conv.short_convolution(
            x, weight.squeeze(1), activation="silu", cu_seqlens=offsets
        )
        torch.testing.assert_close(y, expected[0])
        for backend in ("fla_chunked", "fla_fused_recurrent"):
            kernel = SimpleNamespace(backend=backend)
            given = packed if backend == "fla_chunked" else {"cu_seqlens": offsets}
            o = model.GatedDeltaKernel.forward(kernel, q, k, v, g, beta, **given)
            want, _ = ops.chunk_gated_delta_rule(
                q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets
            )
            torch.testing.assert_close(o, want)


def test_example_imports_what_torchtitan_has() -> None:
    """tests/parallel/test_torchtitan.py trains it, where torchtitan is installed."""
    source = Path(__file__).parents[2] / "examples/torchtitan/hybrid.py"
    root, seen = folder(TORCHTITAN), 0
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan"):
            path = root / str(node.module).replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            names = set()
            for x in ast.parse(file.read_text()).body:
                names |= {getattr(x, "name", None)}
                if isinstance(x, ast.ImportFrom):
                    names |= {y.asname or y.name for y in x.names}
                if isinstance(x, ast.Assign):
                    names |= {ast.unparse(y) for y in x.targets}
            assert {x.name for x in node.names} <= names, node.module
            seen += len(node.names)
    assert seen > 10
