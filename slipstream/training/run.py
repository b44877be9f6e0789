"""One training run: from a config to a directory with a model, resumed if it has begun before."""

import json
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from rich.console import Console
from transformers import PreTrainedTokenizerFast, TrainingArguments, set_seed
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback, TrainerState

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.training import corpus, tokenizer
from slipstream.training.checkpoints import STATE, last_checkpoint, step_of
from slipstream.training.config import RunConfig
from slipstream.training.console import ConsoleProgress
from slipstream.training.interrupt import Interrupt
from slipstream.training.rows import Collator, Cursor, Position, Rows
from slipstream.training.trainer import LMTrainer, Place, StopWhenAsked

DEFAULTS = {
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "max_steps": 1000,
    "eval_strategy": "steps",
    "eval_steps": 200,
    "save_strategy": "steps",
    "save_steps": 200,
    "save_total_limit": 2,
    "logging_steps": 1,
    "seed": 0,
    "dataloader_pin_memory": torch.cuda.is_available(),
}
"""Over transformers' own. A log line per step: only so are the logs of a resumed run the same."""

FORCED = {
    "remove_unused_columns": False,
    "ignore_data_skip": True,
    "disable_tqdm": True,
    "accelerator_config": {"dispatch_batches": False},
    "report_to": "none",
}
"""What the machinery here relies on: it finds its own place in the data and has its own output."""


RESULT = "result.json"


@dataclass(frozen=True)
class Result:
    """held_out: bits per byte of all held-out text; None if the run was interrupted."""

    directory: Path
    step: int
    held_out: float | None
    tokens_per_second: float


