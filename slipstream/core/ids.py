"""Token ids against the vocabulary: reading outside of it is the commonest way to a crash."""

import torch
from torch import Tensor


def expect_ids(name: str, ids: Tensor, size: int, ignore_index: int | None = None) -> None:
    """Every id is in [0, size) or the ignored one. Looks on the CPU only: a device would sync.

    Raises:
        ValueError: names the first id outside, its position and the size.
    """
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < size:
        return
    outside = (ids < 0) | (ids >= size)
    if ignore_index is not None:
        outside &= ids != ignore_index
    if bool(outside.any()):
        where = tuple(outside.nonzero()[0].tolist())
        raise ValueError(
            f"{name}: id {int(ids[where])} at position {where} is outside the vocabulary of {size}"
        )


def clamped(ids: Tensor, size: int) -> Tensor:
    """Ids that are safe to gather with where `expect_ids` did not look."""
    return ids if ids.device.type == "cpu" else ids.clamp(0, size - 1)
