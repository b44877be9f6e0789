"""One launch of the Gluon scan with a decay per channel in the emulator, and its inputs."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import Segments, num_sequences
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import threads

C, K, V = 64, 128, 128
SCALE = 0.3


def gates(kind: str, *shape: int) -> Tensor:
    x = torch.rand(*shape, dtype=torch.float64)
    weak = -0.3 * x
    if kind == "strong":
        return -5 * x
    if kind == "huge":
        return torch.where(x < 0.1, -1e4, weak)
    if kind == "mixed":
        return torch.where(torch.rand_like(x) < 0.02, -50 * x, weak)
    return torch.where(x < 0.01, -torch.inf, weak) if kind == "reset" else weak


def inputs(case: tuple) -> LinearInputs:
    """Past the last sequence of packed ones is NaN."""
    T, H, HV, batch, kind, before, state = case
    lengths: Any = batch if isinstance(batch, tuple) else None
    B: Any = 1 if lengths else batch
    N = len(lengths) if lengths else B
    torch.manual_seed(0)
    make: dict[str, Any] = {"dtype": torch.float64}
    terms = LinearInputs(
        torch.randn(B, T, H, K, **make),
        torch.nn.functional.normalize(torch.randn(B, T, H, K, **make), dim=-1),
        torch.randn(B, T, HV, V, **make),
        g=gates(kind, B, T, HV, K),
        u=torch.randn(HV, K, **make) if before else None,
        initial_state=torch.randn(N, HV, K, V, **make) if state else None,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int() if lengths else None,
    )
    if lengths:
        for y in (terms.q, terms.k, terms.v, terms.g):
            assert y is not None
            y[:, sum(lengths) :] = torch.nan
    return terms


def scan(
    kernel: Any,
    t: LinearInputs,
    x: Tensor,
    s_in: Tensor | None,
    s_out: Tensor | None,
    reverse: bool = False,
    segments: Segments | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """y; with total nothing of it, but E and total of segments."""
    HV, X = x.shape[2:]
    y = torch.full(x.shape, torch.nan, dtype=torch.float64)
    tiles = [(t.q, K), (t.k, K), (x, 64), (t.g, K), (y, 64)]
    made: list[Any] = [
        emulator.Descriptor(a.clone(), a.shape[2] * a.shape[3], C, n) for a, n in tiles
    ]
    made[-1] = emulator.Descriptor(y, HV * X, C, 64)
    given = [y, t.u, s_in, s_out, t.cu_seqlens]
    if total is not None:
        made[0] = made[-1] = given[0] = given[1] = None
    pointers = [None if p is None else emulator.Pointer(p.contiguous()) for p in given]
    scales = (1 / SCALE, SCALE) if reverse else (1.0, 1.0)
    T, heads = t.v.shape[1:3]
    segment = T if segments is None else segments.tokens
    sizes = T, t.sequences, heads, t.q.shape[2], segment
    flags: dict[str, Any] = {
        "K": K,
        "X": X,
        "C": C,
        "ST": 2,
        "LEVELS": 6,
        "BOUND": 60.0,
        "SHIFT": 60.0,
    }
    flags |= {"REVERSE": reverse, "HAS_U": given[1] is not None, "HAS_S_IN": s_in is not None}
    flags |= {"HAS_S_OUT": s_out is not None, "SPLIT": segments is not None}
    flags |= {"PACKED": t.cu_seqlens is not None}
    flags |= {} if total is None else {"total_ptr": emulator.Pointer(total)}
    args = (*made, *pointers, SCALE, *scales, *sizes)
    threads.launch(kernel, HV * num_sequences(t, segments), args, **flags)
    return y
