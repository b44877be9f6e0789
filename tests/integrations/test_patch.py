"""Linear models of transformers, patched, beside what transformers' own functions give."""

import inspect
import logging
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from slipstream.integrations import linear_mixers, patching
from slipstream.integrations.transformers import NAME, patch, unpatch
from tests.support.linear_models import alone, linear_classes, packed_inputs, tiny
from tests.support.tiny_models import build, difference, runs_of

pytestmark = pytest.mark.filterwarnings("ignore")
# one for each kind of layer: Mamba-1, Mamba-2, gated delta rule, KDA, short convolution alone
SAMPLE = (
    "FalconMambaForCausalLM", "BambaForCausalLM", "Qwen3NextForCausalLM", "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
)  # fmt: skip

# what transformers' own get wrong: states that see padding, and steps of several rows
WRONG_THERE = {
    "RecurrentGemmaForCausalLM": ("left padding",),
    "RwkvForCausalLM": ("left padding", "generate"),
}


def every(names: tuple[str, ...] = SAMPLE, of: Iterable[str] | None = None) -> list:
    """Those names by default, and the rest under slow."""
    rest = linear_classes() if of is None else of
    return [*names, *(pytest.param(n, marks=pytest.mark.slow) for n in rest if n not in names)]


@pytest.mark.parametrize("name", every())
def test_patched_gives_what_transformers_gives(name: str) -> None:
    cls, config, weights, inputs, want = tiny(name)
    want = {run: x for run, x in want.items() if run not in WRONG_THERE.get(name, ())}
    # in training transformers asks for whole layers fused
    trained = _trained(build(cls, config, "eager", weights), inputs)
    static = _static(build(cls, config, "eager", weights), inputs)
    assert patch()
    assert difference(runs_of(build(cls, config, "eager", weights), inputs), want) == ""
    ours = build(cls, config, "eager", weights)
    assert difference(_trained(ours, inputs), trained) == ""
    ours = build(cls, config, "eager", weights)
    if static is not None:  # transformers refuses it
        assert difference(_static(ours, inputs), static) == ""


@pytest.mark.parametrize(
    "name", every(("MambaForCausalLM",), ("FalconMambaForCausalLM", "JambaForCausalLM"))
)
def test_mamba_runs_the_selective_scan(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a prompt, and for the tokens after it nothing on transformers' own functions."""
    cls, config, weights, inputs, _ = tiny(name)
    tokens: list[int] = []
    scan, steps = linear_mixers.selective_scan, mock.Mock(wraps=torch.addcmul)
    monkeypatch.setattr(torch, "addcmul", steps)
    monkeypatch.setattr(
        linear_mixers,
        "selective_scan",
        lambda u, *args, **options: tokens.append(u.shape[1]) or scan(u, *args, **options),
    )
    patch()
    model = build(cls, config, NAME, weights)
    with caplog.at_level(logging.WARNING, logger=patching.__name__):
        model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert "own" not in caplog.text
    layers = sum(x.endswith("A_log") for x in model.state_dict())
    prompt = inputs["input_ids"].shape[1]
    assert tokens == layers * [prompt]
    assert steps.call_count == 2 * layers


def _trained(model, inputs) -> dict:
    model.train()
    logits = model(**inputs, use_cache=False).logits
    return {"forward": {"logits": logits.detach()}, "backward": _gradients(logits, model)}


def _gradients(logits, model) -> dict:
    parameters = dict(model.named_parameters())
    loss = (logits.float() * torch.randn(logits.shape, generator=_seeded())).sum()
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {n: g for n, g in zip(parameters, grads) if g is not None}


def _static(model, inputs) -> dict | None:
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
    try:
        result = model.generate(**inputs, cache_implementation="static", **options)
    except RuntimeError as error:  # biases of Inkling are not as long as the cache
        if "must match the size of tensor" in str(error):
            return None
        raise
    return {"generate": {f"logits[{i}]": x for i, x in enumerate(result.logits)}}


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize(
    "told",
    ["position_ids", *(pytest.param(x, marks=pytest.mark.slow) for x in ("seq_idx", "offsets"))],
)
@pytest.mark.parametrize("name", every())
def test_packed_sequences_stay_apart(name: str, told: str) -> None:
    cls, config, weights, inputs, _ = tiny(name)
    model = build(cls, config, NAME, weights)
    ids = inputs["input_ids"]
    with torch.no_grad():
        want = alone(model, ids)
    patch()
    given = packed_inputs(told, ids)
    got = model(**given, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))
    model.gradient_checkpointing_enable()
    model.train()
    again = model(**given, use_cache=False).logits
    first, second = ({"backward": _gradients(x, model)} for x in (got, again))
    assert difference(second, first) == ""


