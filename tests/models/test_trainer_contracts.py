"""What transformers' Trainer, PEFT and TRL pass to a model and expect from it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, Trainer, TrainingArguments

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM


def small() -> SlipstreamForCausalLM:
    torch.manual_seed(0)
    config = SlipstreamConfig(
        vocab_size=17, hidden_size=16, num_heads=2, intermediate_size=16, mixers=["gla"]
    )
    return SlipstreamForCausalLM(config)


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


def test_arguments_without_effect_are_taken() -> None:
    m, ids = small().eval(), torch.randint(17, (2, 5))
    out = m(
        ids,
        output_attentions=False,
        cache_position=torch.arange(5),
        token_type_ids=torch.zeros_like(ids),
        max_length_q=5,
        max_length_k=5,
        anything=None,
        return_dict=True,
    )
    assert torch.equal(out.logits, m(ids).logits)
    assert torch.equal(m(ids, return_dict=False, use_cache=False)[0], out.logits)


@pytest.mark.parametrize("labels", [False, True])
def test_unknown_arguments_are_refused_by_name(labels: bool) -> None:
    m, ids = small(), torch.randint(17, (2, 5))
    given = {"labels": ids} if labels else {}
    for run in (m, m.model) if not labels else (m,):
        with pytest.raises(TypeError, match="atention_mask: unexpected argument"):
            run(ids, atention_mask=torch.ones_like(ids), **given)
        with pytest.raises(NotImplementedError, match="output_attentions"):
            run(ids, output_attentions=True, **given)
