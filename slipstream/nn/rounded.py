"""Tensors of a layer's state that a cache keeps in 8 bits, beside what stands for them.

A tensor `name` that is rounded is one of 8 bits with `name`_scale, and of a recurrence also
`name`_residual (ops/quantize_state.py). Layers that can step on these do (Mixer.steps_rounded);
for a call of any other layer they are made wide, and rounded again after it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.ops.quantize_state import dequantize_state, quantize_state

State = dict[str, Tensor]
RECURRENT = "recurrent"
PARTS = ("_scale", "_residual")


def is_rounded(state: Mapping[str, Tensor], name: str = RECURRENT) -> bool:
    return name + PARTS[0] in state


def has_rounded(state: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(PARTS[0]) for name in state)


def of_step(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The recurrent state as recurrent_step and mixer_step take it."""
    given = {"state": state[RECURRENT]}
    return given | {f"state{x}": state[RECURRENT + x] for x in PARTS if RECURRENT + x in state}


def rounded(state: State) -> State:
    """With the recurrent state in int8, if there is one of matrices."""
    x = state.get(RECURRENT)
    if x is None or x.dim() != 4:
        return state
    parts = quantize_state(x)
    return state | dict(zip((RECURRENT, *(RECURRENT + x for x in PARTS)), parts))


def wide(state: State, dtype: torch.dtype) -> State:
    """With the recurrent state as numbers, of a layer that computes in `dtype`."""
    if not is_rounded(state):
        return state
    others = {name: x for name, x in state.items() if not name.endswith(PARTS)}
    parts = (state[RECURRENT], *(state[RECURRENT + x] for x in PARTS))
    of = torch.float64 if dtype == torch.float64 else torch.float32
    return others | {RECURRENT: dequantize_state(*parts, dtype=of)}