def train(config: RunConfig, interrupt: Interrupt, console: Console, fresh: bool = False) -> Result:
    """Trains, or continues what an earlier call with this config left in its directory.

    Args:
        fresh: refuse to continue; an unfinished run in the directory is an error.

    Raises:
        ValueError: the directory holds a run of another model or other data.
    """
    directory = Path(config.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = last_checkpoint(directory)
    if checkpoint is not None and fresh:
        raise ValueError(f"output_dir: {directory} holds a run; delete it or name another")
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    args = arguments(config)
    _claim(config, directory, resuming=checkpoint is not None)
    begun = 0 if checkpoint is None else step_of(checkpoint)
    if begun >= args.max_steps and (directory / RESULT).is_file():
        console.print(f"{directory} is finished; delete it to train anew", highlight=False)
        return _read_result(directory)
    set_seed(args.seed)
    trainer = _trainer(config, args, directory, interrupt, console)
    _announce(console, trainer, checkpoint)
    if interrupt.requested is not None:
        return Result(directory, begun, None, 0.0)
    _train_on(trainer, checkpoint)
    step, rate = trainer.state.global_step, trainer.speed.mean_rate()
    if step < args.max_steps:
        return Result(directory, step, None, rate)
    return _finish(trainer, directory, rate)


def arguments(config: RunConfig) -> TrainingArguments:
    """transformers' TrainingArguments of the config's section `training`."""
    known = TrainingArguments.__dataclass_fields__
    for key in config.training:
        if key not in known or key in FORCED or key == "output_dir":
            raise ValueError(f"training.{key}: no such option, or one that is not for setting")
    options: dict[str, Any] = {**DEFAULTS, **config.training, **FORCED}
    options.setdefault("per_device_eval_batch_size", options["per_device_train_batch_size"])
    args = TrainingArguments(output_dir=config.output_dir, **options)
    if args.max_steps <= 0:
        raise ValueError(f"training.max_steps: want more than 0 steps, got {args.max_steps}")
    if args.world_size * max(args.n_gpu, 1) > 1:
        raise NotImplementedError(
            "training: one device only as yet; set CUDA_VISIBLE_DEVICES to one of them"
        )
    return args


def _claim(config: RunConfig, directory: Path, resuming: bool) -> None:
    """Writes the resolved config beside the run, or checks that the run is this config's."""
    resolved = directory / "run.yaml"
    before = yaml.safe_load(resolved.read_text(encoding="utf-8")) if resolved.exists() else {}
    now = config.plain()
    for section in ("model", "tokenizer", "data", "muon"):
        if before.get(section) != now[section] and resuming:
            raise ValueError(
                f"{section}: differs from the run in {directory}, {before.get(section)}; "
                "name another output_dir"
            )
    if any(before.get(section) != now[section] for section in ("tokenizer", "data")):
        shutil.rmtree(directory / "tokenizer", ignore_errors=True)  # of a run that never began
    config.dump(resolved)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (directory / "versions.json").write_text(json.dumps(versions, indent=1), encoding="utf-8")


def _trainer(
    config: RunConfig,
    args: TrainingArguments,
    directory: Path,
    interrupt: Interrupt,
    console: Console,
) -> LMTrainer:
    data = config.data
    train_corpus, held_out = corpus.split(data)
    tok = tokenizer.obtain(config.tokenizer, train_corpus, directory / "tokenizer")
    model = SlipstreamForCausalLM(_model_config(config, tok))
    rows = Rows(train_corpus, tok, data.row_tokens, lanes=data.lanes, seed=args.seed)
    held_rows = Rows(held_out, tok, data.row_tokens, seed=0, epochs=1, limit=data.eval_rows)
    collator = Collator(data.packing, tokenizer.end_of_text(tok), tokenizer.token_bytes(tok))
    board = TensorBoardCallback()
    board.logging_dir = str(directory / "tensorboard")
    trainer = LMTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=held_rows,
        data_collator=collator,
        processing_class=tok,
        place=Place(rows.start, train_corpus.fingerprint()),
        muon=config.muon,
        callbacks=[board, StopWhenAsked(interrupt)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ConsoleProgress(console, trainer.speed))
    return trainer


def _model_config(config: RunConfig, tok: PreTrainedTokenizerFast) -> SlipstreamConfig:
    special = {name: getattr(tok, name) for name in ("bos_token_id", "eos_token_id")}
    return SlipstreamConfig(
        **{"vocab_size": len(tok), "pad_token_id": tok.pad_token_id, **special, **config.model}
    )


def _announce(console: Console, trainer: LMTrainer, checkpoint: Path | None) -> None:
    model, rows = trainer.model, trainer.train_dataset
    mixers = ", ".join(model.config.mixer(i)[0] for i in range(model.config.num_hidden_layers))
    console.print(
        f"{model.num_parameters():,} parameters: {mixers}; vocabulary {model.config.vocab_size:,}; "
        f"{len(rows.corpus.files):,} training files",
        highlight=False,
    )
    if checkpoint is not None:
        console.print(f"continuing at {checkpoint}", highlight=False)


def _train_on(trainer: LMTrainer, checkpoint: Path | None) -> None:
    """All steps that are left, from where the checkpoint stood in the data."""
    if checkpoint is None:
        trainer.train()
        return
    state = TrainerState.load_from_json(str(checkpoint / STATE))
    kept: Any = state.stateful_callbacks
    kept = kept[Place.__name__]["attributes"]
    if kept["fingerprint"] != trainer.place.fingerprint:
        raise ValueError("data.files: changed since the checkpoint; name another output_dir")
    turn, lanes = kept["cursor"]
    cursor = Cursor(turn, tuple(Position(*lane) for lane in lanes))
    trainer.train_dataset.start = trainer.place.cursor = cursor
    if state.global_step < trainer.args.max_steps:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    else:  # stopped between its last checkpoint and its end
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = state


def _finish(trainer: LMTrainer, directory: Path, rate: float) -> Result:
    """The final model, its log and its score on all of the held-out text."""
    trainer.save_model()
    rows = trainer.eval_dataset
    rows = Rows(rows.corpus, rows.tokenizer, rows.row_tokens, epochs=1)
    metrics = trainer.evaluate(rows, metric_key_prefix="held_out")
    trainer.save_state()
    result = Result(directory, trainer.state.global_step, metrics["held_out_bits_per_byte"], rate)
    summary = {**asdict(result), "directory": str(directory)}
    (directory / RESULT).write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return result


def _read_result(directory: Path) -> Result:
    stored = json.loads((directory / RESULT).read_text(encoding="utf-8"))
    return Result(**{**stored, "directory": directory})
