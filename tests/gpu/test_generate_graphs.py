"""generate with CUDA graphs: the tokens of generate without, from one capture a batch size."""

import copy

import pytest
import torch
from torch import Tensor

from slipstream.models import MIXERS, SlipstreamConfig, SlipstreamForCausalLM, StateCache
from slipstream.models.graphs import PROMPT
from slipstream.runtime.dispatch import FALLBACK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 211
MODELS: dict[str, list] = {name: [name, name] for name in MIXERS}
MODELS["hybrid"] = ["gated_deltanet", "rwkv7", "attention"]


def model(name: str, dtype: torch.dtype) -> SlipstreamForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "num_heads": 2}
    config = SlipstreamConfig(mixers=MODELS[name], initializer_range=0.2, **sizes)
    return SlipstreamForCausalLM(config).to("cuda", dtype).eval()


def generate(m: SlipstreamForCausalLM, ids: Tensor, **options) -> Tensor:
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "pad_token_id": 0}
    return m.generate(input_ids=ids, **{**given, "do_sample": False, **options})


@pytest.mark.filterwarnings("ignore::slipstream.runtime.dispatch.FallbackWarning")
@pytest.mark.parametrize("name", MODELS)
def test_generate_by_graphs_gives_the_same_tokens(name: str, monkeypatch) -> None:
    if name == "mla":
        # its keys have more than 128 channels, and float32 tiles of those fit no kernel
        monkeypatch.setenv(FALLBACK, "warn")
    m, ids = model(name, torch.float32), torch.randint(1, VOCAB, (3, 9), device="cuda")
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    m.decoding.enabled = False
    want = [generate(m, ids, attention_mask=mask), generate(m, ids[1:2])]
    assert (m.decoding.captures, m.decoding.replays) == (0, 0)
    m.decoding.enabled = True
    before = m.decoding.eager
    for _ in range(2):
        assert torch.equal(generate(m, ids, attention_mask=mask), want[0])
        assert torch.equal(generate(m, ids[1:2]), want[1])
    assert m.decoding.reason is None
    assert m.decoding.captures == 2
    assert (m.decoding.eager - before, m.decoding.replays) == (2, 4 * 11 - 2)


@pytest.mark.filterwarnings("ignore::slipstream.runtime.dispatch.FallbackWarning")
@pytest.mark.parametrize("name", MODELS)
def test_prompts_by_graphs_give_the_same_tokens(name: str) -> None:
    """In bfloat16, in which one other bit gives others; prompts of two lengths in turns."""
    m = model(name, torch.bfloat16)
    prompts = [torch.randint(1, VOCAB, (2, n), device="cuda") for n in (17, 70) for _ in range(3)]
    m.decoding.enabled = False
    want = [generate(m, ids) for ids in prompts]
    m.decoding.enabled = True
    for _ in range(2):
        for ids, tokens in zip(prompts, want):
            assert torch.equal(generate(m, ids), tokens)
    assert m.decoding.reason is None and m.decoding.captures == 1
    (cache,) = m.decoding.caches.values()
    assert sum(bool(x) for key, x in cache.graphs.items() if key[0] == PROMPT) == 2


def test_generate_by_graphs_samples_as_without() -> None:
    m, ids = model("hybrid", torch.bfloat16), torch.randint(1, VOCAB, (2, 9), device="cuda")
    found = []
    for enabled in (False, True):
        m.decoding.enabled = enabled
        torch.manual_seed(3)
        found.append(generate(m, ids, do_sample=True, top_k=5, eos_token_id=7))
    assert found[0].shape == found[1].shape
    # bfloat16 logits of other sums: most tokens, not every one
    assert (found[0] == found[1]).float().mean() > 0.5
    assert m.decoding.captures == 1


def test_generate_by_graphs_reads_weights_that_changed() -> None:
    m, ids = model("gla", torch.float32), torch.randint(1, VOCAB, (1, 9), device="cuda")
    generate(m, ids)
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1.1)
    got = generate(m, ids)
    assert m.decoding.captures == 1
    m.decoding.enabled = False
    assert torch.equal(got, generate(m, ids))
    m.half()
    m.decoding.enabled = True
    generate(m, ids)
    assert m.decoding.captures == 2


@pytest.mark.parametrize("names", [("gated_deltanet", "attention"), ("kda", "gdn2"), ("mamba2",)])
def test_lookup_by_graphs_gives_the_same_tokens(names: tuple[str, ...], monkeypatch) -> None:
    """Drafts from the prompt are right and wrong ones."""
    monkeypatch.setitem(MODELS, "lookup", list(names))
    m, words = model("lookup", torch.float32), torch.randint(1, VOCAB, (1, 9), device="cuda")
    ids = torch.cat([words, words[:, :5]], 1)
    m.decoding.enabled = False
    want = generate(m, ids, max_new_tokens=40)
    m.decoding.enabled = True
    for count in (3, 3, 6):
        got = generate(m, ids, max_new_tokens=40, prompt_lookup_num_tokens=count)
        assert torch.equal(got, want)
        assert m.decoding.reason is None
    assert m.decoding.captures > 0


@torch.no_grad()
def test_assistant_by_graphs_gives_the_same_tokens(monkeypatch) -> None:
    """One whose drafts are mostly wrong, and one whose all are right."""
    monkeypatch.setitem(MODELS, "assisted", ["gated_deltanet", "attention"])
    m, other = model("assisted", torch.float32), model("gated_deltanet", torch.float32)
    ids = torch.randint(1, VOCAB, (1, 9), device="cuda")
    want = generate(m, ids, max_new_tokens=40)
    for assistant in (other, copy.deepcopy(m)):
        m.decoding.replays = 0
        for _ in range(2):  # the second has the graphs of the first
            found = generate(m, ids, max_new_tokens=40, assistant_model=assistant)
            assert torch.equal(found, want)
        assert m.decoding.reason is None and assistant.decoding.reason is None
        assert assistant.decoding.captures and assistant.decoding.replays
    assert m.decoding.replays < 40  # of two calls: several tokens each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_attention_steps_are_those_of_the_prompt(dtype: torch.dtype, monkeypatch) -> None:
    """Keys that one launch writes, with groups of heads and windows, rows of several lengths."""
    layers = [{"type": "attention", "num_kv_heads": 1}, {"type": "attention", "window_size": 12}]
    monkeypatch.setitem(MODELS, "windows", layers)
    m = model("windows", dtype)
    ids, mask = torch.randint(1, VOCAB, (3, 60), device="cuda"), torch.ones(3, 60, device="cuda")
    mask[0, :7] = 0
    mask = mask.long()
    want = m(ids, attention_mask=mask, use_cache=False).logits
    cache, tolerance = StateCache(2), 1e-4 if dtype == torch.float32 else 0.2
    m(ids[:, :20], attention_mask=mask[:, :20], cache=cache, use_cache=True)
    for t in range(20, 60):
        more = {"attention_mask": mask[:, : t + 1], "cache": cache, "use_cache": True}
        logits = m(ids[:, t : t + 1], **more).logits[:, 0]
        torch.testing.assert_close(logits, want[:, t], rtol=tolerance, atol=tolerance)
