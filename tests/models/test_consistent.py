"""SlipstreamConfig(consistent=True): equal logits whatever the batch, the cut and the step."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import models
from slipstream.models import PrefixCache, SlipstreamConfig, StateCache, graphs
from slipstream.models import consistent as consistent_models
from slipstream.models.block_steps import OpenBlocks
from slipstream.models.config import CONSISTENT_MIXERS
from slipstream.nn.consistent import linear
from slipstream.nn.decoding import Drafts
from slipstream.runtime.consistent import BLOCK
from tests.support import wants
from tests.support.consistent_models import LENGTH, differing, logits_of, model_of, sequences

# of all mixers that a consistent model takes
PAIRS = [
    ("gated_deltanet", "attention"),
    ("rwkv7", "attention"),
    ("kda", "mamba2"),
    ("gla", "retention"),
    ("delta_net", "lightning_attn"),
]


@pytest.mark.parametrize("mixer", CONSISTENT_MIXERS)
def test_logits_have_equal_bits(mixer: str) -> None:
    assert differing(model_of(mixer, mixer), 3) == 0


def test_options_keep_equal_bits() -> None:
    options = {"residual_in_fp32": True, "embedding_norm": True, "attention_residuals": 1}
    model = model_of("gla", {"type": "attention", "window_size": 70}, **options)  # pyright: ignore[reportArgumentType]
    assert differing(model, 3) == 0
    for parameter in model.parameters():  # as in a reference policy
        parameter.requires_grad_(False)
    assert torch.equal(logits_of(model, sequences(1)), logits_of(trained_copy(model), sequences(1)))


def trained_copy(model: models.SlipstreamForCausalLM, *, consistent: bool = True) -> Any:
    """Another model with its weights, in training."""
    config = copy.deepcopy(model.config)
    config.consistent = consistent
    other: Any = type(model)(config)  # pyright: ignore[reportArgumentType]
    other.load_state_dict(model.state_dict())
    return other.requires_grad_().train()


def test_generate_equals_prompts_again() -> None:
    model, prompt = model_of("kda", "attention"), sequences(2)[:, :60]
    made = model.generate(prompt, max_new_tokens=10, do_sample=False)
    assert isinstance(made, Tensor)
    again = prompt
    with torch.no_grad():
        for _ in range(10):
            again = torch.cat([again, logits_of(model, again)[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, again)
    assert model.decoding.reason == "there are no graphs on cpu"
    beams = model.generate(prompt, max_new_tokens=10, num_beams=2, do_sample=False)
    plain = model.generate(prompt, max_new_tokens=10, num_beams=2, do_sample=False, use_cache=False)
    assert torch.equal(beams, plain)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_:FutureWarning")  # transformers 5.24
@pytest.mark.parametrize("together", [False, True], ids=["blocks", "packed"])
@torch.no_grad()
def test_checkpointed_model_generates_without_gradients(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As callbacks of trainers call it, with any number of tokens after whole blocks."""
    model = model_of("kda", "attention")
    if together:
        monkeypatch.setattr(consistent_models, "runs_kernels", lambda device: True)
    for tokens in (20, 64, 70):
        prompt = sequences(2)[:, :tokens]
        want = model.eval().generate(prompt, max_new_tokens=4, do_sample=False)
        model.gradient_checkpointing_enable()
        assert torch.equal(model.train().generate(prompt, max_new_tokens=4, do_sample=False), want)
        assert all(x.gradient_checkpointing for x in model.model.layers)
        model.gradient_checkpointing_disable()


def test_prefixes_and_rows_of_a_cache() -> None:
    model, ids = model_of("gla", "attention"), sequences(1)
    prefixes = PrefixCache(model)
    want = logits_of(model, ids)
    for _ in range(2):
        cache = prefixes.prefill(ids)
        with torch.no_grad():
            found = logits_of(model, ids[:, cache.get_seq_length() :], cache=cache)
        assert torch.equal(found, want[:, 128:])
    assert prefixes.reused == 128 and cache.bytes() > 0 and cache.rows == 1
    cache.crop(-1)
    with torch.no_grad():
        assert torch.equal(logits_of(model, ids[:, -1:], cache=cache), want[:, -1:])
    with pytest.raises(NotImplementedError, match="consistent"):
        cache.pool(2)
    cache.batch_repeat_interleave(2)
    assert cache.rows == 2
    cache.batch_select_indices(torch.tensor([True, False]))
    assert cache.rows == 1


def test_whole_blocks_go_on_in_inference_mode() -> None:
    """Tensors of inference mode cannot be marked as wanting gradients."""
    model, ids = model_of("gated_deltanet", "attention"), sequences(1)[:, :BLOCK]
    with torch.inference_mode():
        got = logits_of(model, ids)
    assert torch.equal(got, logits_of(model, ids))


