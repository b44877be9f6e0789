"""consistent=True on a GPU: equal bits whatever the batch, the cut and the step."""

import copy

import pytest
import torch

from slipstream.kernels.elementwise.place_tokens import place_tokens
from slipstream.nn import SwiGLU, projections
from slipstream.nn.consistent import linear, step_products, use_consistent_products
from slipstream.ops import chunk_simple_gla, short_convolution
from slipstream.runtime.block_step import BlockStep
from slipstream.runtime.consistent import consistent
from tests.support.block_inputs import LAYERS, check_inputs
from tests.support.consistent import LENGTH, OPERATORS, Sample, attention_differing, differing
from tests.support.consistent_models import differing as logits_differing
from tests.support.consistent_models import model_of, sequences
from tests.support.operators import Size

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
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


def test_convolution_on_cuda_gives_equal_bits() -> None:
    x = torch.randn(1, 200, 64, device="cuda", dtype=BF16)
    weight = torch.randn(64, 4, device="cuda", dtype=BF16)
    options = {"activation": "silu", "output_final_state": True}
    whole, _ = short_convolution(x, weight, **options)
    _, state = short_convolution(x[:, :64], weight, **options)
    for end in (65, 70, 200):
        part, _ = short_convolution(x[:, 64:end], weight, initial_state=state, **options)
        assert torch.equal(part, whole[:, 64:end])
