"""GRPO with TRL where the completions of a prompt are a prefix tree: the prompt is computed once.

The trainer is TRL's but for one method, which has the log-probabilities of a batch. Two runs, with
rows and with trees, have the same losses and norms of gradients.
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.training.trees import tree_of_rows

WORDS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]
PROMPTS = ["a b c d e f g h", "z y x w v u t s r", "m n o p", "k l m n o p q r s t"]


class TreeGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose batches are packed rows of prefix trees."""

    def _get_per_token_logps_and_entropies(  # what TRL calls it
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: Any
    ) -> Any:
        model, real = self.accelerator.unwrap_model(model), attention_mask.bool()
        rows = [ids[mask].tolist() for ids, mask in zip(input_ids, real)]
        row = tree_of_rows(rows, least=4, device=input_ids.device)
        h = model.model(row.input_ids, context=row.tree).last_hidden_state
        found = row.log_probs(h, model.lm_head.weight, temperature=self.temperature)
        lengths = real.sum(1, keepdim=True)
        used = torch.arange(found[0].shape[1], device=real.device) < lengths
        blank = torch.zeros_like(input_ids, dtype=found[0].dtype)
        padded = (blank.masked_scatter(real, x[used])[:, -logits_to_keep:] for x in found)
        return *padded, None


def train(trainer: type[GRPOTrainer], folder: str, steps: int) -> list[dict[str, float]]:
    """What each step logs."""
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": len(WORDS), "hidden_size": 32, "num_heads": 2, "eos_token_id": 1}
    config = SlipstreamConfig(mixers=["kda", "attention"], pad_token_id=0, **sizes)
    words = Tokenizer(models.WordLevel({x: i for i, x in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    args = GRPOConfig(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=12, num_iterations=3, learning_rate=1e-2, logging_steps=1,
        report_to="none", save_strategy="no", use_cpu=True, bf16=False, temperature=0.8,
    )  # fmt: skip

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(word < "k" for word in x.split())) for x in completions]

    data = Dataset.from_dict({"prompt": PROMPTS})
    given: dict[str, Any] = {"args": args, "train_dataset": data, "processing_class": tokenizer}
    run = trainer(SlipstreamForCausalLM(config), reward_funcs=reward, **given)
    run.train()
    return [{k: x[k] for k in ("loss", "grad_norm")} for x in run.state.log_history if "loss" in x]


def main(steps: int = 6) -> float:
    """The largest difference of losses and norms of gradients."""
    with tempfile.TemporaryDirectory() as folder:
        rows, trees = (train(x, folder, steps) for x in (GRPOTrainer, TreeGRPOTrainer))
    print(rows, trees, sep="\n")
    assert len(rows) == steps and any(abs(x["loss"]) > 1e-4 for x in rows)
    return max(abs(x[k] - y[k]) for x, y in zip(rows, trees) for k in x)


if __name__ == "__main__":
    print(f"at most {main():.1e} apart")
