"""What a run says on the terminal: a line every few steps, and a bar with the time left."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slipstream.training.speed import Speed

LINES = 40
"""Lines a whole run prints, about."""


class ConsoleProgress(TrainerCallback):
    """eval_rows: of held-out text that an evaluation during training takes."""

    def __init__(self, console: Console, speed: Speed, eval_rows: int) -> None:
        self.console, self.speed, self.eval_rows = console, speed, eval_rows
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("training", total=None, left="?")
        self.since: list[tuple[float, float]] = []  # loss and bits per byte since the last line

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress.update(self.task, total=state.max_steps, completed=state.global_step)
        self.progress.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        if "eval_bits_per_byte" in logs:
            self.console.print(
                f"step {state.global_step:>6}  [bold]{logs['eval_bits_per_byte']:.3f} bits per byte"
                f"[/bold] on up to {self.eval_rows} held-out rows",
                highlight=False,
            )
        if "bits_per_byte" not in logs:
            return
        left = duration((state.max_steps - state.global_step) * self.speed.seconds_per_step())
        self.progress.update(self.task, completed=state.global_step, left=left)
        self.since.append((logs["loss"], logs["bits_per_byte"]))
        every = max(1, state.max_steps // LINES)
        if state.global_step % every == 0 or state.global_step in (1, state.max_steps):
            loss, bits = (sum(x) / len(self.since) for x in zip(*self.since, strict=True))
            self.since.clear()
            self.console.print(
                f"step {state.global_step:>6}  loss {loss:.3f}  {bits:.3f} bits/byte  "
                f"{logs['tokens_per_second']:>7,.0f} tokens/s  {details(logs)}  {left} left",
                highlight=False,
            )

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.progress.stop()


def details(logs: dict[str, float]) -> str:
    """Gradient norm, learning rate, peak memory, and the share of the GPU's peak if it is known."""
    words = []
    if "grad_norm" in logs:
        words.append(f"grad {logs['grad_norm']:.2f}")
    words.append(f"lr {logs['learning_rate']:.1e}")
    words.append(f"{logs['memory_gib']:.1f} GiB")
    if "mfu" in logs:
        words.append(f"mfu {logs['mfu']:.0%}")
    return "  ".join(words)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
