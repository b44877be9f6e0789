"""transformers' Trainer with what it lacks: the place in the data, bits per byte, tokens/s.

bits per byte = nats of all predicted tokens / ln 2 / bytes of text they stand for
"""

import gc
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from slipstream.models import SlipstreamForCausalLM
from slipstream.training import ranks
from slipstream.training.rows import Batches, Cursor, Rows, Tally

# The last file of a checkpoint to be written: it is there only if all is.
STATE = "trainer_state.json"


def newest_checkpoint(directory: Path) -> Path | None:
    """That of a run, without those whose saving was interrupted."""
    folders = [p for p in directory.glob("checkpoint-*") if p.name[11:].isdecimal()]
    return next(filter(is_whole, sorted(folders, key=step_of, reverse=True)), None)


def is_whole(checkpoint: Path) -> bool:
    try:
        exported(json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def exported(state: Mapping[str, Any]) -> dict[str, Any]:
    """What Place.state has put into a STATE."""
    return state["stateful_callbacks"][Place.__name__]["attributes"]


class Place(TrainerCallback, ExportableState):
    """The cursor of the rows, and the corpus that it is in, in a checkpoint's STATE."""

    def __init__(self, cursor: Cursor, fingerprint: str) -> None:
        self.cursor, self.fingerprint = cursor, fingerprint

    def state(self) -> dict[str, Any]:
        attributes = {"cursor": list(self.cursor), "fingerprint": self.fingerprint}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # a checkpoint has those of the run that saved it
        state.compute_steps(args, state.max_steps)


class StopWhenAsked(TrainerCallback):
    """After a signal: finishes the step, saves a checkpoint, stops."""

    def __init__(self, interrupt: ranks.Interrupt) -> None:
        self.interrupt = interrupt

    def on_step_end(
        self, args: Any, state: Any, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if ranks.any_of(self.interrupt.requested is not None, args.device):
            control.should_save = control.should_training_stop = True
        return control


class FrozenObjects(TrainerCallback):
    """Keeps what there is after a run's first step out of Python's collections of garbage, of which
    one of all objects takes as long as several steps. A program keeps those that it froze."""

    def __init__(self) -> None:
        self.waits = self.frozen = False

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        self.waits = gc.get_freeze_count() == 0

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self.waits:
            self.waits, self.frozen = False, True
            gc.collect()
            gc.freeze()

    def release(self) -> None:
        if self.frozen:
            self.frozen = False
            gc.unfreeze()


class LMTrainer(Trainer):
    """Its batches are the Collator's, with a tally; its checkpoints remember the place.

    An argument besides Trainer's: place.
    """

    model: SlipstreamForCausalLM  # pyright: ignore[reportIncompatibleVariableOverride]
    train_dataset: Rows  # pyright: ignore[reportIncompatibleVariableOverride]
    eval_dataset: Rows  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, *, place: Place, **options: Any) -> None:
        self.place, self.objects = place, FrozenObjects()
        callbacks = [*options.pop("callbacks", []), place, self.objects]
        super().__init__(callbacks=callbacks, **options)
        # which of how many read rows of their own
        self.readers = self.args.process_index, self.args.world_size
        self.computing_alike = 1  # processes that get the same tokens of the same rows
        self._bytes = self._targets = 0  # since the last log
        self._tokens, self.tokens_per_second = 0, 0.0  # of this process's steps

    def train(self, *args: Any, **options: Any) -> Any:
        try:
            return super().train(*args, **options)
        finally:  # also of a run that fails
            self.objects.release()

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kw: Any) -> Tensor:
        tally: Tally = inputs.pop("tally")
        self.place.cursor = tally.cursor
        self._targets += tally.targets
        self._bytes += tally.text_bytes
        tokens = inputs["input_ids"].numel() * self.args.world_size
        self._tokens += tokens // self.computing_alike
        return super().training_step(model, inputs, *args, **kw)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Trainer counts epochs in steps since the process began; this is the same after a resume
        self.state.epoch = self.state.global_step / max(self.state.max_steps, 1)
        if "loss" in logs and self._bytes:
            targets, text = ranks.summed([self._targets, self._bytes], self.args.device)
            logs["bits_per_byte"] = logs["loss"] / math.log(2) * targets / text
            assert start_time is not None
            self.tokens_per_second = self._tokens / (time.time() - start_time)
            logs["tokens_per_second"] = self.tokens_per_second
            self._bytes = self._targets = 0
        logs.pop("train_loss", None)  # of the steps of this process alone
        super().log(logs, start_time)

    def get_train_dataloader(self) -> DataLoader:
        return self._loader(self.train_dataset, self._train_batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        return self._loader(eval_dataset or self.eval_dataset, self.args.eval_batch_size)

    def _loader(self, rows: Rows, size: int) -> DataLoader:
        """Batches of this rank. Trainer's own would give each worker all of the rows."""
        args = self.args
        return DataLoader(
            Batches(rows, size, *self.readers),
            batch_size=None,  # they are batches already
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        ranks.wait()  # each rank has a file of its own, and the first then writes STATE

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
        for batch, counts in self.eval_batches(self.get_eval_dataloader(eval_dataset)):
            tally: Tally = batch.pop("tally")
            found = self.eval_nats(batch, tally.targets)
            if counts:
                nats += found
                targets, text = targets + tally.targets, text + tally.text_bytes
        self.model.train(was_training)
        nats, targets, text = ranks.summed([nats, targets, text], self.args.device)
        metrics = {
            f"{metric_key_prefix}_loss": nats / max(targets, 1),
            f"{metric_key_prefix}_bits_per_byte": nats / math.log(2) / max(text, 1),
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def eval_batches(self, loader: Any) -> Iterator[tuple[dict[str, Any], bool]]:
        """Each batch, and whether it counts."""
        for batch in loader:
            yield batch, True

    def eval_nats(self, batch: dict[str, Any], targets: int) -> float:
        """The sum of nats over a batch's predicted tokens."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.model(**self._prepare_inputs(batch), skip_logits=True).loss
        return loss.item() * targets