@pytest.mark.parametrize("mixers", [("gated_deltanet", "attention"), ("rwkv7", "mamba2")], ids=str)
def test_packed_calls_are_near(mixers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where all sequences are one call."""
    model, ids = model_of(*mixers), sequences()
    want = logits_of(model, ids)
    monkeypatch.setattr(consistent_models, "runs_kernels", lambda device: True)
    with torch.inference_mode():
        cache = StateCache(2)
        cuts = (0, 40, 41, 60, 130, 131, 145, LENGTH)
        parts = [
            logits_of(model, ids[:, a:b], cache=cache, use_cache=True) for a, b in pairwise(cuts)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), want, atol=1e-5, rtol=1e-4)
    mask = torch.ones(3, LENGTH, dtype=torch.int64)
    mask[0, :70] = 0
    with torch.no_grad():
        cache = StateCache(2)
        first = logits_of(model, ids[:, :100], attention_mask=mask[:, :100], cache=cache)
        second = logits_of(model, ids[:, 100:], attention_mask=mask, cache=cache)
    alone = logits_of(model, ids[:1, 70:])
    found = torch.cat([first, second], 1)
    torch.testing.assert_close(found[:1, 70:], alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1:], want[1:], atol=1e-5, rtol=1e-4)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("mixers", [("gated_deltanet", "attention"), ("rwkv7", "mamba2")], ids=str)
@torch.no_grad()
def test_steps_on_open_blocks(mixers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: rows of several lengths, past the ends of blocks, and a longer call after it."""
    model, ids = model_of(*mixers), sequences()
    whole = [logits_of(model, row[None])[0] for row in ids]
    monkeypatch.setattr(consistent_models, "runs_kernels", lambda device: True)
    ends, count = [5, 64, 75], 70
    longest = max(ends)
    rows, mask = ids.new_zeros(2, 3, longest)
    for n, end in enumerate(ends):
        rows[n, longest - end :], mask[n, longest - end :] = ids[n, :end], 1
    cache = StateCache(2)
    logits_of(model, rows, attention_mask=mask, cache=cache, use_cache=True)
    blocks = cache.blocks_for(model.model, count)

    def tokens(begin: int, length: int) -> Tensor:
        return torch.stack(
            [ids[n, end + begin : end + begin + length] for n, end in enumerate(ends)]
        )

    def compare(found: Tensor, begin: int) -> None:
        for n, end in enumerate(ends):
            want = whole[n][end + begin : end + begin + found.shape[1]]
            torch.testing.assert_close(found[n], want, atol=1e-5, rtol=1e-4)

    for t in range(count):
        assert cache.blocks_for(model.model, count - t) is blocks
        h = blocks.step(model.model, tokens(t, 1), None, blocks.closes())
        cache.step_on(1)
        compare(model.lm_head(h), t)
    compare(logits_of(model, tokens(count, 5), cache=cache, use_cache=True), count)


class _Again:
    """A graph's interface, by the call itself."""

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        self.run, self.result = run, run()
        return self.result

    def replay(self) -> None:
        self.result.copy_(self.run())


def test_generate_by_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of("kda", "attention"), sequences(2)[:, :60]
    ways: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.2}, {"num_beams": 2}]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    want = [model.generate(prompt, **options, **way) for way in ways]
    monkeypatch.setattr(consistent_models, "runs_kernels", lambda device: True)
    monkeypatch.setattr(graphs, "graph_on", lambda device: _Again())
    loads, load = [], OpenBlocks.load
    monkeypatch.setattr(OpenBlocks, "load", lambda *given: loads.append(load(*given)))
    for way, tokens in zip(ways, want):
        model.decoding = graphs.Decoding()
        loads.clear()
        for _ in range(2):  # the second has the graphs of the first
            assert torch.equal(model.generate(prompt, **options, **way), tokens), way  # pyright: ignore[reportArgumentType]
        assert model.decoding.reason is None
        # a step that ends a block is another graph
        assert model.decoding.captures == 2 and model.decoding.eager == 2
        assert model.decoding.replays == 2 * 11 - 2
        assert len(loads) == 2  # once for each prompt: beams are put in order where they are


@pytest.mark.parametrize("mixers", PAIRS, ids=str)
@torch.no_grad()
def test_steps_give_the_logits_of_prompts(mixers: tuple[str, str]) -> None:
    """Steps of one token a row, in blocks of which some end earlier than others. Not bit for bit on
    a CPU, where they have other shapes; on a GPU they are (tests/gpu/test_models.py)."""
    assert {*CONSISTENT_MIXERS} == {mixer for pair in PAIRS for mixer in pair}
    model, ids = model_of(*mixers), sequences(3)[:, :140]
    lengths = (70, 61, 8)
    mask = torch.stack([torch.arange(70) >= 70 - n for n in lengths])
    cache = StateCache(2)
    model(ids[:, :70], attention_mask=mask, cache=cache, use_cache=True)
    whole = torch.cat([mask, torch.ones(3, 70, dtype=torch.bool)], 1)
    want = model(ids, attention_mask=whole).logits
    blocks = cache.blocks_for(model.model, 70)
    for t in range(70, 140):
        if t == 100:  # by way of rows
            cache.open_rows = cache.open_rows
            blocks = cache.blocks_for(model.model, 40)
        h = blocks.step(model.model, ids[:, t : t + 1], None, blocks.closes())
        cache.step_on(1)
        logits = consistent_models.logits_of(model, h)[:, 0]
        torch.testing.assert_close(logits, want[:, t], rtol=1e-4, atol=1e-5)


