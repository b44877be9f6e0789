"""Operators and models on a CUDA device that is not the current one, or on two at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.models import SlipstreamForCausalLM
from tests.support.derivatives import ON_CUDA, Case, Problem, assert_near
from tests.support.model_ways import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("ignore"),  # of DataParallel and accelerate
]
# whose gradients are plain torch's
PLAIN = {"short_convolution_update-bias", "latent_attention"}
NEAR = 1e-3
IDS = torch.arange(18).mul(7).remainder(53).view(2, 9)


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


@pytest.mark.parametrize("mask", masks(), ids=["whole", "padded"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["every", "hybrid", "residuals"])
def test_model_on_two_devices(name: str, tied: bool, mask: Tensor, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    torch.cuda.set_device(0)
    options: dict[str, Any] = {"tie_word_embeddings": tied}
    if name == "residuals":
        name, options = "hybrid", {**options, "attention_residuals": 2}
    plain = make(name, "cuda:0", **options)
    plain.save_pretrained(tmp_path)
    size = sum(p.numel() for p in plain.parameters()) * 4
    split = SlipstreamForCausalLM.from_pretrained(
        tmp_path, device_map="auto", max_memory={0: size * 6 // 10, 1: 10 * size}
    ).train()
    assert {p.device.index for p in split.parameters()} == {0, 1}, split.hf_device_map
    assert_same(step(split, mask), step(plain, mask))
    given = {"attention_mask": mask.cuda(0), "max_new_tokens": 4, "do_sample": False}
    ids = {"pad_token_id": 0, "eos_token_id": None}
    tokens = [m.eval().generate(IDS.cuda(0), **given, **ids) for m in (split, plain)]
    assert torch.equal(tokens[0], tokens[1])


@pytest.mark.parametrize("way", ["moved", "parallel"])
def test_model_on_another_device(way: str) -> None:
    torch.cuda.set_device(0)
    plain, model = make("every", "cuda:0"), make("every", "cuda:0")
    mask = masks()[0]
    want = step(plain, mask)
    if way == "moved":
        step(model, mask)
        model.zero_grad()
        model.to("cuda:1")
        got = step(model, mask, device=1)
    else:
        got = step(nn.DataParallel(model, [0, 1]), mask)
        # to it a parameter that no replica used has a gradient of zeros
        unused = got[1].keys() - want[1].keys()
        assert not any(got[1].pop(name).any() for name in unused)
    assert_same(got, want)
