"""On a device, too, other sizes and other packed lengths find their kernels compiled."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from slipstream.runtime import compile_ahead
from slipstream.tools.catalog import Sample, Shape
from tests.support.chunk_sizes import CHUNKED, PACKED, WAYS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles, or finds in its cache on disk, meanwhile."""
    from triton import knobs

    asked: list[str] = []

    def note(*, src: Any, **_: Any) -> None:
        asked.append(src.name)

    listening: Any = note
    before, knobs.compilation.listener = knobs.compilation.listener, listening
    try:
        yield asked
    finally:
        knobs.compilation.listener = before


def both(sample: Sample, size: tuple[int, int, int], packed: bool) -> None:
    B, T, H = size
    args = sample.inputs(Shape(B=B, T=T, H=H, packed=packed), torch.device("cuda"))
    leaves = [x.requires_grad_() for x in args.values() if x.is_floating_point()]
    o, *_ = sample.call(args)
    torch.autograd.grad(o, leaves, torch.randn_like(o), allow_unused=True)
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("sample", CHUNKED, ids=lambda x: x.op)
def test_other_sizes_compile_nothing(sample: Sample, is_packed: bool) -> None:
    first, *others = PACKED if is_packed else WAYS["few programs"]
    both(sample, first, is_packed)
    compile_ahead.finish()
    with compilations() as asked:
        for size in others:
            both(sample, size, is_packed)
    assert not asked, f"{sample.op}: after {first} these sizes compile {set(asked)}: {others}"
