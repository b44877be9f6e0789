"""fla.utils: what code written for fla asks it about devices, and its decorators.

Slipstream looks at tensors, not at the process, to choose a kernel; these are for the asker.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

F = TypeVar("F", bound=Callable[..., Any])

# "cuda" is what torch calls an AMD GPU too
device_platform = "cpu"
if torch.cuda.is_available():
    device_platform = "hip" if torch.version.hip else "cuda"
device = "cuda"
device_name = "cpu" if device_platform == "cpu" else "cuda"
device_torch_lib = torch.cuda

IS_AMD = is_amd = device_platform == "hip"
IS_NVIDIA = is_nvidia = device_platform == "cuda"
_capability = torch.cuda.get_device_capability() if IS_NVIDIA else (0, 0)
IS_NVIDIA_HOPPER = is_nvidia_hopper = _capability[0] == 9
IS_NVIDIA_BLACKWELL = is_nvidia_blackwell = _capability[0] in (10, 12)
IS_TF32_SUPPORTED = is_tf32_supported = _capability[0] >= 8
IS_TMA_SUPPORTED = is_tma_supported = False
IS_INTEL = is_intel = IS_INTEL_ALCHEMIST = is_intel_alchemist = IS_NPU = is_npu = False

autocast_custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=device)
autocast_custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=device)


def tensor_cache(fn: F) -> F:
    """fn as it is. fla keeps the last results by the identity of the arguments, which is wrong
    after a tensor was written to in place."""
    return fn


def input_guard(fn: Any = None, *, no_guard_contiguous: Any = False) -> Any:
    """fn with contiguous tensors, on the device of the first.

    Args:
        no_guard_contiguous: True, or the names of arguments that stay as they are.
    """
    if fn is None:
        return functools.partial(input_guard, no_guard_contiguous=no_guard_contiguous)
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    kept = set(names) if no_guard_contiguous is True else set(no_guard_contiguous or ())

    def contiguous_unless_kept(name: str, x: Any) -> Any:
        return x.contiguous() if isinstance(x, Tensor) and name not in kept else x

    @functools.wraps(fn)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        padded = [*names, *[""] * max(len(args) - len(names), 0)]
        args = tuple(contiguous_unless_kept(n, x) for n, x in zip(padded, args))
        kwargs = {n: contiguous_unless_kept(n, x) for n, x in kwargs.items()}
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with custom_device_ctx(next((x.device.index for x in tensors), None)):
            return fn(*args, **kwargs)

    return guarded


contiguous = input_guard


def custom_device_ctx(index: int | None) -> Any:
    """The context of a GPU, or of nothing."""
    return contextlib.nullcontext() if index is None else torch.cuda.device(index)


def checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn, computed again in the backward."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)

    return wrapper


def get_multiprocessor_count(tensor_idx: int = 0, *, use_aicore: bool = False) -> int:
    """Multiprocessors of a GPU; 1 without one."""
    if device_platform == "cpu":
        return 1
    return torch.cuda.get_device_properties(tensor_idx).multi_processor_count


def get_available_device() -> str:
    return device_platform


def check_shared_mem(arch: str = "none", tensor_idx: int = 0) -> bool:
    """Whether a GPU has as much shared memory as an architecture of that name."""
    least = {"ada": 101376, "ampere": 166912, "hopper": 232448}.get(arch.lower(), 102400)
    if device_platform == "cpu":
        return False
    properties = torch.cuda.get_device_properties(tensor_idx)
    return properties.shared_memory_per_block_optin >= least


def get_abs_err(x: Tensor, y: Tensor) -> float:
    """The largest difference."""
    return (x.detach() - y.detach()).abs().max().item()


def get_err_ratio(x: Tensor, y: Tensor) -> float:
    """The root mean square of the difference over that of x."""
    x, y = x.detach().double(), y.detach().double()
    return ((x - y).square().mean().sqrt() / (x.square().mean().sqrt() + 1e-8)).item()


def assert_close(
    prefix: str,
    ref: Tensor,
    tri: Tensor,
    ratio: float,
    warning: bool = False,
    err_atol: float = 1e-6,
) -> None:
    """AssertionError where the difference is above err_atol and above `ratio` of ref."""
    error = get_err_ratio(ref, tri)
    text = f"{prefix}: difference {get_abs_err(ref, tri):.6f}, ratio {error:.6f}, want {ratio}"
    if get_abs_err(ref, tri) <= err_atol:
        return
    if ref.isnan().any() or tri.isnan().any() or not error < ratio:
        raise AssertionError(text)
