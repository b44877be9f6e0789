"""A run's output on the terminal: a line every few steps, and a bar with the time left."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slipstream.training.speed import Speed

LINES = 40
"""Lines a whole run prints, about."""
WIDTHS = {
    "step": 7,
    "loss": 6,
    "bits/byte": 9,
    "tokens/s": 9,
    "gradient": 8,
    "rate": 7,
    "GiB": 5,
    "mfu": 4,
}
"""Of the columns of a line; of others 8. A line has at most 80 characters."""


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
        self.headings = ""  # printed before the first line
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
            cells = {
                "step": str(state.global_step),
                "loss": f"{loss:.3f}",
                "bits/byte": f"{bits:.3f}",
            }
            cells |= {**columns(logs), "left": left}
            if not self.headings:
                self.headings = "  ".join(f"{x:>{WIDTHS.get(x, 8)}}" for x in cells)
                self.console.print(self.headings, highlight=False)
            line = "  ".join(f"{text:>{WIDTHS.get(x, 8)}}" for x, text in cells.items())
            self.console.print(line, highlight=False)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.progress.stop()


def columns(logs: dict[str, float]) -> dict[str, str]:
    """Heading and text: tokens a second, norm of the gradient, learning rate, peak memory, and the
    share of the GPU's peak if it is known."""
    found = {"tokens/s": f"{logs['tokens_per_second']:,.0f}"}
    if "grad_norm" in logs:
        found["gradient"] = f"{logs['grad_norm']:.2f}"
    found |= {"rate": f"{logs['learning_rate']:.1e}", "GiB": f"{logs['memory_gib']:.1f}"}
    if "mfu" in logs:
        found["mfu"] = f"{logs['mfu']:.0%}"
    return found


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
