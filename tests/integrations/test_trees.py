"""Patched models of transformers on a row of prefix trees, on a CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slipstream.integrations.context import call_in_context
from slipstream.integrations.transformers import unpatch
from slipstream.training.trees import TreeRow, tree_of_rows
from tests.support.transformers_context import NAMES, make

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = ("Qwen3NextForCausalLM", "FalconH1ForCausalLM", "Gemma3ForCausalLM", "Lfm2ForCausalLM")


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    unpatch()


def row_of() -> tuple[TreeRow, list[list[int]], list[list[int]]]:
    """A tree of two levels, a leaf at a root's end, and the rows and labels of its samples."""
    prompt, middle, other = [7, 14, 21, 28, 35, 42, 9], [8, 15, 22], [11, 18]
    rows = [[*prompt, *middle, 6, 13], [*prompt, *middle, 20], [*prompt, 27, 34, 41], [*other, 9]]
    labels = [[-100] * (len(x) - 2) + x[-2:] for x in rows]
    labels[1] = [-100] * 10 + [20]
    return tree_of_rows(rows, labels), rows, labels


def equal_gradients(found: Any, wanted: Any) -> None:
    largest = max(float(p.grad.abs().max()) for p in wanted.parameters() if p.grad is not None)
    for (name, p), q in zip(found.named_parameters(), wanted.parameters(), strict=True):
        if q.grad is not None:
            grad = torch.zeros_like(q.grad) if p.grad is None else p.grad
            assert float((grad - q.grad).abs().max()) < 1e-4 * largest, name


def by_rows(model: Any, rows: list[list[int]], labels: list[list[int]]) -> Tensor:
    """The mean loss over all labels."""
    count = sum(x != -100 for own in labels for x in own[1:])
    losses = []
    for x, y in zip(rows, labels):
        given: Any = {"input_ids": torch.tensor([x]), "labels": torch.tensor([y])}
        losses.append(model(**given, use_cache=False, num_items_in_batch=torch.tensor(count)).loss)
    return torch.stack(losses).sum()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x in QUICK else pytest.mark.slow)
        for x in NAMES
        if hasattr(transformers, x)
    ],
)
def test_tree_equals_its_rows(name: str) -> None:
    """Losses and gradients."""
    whole, part = make(name), make(name)
    part.load_state_dict(whole.state_dict())
    row, rows, labels = row_of()
    wanted = by_rows(whole, rows, labels)
    wanted.backward()
    out = call_in_context(part, row.tree, input_ids=row.input_ids, labels=row.labels)
    torch.testing.assert_close(out.loss, wanted, atol=1e-5, rtol=1e-4)
    out.loss.backward()
    equal_gradients(part, whole)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3NextForCausalLM"])
def test_fields_of_trl_are_a_tree(name: str) -> None:
    row, *_ = row_of()
    model, tree = make(name), row.tree
    wanted = call_in_context(model, tree, input_ids=row.input_ids).logits
    paths = [[t for x in [*tree.path(n), tree.own(n)] for t in x] for n in range(tree.sequences)]
    fields = {
        "tree_kv_index": torch.tensor(sum(paths, [])),  # noqa: RUF017
        "tree_cu_seqlens_q": tree.cu_seqlens,
        "tree_cu_seqlens_k": torch.tensor([0, *map(len, paths)]).cumsum(0).int(),
    }
    more = {"tree_max_seqlen_q": 7, "tree_max_seqlen_k": 12, "use_cache": False}
    given = {
        "input_ids": row.input_ids,
        "position_ids": row.tree.nodes.positions(torch.device("cpu")),
    }
    assert torch.equal(model(**given, **fields, **more).logits, wanted)
    fields["tree_kv_index"] = fields["tree_kv_index"].flip(0)
    with pytest.raises(ValueError, match=r"parents: |tree_kv_index: want"):
        model(**given, **fields, **more)
