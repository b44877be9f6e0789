"""Other people's trainers and evaluations on our model, each as its documentation calls it.

    pip install "slipstream[trainers]"

transformers' own Trainer is in tests/models/test_trainer_contracts.py; here its rows are packed.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from tests.support.byte_tokenizer import tokenizer
from tests.support.scripts import ROOT
from tests.support.trainer_runs import MODELS, QUIET

TEXTS = [f"the {x} sat on the mat and the {x} ate the hat" for x in ("cat", "rat", "bat", "gnat")]
# warnings of these libraries about one another
pytestmark = pytest.mark.filterwarnings("ignore")


def small(*mixers: Any) -> SlipstreamForCausalLM:
    torch.manual_seed(0)
    return SlipstreamForCausalLM(
        SlipstreamConfig(
            vocab_size=257,
            hidden_size=32,
            num_heads=2,
            mixers=list(mixers or ("gated_deltanet", "attention")),
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def arguments(folder: Path, cls: Any = TrainingArguments, **options: Any) -> Any:
    given = {"output_dir": str(folder), "max_steps": 6, "learning_rate": 1e-2}
    given |= {**QUIET, "per_device_train_batch_size": 2}
    return cls(**{**given, **options})


def losses(trainer: Trainer) -> list[float]:
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


def examples() -> list[dict[str, list[int]]]:
    tok = tokenizer()
    return [{"input_ids": tok(x)["input_ids"]} for x in TEXTS]


@pytest.mark.parametrize("kwargs", [False, True])
def test_trainer_on_flattened_rows(tmp_path: Path, kwargs: bool) -> None:
    """The same losses as on rows padded to one length."""
    collate: Any = DataCollatorWithFlattening(return_flash_attn_kwargs=kwargs)

    def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        longest = max(len(x["input_ids"]) for x in rows)
        fill = [longest - len(x["input_ids"]) for x in rows]
        ids = torch.tensor([x["input_ids"] + [0] * n for x, n in zip(rows, fill)])
        mask = torch.arange(longest) < torch.tensor([longest - n for n in fill])[:, None]
        # as the collator, which predicts no row's first token
        return {
            "input_ids": ids,
            "attention_mask": mask.long(),
            "labels": ids.masked_fill(~mask, -100),
        }

    found = []
    for collator in (collate, padded):
        options = {"remove_unused_columns": False, "seed": 1}
        trainer = Trainer(
            small(),
            arguments(tmp_path, **options),
            train_dataset=examples(),
            data_collator=collator,
        )
        trainer.train()
        found.append(losses(trainer))
    np.testing.assert_allclose(found[0], found[1], rtol=2e-4)
    assert found[0][-1] < found[0][0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_trl_sft_with_packing(tmp_path: Path, strategy: str) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    data = datasets.Dataset.from_dict({"text": TEXTS * 4})
    args = arguments(
        tmp_path,
        trl.SFTConfig,
        packing=True,
        packing_strategy=strategy,
        max_length=64,
        gradient_checkpointing=strategy == "bfd",
        dataset_num_proc=None,
    )
    trainer = trl.SFTTrainer(small(), args, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    found = losses(trainer)
    assert found[-1] < found[0] - 0.5


# plain descent, on rows in order
PLAIN: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}
PLAIN |= {"train_sampling_strategy": "sequential", "gradient_checkpointing": False, "max_steps": 3}
SFT: dict[str, dict[str, Any]] = {
    "padding free": {"padding_free": True, "max_length": None},
    "padding free, checkpointed": {
        "padding_free": True,
        "max_length": None,
        "gradient_checkpointing": True,
    },
    "loss of its own": {"loss_type": "nll"},
    "loss in chunks": {"loss_type": "chunked_nll"},
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
    "bf16": {"bf16": True},
}


@functools.cache
def sft_losses(way: str | None) -> list[float]:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    options = {**PLAIN, **(SFT[way] if way else {})}
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(Path(folder), trl.SFTConfig, **options)
        trainer = trl.SFTTrainer(
            small(*MODELS["every"]),
            args,
            train_dataset=datasets.Dataset.from_dict({"text": TEXTS * 4}),
            processing_class=tokenizer(),
        )
        trainer.train()
    return losses(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("way", SFT)
def test_trl_sft_in_a_way_is_the_same(way: str) -> None:
    """Every mixer has the losses of padded rows."""
    near = 3e-2 if way == "bf16" else 1e-3
    np.testing.assert_allclose(sft_losses(way), sft_losses(None), rtol=near)


@pytest.mark.slow
def test_trl_sft_of_a_saved_run_with_lora(tmp_path: Path) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    small().save_pretrained(tmp_path / "run")
    tokenizer().save_pretrained(tmp_path / "run")
    data = datasets.Dataset.from_dict({"prompt": ["the "] * 4, "completion": ["cat sat"] * 4})
    args = arguments(
        tmp_path / "sft",
        trl.SFTConfig,
        model_init_kwargs={"trust_remote_code": True, "dtype": "float32"},
    )
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    trainer = trl.SFTTrainer(str(tmp_path / "run"), args, train_dataset=data, peft_config=lora)
    trainer.train()
    found = losses(trainer)
    assert found[-1] < found[0] - 0.1
    trainer.save_model(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    again = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    ids = torch.tensor([tokenizer()("the cat")["input_ids"]])
    with torch.no_grad():
        want = trainer.model.eval()(ids).logits
        torch.testing.assert_close(again(ids).logits, want, rtol=1e-4, atol=1e-4)
        merged = again.merge_and_unload()(ids).logits
    torch.testing.assert_close(merged, want, rtol=1e-3, atol=1e-3)


CHOICE = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["red", "blue"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: wholes
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""
GENERATED = """
task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "red"
generation_kwargs: {{until: ["."], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.mark.slow
def test_lm_eval_on_a_saved_run(tmp_path: Path) -> None:
    """lm_eval loads it by remote code, and scores what the model itself says."""
    pytest.importorskip("lm_eval")
    model = small().eval()
    model.save_pretrained(tmp_path / "run")
    tokenizer().save_pretrained(tmp_path / "run")
    questions = ["the sky is ", "a rose is sometimes ", "water is "]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": x}) + "\n" for x in questions)
    )
    tasks = {"colours": CHOICE, "wholes": ROLLING, "endings": GENERATED}
    for name, text in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(text.format(folder=tmp_path))
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "hf"),
        *("--model_args", f"pretrained={tmp_path / 'run'},trust_remote_code=True,dtype=float32"),
        *("--tasks", ",".join(tasks), "--include_path", str(tmp_path)),
        *("--device", "cpu", "--batch_size", "2", "--output_path", str(tmp_path / "out")),
        "--trust_remote_code",
    ]
    result = subprocess.run(
        command,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]
    tok, right, nats, count = tokenizer(), 0, 0.0, 0
    with torch.no_grad():
        for question in questions:
            scores = []
            for answer in ("red", "blue"):
                ids = torch.tensor([tok(question + answer)["input_ids"]])
                logs = model(ids).logits.log_softmax(-1)[0, :-1]
                each = logs.gather(1, ids[0, 1:, None])[:, 0]
                scores.append(each[len(tok(question)["input_ids"]) - 1 :].sum().item())
            right += scores[0] > scores[1]
            ids = torch.tensor([[0, *tok(question)["input_ids"]]])
            logs = model(ids).logits.log_softmax(-1)[0, :-1]
            nats -= logs.gather(1, ids[0, 1:, None]).sum().item()
            count += len(question.encode())
    assert found["colours"]["acc,none"] == pytest.approx(right / len(questions))
    perplexity = found["wholes"]["byte_perplexity,none"]
    assert perplexity == pytest.approx(np.exp(nats / count), rel=1e-4)
    assert "exact_match,none" in found["endings"]
