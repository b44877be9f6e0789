"""A run's output on the terminal: a line every few steps, and transformers' bar of progress."""

from typing import Any

from rich.console import Console
from tqdm import tqdm
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

# Lines that a whole run prints, about.
LINES = 40
# What Trainer logs -> heading, format and width of its column.
COLUMNS = {
    "step": ("step", "d", 7),
    "loss": ("loss", ".3f", 6),
    "bits_per_byte": ("bits/byte", ".3f", 9),
    "tokens_per_second": ("tokens/s", ",.0f", 9),
    "grad_norm": ("gradient", ".2f", 8),
    "learning_rate": ("rate", ".1e", 7),
}


class ConsoleProgress(ProgressCallback):
    """The bar on a terminal alone, with the time left; the lines also in files."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.headings = False  # whether they are printed
        self.since: list[tuple[float, float]] = []  # loss and bits per byte since the last line

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        begun, hidden = state.global_step, self.console.quiet or not self.console.is_terminal
        self.training_bar = tqdm(total=state.max_steps, initial=begun, leave=False, disable=hidden)
        self.current_step = begun

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
            bits = logs["eval_bits_per_byte"]
            self._print(f"step {state.global_step:>6}  {bits:.3f} bits per byte on held-out rows")
        if "bits_per_byte" not in logs:
            return
        self.since.append((logs["loss"], logs["bits_per_byte"]))
        every = max(1, state.max_steps // LINES)
        if state.global_step % every == 0 or state.global_step in (1, state.max_steps):
            means = [sum(x) / len(self.since) for x in zip(*self.since, strict=True)]
            self.since.clear()
            found = {**logs, "step": state.global_step}
            found |= zip(("loss", "bits_per_byte"), means, strict=True)
            cells = [(*column, found[key]) for key, column in COLUMNS.items() if key in found]
            if not self.headings:
                self.headings = True
                self._print("  ".join(f"{heading:>{width}}" for heading, _, width, _ in cells))
            self._print("  ".join(f"{f'{x:{form}}':>{width}}" for _, form, width, x in cells))

    def _print(self, line: str) -> None:
        with tqdm.external_write_mode():
            self.console.print(line, highlight=False)
