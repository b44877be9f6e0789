"""Runs of transformers' Trainer beside a loop of its own that takes one row at a time, unpadded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from slipstream.models import MIXERS, SlipstreamForCausalLM
from tests.support.language_models import LAYERS, small_model

VOCAB, STEPS, ROWS, RATE = 31, 3, 4, 0.1
LENGTHS = [9, 5, 12, 7, 11, 3, 8, 12, 6, 10, 4, 9]
# an indexer's own loss is a mean over a call's queries: rows apart have another
WITHOUT = {name: {**LAYERS[name], "index_loss": 0.0} for name in ("dsa", "qsa", "msa")}
MODELS: dict[str, list[Any]] = {name: [layer] * 2 for name, layer in (LAYERS | WITHOUT).items()}
# a layer of each, and one that takes RWKV-7's first value past them
MODELS["every"] = [*(layers[0] for layers in MODELS.values()), {"type": "rwkv7"}]
HYBRID: dict[str, list[Any]] = {
    "hybrid": ["gated_deltanet", "rwkv7", "attention", "mamba2", "rwkv7"]
}
_KINDS = list(MIXERS)
# two mixers in each, for kernels that take long to compile
PAIRS = {
    "+".join(pair): [MODELS[name][0] for name in pair]
    for pair in (_KINDS[i : i + 2] for i in range(0, len(_KINDS), 2))
}
IDS = torch.arange(18).mul(7).remainder(VOCAB - 1).add(1).view(2, 9)


def make(name: str, **options: Any) -> SlipstreamForCausalLM:
    """The same weights each time; no token ends a text."""
    options |= {"initializer_range": 0.1, "pad_token_id": 0, "eos_token_id": None}
    mixers = (MODELS | PAIRS | HYBRID)[name]
    return small_model(mixers, vocab_size=VOCAB, intermediate_size=24, **options)


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, VOCAB, (n,), generator=generator) for n in LENGTHS]
    return [{"input_ids": x, "labels": x.clone()} for x in ids]


class Padded:
    """Collates rows, padded on one side; a class, for workers that are spawned."""

    def __init__(self, side: str = "right") -> None:
        self.side = side

    def __call__(self, many: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        longest = max(len(x["input_ids"]) for x in many)

        def padded(x: Tensor, value: int) -> Tensor:
            n = longest - len(x)
            return F.pad(x, (n, 0) if self.side == "left" else (0, n), value=value)

        ids = torch.stack([padded(x["input_ids"], 0) for x in many])
        # no token predicts a row's first, but Trainer counts it where padding is before it
        targets = [torch.cat([x["labels"].new_tensor([-100]), x["labels"][1:]]) for x in many]
        labels = torch.stack([padded(x, -100) for x in targets])
        mask = torch.stack([padded(torch.ones_like(x["input_ids"]), 0) for x in many])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def row_loss(model: nn.Module, ids: Tensor, smoothing: float = 0.0) -> Tensor:
    logits = model(input_ids=ids[None]).logits[0, :-1].float()
    return F.cross_entropy(logits, ids[1:], reduction="sum", label_smoothing=smoothing)


def own_loop(
    model: nn.Module,
    smoothing: float = 0.0,
    steps: int = STEPS,
    rate: float = RATE,
    batches: Sequence[int] | None = None,
) -> list[float]:
    """Plain descent on the batches in order, or on these; the losses."""
    data, found = [x["input_ids"] for x in rows()], []
    parameters = [p for p in model.parameters() if p.requires_grad]
    for i in range(steps) if batches is None else batches:
        batch = data[i * ROWS : (i + 1) * ROWS]
        count = sum(len(x) - 1 for x in batch)
        loss = torch.stack([row_loss(model, x, smoothing) for x in batch]).sum() / count
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for p, grad in zip(parameters, grads):
                if grad is not None:
                    p -= rate * grad
        found.append(loss.item())
    return found


QUIET: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        **QUIET,
        "output_dir": str(folder),
        "max_steps": STEPS,
        "learning_rate": RATE,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS,
        "train_sampling_strategy": "sequential",
        **options,
    }
    made = TrainingArguments(**given)
    # with several GPUs DataParallel would give each of them a batch of this size
    made._n_gpu = min(made.n_gpu, 1)
    return made


def trainer(
    model: nn.Module, folder: Path, side: str = "right", others: Any = None, **options: Any
) -> Trainer:
    """others: arguments of Trainer itself."""
    return Trainer(
        model,
        arguments(folder, **options),
        train_dataset=rows(),
        eval_dataset=rows()[:6],
        data_collator=Padded(side),
        **others or {},
    )


def losses(t: Trainer) -> list[float]:
    return [float(x["loss"]) for x in t.state.log_history if "loss" in x]


def assert_same_weights(got: nn.Module, want: nn.Module, tolerance: float = 1e-3) -> None:
    found = dict(got.named_parameters())
    for name, p in want.named_parameters():
        limit = tolerance * max(0.01, float(p.detach().abs().max()))
        torch.testing.assert_close(found[name], p, rtol=0, atol=limit, msg=name)


def generated(model: Any, ids: Tensor, tokens: int = 3, **options: Any) -> Tensor:
    mask = torch.ones_like(ids)
    return model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **options
    )
