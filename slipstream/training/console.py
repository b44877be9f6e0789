"""A run's output on the terminal: a line every few steps, and a bar of progress."""

from typing import Any

from rich.console import Console
from rich.progress import Progress
from transformers import TrainerCallback, TrainerState

# Lines that a whole run prints, about.
LINES = 40
# What Trainer logs -> format of its column, as wide as its heading or WIDTH.
COLUMNS = {
    "step": "d",
    "loss": ".3f",
    "bits_per_byte": ".3f",
    "tokens_per_second": ",.0f",
    "grad_norm": ".2f",
    "learning_rate": ".1e",
}
WIDTH = 7


class ConsoleProgress(TrainerCallback):
    """The bar on a terminal alone, with the time left; the lines also in files."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(console=console, disable=not console.is_terminal, transient=True)
        self.task = self.bar.add_task("training")

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.bar.update(self.task, total=state.max_steps, completed=state.global_step)
        self.bar.start()
        self._print("  ".join(f"{x:>{WIDTH}}" for x in COLUMNS))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.bar.update(self.task, completed=state.global_step)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.bar.stop()

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        found = {**(logs or {}), "step": state.global_step}
        if "eval_bits_per_byte" in found:
            bits = found["eval_bits_per_byte"]
            self._print(f"step {state.global_step}: {bits:.3f} bits per byte on held-out rows")
        every = max(1, state.max_steps // LINES)
        if "bits_per_byte" in found and (state.global_step % every == 0 or state.global_step == 1):
            cells = {x: format(found.get(x, 0), form) for x, form in COLUMNS.items()}
            self._print("  ".join(f"{y:>{max(WIDTH, len(x))}}" for x, y in cells.items()))

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False)
