"""Tensors of a layer's state that a cache keeps in 8 bits, beside what stands for them.

A tensor `name` that is rounded is one of 8 bits with `name`_scale: a recurrent state, which has
`name`_residual too (ops/quantize_state.py), or keys and values (common/rounded_keys.py). Layers
that can step on these do (Mixer.steps_rounded); for a call of any other layer they are made wide,
and rounded again after it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.common import rounded_keys
from slipstream.ops.quantize_state import dequantize_state, quantize_state

State = dict[str, Tensor]
RECURRENT = "recurrent"
PARTS = ("_scale", "_residual")
SCALE = PARTS[0]


class Rounding(NamedTuple):
    """Which tensors a cache keeps in 8 bits, and how.

    states: torch.int8, of recurrent states of matrices, or None.
    keys: torch.int8 or torch.float8_e4m3fn, of keys and values of softmax attention, or None.
    """

    states: torch.dtype | None = None
    keys: torch.dtype | None = None

    def check(self) -> None:
        if self.states not in (None, torch.int8):
            raise ValueError(f"state_dtype: want torch.int8 or None, got {self.states}")
        if self.keys not in (None, *rounded_keys.LARGEST):
            raise ValueError(
                f"key_dtype: want torch.int8, torch.float8_e4m3fn or None, got {self.keys}"
            )

    def expect(self, name: str, wanted: "Rounding") -> None:
        if self != wanted:
            kinds = "state_dtype and key_dtype"
            raise ValueError(f"{name}: want {kinds} {tuple(wanted)}, got {tuple(self)}")


AS_RETURNED = Rounding()


def is_rounded(state: Mapping[str, Tensor], name: str = RECURRENT) -> bool:
    return name + SCALE in state


def has_rounded(state: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(SCALE) for name in state)


def of_step(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The recurrent state as recurrent_step and mixer_step take it."""
    given = {"state": state[RECURRENT]}
    return given | {f"state{x}": state[RECURRENT + x] for x in PARTS if RECURRENT + x in state}


def rounded(state: State, rounding: Rounding, keys: Sequence[str] = ()) -> State:
    """A layer's state as `rounding` says; `keys` are the names of its keys and values."""
    made = dict(state)
    x = state.get(RECURRENT)
    if rounding.states is not None and x is not None and x.dim() == 4:
        made |= dict(zip((RECURRENT, *(RECURRENT + x for x in PARTS)), quantize_state(x)))
    if rounding.keys is not None:
        for name in keys:
            made[name], made[name + SCALE] = rounded_keys.encode(state[name], rounding.keys)
    return made


def rounding_of(state: State) -> Rounding:
    """How the tensors of a state are rounded."""
    dtypes = {x.dtype for name, x in state.items() if name != RECURRENT and is_rounded(state, name)}
    return Rounding(torch.int8 if is_rounded(state) else None, next(iter(dtypes), None))


def wide(state: State, dtype: torch.dtype) -> State:
    """Without anything in 8 bits, of a layer that computes in `dtype`."""
    if not has_rounded(state):
        return state
    made = {name: x for name, x in state.items() if not name.endswith(PARTS)}
    if is_rounded(state):
        parts = (state[RECURRENT], *(state[RECURRENT + x] for x in PARTS))
        of = torch.float64 if dtype == torch.float64 else torch.float32
        made[RECURRENT] = dequantize_state(*parts, dtype=of)
    for name, x in made.items():
        if name != RECURRENT and is_rounded(state, name):
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
