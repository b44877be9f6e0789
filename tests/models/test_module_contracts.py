"""Changes that trainers and libraries make to a model's modules: hooks, adapters,
offloading, construction on the meta device. Each gives the numbers of the untouched model."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.nn import GatedRMSNorm, LayerNorm, RMSNorm
from tests.support import model_ways
from tests.support.model_ways import VOCAB, WIDTH
from tests.support.module_changes import adapt

MODELS = {name: layers for name, layers in model_ways.MODELS.items() if name != "every"}
every_model = pytest.mark.parametrize("name", MODELS)


def config(name: str, **options: Any) -> SlipstreamConfig:
    small = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_heads": 2, "intermediate_size": 48}
    return SlipstreamConfig(**{**small, "mixers": MODELS[name], **options})


def model(name: str, **options: Any) -> SlipstreamForCausalLM:
    """With larger weights than a new model's, none of them 0: a missing factor has to show."""
    m = SlipstreamForCausalLM(config(name, initializer_range=0.2, **options))
    with torch.no_grad():
        for p in m.model.layers.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return m.train()


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCAB, shape)


def gradients(m: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}


# ---- hooks


@every_model
@pytest.mark.parametrize("decoding", [False, True], ids=["training", "decoding"])
def test_every_module_is_called(name: str, decoding: bool) -> None:
    m, ids, called = model(name).train(not decoding), tokens(2, 9), set()
    cache = m(ids, use_cache=True).past_key_values if decoding else None
    for key, module in m.named_modules():
        if not isinstance(module, nn.ModuleList):
            module.register_forward_hook(lambda *_, key=key: called.add(key))
    wanted = {key for key, module in m.named_modules() if module._forward_hooks}
    if decoding:
        with torch.no_grad():
            m(ids[:, :1], past_key_values=cache, use_cache=True)
    else:
        m(ids, labels=ids)
    assert called == wanted


@pytest.mark.parametrize("tied", [True, False])
def test_model_applies_a_hook_on_the_embedding(tied: bool) -> None:
    m, ids = model("gated_deltanet", tie_word_embeddings=tied), tokens(2, 9)
    want = m(inputs_embeds=m.get_input_embeddings()(ids) * 1.5, labels=ids).loss
    m.get_input_embeddings().register_forward_hook(lambda module, args, y: y * 1.5)
    torch.testing.assert_close(m(ids, labels=ids).loss, want)


