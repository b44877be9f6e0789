"""Patched models of transformers on a row of prefix trees, or whose tokens are divided among
processes, on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slipstream.integrations.context import TYPES, call_in_context
from slipstream.integrations.transformers import NAME
from slipstream.parallel import ContextParallel
from slipstream.training.trees import TreeRow, tree_of_rows
from tests.support import wants
from tests.support.processes import in_processes, own_group
from tests.support.transformers_context import NAMES, make, run_models

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = ("Qwen3NextForCausalLM", "FalconH1ForCausalLM", "Gemma3ForCausalLM", "Lfm2ForCausalLM")


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


def equal(names: list[str], checkpointed: bool, folder: Path) -> None:
    assert in_processes(2, folder, run_models, names, checkpointed) == []


@wants.collectives
def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Losses and gradients, of rows and of packed sequences."""
    equal(["Qwen3NextForCausalLM"], False, tmp_path)


@wants.collectives
@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_type_on_two_processes(checkpointed: bool, tmp_path: Path) -> None:
    equal([x for x in NAMES if hasattr(transformers, x)], checkpointed, tmp_path)


@wants.collectives
def test_types_are_those_that_are_tested() -> None:
    classes = [getattr(transformers, x) for x in NAMES if hasattr(transformers, x)]
    assert {x.config_class.model_type for x in classes} <= set(TYPES)
    assert len(TYPES) == len({*TYPES}) == len(NAMES)


@wants.collectives
@own_group()
def test_refusals_are_named() -> None:
    plan, ids = ContextParallel(), torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"context: want a model of .*, got mamba2"):
        call_in_context(make("Mamba2ForCausalLM"), plan, input_ids=ids)
    model = make("LlamaForCausalLM")
    with pytest.raises(ValueError, match="position_ids: want None with a context"):
        call_in_context(model, plan, input_ids=ids, position_ids=ids)
    with pytest.raises(ValueError, match="use_cache: want None with a context"):
        call_in_context(model, plan, input_ids=ids, use_cache=True)
    assert call_in_context(model, plan, input_ids=ids, use_cache=False).logits.shape[1] == 4
    with pytest.raises(ValueError, match="output_router_logits: want False"):
        call_in_context(model, plan, input_ids=ids, output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits: want False"):
        call_in_context(model, plan, input_ids=ids, output_router_logits=None)
    model.config.output_router_logits = False
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=f"want attn_implementation='{NAME}'.*got sdpa"):
        call_in_context(model, plan, input_ids=ids)


@wants.collectives
@pytest.mark.parametrize("by_layer_type", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@own_group()
def test_angles_that_follow_from_the_length_are_refused(kind: str, by_layer_type: bool) -> None:
    """A rank sees the largest position of its own tokens, not the batch's."""
    plan, ids = ContextParallel(), torch.ones(1, 13, dtype=torch.int64)
    model = make("LlamaForCausalLM")
    rope = {"rope_type": kind, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 12} if kind == "longrope" else {}
    model.config.max_position_embeddings = 48 if kind == "longrope" else 12
    model.config.rope_parameters = {"full_attention": rope} if by_layer_type else rope
    with pytest.raises(NotImplementedError, match=f"'{kind}' want sequences of at most 12 "):
        call_in_context(model, plan, input_ids=ids)
    assert call_in_context(model, plan, input_ids=ids[:, :12]).logits.shape[1] == 12
