"""transformers' Trainer with what it lacks: the place in the data, bits per byte, tokens/s.

bits per byte = nats of all predicted tokens / ln 2 / bytes of text they stand for
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl
from transformers.trainer_callback import ExportableState

from slipstream.models import SlipstreamForCausalLM
from slipstream.training import config
from slipstream.training.interrupt import Interrupt
from slipstream.training.muon import Muon, inner_matrices
from slipstream.training.rows import Cursor, Rows, Tally
from slipstream.training.speed import Speed


class Place(TrainerCallback, ExportableState):
    """What rows follow; kept in the checkpoint's trainer_state.json.

    That file is the last one of a checkpoint to be written, so it is there only if all is.
    """

    def __init__(self, cursor: Cursor, fingerprint: str) -> None:
        self.cursor, self.fingerprint = cursor, fingerprint

    def state(self) -> dict[str, Any]:
        attributes = {"cursor": list(self.cursor), "fingerprint": self.fingerprint}
        return {"args": {}, "attributes": attributes}


class StopWhenAsked(TrainerCallback):
    """After a signal: finishes the step, saves a checkpoint, stops."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt

    def on_step_end(
        self, args: Any, state: Any, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.interrupt.requested:
            control.should_save = control.should_training_stop = True
        return control


class LMTrainer(Trainer):
    """Its batches are the Collator's, with a tally; its checkpoints remember the place.

    Args besides Trainer's: place, and muon for that optimizer instead of args.optim.
    """

    model: SlipstreamForCausalLM  # pyright: ignore[reportIncompatibleVariableOverride]
    train_dataset: Rows  # pyright: ignore[reportIncompatibleVariableOverride]
    eval_dataset: Rows  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, *, place: Place, muon: config.Muon | None = None, **options: Any) -> None:
        self.place, self.speed, self.muon = place, Speed(), muon
        callbacks = [*options.pop("callbacks", []), place, self.speed]
        super().__init__(callbacks=callbacks, **options)
        self._bytes = self._targets = 0  # since the last log

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.muon is None or self.optimizer is not None:
            return super().create_optimizer(model)
        matrices = inner_matrices(self.model)
        taken = {id(p) for p in matrices}
        self.optimizer = Muon(
            matrices,
            [p for p in self.model.parameters() if p.requires_grad and id(p) not in taken],
            lr=self.args.learning_rate,
            matrix_lr=self.muon.learning_rate,
            momentum=self.muon.momentum,
            weight_decay=self.args.weight_decay,
            betas=(self.args.adam_beta1, self.args.adam_beta2),
            eps=self.args.adam_epsilon,
            fused=True,
        )
        return self.optimizer

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kw: Any) -> Tensor:
        tally: Tally = inputs.pop("tally")
        self.place.cursor = tally.cursor
        self._targets += tally.targets
        self._bytes += tally.text_bytes
        self.speed.tokens += inputs["input_ids"].numel()
        return super().training_step(model, inputs, *args, **kw)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Trainer counts epochs in steps since the process began; this is the same after a resume
        self.state.epoch = self.state.global_step / max(self.state.max_steps, 1)
        if "loss" in logs and self._bytes:
            logs["bits_per_byte"] = logs["loss"] / math.log(2) * self._targets / self._bytes
            logs["tokens_per_second"] = self.speed.rate()
            self._bytes = self._targets = 0
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Nats per token and bits per byte, exact over rows of unequal numbers of labels."""
        nats, targets, text = 0.0, 0, 0
        was_training = self.model.training
        self.model.eval()
        for batch in self.get_eval_dataloader(eval_dataset):
            tally: Tally = batch.pop("tally")
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.model(**self._prepare_inputs(batch), skip_logits=True).loss
            nats += loss.item() * tally.targets
            targets, text = targets + tally.targets, text + tally.text_bytes
        self.model.train(was_training)
        metrics = {
            f"{metric_key_prefix}_loss": nats / max(targets, 1),
            f"{metric_key_prefix}_bits_per_byte": nats / math.log(2) / max(text, 1),
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics
