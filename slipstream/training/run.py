"""One training run: from a config to a directory with a model, resumed if it has begun before."""

import functools
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from transformers import PreTrainedTokenizerFast, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, TrainerState

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.runtime.files import write_text
from slipstream.training import corpus, ranks, sample, tokenizer
from slipstream.training import trainer as training
from slipstream.training.config import Parallel, RunConfig, checked, expect_keys, read_yaml
from slipstream.training.config import Tokenizer as TokenizerConfig
from slipstream.training.console import ConsoleProgress
from slipstream.training.parallel import ShardedTrainer, expect_processes, is_sharded, make_mesh
from slipstream.training.ranks import Interrupt
from slipstream.training.rows import Collator, Cursor, Position, Rows

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
    "report_to": "tensorboard",
    "dataloader_pin_memory": torch.cuda.is_available(),
}
"""Over transformers' own. A log line per step: only so are the logs of a resumed run the same."""

FORCED = {
    "remove_unused_columns": False,
    "ignore_data_skip": True,
    "disable_tqdm": True,
    "accelerator_config": {"dispatch_batches": False},
}
"""What the machinery here relies on: it finds its own place in the data and has its own output."""

UNUSED = {
    "num_train_epochs": "training.max_steps says how long a run is",
    "resume_from_checkpoint": "a run continues from what is in its output_dir",
    "save_only_model": "a run could not continue from such a checkpoint",
    "dataloader_drop_last": "rows are a stream, which has no last batch",
    "dataloader_in_order": "batches are always in order",
    "train_sampling_strategy": "data.lanes says how rows are mixed",
    "data_seed": "training.seed shuffles the files",
    "do_train": "the command trains",
    "do_eval": "training.eval_strategy says when",
    "do_predict": "the command trains",
}
"""Options of TrainingArguments that would do nothing or harm here, and why."""

FIXED = (
    "optim",
    "optim_args",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "seed",
)
"""Options that a resumed run has from its checkpoint; of all others its config decides."""

