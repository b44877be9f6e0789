"""Models on a GPU: generation by graphs, equal bits."""

import copy

import pytest
import torch
from torch import Tensor

from slipstream.kernels.elementwise.place_tokens import place_tokens
from slipstream.models import MIXERS, SlipstreamConfig, SlipstreamForCausalLM, StateCache
from slipstream.models.graphs import PROMPT
from slipstream.nn import SwiGLU, projections
from slipstream.nn.consistent import linear, step_products, use_consistent_products
from slipstream.ops import chunk_simple_gla
from slipstream.runtime.consistent import BlockStep, consistent
from slipstream.runtime.dispatch import FALLBACK
from tests.support.block_inputs import LAYERS, check_inputs
from tests.support.consistent import LENGTH, OPERATORS, Sample, attention_differing, differing
from tests.support.consistent_models import differing as logits_differing
from tests.support.consistent_models import model_of, sequences
from tests.support.operators import Size

# ---- generate with CUDA graphs: the tokens of generate without, from one capture a batch size.


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
    if name in ("dsa", "mla"):
        # their keys have more than 128 channels, and float32 tiles of those fit no kernel
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


# ---- consistent=True on a GPU: equal bits whatever the batch, the cut and the step.


BF16 = torch.bfloat16


@pytest.mark.parametrize("impl", [None, "triton"])
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_operator_on_cuda_gives_equal_bits(op: Sample, impl: str | None) -> None:
    size = Size(B=3, T=LENGTH, H=2, HV=4, K=64, V=64, gate="mixed", dtype=BF16)
    assert differing(op, 10, impl, size=size, device="cuda") == 0


@pytest.mark.parametrize("impl", [None, "triton"])
def test_attention_on_cuda_gives_equal_bits(impl: str | None) -> None:
    assert attention_differing(10, impl, width=64, device="cuda", dtype=BF16) == 0


@pytest.mark.parametrize("mixers", [("gated_deltanet", "attention"), ("kda", "mamba2")], ids=str)
def test_model_on_cuda_gives_equal_bits(mixers: tuple[str, ...]) -> None:
    model = model_of(*mixers, hidden_size=256, num_heads=2).to("cuda", BF16)
    assert logits_differing(model, 6) == 0


def test_few_heads_on_cuda_give_equal_bits() -> None:
    """In segments from scanned states, and in pieces too short for any."""
    torch.manual_seed(0)
    T, H, K = 4096 + 37, 4, 128
    q, k, v = (torch.randn(1, T, H, K, device="cuda", dtype=BF16) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -torch.rand(1, T, H, device="cuda")
    options = {"consistent": True, "output_final_state": True}
    for gates in ((g,), ()):
        whole, final = chunk_simple_gla(q, k, v, *gates, **options)
        parts, state = [], None
        for begin in range(0, T, 448):
            piece = [x[:, begin : begin + 448] for x in (q, k, v, *gates)]
            o, state = chunk_simple_gla(*piece, initial_state=state, **options)
            parts.append(o)
        assert torch.equal(torch.cat(parts, 1), whole)
        assert torch.equal(state, final)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "mixers",
    [
        ("gated_deltanet", "attention"),
        ("kda", "mamba2"),
        ("rwkv7", "gla"),
        ("delta_net", "lightning_attn"),
        ("retention", "attention"),
    ],
    ids=str,
)
@torch.no_grad()
def test_generate_on_cuda_gives_equal_bits(mixers: tuple[str, ...]) -> None:
    """By graphs, past the ends of blocks: the tokens of prompts that have them."""
    model = model_of(*mixers, hidden_size=256, num_heads=2).to("cuda", BF16)
    ids = sequences(3)[:, :60].cuda()
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    options = {"max_new_tokens": 140, "do_sample": False, "attention_mask": mask}
    made = model.generate(ids, **options)
    logits = model(made, attention_mask=torch.cat([mask, torch.ones_like(made[:, 60:])], 1)).logits
    assert torch.equal(logits[:, 59:-1].argmax(-1), made[:, 60:])
    assert model.decoding.reason is None
    assert (model.decoding.captures, model.decoding.eager) == (2, 2)
    alone = model.generate(ids[1:2], max_new_tokens=140, do_sample=False)
    assert torch.equal(alone, made[1:2])


