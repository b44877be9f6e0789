"""Whether a call of a module may do more than its class says."""

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook waits for a call of the module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()
    )


def is_hooked(module: nn.Module | None) -> bool:
    """Whether a call of the module may do more than its class's forward."""
    return module is not None and ("forward" in module.__dict__ or has_hooks(module))
