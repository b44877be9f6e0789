"""torchtitan's trainer on a CPU, which it does not know: arguments as torchtitan.train has them.
The first rank prints losses and gradient norms, a line a step."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch


def claim_cpu() -> None:
    """Before torchtitan asks torch for the device."""
    found: Any = sys.modules["torch._utils"]
    found._get_available_device_type = lambda: "cpu"
    found._get_device_module = lambda _: SimpleNamespace(
        set_device=lambda _: None,
        current_device=lambda: 0,
        get_device_name=lambda _: "CPU",
        get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 30),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda _: {},
        synchronize=lambda: None,
    )


def claim_timeouts() -> None:
    """torchtitan 0.3.0 shortens them after the first step by a function that torch 2.13 has not."""
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]


def log(self: Any, step: int, loss: float, largest: float, norm: float, **_: Any) -> None:
    if int(os.environ["RANK"]) == 0:
        print(f"step {step} loss {loss:.9f} norm {norm:.9f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    claim_cpu()
    claim_timeouts()
    from torchtitan import train
    from torchtitan.components.metrics import MetricsProcessor

    os.environ["LOCAL_RANK"] = "0"  # the one CPU
    MetricsProcessor.log = log  # pyright: ignore[reportAttributeAccessIssue]
    train.main()