@pytest.mark.filterwarnings("ignore:generate runs without graphs")  # of the assistant, too
@torch.no_grad()
def test_drafts_on_cuda_change_no_token() -> None:
    """In bfloat16, over ends of blocks, with words of the prompt and a noisy assistant's."""
    model = model_of("gated_deltanet", "attention", hidden_size=256, num_heads=2).to("cuda", BF16)
    noisy, ids = copy.deepcopy(model), sequences(1)[:, :60].cuda()
    for parameter in noisy.parameters():
        parameter += 0.02 * parameter.std() * torch.randn_like(parameter)
    options = {"max_new_tokens": 80, "do_sample": False}
    want = model.generate(ids, **options)
    with pytest.warns(RuntimeWarning, match="runs without graphs, since drafts are verified"):
        looked_up = model.generate(ids, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(looked_up, want)
    assert torch.equal(model.generate(ids, assistant_model=noisy, **options), want)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("case", range(len(LAYERS)))
def test_inputs_of_steps_on_cuda_have_equal_bits(case: int, dtype: torch.dtype) -> None:
    make, bound = LAYERS[case]
    check_inputs(make(), bound, dtype, "cuda")


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("N", "K"), [(256, 512), (1000, 1048)])
def test_products_on_cuda_give_equal_bits(N: int, K: int, dtype: torch.dtype) -> None:
    """By all tiles that calls of some numbers of rows have."""
    x = torch.randn(4500, K, device="cuda", dtype=dtype)
    weight, bias = torch.randn(N, K, device="cuda", dtype=dtype), torch.randn(N, device="cuda")
    for b in (None, bias.to(dtype)):
        whole = linear(x, weight, b)
        for rows in (1, 2, 3, 16, 17, 64, 512, 513, 2048, 2049):
            assert torch.equal(linear(x[7 : 7 + rows], weight, b), whole[7 : 7 + rows]), rows
            with torch.no_grad():  # those of a step have another kernel then
                assert torch.equal(linear(x[7 : 7 + rows], weight, b), whole[7 : 7 + rows]), rows


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@torch.no_grad()
def test_step_products_on_cuda_give_equal_bits(dtype: torch.dtype) -> None:
    sizes = (3072, 1024, 16)
    layers = torch.nn.ModuleList(torch.nn.Linear(1024, n, bias=False) for n in sizes)
    layers.to("cuda", dtype)
    use_consistent_products(layers)
    x = torch.randn(4096, 1, 1024, device="cuda", dtype=dtype)
    want = [layer(x) for layer in layers]
    for rows in (1, 2, 16, 64):
        found = step_products(x[:rows], [*layers])
        assert found is not None
        assert all(torch.equal(y, z[:rows]) for y, z in zip(found, want, strict=True))


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("in_fp32", [False, True])
@torch.no_grad()
def test_gated_mlp_step_on_cuda_gives_equal_bits(dtype: torch.dtype, in_fp32: bool) -> None:
    mlp = SwiGLU(1024, 2816).to("cuda", dtype)
    use_consistent_products(mlp)
    x, h = torch.randn(2, 512, 1, 1024, device="cuda", dtype=dtype)
    h = h.float() if in_fp32 else h
    with consistent():
        want = projections.consistent_mlp(mlp, x, h)
        step = BlockStep(torch.zeros(1, dtype=torch.int64, device="cuda"), place_tokens)
        for rows in (1, 2, 16, 64):
            with step.running():
                assert torch.equal(
                    projections.consistent_mlp(mlp, x[:rows], h[:rows]), want[:rows]
                ), rows
