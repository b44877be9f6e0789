"""Prompt lookup whose drafts are verified within graphs: the tokens are those of greedy steps."""

import copy
import warnings
from typing import Any

import pytest
import torch

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, greedy
from slipstream.models.generation import DRAFTS, HOLES

pytestmark = pytest.mark.usefixtures("graphs_on_a_cpu")

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 30}


def make(*mixers: str) -> tuple[SlipstreamForCausalLM, torch.Tensor]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_heads": 2}
    config = SlipstreamConfig(mixers=list(mixers), initializer_range=0.3, **sizes)
    words = torch.randint(1, 40, (1, 9))
    return SlipstreamForCausalLM(config).eval(), torch.cat([words, words[:, :5]], 1)


@pytest.mark.parametrize(
    "mixers",
    [("gated_deltanet", "attention"), ("kda", "gdn2"), ("mamba2", "gla"), ("delta_net",) * 2],
    ids="-".join,
)
def test_lookup_gives_greedy_tokens(mixers: tuple[str, ...]) -> None:
    model, prompt = make(*mixers)
    want = model.generate(prompt, eos_token_id=None, **GREEDY)
    before = model.decoding.captures
    for count in (3, 3, 5):
        options = {**GREEDY, "prompt_lookup_num_tokens": count}
        assert torch.equal(model.generate(prompt, eos_token_id=None, **options), want)
        assert model.decoding.reason is None
    assert model.decoding.captures > before
    eos = int(want[0, -7])
    options = {**GREEDY, "eos_token_id": eos}
    want = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **options), want)


@pytest.mark.parametrize(
    "mixers", [("gated_deltanet", "attention"), ("kda", "mamba2")], ids="-".join
)
def test_assistant_gives_greedy_tokens(mixers: tuple[str, ...]) -> None:
    """One whose guesses are mostly wrong, and one whose all are right; both by graphs."""
    model, prompt = make(*mixers)
    options = {**GREEDY, "eos_token_id": None}
    want = model.generate(prompt, **options)
    other, _ = make("gla", "attention")
    for assistant in (other, copy.deepcopy(model)):
        for count in (1, 3, 3):
            assistant.generation_config.num_assistant_tokens = count
            model.decoding.replays = 0
            assert torch.equal(model.generate(prompt, assistant_model=assistant, **options), want)
            assert model.decoding.reason is None and assistant.decoding.reason is None
        assert model.decoding.captures and assistant.decoding.captures
    # four of 29 tokens a call, where all guesses are right
    assert model.decoding.replays == 8
    eos = int(want[0, -7])
    want = model.generate(prompt, **{**options, "eos_token_id": eos})
    found = model.generate(prompt, assistant_model=other, **{**options, "eos_token_id": eos})
    assert torch.equal(found, want)
    # which is still there for calls of its own
    assert other.generate(prompt, **options).shape == (1, prompt.shape[1] + 30)


@pytest.mark.parametrize("right", [False, True])
def test_assistant_needs_one_graph_for_any_length(right: bool) -> None:
    """Another would be compiled and captured in the middle of a generate."""
    model, prompt = make("gated_deltanet", "attention")
    assistant = copy.deepcopy(model) if right else make("gla", "attention")[0]
    assistant.generation_config.num_assistant_tokens = 2
    for count in range(7, 13):
        options = {**GREEDY, "eos_token_id": None, "max_new_tokens": count}
        model.generate(prompt, assistant_model=assistant, **options)
    for one in (model, assistant):
        assert (one.decoding.captures, one.decoding.eager, one.decoding.reason) == (1, 1, None)


@pytest.mark.parametrize("last", [False, True])
def test_pad_token_in_the_prompt_ends_drafts(last: bool) -> None:
    """transformers makes a mask of it, and drafts behind such padding could not be taken back."""
    model, prompt = make("gated_deltanet", "attention")
    prompt[0, [-1, -2] if last else 1] = 39
    options = {**GREEDY, "eos_token_id": None, "pad_token_id": 39}
    want = model.generate(prompt, **options)
    for drafts in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": copy.deepcopy(model)}):
        assert torch.equal(model.generate(prompt, **options, **drafts), want)
        assert model.decoding.reason == HOLES


@pytest.mark.parametrize("padding", [0, 3])
def test_assistant_forgets_all_of_a_short_prompt(padding: int) -> None:
    """transformers' loop has it draft again from one token before what the model accepted."""
    model, prompt = make("mamba2", "mla")
    assistant, _ = make("mamba2")
    assistant.generation_config.num_assistant_tokens = 1
    prompt = torch.cat([prompt.new_zeros(1, padding), prompt[:, :1]], 1)
    mask = torch.ones_like(prompt)
    mask[:, :padding] = 0
    options = {**GREEDY, "max_new_tokens": 4, "attention_mask": mask, "eos_token_id": None}
    want = model.generate(prompt, **options)
    found = model.generate(prompt, assistant_model=assistant, **options)
    assert torch.equal(found, want)


