"""consistent=True of operators in plain torch: they are called for 64 tokens of one sequence at a
time, with everything that they do before the recurrence.

On a CPU torch rounds exp, softplus or sigmoid of an element by where in memory it lies. So every
block has one shape and is a copy; what is missing of the last is padded with zeros, and with gates
that decay nothing.
"""

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from slipstream.common import checks, varlen
from slipstream.kernels.linear import inputs, prefix_states
from slipstream.runtime import backends, consistent

P = ParamSpec("P")
R = TypeVar("R")


def is_plain(x: Tensor, impl: str | None) -> bool:
    """Whether plain torch runs a call, for whose tensors no kernel would be asked."""
    return impl == "eager" or (impl is None and not (x.is_cuda or backends.INTERPRETED))


def by_blocks(fn: Callable[P, R]) -> Callable[P, R]:
    """A linear operator whose `consistent=True` in plain torch goes by blocks."""
    names = tuple(inspect.signature(fn).parameters)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        given: dict[str, Any] = {**dict(zip(names, args)), **kwargs}
        blocks = _Blocks.of(given)
        return fn(*args, **kwargs) if blocks is None else cast(R, blocks.run(fn))

    vars(fn)[checks.CONSISTENT] = call
    return fn


class _Blocks(NamedTuple):
    """given: arguments by name. tokens: those with a number, or row, for each token [B, T, ...].
    places: row, first token and end of each sequence."""

    given: dict[str, Any]
    tokens: dict[str, Tensor]
    places: list[tuple[int, int, int]]

    @classmethod
    def of(cls, given: dict[str, Any]) -> "_Blocks | None":
        """None where kernels run, or for arguments that fn refuses, or that have no tokens."""
        q = given.get("q", given.get("r"))
        if not isinstance(q, Tensor) or q.dim() != 4 or 0 in q.shape:
            return None
        if not is_plain(q, given.get("impl")):
            return None
        if given.get("context") is not None or given.get("reverse"):
            return None
        tensors = {n: x for n, x in given.items() if isinstance(x, Tensor) and x.dim() > 2}
        state = tensors.pop("initial_state", None)
        if any(x.shape[:2] != q.shape[:2] for x in tensors.values()):
            return None
        offsets = given.get("cu_seqlens")
        if offsets is None:
            places = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
        elif offsets.dim() == 1 and q.shape[0] == 1:
            varlen.check_cu_seqlens_values(offsets, q.shape[1])
            places = [(0, *ends) for ends in pairwise(offsets.tolist())]
        else:
            return None
        if not places or (state is not None and state.shape[0] != len(places)):
            return None
        return cls(given, tensors, places)

    def run(self, fn: Callable[..., Any]) -> tuple[Tensor, Tensor | None]:
        rows, states, initial = [], [], self.given.get("initial_state")
        prefix = self.given.get("prefix_states")
        if prefix is not None:
            q = self.given["q" if "q" in self.given else "r"]
            terms = inputs.LinearInputs(q, self.given["k"], self.given["v"])
            terms = terms._replace(cu_seqlens=self.given.get("cu_seqlens"))
            others = (x for x in self.given.values() if isinstance(x, Tensor))
            prefix = prefix_states.check(prefix, terms, *others)
            initial = None if initial is None else initial.clone()  # it may be rows of the pool
        for n, place in enumerate(self.places):
            to = None if prefix is None else (prefix.pool, prefix.rows[n].tolist())
            state = None if initial is None else initial[n : n + 1]
            o, state = self._sequence(fn, state, to, *place)
            rows.append(o)
            states.append(state)
        packed = self.given.get("cu_seqlens") is not None
        final = torch.cat(states) if self.given.get("output_final_state") else None
        return torch.cat(rows, dim=1 if packed else 0), final

    def _sequence(
        self,
        fn: Callable[..., Any],
        state: Tensor | None,
        prefix: tuple[Tensor, list[int]] | None,
        row: int,
        begin: int,
        end: int,
    ) -> tuple[Tensor, Tensor]:
        """prefix: a pool, and its rows for the states after blocks."""
        parts = []
        for at in range(begin, max(end, begin + 1), consistent.BLOCK):  # one of an empty sequence
            stop = min(at + consistent.BLOCK, end)
            block = {n: self._block(n, x[row : row + 1, at:stop]) for n, x in self.tokens.items()}
            ends: dict[str, Any] = {"initial_state": state, "output_final_state": True}
            ends |= {"cu_seqlens": None, "prefix_states": None}
            o, state = fn(**{**self.given, **block, **ends})
            parts.append(o[:, : stop - at])
            if prefix is not None and state is not None and stop - at == consistent.BLOCK:
                self._store(state, prefix[0], prefix[1][(at - begin) // consistent.BLOCK])
        assert state is not None
        return torch.cat(parts, dim=1), state

    def _store(self, state: Tensor, pool: Tensor, to: int) -> None:
        if to >= 0:
            pool[to] = state[0] if self.given.get("state_v_first") else state[0].mT

    def _block(self, name: str, x: Tensor) -> Tensor:
        missing = consistent.BLOCK - x.shape[1]
        raw = name in ("g", "gk") and self.given.get("use_gate_in_kernel", False)
        # of which softplus and sigmoid are 0
        value = torch.finfo(x.dtype).min / 2**16 if raw and x.dtype != torch.float16 else 0.0
        value = -3e4 if raw and x.dtype == torch.float16 else value
        if not missing:
            return x.clone(memory_format=torch.contiguous_format)
        return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing), value=value)
