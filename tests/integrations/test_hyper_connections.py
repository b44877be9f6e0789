"""Models with hyper-connections, patched, beside themselves as they were."""

import inspect
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

from slipstream import layers, ops
from slipstream.integrations import hyper_connections
from slipstream.integrations.patching import ORIGINAL
from slipstream.integrations.transformers import patch, unpatch
from tests.support.linear_models import tiny
from tests.support.tiny_models import build

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = [
    name
    for name in (
        "DeepseekV4ForCausalLM", "Glm5NextForConditionalGeneration", "HYV4ForCausalLM",
        "HYV4VLForConditionalGeneration", "Qwen4ExpForCausalLM",
    )
    if hasattr(transformers, name)
]  # fmt: skip


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    unpatch()


def test_every_class_with_a_forward_is_tested() -> None:
    """And is replaced: a release whose layers do more would keep its own."""
    patch()
    known = set()
    for name in MODELS:
        found = vars(inspect.getmodule(getattr(transformers, name)))
        classes = [found[x] for x in hyper_connections.FORWARDS if x in found]
        assert classes, name
        known |= {x.__name__ for x in classes}
        assert all(hasattr(x.forward, ORIGINAL) for x in classes), name
    if len(MODELS) == 5:
        assert known == {*hyper_connections.FORWARDS}
    unpatch()
    assert not any(hasattr(x.forward, ORIGINAL) for x in classes)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, config, weights, inputs, _ = tiny(name)
    vars(config.get_text_config()).update(hc_eps=0.02, rms_norm_eps=0.1, hc_sinkhorn_iters=3)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :4] = 0
    pre, post = Mock(wraps=ops.mhc_pre), Mock(wraps=ops.mhc_post)
    monkeypatch.setattr(hyper_connections, "mhc_pre", pre)
    monkeypatch.setattr(hyper_connections, "mhc_post", post)

    def by_position(layer: Any, args: Any, kwargs: Any) -> Any:
        bound = inspect.signature(layer.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def run() -> tuple[Tensor, dict[str, Tensor | None]]:
        model = build(cls, config, "eager", weights).train()
        *_, last = (x for x in model.modules() if type(x).__name__ in hyper_connections.FORWARDS
                    and type(x).__name__.endswith("Layer"))  # fmt: skip
        last.register_forward_pre_hook(by_position, with_kwargs=True)
        logits = model(**inputs, attention_mask=mask, use_cache=False).logits[mask.bool()]
        loss = (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum()
        parameters = dict(model.named_parameters())
        grads = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
        return logits.detach(), dict(zip(parameters, grads))

    want, right = run()
    if not all(g is None or g.isfinite().all() for g in right.values()):
        pytest.skip("transformers 5.17's own gradients are not finite")
    assert not pre.called and not post.called
    patch()
    got, ours = run()
    layers = config.get_text_config().num_hidden_layers
    assert post.call_count == 2 * layers
    head = 0 if "Glm5Next" in name else 1  # a mean
    assert pre.call_count == (0 if "Qwen4" in name else 2 * layers + head)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    largest = max(float(g.abs().max()) for g in right.values() if g is not None)
    for parameter, grad in right.items():
        assert (grad is None) == (ours[parameter] is None), parameter
        if grad is not None:
            torch.testing.assert_close(
                ours[parameter], grad, rtol=1e-3, atol=1e-4 * largest, msg=parameter
            )


@pytest.mark.parametrize("name", [x for x in MODELS if "Qwen4" not in x])
def test_layers_take_state_dicts_of_transformers(name: str) -> None:
    cls, config, weights, _, _ = tiny(name)
    model = build(cls, config, "eager", weights)
    parts = {type(x).__name__.partition("Hyper")[2]: x for x in model.modules()}
    text = config.get_text_config()
    N, D = text.hc_mult, text.hidden_size
    streams = torch.randn(2, 3, N, D)
    alone = "HYV4" in name
    ours = layers.HyperConnection(
        D, N, mix=not alone, eps=text.hc_eps, norm_eps=text.rms_norm_eps,
        **({"magnitude": text.hc_magnitude, "post_eps": text.hc_eps} if alone
           else {"iterations": text.hc_sinkhorn_iters}),
    )  # fmt: skip
    ours.load_state_dict(parts["Connection"].state_dict())
    *want, collapsed = parts["Connection"](streams)
    for got, right in zip(ours(streams), (collapsed, *want)):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
    if parts["Head"].state_dict():
        head = layers.HyperHead(D, N, eps=text.hc_eps, norm_eps=text.rms_norm_eps)
        head.load_state_dict(parts["Head"].state_dict())
        torch.testing.assert_close(head(streams), parts["Head"](streams), rtol=1e-5, atol=1e-5)
