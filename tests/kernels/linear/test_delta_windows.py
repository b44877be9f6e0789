"""Which chunks of packed sequences a span takes (hopper/delta_windows.py), as its docstring says.

As test_triton_interpreted.py: the kernel runs in a process of its own, this file as a script.
"""

import pytest
import torch

from slipstream.kernels.linear.hopper.plan import CHUNK
from slipstream.kernels.linear.terms import Terms
from slipstream.kernels.linear.triton.plan import HAVE_TRITON
from tests.kernels.interpreted import run
from tests.operators import offsets

# lengths, and tokens of nobody after them
CASES = [
    ((300, 300, 300, 300), 0),
    ((5, 0, 1000, 1, 64), 7),
    ((0, 0, 0), 40),
    ((2000,), 0),
    ((63, 65, 64, 128, 1, 0, 700) * 40, 3),
    (tuple(range(0, 1200, 37)), 100),
]
SHAPES = [(1, 2), (2, 3), (3, 5), (4, 4), (400, 3)]  # sequences that go at once, spans


def packed(lengths: tuple[int, ...], past: int) -> Terms:
    x = torch.zeros(1, sum(lengths) + past, 1, 1)
    return Terms(x, x, x, cu_seqlens=offsets(lengths))


def wanted(lengths: tuple[int, ...], rows: int, room: int, spans: int) -> torch.Tensor:
    """Chunk after chunk."""
    chunks = [-(-n // CHUNK) for n in lengths]
    order = sorted((n // rows, c, n) for n, count in enumerate(chunks) for c in range(count))
    table = torch.zeros(spans + 1, len(lengths), 4, dtype=torch.int32)
    past = [0] * len(lengths)
    for i in range(spans + 1):
        table[i, :, 0] = torch.tensor(past)
        for _, c, n in order[i * room : (i + 1) * room]:
            assert c == past[n]
            past[n] += 1
        table[i, :, 1] = torch.tensor(past)
        own = table[i, :, 1] - table[i, :, 0]
        table[i, :, 2] = own.cumsum(0) - own
        table[i, :, 3] = torch.arange(len(lengths)) % rows
    assert past == chunks
    return table


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_windows_hold_every_chunk_once_when_interpreted() -> None:
    run(script="tests.kernels.linear.test_delta_windows")


if __name__ == "__main__":
    from slipstream.kernels.linear.hopper.delta_windows import Cut, windows

    for lengths, past in CASES:
        terms = packed(lengths, past)
        for rows, spans in SHAPES:
            rows = min(rows, len(lengths))
            room = max(-(-(terms.q.shape[1] // CHUNK + len(lengths)) // spans), rows)
            got = windows(terms, Cut(spans, rows, room))
            want = wanted(lengths, rows, room, spans)
            assert torch.equal(got, want), (lengths, rows, spans, got, want)
            going = (want[1:, :, 0] > 0) & (want[1:, :, 0] < want[-1, :, 1])
            moved = want[:, :, 1] > want[:, :, 0]
            for i in range(spans - 1):  # slots are others', and what goes on is met by the next
                n = going[i].nonzero()[:, 0]
                assert len(set(want[i + 1, n, 3].tolist())) == len(n)
                assert moved[i, n].all() and moved[i + 1, n].all()
        print(len(lengths), "ok", flush=True)
