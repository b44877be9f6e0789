"""attn_implementation="slipstream" on a device, beside "eager" there."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = ("llama", "gemma2", "mistral", "gpt_oss")


def pair(name: str) -> tuple[Any, Any]:
    from tests.integrations.small_models import make

    eager, slip = make(name)
    return eager.cuda(), slip.cuda()


@pytest.mark.parametrize("name", MODELS)
def test_padded_and_packed_rows(name: str) -> None:
    eager, slip = pair(name)
    ids = torch.randint(1, 61, (3, 77), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    for inputs, live in (({}, mask >= 0), ({"attention_mask": mask}, mask > 0)):
        want, got = (model(ids, **inputs).logits[live] for model in (eager, slip))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    # Eager GPT-OSS of transformers attends across packed sequences: compare with each alone
    at = (torch.arange(77, device="cuda") % 21)[None].expand(3, -1)
    alone = [eager(part, use_cache=False).logits for part in ids.split(21, 1)]
    got = slip(ids, position_ids=at, use_cache=False).logits
    torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tables", [3, 4])
def test_tables_of_positions_keep_sequences_apart(tables: int) -> None:
    """Qwen3.5's packed rows, patched: positions of images, and of text beside them."""
    from slipstream.integrations.transformers import patch, unpatch
    from tests.support.linear_models import alone, packed_inputs, tiny
    from tests.support.tiny_models import build

    cls, config, weights, inputs, _ = tiny("Qwen3_5ForCausalLM")
    model = build(cls, config, "slipstream", weights).cuda()
    given = {x: y.cuda() for x, y in packed_inputs("position_ids", inputs["input_ids"]).items()}
    given["position_ids"] = given["position_ids"].expand(tables, -1, -1)
    want = alone(model, given["input_ids"])
    patch()
    try:
        got = [model(**given, use_cache=x).logits for x in (False, True)]
    finally:
        unpatch()
    for logits in got:
        torch.testing.assert_close(logits, want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(name: str, cache: str | None) -> None:
    eager, slip = pair(name)
    ids = torch.randint(1, 61, (3, 20), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None,
        "return_dict_in_generate": True, "output_logits": True, "disable_compile": True,
        "cache_implementation": cache,
    }  # fmt: skip
    want, got = (model.generate(ids, **options) for model in (eager, slip))
    for step, (x, y) in enumerate(zip(got.logits, want.logits)):
        alike = (got.sequences == want.sequences)[:, : 20 + step].all(1)
        torch.testing.assert_close(x[alike], y[alike], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_training_step_in_a_graph(name: str) -> None:
    """What a captured step gives for other tokens is what it gives as it is."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    from slipstream.integrations.transformers import patch, unpatch

    if name == "llama":
        model = pair(name)[1]
    else:
        config = Qwen3NextConfig(
            vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=0,
            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32,
            linear_value_head_dim=32, pad_token_id=0,
        )  # fmt: skip
        config._attn_implementation = "slipstream"
        patch()
        model = Qwen3NextForCausalLM(config).cuda()
    batches = torch.randint(1, 61, (5, 2, 77), device="cuda")
    ids = batches[0].clone()

    def step() -> list[torch.Tensor]:
        loss = model(ids, labels=ids, use_cache=False).loss
        return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]

    try:
        for batch in batches[:3]:
            ids.copy_(batch)
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for batch in batches[3:]:
            ids.copy_(batch)
            graph.replay()
            torch.testing.assert_close(found, step(), rtol=1e-3, atol=1e-4)
    finally:
        unpatch()