TABLES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen4ExpForCausalLM")


@pytest.mark.parametrize("tables", [1, 3, 4])
@pytest.mark.parametrize("name", every(TABLES[:1], TABLES))
def test_tables_of_positions_keep_sequences_apart(name: str, tables: int) -> None:
    """Positions of text, and in three more those of images."""
    if tables == 1 and name != "Qwen4ExpForCausalLM":
        pytest.skip("the model takes no such tensor")
    cls, config, weights, inputs, _ = tiny(name)
    ids = inputs["input_ids"]
    model = build(cls, config, NAME, weights)
    with torch.no_grad():
        want = alone(model, ids)
    patch()
    given = packed_inputs("position_ids", ids)
    given["position_ids"] = given["position_ids"].expand(tables, -1, -1)
    with torch.no_grad():
        for use_cache in (False, True):
            got = model(**given, use_cache=use_cache).logits
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))


def test_tables_of_positions_of_images() -> None:
    find = linear_mixers.sequences_of_positions
    one, real = torch.tensor([[0, 0, 1, 5, 0]]), torch.tensor([[1, 0, 1, 1, 1]]).bool()
    given = [(None, False), (None, True), (real, False), (real.flip(1), False)]
    got = [find(one, *x) for x in given]
    want = [[0, 1, 1, 1, 2], [0, 1, 1, 2, 3], [0, 0, 0, 0, 1], [0, 1, 1, 1, 1]]
    assert [None if x is None else x[0].tolist() for x in got] == want
    text = torch.arange(3)
    # text, an image of two rows of three tokens, text
    height = torch.tensor([3, 3, 3, 4, 4, 4])
    image = torch.stack([torch.full((6,), 3), height, torch.tensor([3, 4, 5, 3, 4, 5])])
    one = torch.cat([text.expand(3, -1), image, 6 + text.expand(3, -1)], 1)[:, None]
    assert find(one, counted=True) is None and find(one) is None
    two = torch.cat([one, one], 2)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        find(two, counted=True)
    tokens = torch.arange(12).repeat(2)[None, None]
    got = find(torch.cat([tokens, two]), counted=True)
    assert got is not None and got.tolist() == [12 * [0] + 12 * [1]]
    # padding between them begins nothing
    real = torch.ones(1, 24, dtype=torch.bool)
    real[0, 11] = False
    assert find(two, real) is None


@pytest.mark.parametrize("name", every(("BambaForCausalLM", "KimiLinearForCausalLM")))
def test_compiled_as_eager(name: str) -> None:
    torch.compiler.reset()  # or the models of earlier cases count as recompilations
    cls, config, weights, inputs, want = tiny(name)
    patch()
    model = torch.compile(build(cls, config, NAME, weights), backend="aot_eager")
    with torch.no_grad():
        got = {"logits": model(**inputs, use_cache=False).logits}
    assert difference({"forward": got}, {"forward": {"logits": want["forward"]["logits"]}}) == ""


def test_patch_and_unpatch() -> None:
    module = modeling_qwen3_next
    before = dict(vars(module)), module.Qwen3NextRMSNormGated.forward
    names = patch()
    mine = [n.rsplit(".", 1)[0] for n in names if n.startswith(module.__name__)]
    assert f"{module.__name__}.torch_chunk_gated_delta_rule" in names
    assert f"{module.__name__}.Qwen3NextRMSNormGated.forward" in names
    assert mine
    assert patch() == []
    assert module.torch_chunk_gated_delta_rule is not before[0]["torch_chunk_gated_delta_rule"]
    unpatch()
    assert dict(vars(module)) == before[0]
    assert module.Qwen3NextRMSNormGated.forward is before[1]
    assert patch() == names


