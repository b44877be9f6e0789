"""torch.autocast at the boundary of an operator: it does not reach inside, so casts are here."""

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast, if on for x's device, makes of x; None if it leaves x alone."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