@pytest.mark.parametrize("mixer", ["gla", "rwkv7"])
def test_drafts_of_another_kind_are_refused_by_name(mixer: str) -> None:
    model, prompt = make(mixer)
    with pytest.raises(NotImplementedError, match=r"^assistant_early_exit: want None, got 1"):
        model.generate(prompt, assistant_early_exit=1, **GREEDY)
    options = {"assistant_model": copy.deepcopy(model), "speculation_type": "dflash"}
    if hasattr(model.generation_config, "speculation_type"):  # since transformers 5.24
        with pytest.raises(
            NotImplementedError, match=r"^speculation_type: want None, got 'dflash'"
        ):
            model.generate(prompt, **options, **GREEDY)


def test_busy_assistant_is_asked_again_later() -> None:
    model, prompt = make("gated_deltanet", "attention")
    options = {**GREEDY, "eos_token_id": None}
    want, assistant = model.generate(prompt, **options), copy.deepcopy(model)
    assert assistant.decoding.begin(assistant)  # as a generate in another thread
    assert torch.equal(model.generate(prompt, assistant_model=assistant, **options), want)
    assert "elsewhere" in str(model.decoding.reason)
    assistant.decoding.end()
    assert torch.equal(model.generate(prompt, assistant_model=assistant, **options), want)
    assert model.decoding.reason is None and assistant.decoding.captures


def test_wrong_drafts_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is guessed, and however much of it is right."""
    model, prompt = make("gated_deltanet", "attention", "kda")
    want = model.generate(prompt, eos_token_id=None, **GREEDY)
    future = want[0].tolist()
    calls = []

    def guess(tokens: list[int], count: int, ngram: int) -> list[int]:
        right = len(calls) % (count + 1)
        calls.append(count)
        ahead = future[len(tokens) : len(tokens) + right]
        return [*ahead, *[(future[-1] + 1) % 40] * (count - right)][:count]

    monkeypatch.setattr(greedy, "drafts_after", guess)
    options = {**GREEDY, "prompt_lookup_num_tokens": 4}
    for _ in range(3):
        assert torch.equal(model.generate(prompt, eos_token_id=None, **options), want)
    assert len(calls) < 3 * 30


def test_lookup_without_graphs_says_why() -> None:
    """A layer that verifies no drafts, a processor of logits, padding; later calls have graphs."""
    options = {**GREEDY, "eos_token_id": None}
    model, prompt = make("retention", "gated_deltanet")
    want = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **options), want)
    assert model.decoding.reason == DRAFTS
    model, prompt = make("gated_deltanet")
    penalty = {**options, "repetition_penalty": 1.3}
    want = model.generate(prompt, **penalty)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **penalty), want)
    assert model.decoding.reason == DRAFTS
    padded = torch.cat([torch.zeros_like(prompt[:, :2]), prompt], 1)
    mask = (padded != 0).long()
    want = model.generate(padded, attention_mask=mask, **options)
    options["prompt_lookup_num_tokens"] = 3
    assert torch.equal(model.generate(padded, attention_mask=mask, **options), want)
    assert model.decoding.reason == DRAFTS
    replays = model.decoding.replays
    model.generate(prompt, **options)
    assert model.decoding.reason is None
    assert model.decoding.replays > replays


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_lookup_that_fails_leaves_it_to_the_other_loop(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it fails, after states have changed; said once, and not tried again."""
    model, prompt = make("gated_deltanet", "attention")
    options = {**GREEDY, "eos_token_id": None}
    want, verify, calls = model.generate(prompt, **options), model.model.verify, []

    def failing(*args: Any) -> torch.Tensor:
        h = verify(*args)
        calls.append(args)
        if len(calls) >= at:
            raise MemoryError("no room")
        return h

    monkeypatch.setattr(model.model, "verify", failing)
    options["prompt_lookup_num_tokens"] = 3
    with pytest.warns(RuntimeWarning, match="drafts could not be verified: MemoryError: no room"):
        assert torch.equal(model.generate(prompt, **options), want)
    count = len(calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.generate(prompt, **options), want)
        assert "no room" in (model.decoding.reason or "")
        del options["prompt_lookup_num_tokens"]
        assert torch.equal(model.generate(prompt, **options), want)
    assert model.decoding.reason is None
    assert len(calls) == count
