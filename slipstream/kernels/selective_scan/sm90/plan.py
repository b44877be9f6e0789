"""Which calls the kernels for sm_90 take, and how they leave states for a backward. Plain torch."""

import torch
from torch import Tensor

from slipstream.kernels.selective_scan.inputs import ScanInputs
from slipstream.runtime.backends import DTYPES, sm90_unsupported

# Tokens from one saved state to the next.
CHUNK = 16
# Numbers of a channel's state that registers have room for.
MAX_N = 64


def unsupported_reason(inputs: ScanInputs) -> str | None:
    """Why these kernels can't take a call, or None if they can."""
    if reason := sm90_unsupported(inputs.u):
        return reason
    for name, x in zip(ScanInputs._fields[:-1], inputs):
        if x is not None and x.dtype not in DTYPES:
            return f"it computes in float32, and {name} is {x.dtype}"
    if inputs.A.shape[1] > MAX_N:
        return f"a state of more than {MAX_N} numbers a channel has no room in registers"
    return None


def padded(N: int) -> int:
    """Numbers of a state in registers."""
    return max(4, 1 << (N - 1).bit_length())


def empty_states(inputs: ScanInputs, for_backward: bool) -> Tensor:
    """As inputs.empty_states, with this CHUNK; none unless a backward follows."""
    u = inputs.u
    chunks = u.shape[0] * u.shape[1] // CHUNK + 2 if for_backward else 0
    return u.new_empty(chunks, inputs.A.shape[1], u.shape[2], dtype=torch.float32)