def test_model_adds_the_bias_of_a_head() -> None:
    m, ids = model("gated_deltanet", tie_word_embeddings=False), tokens(2, 9)
    m.lm_head = nn.Linear(WIDTH, VOCAB)
    want = F.cross_entropy(m(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(m(ids, labels=ids).loss, want)


# ---- adapters


@every_model
def test_model_with_adapters_equals_merged_weights(name: str) -> None:
    m, ids = model(name, tie_word_embeddings=False), tokens(2, 9)
    m.requires_grad_(False)
    adapters = adapt(m)
    loss = m(ids, labels=ids).loss
    loss.backward()
    logits = m(ids).logits
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, want)
    for adapter in adapters.values():
        for grad in (adapter.down.grad, adapter.up.grad):
            assert grad is not None
            assert grad.abs().max() > 0
    with torch.no_grad():
        out = m(ids[:, :7], use_cache=True)
        step = m(ids[:, 7:8], past_key_values=out.past_key_values, use_cache=True).logits
        torch.testing.assert_close(step, logits[:, 7:8], rtol=1e-4, atol=1e-4)
        for key, adapter in adapters.items():
            parent, _, child = key.rpartition(".")
            adapter.base.weight.copy_(adapter.merged())
            setattr(m.get_submodule(parent), child, adapter.base)
        torch.testing.assert_close(m(ids).logits, logits, rtol=1e-4, atol=1e-4)


class Called(nn.Module):
    """What a user puts in a module's place: a call, and none of its attributes."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.base(*args, **options)


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_model_reads_no_attribute_of_layers_in_its_place(name: str, dtype: torch.dtype) -> None:
    """Linear layers, embedding and norms."""
    m = model(name, tie_word_embeddings=False, residual_in_fp32=True).to(dtype).eval()
    ids = tokens(2, 9)
    with torch.no_grad():
        want = m(ids).logits
    m.train()(ids, labels=ids).loss.backward()
    trained = len(gradients(m))
    m.eval().zero_grad()
    for key, module in list(m.named_modules()):
        kind = (nn.Linear, nn.Embedding, RMSNorm, GatedRMSNorm, LayerNorm)
        if isinstance(module, kind):
            parent, _, child = key.rpartition(".")
            setattr(m.get_submodule(parent), child, Called(module))
    near = {"rtol": 0, "atol": 1e-4 if dtype == torch.float32 else 0.1}
    with torch.no_grad():
        out = m(ids[:, :8], use_cache=True)
        step = m(ids[:, 8:], past_key_values=out.past_key_values).logits
        torch.testing.assert_close(out.logits, want[:, :8], **near)
        torch.testing.assert_close(step, want[:, 8:], **near)
    m.train()(ids, labels=ids).loss.backward()
    assert len(gradients(m)) == trained


# ---- the meta device and missing weights


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Constructed on the meta device, then in memory that holds NaN."""
    with torch.device("meta"):
        m = make()
    assert all(p.is_meta for p in m.parameters())
    m.to_empty(device="cpu")
    with torch.no_grad():
        for x in (*m.parameters(), *m.buffers()):
            x.fill_(torch.nan)
    return m


def assert_same_distribution(got: nn.Module, make: Callable[[], nn.Module]) -> None:
    """That of two constructions: equal where those are, else of the same location and scale."""
    first, second = (dict(make().named_parameters()) for _ in range(2))
    assert [n for n, _ in got.named_parameters()] == list(first)
    for n, p in got.named_parameters():
        assert p.dtype == first[n].dtype
        assert_alike(n, p, first[n], torch.equal(first[n], second[n]))


def assert_alike(name: str, p: Tensor, new: Tensor, is_constant: bool) -> None:
    """Eight values, the fewest there are, say little of the scale."""
    if is_constant:
        assert torch.equal(p, new), name
    else:
        slack = 1.2 if p.numel() > 500 else 6
        assert 1 / slack < p.std() / new.std() < slack, name
        assert (p.mean() - new.mean()).abs() < 6 * (p.std() + new.std()) / p.numel() ** 0.5, name


@every_model
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_model_from_the_meta_device_is_as_constructed(name: str, tied: bool) -> None:
    def make() -> SlipstreamForCausalLM:
        return SlipstreamForCausalLM(config(name, num_heads=8, tie_word_embeddings=tied))

    m = on_meta(make)
    m.init_weights()
    assert_same_distribution(m, make)
    assert (m.lm_head.weight is m.model.embed_tokens.weight) == tied
    ids = tokens(2, 9)
    assert m(ids, labels=ids).loss.isfinite()


@every_model
def test_mixer_from_the_meta_device_is_as_constructed(name: str) -> None:
    """By each module's own reset_parameters, as FSDP and torchtitan call it."""

    def make() -> nn.Module:
        return SlipstreamForCausalLM(config(name, num_heads=8)).model.layers[1].mixer

    m = on_meta(make)
    for module in m.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    assert_same_distribution(m, make)


@every_model
def test_model_initialises_what_a_checkpoint_lacks(name: str, tmp_path: Path) -> None:
    m = model(name, num_heads=8)
    m.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    # a layer as a whole, and every other parameter of another one
    lost = [n for n in weights if n.startswith("model.layers.1.")]
    lost += [n for n in sorted(weights) if n.startswith("model.layers.0.")][::2]
    save_file({n: w for n, w in weights.items() if n not in lost}, file, {"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    first, second = (dict(SlipstreamForCausalLM(m.config).named_parameters()) for _ in range(2))
    for n, p in again.named_parameters():
        if n in lost:
            assert_alike(n, p, first[n], torch.equal(first[n], second[n]))
        else:
            assert torch.equal(p, weights[n]), n


# ---- layers in a wrapper


def compiled(block: nn.Module) -> Any:
    return torch.compile(block, backend="eager")


def checkpointed(block: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(block)


@pytest.mark.parametrize("wrapped", [compiled, checkpointed])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_model_with_wrapped_layers_has_a_cache(
    wrapped: Callable[[nn.Module], nn.Module], grad: bool
) -> None:
    """As trainers leave a model that is then evaluated: layers[i] = torch.compile(layers[i])."""
    m, ids = model("hybrid").eval(), tokens(2, 9)
    want = m(ids, use_cache=False).logits.detach()
    m.model.layers = nn.ModuleList(map(wrapped, m.model.layers))
    with torch.set_grad_enabled(grad):
        first = m(ids[:, :8])
        step = m(ids[:, 8:], past_key_values=first.past_key_values).logits
    got = torch.cat([first.logits, step], 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# ---- parameters of two dtypes


def errors(m: SlipstreamForCausalLM, whole: SlipstreamForCausalLM, ids: Tensor) -> Tensor:
    """Of the logits, and the mean of those of gradients, each relative to that of a whole model."""
    for x in (m, whole):
        x.zero_grad()
        x.train()(ids, labels=ids).loss.backward()
    pairs = [(m.eval()(ids).logits, whole.eval()(ids).logits)]
    pairs += [(p.grad, q.grad) for p, q in zip(m.parameters(), whole.parameters())]
    found = torch.stack([(x - y).norm() / y.norm() for x, y in pairs]).detach()
    return torch.stack([found[0], found[1:].mean()])


@every_model
@pytest.mark.parametrize("ranks", [(1,), (1, 2, 3)], ids=["vectors", "all"])
def test_bfloat16_linears_with_float32_parameters(name: str, ranks: tuple[int, ...]) -> None:
    """As trainers and _keep_in_fp32_modules leave norms, decays and layers' own matrices."""
    options: dict[str, Any] = {"residual_in_fp32": len(ranks) > 1, "tie_word_embeddings": False}
    options |= {"mlps": ["rwkv7"] * 4} if name == "hybrid" else {}
    m, ids = model(name, **options).bfloat16(), tokens(2, 20)
    whole = copy.deepcopy(m).float()
    narrow = errors(m, whole, ids)
    for module in m.modules():
        for p in () if isinstance(module, (nn.Linear, nn.Embedding)) else module.parameters(False):
            p.data = p.data.float() if p.dim() in ranks else p.data
    assert (errors(m, whole, ids) < 1.5 * narrow + 0.01).all()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in m.parameters())
    want = whole(ids).logits[:, 19:]
    for autocast in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = m(ids[:, :19], use_cache=True)
            step = m(ids[:, 19:], past_key_values=out.past_key_values).logits
            assert step.dtype == torch.bfloat16
            assert (step - want).norm() / want.norm() < 2 * narrow[0] + 0.01
    for cached in (False, True):
        made = m.generate(ids, max_new_tokens=4, do_sample=False, use_cache=cached)
        assert made.shape == (2, 24)


# ---- offloading


@pytest.mark.parametrize("name", ["mla", "hybrid"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_model_with_cpu_offload(name: str, tied: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    m, ids = model(name, tie_word_embeddings=tied).eval(), tokens(2, 9)
    with torch.no_grad():
        want = m(ids, labels=ids, logits_to_keep=0)
        accelerate.cpu_offload(m, execution_device=torch.device("cpu"))
        assert all(p.is_meta for p in m.model.layers.parameters())
        got = m(ids, labels=ids, logits_to_keep=0)
        torch.testing.assert_close(got.loss, want.loss)
        torch.testing.assert_close(got.logits, want.logits)
        # a decoding step, in which MLA multiplies by a weight instead of calling the layer
        out = m(ids[:, :8], use_cache=True)
        step = m(ids[:, 8:], past_key_values=out.past_key_values, use_cache=True).logits
        torch.testing.assert_close(step, want.logits[:, 8:], rtol=1e-4, atol=1e-4)
