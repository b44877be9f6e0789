"""Arguments that transformers' Trainer, PEFT and TRL pass to a model, and results they expect."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, Trainer, TrainingArguments

from slipstream.models import SlipstreamForCausalLM
from tests.support.language_models import small_model


def small(mixer: str = "gla") -> SlipstreamForCausalLM:
    return small_model([mixer])


def test_trainer_predicts_and_computes_metrics(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.randint(17, (6,))} for _ in range(3)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]

    def accuracy(given: EvalPrediction) -> dict[str, float]:
        assert given.predictions.shape == (3, 6, 17)
        right = given.predictions[:, :-1].argmax(-1) == given.label_ids[:, 1:]
        return {"accuracy": float(np.mean(right))}

    m = small()
    options = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True}
    args = TrainingArguments(per_device_eval_batch_size=2, disable_tqdm=True, **options)
    trainer = Trainer(m, args, eval_dataset=rows, compute_metrics=accuracy)
    found = trainer.predict(rows)
    with torch.no_grad():
        ids = torch.stack([row["input_ids"] for row in rows])
        want = m.eval()(ids).logits
    np.testing.assert_allclose(found.predictions, want.numpy(), rtol=1e-4, atol=1e-5)
    assert trainer.evaluate()["eval_accuracy"] == found.metrics["test_accuracy"]


@pytest.mark.parametrize("labels", [False, True])
def test_unknown_arguments_are_refused_by_name(labels: bool) -> None:
    m, ids = small(), torch.randint(17, (2, 5))
    given = {"labels": ids} if labels else {}
    for run in (m, m.model) if not labels else (m,):
        with pytest.raises(TypeError, match="atention_mask: unexpected argument"):
            run(ids, atention_mask=torch.ones_like(ids), **given)
        with pytest.raises(NotImplementedError, match="output_attentions"):
            run(ids, output_attentions=True, **given)


IDS = torch.arange(10).view(2, 5)
TENSORS = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels", "cu_seqlens"}
TENSORS |= {"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"}
NO_TENSORS: dict[str, Any] = {
    "list": IDS.tolist(),
    "integer": 3,
    "text": "text",
    "array": IDS.numpy(),
    "dict": {},
    "sparse": IDS.to_sparse(),
    "nested": torch.nested.nested_tensor(list(IDS), layout=torch.jagged),
    "no values": IDS.to("meta"),
    "complex": IDS.to(torch.complex64),
    "number": torch.tensor(1),
    "empty": torch.zeros(0, dtype=torch.int64),
    "of higher rank": IDS[..., None, None],
}
WRONG = [(name, kind) for name in sorted(TENSORS) for kind in NO_TENSORS]
WRONG += [("past_key_values", k) for k in NO_TENSORS] + [("cache", k) for k in NO_TENSORS]
FLAGS = ("list", "text", "array", "dict", "complex", "empty")
WRONG += [(n, k) for n in ("use_cache", "skip_logits", "output_hidden_states") for k in FLAGS]
WRONG += [("num_items_in_batch", k) for k in ("list", "text", "array", "complex", "empty")]
WRONG += [("logits_to_keep", k) for k in ("text", "array", "dict", "complex", "number")]


@pytest.mark.parametrize(("name", "kind"), WRONG)
def test_inputs_of_another_kind_are_refused_by_name(name: str, kind: str) -> None:
    packed = name.startswith(("cu_seq", "seq_idx"))
    ids = IDS[:1] if packed else IDS
    given: dict[str, Any] = {"input_ids": ids, "labels": ids, "attention_mask": ids + 1}
    if name == "inputs_embeds":
        given["input_ids"] = None
    # of two devices either may be the wrong one
    known = TENSORS | {name} if kind == "no values" else {name}
    with pytest.raises((TypeError, ValueError), match=rf"\b({'|'.join(known)})\b"):
        small()(**{**given, name: NO_TENSORS[kind]})


def test_loss_is_divided_by_no_number_below_one_item() -> None:
    m = small()
    for number in (0, 0.0, -3, float("nan")):
        with pytest.raises(ValueError, match="num_items_in_batch: want more than 0"):
            m(IDS, labels=IDS, num_items_in_batch=number)


@pytest.mark.parametrize("count", [None, torch.tensor(0)], ids=["counted", "zero"])
def test_batch_without_labels_has_no_gradient(count: Any) -> None:
    m = small().train()
    loss = m(IDS, labels=torch.full_like(IDS, -100), num_items_in_batch=count).loss
    assert loss == 0
    loss.backward()
    assert not any(p.grad.any() for p in m.parameters() if p.grad is not None)


def test_ranks_divide_by_their_share_of_the_items() -> None:
    """One item among the four ranks of a context, as LMTrainer counts."""
    m = small()
    losses = [m(IDS, labels=IDS, num_items_in_batch=x).loss for x in (torch.tensor(0.25), 1)]
    torch.testing.assert_close(losses[0], 4 * losses[1])


def test_places_of_logits_outside_are_reported_as_given() -> None:
    m = small()
    for places in ([-8], [0, -6], torch.tensor([-8]), [7]):
        wrong = int(torch.as_tensor(places)[-1])
        with pytest.raises(ValueError, match=rf"logits_to_keep: id {wrong} at position"):
            m(IDS, logits_to_keep=places)
    with pytest.raises(ValueError, match=r"logits_to_keep: want 0 or more .* got -8"):
        m(IDS, logits_to_keep=-8)
    torch.testing.assert_close(m(IDS, logits_to_keep=[-5, 4]).logits, m(IDS).logits[:, [0, 4]])


def test_logits_are_kept_of_places_that_are_there() -> None:
    m = small()
    want = m(IDS).logits
    for places in ([0, -1], torch.tensor([3, 0, 3]), torch.arange(5) < 2, slice(1, 3), []):
        index = slice(0, 0) if places == [] else places
        torch.testing.assert_close(m(IDS, logits_to_keep=places).logits, want[:, index])
    for place in (5, -6):
        with pytest.raises(ValueError, match="logits_to_keep"):
            m(IDS, logits_to_keep=torch.tensor([0, place]))
    for places in ([1.5], [[0, 1]]):
        with pytest.raises(TypeError, match=r"logits_to_keep: want integers or bools \[N\]"):
            m(IDS, logits_to_keep=places)
    compiled = torch.compile(m, fullgraph=True, backend="eager")
    places = torch.tensor([3, 0, -1])
    torch.testing.assert_close(compiled(IDS, logits_to_keep=places).logits, want[:, places])
    with pytest.raises(ValueError, match="logits_to_keep: want 5 bools, got 4"):
        m(IDS, logits_to_keep=torch.ones(4, dtype=torch.bool))


def test_batch_of_padding_or_nothing_has_a_loss() -> None:
    """As of ranks that have run out of rows: a gradient of 0 where the count is of all ranks."""
    for ids, mask in ((IDS, IDS * 0), (IDS[:0], None), (IDS[:, :0], None)):
        m = small().train()
        m(ids, attention_mask=mask, labels=ids, num_items_in_batch=7).loss.backward()
        grads = [p.grad for p in m.parameters() if p.grad is not None]
        assert grads and not any(x.any() for x in grads)


@pytest.mark.parametrize("embedded", [False, True])
def test_labels_of_other_rows_are_refused(embedded: bool) -> None:
    """Even as many of them as there are tokens, which the loss would take."""
    m = small()
    given = {"inputs_embeds": m.get_input_embeddings()(IDS)} if embedded else {"input_ids": IDS}
    for labels in (IDS.T, IDS.reshape(1, -1), IDS[:, :-1]):
        with pytest.raises(ValueError, match=r"labels: want shape \(\d+, \d+\) of the tokens"):
            m(**given, labels=labels)


@pytest.mark.parametrize("mixer", ["gla", "attention", "mamba2"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [1, 4])
def test_cache_of_other_rows_is_refused(mixer: str, rows: int, tokens: int) -> None:
    model = small(mixer).eval()
    cache = model(IDS, use_cache=True).past_key_values
    more = torch.zeros(rows, tokens, dtype=torch.int64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"^cache .*, got 2\. "):
            model(more, past_key_values=cache, use_cache=True)


def test_model_without_values_takes_all_inputs() -> None:
    with torch.device("meta"):
        model, ids = small(), torch.zeros(2, 5, dtype=torch.int64)
        out = model(ids, torch.ones_like(ids), torch.arange(5)[None], labels=ids, skip_logits=False)
    assert out.logits.shape == (2, 5, 17)
    assert out.loss.is_meta