def test_graphs_of_another_dtype_have_their_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that generate keeps has states in the dtype without autocast."""
    monkeypatch.setattr(consistent_models, "runs_kernels", lambda device: True)
    monkeypatch.setattr(graphs, "graph_on", lambda device: _Again())
    model, prompt = model_of("kda", "attention"), sequences(2)[:, :60]
    found = []
    for dtype in (None, torch.bfloat16) * 2:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            found.append(model.generate(prompt, max_new_tokens=10, do_sample=False))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("mixers", PAIRS[:3], ids=str)
def test_drafts_change_no_token(mixers: tuple[str, ...]) -> None:
    """In bfloat16, over ends of blocks, with drafts that are right, wrong, and partly right."""
    model, prompt = model_of(*mixers).bfloat16(), sequences(1)[:, :50]
    noisy = copy.deepcopy(model)
    for parameter in noisy.parameters():
        parameter.data += 0.05 * parameter.std() * torch.randn_like(parameter)
    options = {"max_new_tokens": 90, "do_sample": False}
    want = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **options), want)
    for assistant in (copy.deepcopy(model), noisy):
        assert torch.equal(model.generate(prompt, assistant_model=assistant, **options), want)


@pytest.mark.parametrize("mixers", PAIRS, ids=str)
def test_cropped_cache_goes_on_with_equal_bits(mixers: tuple[str, ...]) -> None:
    """Within a block, over the end of one, back into a call of several; with padding."""
    model, ids = model_of(*mixers), sequences(2)[:, :150]
    mask = torch.ones_like(ids)
    mask[0, 130:135] = 0
    with torch.no_grad():
        for given in (None, mask):
            want = model(ids, attention_mask=given).logits
            cache = StateCache(len(mixers))
            cache.activate_past_recording()
            at = 0
            for end, keep in ((40, 40), (140, 129), (136, 131), (133, 100), (150, 150)):
                part = None if given is None else given[:, :end]
                y = model(ids[:, at:end], attention_mask=part, past_key_values=cache).logits
                alive = slice(None) if given is None else given[:, at:end].bool()
                assert torch.equal(y[alive], want[:, at:end][alive]), (end, keep)
                cache.crop(keep)
                assert cache.get_seq_length() == keep
                at = keep


def test_crop_wants_states_that_there_are() -> None:
    """Without a record only the tokens of the last block may go."""
    model, ids, cache = model_of("gla"), sequences(2)[:, :100], StateCache(1)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="at least 64 tokens"):
            cache.crop(-40)
        assert cache.get_seq_length() == 100
        cache.crop(-36)
        y = model(ids[:, 64:], past_key_values=cache).logits
        assert torch.equal(y, model(ids).logits[:, 64:])


def test_verify_is_refused() -> None:
    model, prompt = model_of("gated_deltanet"), sequences(1)[:, :20]
    with pytest.raises(NotImplementedError, match="drafts are not implemented"):
        model.model.verify(prompt, StateCache(1), Drafts(3))


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="mixers"):
        SlipstreamConfig(consistent=True, mixers=["mla"])
    with pytest.raises(ValueError, match="mlps"):
        SlipstreamConfig(consistent=True, mixers=["gla"], mlps=["qwen3_next_moe"])
    model = model_of("gla")
    with pytest.raises(NotImplementedError, match="consistent"):
        model(sequences(1), output_hidden_states=True)
    with pytest.raises(NotImplementedError, match="consistent"):
        model(sequences(1), cache=StateCache(1, key_dtype=torch.int8))
    model.train()
    model.model.gradient_checkpointing = True
    with pytest.raises(NotImplementedError, match="gradient checkpointing"):
        model(sequences(1))


@wants.triton
def test_products_on_sm90_have_tiles_by_rows() -> None:
    """The same slices of K, so that sums have one order; one tile in float32 and with a bias."""
    from slipstream.compiler.trace import trace

    def tiles(rows: int, dtype: torch.dtype, biased: bool) -> set[tuple[str, int, int]]:
        def call(device: torch.device) -> None:
            x, weight = (torch.empty(n, 1024, dtype=dtype, device=device) for n in (rows, 2048))
            linear(x, weight, torch.empty(2048, dtype=dtype, device=device) if biased else None)

        found = trace(call, "sm_90", backward=False)
        return {(job.name, job.constants["BN"], job.constants["BK"]) for job in found}

    bf16 = [tiles(rows, torch.bfloat16, False) for rows in (1, 64, 65, 600, 5000)]
    # a step's, by the kernel that takes the weights of several layers
    assert {name for found in bf16[:2] for name, *_ in found} == {"projection_step_kernel"}
    assert bf16[2] == {("matmul_kernel", 64, 64)}
    assert bf16[3] == {("matmul_sm90_kernel", 128, 64)}
    assert bf16[4] == {("matmul_sm90_kernel", 256, 64)}
    for dtype, biased in ((torch.float32, False), (torch.bfloat16, True)):
        assert tiles(64, dtype, biased) == tiles(5000, dtype, biased), dtype
