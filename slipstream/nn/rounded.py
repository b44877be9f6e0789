"""Keys and values that a cache keeps in 8 bits, beside what stands for them.

A tensor `name` that is rounded is one of 8 bits with `name`_scale (common/rounded_keys.py). A layer
with such keys steps on them; for a call of several tokens they are made wide, and rounded again
after it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.common import rounded_keys

State = dict[str, Tensor]
SCALE = "_scale"


def expect_key_dtype(dtype: torch.dtype | None) -> None:
    if dtype not in (None, *rounded_keys.LARGEST):
        raise ValueError(f"key_dtype: want torch.int8, torch.float8_e4m3fn or None, got {dtype}")


def is_rounded(state: Mapping[str, Tensor], name: str) -> bool:
    return name + SCALE in state


def has_rounded(state: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(SCALE) for name in state)


def rounded(state: State, dtype: torch.dtype | None, keys: Sequence[str]) -> State:
    """A layer's state with its keys and values, of the given names, in `dtype`."""
    made = dict(state)
    if dtype is not None:
        for name in keys:
            made[name], made[name + SCALE] = rounded_keys.encode(state[name], dtype)
    return made


def key_dtype_of(state: State) -> torch.dtype | None:
    """The dtype of what is in 8 bits."""
    return next((x.dtype for name, x in state.items() if is_rounded(state, name)), None)


def wide(state: State, dtype: torch.dtype) -> State:
    """Without anything in 8 bits, of a layer that computes in `dtype`."""
    if not has_rounded(state):
        return state
    made = {name: x for name, x in state.items() if not name.endswith(SCALE)}
    for name, x in made.items():
        if is_rounded(state, name):
            made[name] = rounded_keys.decode(x, state[name + SCALE], dtype)
    return made


def as_bytes(state: State | None) -> dict[str, tuple[torch.dtype, Tensor]] | None:
    """Float8 as bytes beside its dtype, since torch does not unpickle it."""
    if state is None:
        return None
    float8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    return {n: (x.dtype, x.view(torch.uint8) if x.dtype in float8 else x) for n, x in state.items()}


def of_bytes(held: dict[str, tuple[torch.dtype, Tensor]] | None) -> State | None:
    """What as_bytes was given."""
    if held is None:
        return None
    return {n: x if x.dtype == dtype else x.view(dtype) for n, (dtype, x) in held.items()}