def test_modules_imported_later_are_patched() -> None:
    code = """
import sys
from slipstream.integrations.transformers import patch, unpatch
assert patch() == []
from transformers import LlamaForCausalLM, Lfm2ForCausalLM
module = sys.modules["transformers.models.lfm2.modeling_lfm2"]
assert hasattr(module.causal_conv1d_fn, "slipstream_original")
unpatch()
assert not hasattr(module.causal_conv1d_fn, "slipstream_original")
from transformers import MambaForCausalLM
module = sys.modules["transformers.models.mamba.modeling_mamba"]
assert not hasattr(module.causal_conv1d_fn, "slipstream_original")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_functions_looked_up_are_all_known() -> None:
    """A release that looks up another function, or in another way, has to be looked at."""
    found = set()
    for name in linear_classes():
        module = inspect.getmodule(tiny_class(name))
        found |= {n for f in vars(module).values() if (n := patching.looked_up(f))}
    assert found == set(linear_mixers.FUNCTIONS)


def tiny_class(name: str):
    import transformers

    return getattr(transformers, name)


def test_patch_leaves_the_rest_to_transformers(caplog: pytest.LogCaptureFixture) -> None:
    theirs = modeling_qwen3_next.causal_conv1d_fn
    x, weight = torch.randn(2, 4, 6), torch.randn(4, 3)
    want = theirs(x, weight, None, "gelu")
    patch()
    ours = modeling_qwen3_next.causal_conv1d_fn
    with caplog.at_level(logging.WARNING, logger=patching.__name__):
        assert torch.equal(ours(x, weight, None, "gelu"), want)
    assert "causal_conv1d_fn runs: activation" in caplog.text
    with pytest.raises(ValueError, match="activation"):
        # transformers' own would mix the sequences
        ours(x, weight, None, "gelu", seq_idx=torch.zeros(2, 6, dtype=torch.int32))


def test_gated_norms_are_found_by_what_they_compute() -> None:
    patch()
    for module in (modeling_qwen3_next, modeling_mamba2):
        (norm,) = (cls for n, cls in vars(module).items() if n.endswith("RMSNormGated"))
        assert hasattr(norm.forward, patching.ORIGINAL), norm
    assert not hasattr(modeling_qwen3_next.Qwen3NextMLP.forward, patching.ORIGINAL)

    class Other(torch.nn.Module):
        def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))
            self.variance_epsilon = eps

        def forward(self, hidden_states, gate=None):
            return self.weight * hidden_states * gate

    assert patching._gated_norm(Other) is None


def test_states_of_packed_rows_go_on() -> None:
    """Two rows of two and three sequences: the first goes on from a state, the last leaves one."""
    B, T, H, D = 2, 10, 2, 8
    q, k, v = torch.randn(3, B, T, H, D)
    g, beta = -torch.rand(B, T, H), torch.rand(B, T, H)
    state = torch.randn(B, H, D, D)
    op = linear_mixers.FUNCTIONS["chunk_gated_delta_rule"]
    seq_idx = torch.tensor([[0] * 4 + [1] * 6, [0] * 3 + [1] * 3 + [2] * 4])
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    o, final = op(q, k, v, g, beta, initial_state=state, seq_idx=seq_idx, **options)
    for b, cuts in enumerate(((0, 4, 10), (0, 3, 6, 10))):
        s = state[b : b + 1]
        for i, j in pairwise(cuts):
            row = (x[b : b + 1, i:j] for x in (q, k, v, g, beta))
            want, s = op(*row, initial_state=s if i == 0 else None, **options)
            torch.testing.assert_close(o[b : b + 1, i:j], want)
        torch.testing.assert_close(final[b : b + 1], s)


def test_convolutions_in_plain_torch_keep_sequences_apart() -> None:
    """As Inkling2's of transformers 5.23, which looks nothing up and reads no seq_idx."""

    class Mixing(torch.nn.Module):
        def __init__(self, conv_kernel_size: int) -> None:
            super().__init__()
            self.conv_kernel_size = conv_kernel_size

        def forward(self, hidden_states, dynamic_input, cache=None, conv_mask=None, **kwargs):
            x = hidden_states if conv_mask is None else hidden_states * conv_mask[..., None]
            x = torch.nn.functional.pad(x, (0, 0, self.conv_kernel_size - 1, 0))
            return x.unfold(1, self.conv_kernel_size, 1).sum(-1) * dynamic_input

    class Told(Mixing):
        def forward(self, hidden_states, conv_mask=None, **kwargs):
            return hidden_states * (kwargs.get("seq_idx") is not None)

    assert patching._mixes(Mixing) and not patching._mixes(Told)
    forward, layer = patching._apart(Mixing.forward), Mixing(4)
    x, by = torch.randn(2, 2, 10, 3).unbind()
    mask = torch.ones(2, 10)
    mask[0, :2] = 0.0
    seq_idx = torch.tensor([[0] * 4 + [1] * 6, [0] * 3 + [1] + [2] * 6])
    got = forward(layer, x, by, conv_mask=mask, seq_idx=seq_idx)
    for b, cuts in enumerate(((0, 4, 10), (0, 3, 4, 10))):
        for i, j in pairwise(cuts):
            part = (slice(b, b + 1), slice(i, j))
            torch.testing.assert_close(got[part], layer(x[part], by[part], conv_mask=mask[part]))
    assert torch.equal(forward(layer, x, by), layer(x, by))
