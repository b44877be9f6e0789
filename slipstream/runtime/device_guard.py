"""The device that kernels are launched on."""

import threading
from contextlib import AbstractContextManager, nullcontext

import torch

_NOWHERE = nullcontext()
_THREAD = threading.local()


def device_of(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device."""
    if not hasattr(_THREAD, "bound"):
        _bind(device)
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOWHERE
    return torch.cuda.device(device)


def _bind(device: torch.device) -> None:
    """A thread of autograd has no CUDA context before it asks the runtime for something, and the
    driver, which makes the descriptors for TMA, wants one."""
    _THREAD.bound = True
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.mem_get_info(device)
