"""`make demo`: trains a small hybrid on Python's own library, samples from it, measures it.

Everything is read from the running Python; nothing is downloaded. Leaves demo-out/ and loss.png.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import own_checkout  # noqa: F401
import torch
from rich.console import Console
from rich.table import Table

from slipstream.models.cache import CACHE
from slipstream.training.config import load
from slipstream.training.corpus import split
from slipstream.training.ranks import Interrupt
from slipstream.training.run import train
from slipstream.training.sample import generate
from slipstream.training.sample import load as load_model

CONFIG = "configs/demo.yaml"
PROSE = Path("demo-out/prose")
PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"
CONTEXT = 1024
TRAINING, HELD_OUT = "bits_per_byte", "eval_bits_per_byte"  # as a run logs them
MEAN_OF = 20  # steps


def main() -> None:
    begin, console = time.perf_counter(), Console()
    write_prose(PROSE)
    config = load(CONFIG, sys.argv[1:])
    with Interrupt() as interrupt:
        result = train(config, interrupt, console)
    if result.held_out is None:
        console.print("stopped, nothing lost; `make demo` continues")
        return
    model, tokenizer = load_model(result.directory)
    console.rule("a sample, from the first two lines on")
    generate(model, tokenizer, [PROMPT], tokens=160)
    rows = config.data.eval_rows
    plot(result.directory, Path("loss.png"), rows)
    text = next(iter(split(config.data)[1].files)).path.read_text(encoding="utf-8")
    chunk, recurrent, apart = reading_speeds(model, held_out_ids(tokenizer, text))
    table = Table(title=f"{time.perf_counter() - begin:.0f} s on {torch.get_num_threads()} threads")
    table.add_column("measured")
    table.add_column("value", justify="right")
    during = history(result.directory, HELD_OUT)
    if during:
        what = f"up to {rows} held-out rows, last scored at step {during[-1][0]}, bits per byte"
        table.add_row(what, f"{during[-1][1]:.3f}")
    table.add_row("all held-out text, after the last step, bits per byte", f"{result.held_out:.3f}")
    table.add_row("training, tokens/s", f"{result.tokens_per_second:,.0f}")
    table.add_row(f"reading {CONTEXT} tokens in chunks, tokens/s", f"{chunk:,.0f}")
    table.add_row("reading them one by one from the state, tokens/s", f"{recurrent:,.0f}")
    table.add_row("largest difference of the two's logits", f"{apart:.1e}")
    console.print(table)
    console.print(f"loss.png; model in {result.directory}", highlight=False)


def write_prose(directory: Path) -> None:
    """The topics of Python's help(), a document each."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in topics.items():
        (directory / f"{name.replace('/', '_')}.txt").write_text(text, encoding="utf-8")


def held_out_ids(tokenizer: Any, text: str) -> torch.Tensor:
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return ids.repeat(1, -(-CONTEXT // ids.shape[1]))[:, :CONTEXT]


@torch.no_grad()
def reading_speeds(model: Any, ids: torch.Tensor) -> tuple[float, float, float]:
    """Tokens per second of the whole text at once and token by token; how far the logits differ."""
    model(ids)
    begin = time.perf_counter()
    whole = model(ids).logits
    middle = time.perf_counter()
    cache, steps = None, []
    for t in range(ids.shape[1]):
        out = model(ids[:, t : t + 1], cache=cache, use_cache=True)
        cache = out[CACHE]
        steps.append(out.logits)
    end = time.perf_counter()
    apart = (torch.cat(steps, 1) - whole).abs().max().item()
    tokens = ids.shape[1]
    return tokens / (middle - begin), tokens / (end - middle), apart


def history(run: Path, key: str) -> list[tuple[int, float]]:
    """(step, value) of what a run logged."""
    log = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [(entry["step"], entry[key]) for entry in log if key in entry]


def running_mean(values: Sequence[float], window: int = MEAN_OF) -> list[float]:
    """The mean of each value and up to so many before it."""
    parts = (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    return [sum(x) / len(x) for x in parts]


def plot(run: Path, path: Path, rows: int) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    steps, values = zip(*history(run, TRAINING))
    axes.plot(steps, values, color="C0", alpha=0.25, lw=1, label="training, each step")
    axes.plot(steps, running_mean(values), color="C0", label=f"training, mean of {MEAN_OF} steps")
    if during := history(run, HELD_OUT):
        axes.plot(*zip(*during), "o-", color="C1", label=f"held-out, up to {rows} rows")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(1, 4))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
