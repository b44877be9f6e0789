"""Rows of prefix trees made of samples."""

import pytest
import torch

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.training.trees import TreeRow, tree_of_rows

PROMPT = [3, 1, 4, 1, 5]
ROWS = [[*PROMPT, 9, 2], [*PROMPT, 9, 7, 7], [2, 7], [*PROMPT], [], [*PROMPT, 9, 2], [2, 8, 1]]


def tokens_of(row: TreeRow) -> list[list[int]]:
    """Of each sample, by its path."""
    ids = row.input_ids[0].tolist()
    return [
        [t for n in path for t in ids[slice(*row.tree.offsets[n : n + 2])]] for path in row.paths
    ]


@pytest.mark.parametrize("least", [1, 2, 3])
def test_tree_has_every_row_and_what_they_share_once(least: int) -> None:
    row = tree_of_rows(ROWS, least=least)
    assert tokens_of(row) == ROWS
    wanted = {1: 5 + 1 + 1 + 2 + 1 + 1 + 2, 2: 5 + 2 + 3 + 2 + 3, 3: 5 + 2 + 3 + 2 + 2 + 3}
    assert row.tree.tokens == wanted[least]
    assert row.tree.to_levels is None  # recurrences read it as it lies


def test_tokens_with_labels_are_not_shared() -> None:
    labels = [[-100] * 5 + row[5:] if row[:5] == PROMPT else row for row in ROWS]
    row = tree_of_rows(ROWS, labels)
    assert tokens_of(row) == ROWS
    assert row.tree.tokens == 5 + sum(len(x) - 5 if x[:5] == PROMPT else len(x) for x in ROWS)
    kept = [x for own in labels for x in own if x != -100]
    assert sorted(x for x in row.labels[0].tolist() if x != -100) == sorted(kept)


def test_labels_have_to_be_as_many_as_tokens() -> None:
    with pytest.raises(ValueError, match="want 7 for row 0, got 6"):
        tree_of_rows(ROWS, [row[1:] for row in ROWS])
    with pytest.raises(ValueError, match="least: want at least 1"):
        tree_of_rows(ROWS, least=0)


def test_step_of_a_tree_is_that_of_its_rows() -> None:
    """Loss, log-probabilities and gradients."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 10, "hidden_size": 16, "num_heads": 2, "intermediate_size": 8}
    config = SlipstreamConfig(mixers=["gated_deltanet", "attention"], **sizes)
    model = SlipstreamForCausalLM(config).double().train()
    rows = [x for x in ROWS if len(x) > 5]
    labels = [[-100] * 5 + x[5:] for x in rows]
    row = tree_of_rows(rows, labels)
    loss = model(**row.inputs()).loss
    each = [model(torch.tensor([x]), labels=torch.tensor([y])).loss for x, y in zip(rows, labels)]
    counts = torch.tensor([len(x) - 5.0 for x in rows])
    wanted = (torch.stack(each) * counts).sum() / counts.sum()
    torch.testing.assert_close(loss, wanted)
    parameters = [*model.parameters()]
    pairs = zip(*(torch.autograd.grad(x, parameters) for x in (loss, wanted)))
    for x, y in pairs:
        torch.testing.assert_close(x, y)
    h = model.model(row.input_ids, context=row.tree).last_hidden_state
    found, entropies = row.log_probs(h, model.lm_head.weight, temperature=0.7)
    for x, got, entropy in zip(rows, found, entropies):
        each = (model(torch.tensor([x])).logits[0, :-1] / 0.7).log_softmax(-1)
        torch.testing.assert_close(got[1 : len(x)], each.gather(1, torch.tensor(x)[1:, None])[:, 0])
        torch.testing.assert_close(entropy[1 : len(x)], -(each.exp() * each).sum(-1))
        assert got[0] == 0
        assert not got[len(x) :].any()
    alone = [model(torch.tensor([x])).logits[0, :-1].log_softmax(-1) for x in rows]
    each = [y.gather(1, torch.tensor(x)[1:, None]).sum() for x, y in zip(rows, alone)]
    h = model.model(row.input_ids, context=row.tree).last_hidden_state
    whole = row.log_probs(h, model.lm_head.weight)[0].sum()
    sums = whole, torch.stack(each).sum()
    for results in zip(*(torch.autograd.grad(x, parameters) for x in sums)):
        torch.testing.assert_close(*results)
