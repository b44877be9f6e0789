"""The pass of a prompt as a graph: which are made, and what they refuse."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slipstream.models import graphs
from slipstream.runtime import token_ids
from tests.support.language_models import generate, model, tokens, without_graphs

pytestmark = pytest.mark.usefixtures("graphs_on_a_cpu")


def test_prompts_in_turns_are_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more lengths than there are graphs each is captured once; what is in use stays."""
    monkeypatch.setattr(graphs, "MAX_PROMPTS", 2)
    m, made = model("gla"), []
    captured = graphs.Decoding._captured

    def capture(step: Any, inputs: Any, device: Any) -> Any:
        if getattr(step, "func", None) is graphs._prompt_step:
            made.append(inputs[0].shape[1])
        return captured(step, inputs, device)

    monkeypatch.setattr(graphs.Decoding, "_captured", staticmethod(capture))
    generate(m, tokens(2, 9))  # whose steps make the buffers of a new cache
    for n in (6, 6, 5, 5, 6, 4, 4, 3, 6, 3, 6, *(7, 8, 3, 4, 5, 6) * 3):
        ids = tokens(2, n)
        assert torch.equal(generate(m, ids), without_graphs(m, ids))
    assert made == [6, 5, 4, 3, 7, 8]


def test_step_graph_is_of_one_room() -> None:
    decoding, cache = graphs.Decoding(), SimpleNamespace(graphs={})
    decoding.active = True
    ids = tokens(2, 1)
    given = [((ids,), 64), ((ids,), 128), ((ids[:1],), 64), ((ids.int(),), 64), ((ids, ids), 64)]
    steps = [lambda *inputs, n=n: inputs[0] + n for n in range(len(given))]
    for _ in range(3):
        for step, (inputs, room) in zip(steps, given):
            got = decoding.run(step, cast(Any, cache), inputs, room, ids.device)
            assert torch.equal(got, step(*inputs))
    assert decoding.captures == decoding.eager == len(given)


def test_wrong_ids_of_a_replayed_prompt_raise() -> None:
    """A replay has the kernel that reports them, as here a CPU does not, but asks for no report."""
    m, ids = model("gla"), tokens(2, 6)
    for _ in range(3):
        generate(m, ids)
    slots = token_ids.slots_for(ids)
    slots[:6] = torch.tensor([1, 3 + 1, 149, 50, 2, 0])
    with pytest.raises(token_ids.WrongId, match=r"input_ids: id 149 at position \(1, 1\)"):
        generate(m, ids)
    assert torch.equal(generate(m, ids), without_graphs(m, ids))


def test_prompt_of_a_foreign_table_refuses_ids() -> None:
    """Which on a device would end the process's use of it."""
    m: Any = model("gla")
    ids = tokens(2, 6)
    table = torch.nn.Embedding(*m.model.embed_tokens.weight.shape)
    table.weight = m.model.embed_tokens.weight
    m.model.embed_tokens = table
    wrong = ids.clone()
    wrong[1, 3] = table.num_embeddings
    want = without_graphs(m, ids)
    for n in range(4):
        # here the table itself looks at the ids, which no capture permits
        said = (
            pytest.warns(RuntimeWarning, match="prompt of 2 x 6 tokens")
            if n == 2
            else nullcontext()
        )
        with said:
            assert torch.equal(generate(m, ids), want)
    with pytest.raises(token_ids.WrongId, match="input_ids"):
        generate(m, wrong)


def test_prompts_with_tables_of_positions_have_a_graph() -> None:
    """As Qwen-VL's of text, [3, B, T]."""
    m, ids = model("attention"), tokens(2, 6)
    options = {"position_ids": torch.arange(6).expand(3, 2, 6)}
    want = without_graphs(m, ids, **options)
    for _ in range(3):
        assert torch.equal(generate(m, ids, **options), want)
    (cache,) = m.decoding.caches.values()
    assert [bool(x) for key, x in cache.graphs.items() if key[0] == graphs.PROMPT] == [True]


@pytest.mark.parametrize("short", [False, True], ids=["of any kind", "of memory"])
def test_failed_capture_of_a_prompt_is_said_once(
    short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tried again where memory was short, which an error of the capture's end may hide."""
    m, ids = model("hybrid"), tokens(2, 6)
    want = without_graphs(m, ids)
    captured, tries = graphs.Decoding._captured, []

    def capture(step: Any, inputs: Any, device: Any) -> Any:
        if getattr(step, "func", None) is graphs._prompt_step:
            tries.append(inputs[0].shape)
            if len(tries) < 3:
                step.func(*step.args, *inputs)  # which has written into the cache
                try:
                    raise torch.OutOfMemoryError("none left") if short else ValueError("no")
                finally:
                    raise RuntimeError("capture was invalidated")
        return captured(step, inputs, device)

    monkeypatch.setattr(graphs.Decoding, "_captured", staticmethod(capture))
    generate(m, tokens(2, 9))  # whose steps make the buffers of a new cache
    assert torch.equal(generate(m, ids), want)
    words = "prompt of 2 x 6 tokens runs without a graph, since .* capture was invalidated"
    with pytest.warns(RuntimeWarning, match=words):
        assert torch.equal(generate(m, ids), want)
    for _ in range(6):  # a warning would be an error
        assert torch.equal(generate(m, ids), want)
    assert len(tries) == (3 if short else 1) and m.decoding.reason is None
    (cache,) = m.decoding.caches.values()
    assert [bool(x) for key, x in cache.graphs.items() if key[0] == graphs.PROMPT] == [short]
