"""Tokens per second of the training steps, without evaluations and checkpoints; memory; MFU."""

import resource
import sys
import time
from collections import deque
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

# steps
WINDOW = 50
# name of a GPU -> dense FLOP/s in 16 bits on tensor cores, as its maker says
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
}


class Speed(TrainerCallback):
    """Tokens per second of training steps. The trainer adds each batch to `tokens`; a step is timed
    from the end of the step or evaluation before it."""

    def __init__(self) -> None:
        self.tokens = 0
        self.total_tokens, self.total_seconds = 0, 0.0
        self._steps: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._mark = time.perf_counter()

    def rate(self) -> float:
        """Tokens a second over the last WINDOW steps."""
        return sum(n for n, _ in self._steps) / max(sum(s for _, s in self._steps), 1e-9)

    def mean_rate(self) -> float:
        """Tokens a second over all steps so far."""
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


def peak_flops() -> float | None:
    """Peak flops of one device; None where PEAKS does not have it."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def flops_per_token(model: nn.Module) -> float:
    """The operations of a training step: 6 for each weight that a token is multiplied with.

    The embedding's lookup multiplies nothing; of a mixture of experts those chosen count. Left out
    are recurrences and attention: a few percent, but where rows are much longer than heads times
    their width.
    """
    total = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            total += module.weight.numel()
        elif hasattr(module, "experts") and hasattr(module, "gate"):  # transformers' blocks
            gate: Any = module.gate
            used = gate.top_k / gate.num_experts
            experts: Any = module.experts
            total += used * sum(p.numel() for p in experts.parameters()) + gate.weight.numel()
    return 6 * total


def peak_memory() -> int:
    """Bytes: of the GPU's allocator, or of the process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
