"""The scope of `consistent=True`: within it nothing that decides about arithmetic looks at how many
sequences or tokens a call has.

Kernels then take every sequence as one segment, from its first chunk to its last, by the same
program. Plain torch has no such promise of torch's own functions, whose sums depend on sizes and,
on a CPU, on where an element lies; it works on one sequence and BLOCK tokens at a time.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.runtime.block_step import BlockStep

# Tokens between the places of a sequence at which it may be cut: a multiple of all chunks.
BLOCK = 64


class _Scope(threading.local):
    def __init__(self) -> None:
        # in each thread's own dictionary from the start: torch.compile guards on its being there
        self.on = False
        self.step: BlockStep | None = None


# Of this thread: `on` within consistent(), `step` within a decoding step of such a model.
consistent_scope = _Scope()


@contextmanager
def consistent(on: bool = True) -> Iterator[None]:
    """Calls within give the bits that any other cut or batch gives; on=False changes nothing."""
    before = consistent_scope.on
    consistent_scope.on = before or on
    try:
        yield
    finally:
        consistent_scope.on = before
