"""Operators and models on a CUDA device that is not the current one, or on two at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.models import SlipstreamForCausalLM
from tests.support.derivatives import ON_CUDA, Case, Problem, assert_near
from tests.support.trainer_runs import IDS, PAIRS, make

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("ignore"),
]
# whose gradients are plain torch's
PLAIN = {"short_convolution_update-bias", "latent_attention"}
NEAR = 1e-3


def on_device(case: Case, index: int) -> Problem:
    torch.manual_seed(0)
    with torch.cuda.device(index):
        return Problem(case)


@pytest.mark.parametrize("case", ON_CUDA, ids=lambda case: case.name)
def test_operator_on_another_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls: the third is played from the record of the second."""
    if case.name in PLAIN:
        monkeypatch.setenv("SLIPSTREAM_FALLBACK", "warn")
    torch.cuda.set_device(0)
    first, second = on_device(case, 0), on_device(case, 1)
    for x, y in zip(second.inputs, first.inputs, strict=True):
        assert x.get_device() == 1
        x.copy_(y)
    second.weights = [x.cuda(1) for x in first.weights]
    want = first.gradient()
    for _ in range(3):
        given = second.leaves()
        outputs = second.run(*given)
        assert all(x.get_device() == 1 for x in outputs)
        grads = torch.autograd.grad(second.of_outputs(outputs), given)
        assert_near([x.cuda(0) for x in grads], want, NEAR)
    assert torch.cuda.current_device() == 0


def step(model: nn.Module, mask: Tensor, device: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    ids = IDS.cuda(device)
    labels = ids.masked_fill(mask.cuda(device) == 0, -100)
    out = model(input_ids=ids, attention_mask=mask.cuda(device), labels=labels, skip_logits=False)
    out.loss.mean().backward()
    named = getattr(model, "module", model).named_parameters()
    grads = {name: p.grad.cuda(0) for name, p in named if p.grad is not None}
    return out.logits.detach().cuda(0), grads


def assert_same(
    got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=2e-3, atol=2e-3)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        top = max(float(grad.norm()), 0.05)
        assert float((got[1][name] - grad).norm()) < 0.01 * top, name


def masks() -> list[Tensor]:
    padded = torch.ones_like(IDS)
    padded[0, :4] = 0
    return [torch.ones_like(IDS), padded]


def whole_and_split(
    name: str, folder: Path, device_map: Any, **options: Any
) -> tuple[SlipstreamForCausalLM, SlipstreamForCausalLM]:
    """A model on one device, and the same loaded onto two."""
    pytest.importorskip("accelerate")
    torch.cuda.set_device(0)
    plain = make(name, **options).train().cuda()
    plain.save_pretrained(folder)
    size = sum(p.numel() for p in plain.parameters()) * 4
    memory = {0: size * 6 // 10, 1: 10 * size} if device_map == "auto" else None
    split = SlipstreamForCausalLM.from_pretrained(folder, device_map=device_map, max_memory=memory)
    assert {p.device.index for p in split.parameters()} == {0, 1}, split.hf_device_map
    return plain, split.train()


def assert_trains_and_generates_the_same(
    split: SlipstreamForCausalLM, plain: SlipstreamForCausalLM, mask: Tensor
) -> None:
    assert_same(step(split, mask), step(plain, mask))
    given = {"attention_mask": mask.cuda(0), "max_new_tokens": 4, "do_sample": False}
    tokens = [m.eval().generate(IDS.cuda(0), **given) for m in (split, plain)]
    assert torch.equal(tokens[0], tokens[1])


@pytest.mark.parametrize("mask", masks(), ids=["whole", "padded"])
@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": False}, {"attention_residuals": 2}]
)
def test_model_on_two_devices(options: dict[str, Any], mask: Tensor, tmp_path: Path) -> None:
    """One mixer of each family: kernels of all would compile for minutes."""
    plain, split = whole_and_split("hybrid", tmp_path, "auto", **options)
    assert_trains_and_generates_the_same(split, plain, mask)


@pytest.mark.parametrize("name", PAIRS)
def test_mixers_on_two_devices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixer on each, then both on the one that is not the current one."""
    if "mla" in name:  # no kernel of its decoding takes float32
        monkeypatch.setenv("SLIPSTREAM_FALLBACK", "warn")
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1}
    plain, split = whole_and_split(name, tmp_path, {**places, "lm_head": 0})
    mask = masks()[1]
    assert_trains_and_generates_the_same(split, plain, mask)
    plain.train().zero_grad()
    want = step(plain, mask)
    plain.zero_grad()
    plain.to("cuda:1")
    assert_same(step(plain, mask, device=1), want)


def test_replicas_on_two_devices() -> None:
    torch.cuda.set_device(0)
    plain, model = make("hybrid").train().cuda(), make("hybrid").train().cuda()
    mask = masks()[0]
    want, got = step(plain, mask), step(nn.DataParallel(model, [0, 1]), mask)
    # to it a parameter that no replica used has a gradient of zeros
    unused = got[1].keys() - want[1].keys()
    assert not any(got[1].pop(name).any() for name in unused)
    assert_same(got, want)