RESULT = "result.json"
RUN = "run.yaml"


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

    Under torchrun every rank calls this; the first writes the files and prints.

    Raises:
        ValueError: a key or value that cannot be; the directory holds a run of another config.
    """
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    directory = Path(config.output_dir)
    args = arguments(config)
    parallel = expect_processes(config.parallel, args.world_size)
    if config.init_from is None:
        _expect_model(config.model)
    checkpoint = ranks.on_first_rank(lambda: _begin(config, directory, fresh))
    begun = 0 if checkpoint is None else training.step_of(checkpoint)
    if begun >= args.max_steps and (result := _read_result(directory)) is not None:
        console.print(
            f"{directory} is finished; delete the directory to train again", highlight=False
        )
        return result
    set_seed(args.seed)
    with console.status("reading the text and obtaining the tokenizer"):
        trainer = _trainer(config, parallel, args, directory, interrupt, console)
    _announce(console, trainer, checkpoint)
    if ranks.any_of(interrupt.requested is not None, args.device):
        return Result(directory, begun, None, 0.0)
    _train_on(trainer, checkpoint)
    step, rate = trainer.state.global_step, trainer.tokens_per_second
    if step < args.max_steps:
        return Result(directory, step, None, rate)
    with console.status("scoring all held-out text"):
        return _finish(trainer, directory, rate)


def arguments(config: RunConfig) -> TrainingArguments:
    """transformers' TrainingArguments of the config's section `training`."""
    hints = get_type_hints(TrainingArguments)
    settable = {x: hints[x] for x in hints if x not in {*FORCED, *UNUSED, "output_dir"}}
    for key in config.training:
        if key in UNUSED:
            raise ValueError(f"training.{key}: has no use here: {UNUSED[key]}")
        if key in FORCED or key == "output_dir":
            raise ValueError(f"training.{key}: is not for setting; the run sets it")
    given = checked("training.", config.training, settable)
    options: dict[str, Any] = {**DEFAULTS, **given, **FORCED}
    options.setdefault("per_device_eval_batch_size", options["per_device_train_batch_size"])
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and not torch.accelerator.is_available():
        options["use_cpu"] = True  # without it, each process takes itself for the only one
    try:
        args = TrainingArguments(output_dir=config.output_dir, **options)
    except ValueError as error:
        raise ValueError(f"training: {error}") from error
    if started != args.world_size:
        raise NotImplementedError(
            f"training: {started} processes were started (WORLD_SIZE), and transformers makes "
            f"{args.world_size} of them work together; start one, or as many as there are devices"
        )
    if args.max_steps <= 0:
        raise ValueError(f"training.max_steps: want more than 0 steps, got {args.max_steps}")
    if args.n_gpu > 1:
        raise NotImplementedError(
            f"training: one process trains on one device, and sees {args.n_gpu}; set "
            f"CUDA_VISIBLE_DEVICES to one of them, or start "
            f"torchrun --nproc-per-node {args.n_gpu} -m slipstream train"
        )
    return args


def _expect_model(options: Mapping[str, Any]) -> None:
    """Refuses a section `model` that makes no model, before anything is written.

    Raises:
        ValueError: a key or a value that cannot be.
    """
    expect_keys("model.", options, [f.name for f in fields(SlipstreamConfig)])
    try:
        with torch.device("meta"):
            SlipstreamForCausalLM(SlipstreamConfig(**options))
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ValueError(f"model: {' '.join(str(error).split())}") from error


def _begin(config: RunConfig, directory: Path, fresh: bool) -> Path | None:
    """Takes the directory for this config; the checkpoint to continue from, if there is one."""
    directory.mkdir(parents=True, exist_ok=True)
    if fresh and any(directory.glob("checkpoint-*")):
        raise ValueError(f"output_dir: {directory} holds a run; delete it or name another")
    newest = training.newest_checkpoint(directory)
    _claim(config, directory, resuming=newest is not None)
    return newest


def _claim(config: RunConfig, directory: Path, resuming: bool) -> None:
    """Writes the resolved config beside the run, or checks that the run is this config's."""
    path = directory / RUN
    if resuming:
        before = read_yaml(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(before, dict):
            raise ValueError(f"{path}: want the config of the run, got {before!r:.60}")
        _expect_same(before, config.plain(), directory)
    else:
        shutil.rmtree(directory / "tokenizer", ignore_errors=True)  # of a run that never began
    config.dump(path)


def _expect_same(before: Mapping[str, Any], now: Mapping[str, Any], directory: Path) -> None:
    """
    Raises:
        ValueError: what a resumed run would not take from its config differs from the run's own.
    """
    ours, theirs = _fixed(before), _fixed(now)
    for key in {**ours, **theirs}:
        was, wanted = ours.get(key), theirs.get(key)
        if was != wanted:
            raise ValueError(
                f"{key}: differs from the run in {directory}, {was!r}, and a resumed run cannot "
                f"take another, got {wanted!r}; name another output_dir"
            )


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a resumed run cannot take from another config, by dotted keys."""
    training = {f.name: f.default for f in fields(TrainingArguments)}
    training |= {**DEFAULTS, **(config.get("training") or {})}
    found = {f"training.{name}": training[name] for name in FIXED}
    for section in ("model", "tokenizer", "data"):
        found |= {f"{section}.{key}": x for key, x in (config.get(section) or {}).items()}
    return {"init_from": config.get("init_from"), **found}


def _trainer(
    config: RunConfig,
    parallel: Parallel,
    args: TrainingArguments,
    directory: Path,
    interrupt: Interrupt,
    console: Console,
) -> training.LMTrainer:
    data = config.data
    train_corpus, held_out = corpus.split(data)
    place = directory / "tokenizer"
    begun = None if config.init_from is None else sample.saved_directory(Path(config.init_from))
    wanted = _with_tokenizer_of(config.tokenizer, begun)
    tok = ranks.on_first_rank(lambda: tokenizer.obtain(wanted, train_corpus, place))
    if begun is None:
        model = SlipstreamForCausalLM(_model_config(config, tok))
    else:
        model = _begun_model(begun, tok)
    rows = Rows(train_corpus, tok, data.row_tokens, lanes=data.lanes, seed=args.seed)
    held_rows = Rows(held_out, tok, data.row_tokens, seed=0, epochs=1, limit=data.eval_rows)
    collator = Collator(data.packing, tokenizer.end_of_text(tok), tokenizer.token_bytes(tok))
    make: Any = training.LMTrainer
    if is_sharded(parallel):
        make = functools.partial(ShardedTrainer, mesh=make_mesh(parallel, args.device))
    trainer: training.LMTrainer = make(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=held_rows,
        data_collator=collator,
        processing_class=tok,
        place=training.Place(rows.start, train_corpus.fingerprint()),
        callbacks=[training.StopWhenAsked(interrupt)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ConsoleProgress(console))
    return trainer


def _with_tokenizer_of(config: TokenizerConfig, begun: Path | None) -> TokenizerConfig:
    """The tokenizer beside the weights that a run begins with, unless the config names another."""
    if begun is None or config.path is not None:
        return config
    if not (begun / "tokenizer_config.json").is_file():
        raise ValueError(f"tokenizer.path: want a tokenizer, since {begun} has none")
    return replace(config, path=str(begun))


def _begun_model(directory: Path, tok: PreTrainedTokenizerFast) -> SlipstreamForCausalLM:
    """
    Raises:
        ValueError: it is not Slipstream's, or has fewer embeddings than the tokenizer has ids.
    """
    model = sample.weights(directory)
    if not isinstance(model, SlipstreamForCausalLM):
        kind = type(model).__name__
        raise ValueError(f"init_from: want a Slipstream model, got {kind}; see slipstream convert")
    if len(tok) > model.config.vocab_size:
        raise ValueError(
            f"tokenizer: {len(tok)} ids are more than the {model.config.vocab_size} of init_from"
        )
    return model.float()  # mixed precision is training.bf16's


def _model_config(config: RunConfig, tok: PreTrainedTokenizerFast) -> SlipstreamConfig:
    special = {name: getattr(tok, name) for name in ("bos_token_id", "eos_token_id")}
    return SlipstreamConfig(
        **{"vocab_size": len(tok), "pad_token_id": tok.pad_token_id, **special, **config.model}
    )


def _announce(console: Console, trainer: training.LMTrainer, checkpoint: Path | None) -> None:
    model, rows = trainer.model, trainer.train_dataset
    mixers = ", ".join(model.config.mixer(i)[0] for i in range(model.config.num_hidden_layers))
    console.print(
        f"{model.num_parameters():,} parameters: {mixers}; vocabulary {model.config.vocab_size:,}; "
        f"{len(rows.corpus.files):,} training files",
        highlight=False,
    )
    if checkpoint is not None:
        console.print(f"continuing at {checkpoint}", highlight=False)


def _train_on(trainer: training.LMTrainer, checkpoint: Path | None) -> None:
    """All steps that are left, from where the checkpoint stood in the data."""
    if checkpoint is None:
        trainer.train()
        return
    state = TrainerState.load_from_json(str(checkpoint / training.STATE))
    saved = training.exported(asdict(state))
    if saved["fingerprint"] != trainer.place.fingerprint:
        raise ValueError("data.files: changed since the checkpoint; name another output_dir")
    turn, lanes = saved["cursor"]
    cursor = Cursor(turn, tuple(Position(*lane) for lane in lanes))
    trainer.train_dataset.start = trainer.place.cursor = cursor
    if state.global_step < trainer.args.max_steps:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    else:  # stopped between its last checkpoint and its end
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = state


def _finish(trainer: training.LMTrainer, directory: Path, rate: float) -> Result:
    """The final model, its log and its score on all of the held-out text."""
    trainer.save_model()
    rows = trainer.eval_dataset
    rows = Rows(rows.corpus, rows.tokenizer, rows.row_tokens, epochs=1)
    metrics = trainer.evaluate(rows, metric_key_prefix="held_out")
    trainer.save_state()
    result = Result(directory, trainer.state.global_step, metrics["held_out_bits_per_byte"], rate)
    summary = {**asdict(result), "directory": str(directory)}
    ranks.on_first_rank(lambda: write_text(directory / RESULT, json.dumps(summary, indent=1)))
    return result


def _read_result(directory: Path) -> Result | None:
    """None where there is none that can be read."""
    try:
        stored = json.loads((directory / RESULT).read_text(encoding="utf-8"))
        return Result(**{**stored, "directory": directory})
    except (OSError, ValueError, TypeError):
        return None
