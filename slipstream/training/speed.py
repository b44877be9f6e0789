"""Tokens per second of the training steps, without evaluations and checkpoints."""

import time
from collections import deque
from typing import Any

from transformers import TrainerCallback

WINDOW = 50


class Speed(TrainerCallback):
    """The trainer adds each batch to `tokens`; steps are timed from the end of what was before."""

    def __init__(self) -> None:
        self.tokens = 0
        self.total_tokens, self.total_seconds = 0, 0.0
        self._steps: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._mark = time.perf_counter()

    def rate(self) -> float:
        """Over the last WINDOW steps."""
        return sum(n for n, _ in self._steps) / max(sum(s for _, s in self._steps), 1e-9)

    def mean_rate(self) -> float:
        """Over all steps so far."""
        return self.total_tokens / max(self.total_seconds, 1e-9)

    def seconds_per_step(self) -> float:
        return sum(s for _, s in self._steps) / max(len(self._steps), 1)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._mark = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self._steps.append((self.tokens, now - self._mark))
        self.total_tokens += self.tokens
        self.total_seconds += now - self._mark
        self.tokens, self._mark = 0, now

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._mark = time.perf_counter()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._mark = time.perf_counter()
