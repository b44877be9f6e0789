"""Other numbers of sequences, tokens and heads, or other lengths packed, take the same kernels.
There are few ways that a call can go: with fewer programs than the card takes at once, or with
more, which some tiles are chosen by; with its sequences split over programs, where they are few and
long; the delta rule back in one scan, where it has many programs; packed, with so few heads that a
scan's programs have a multiprocessor each. The sizes say which. Each is compiled when it is first
wanted; within one nothing is compiled again."""

from collections.abc import Sequence

import pytest

from slipstream.compiler.trace import trace
from slipstream.tools.catalog import Sample, Shape
from tests.support import wants
from tests.support.chunk_sizes import CHUNKED, PACKED, WAYS

pytestmark = wants.compiler
# one of each transition
EACH = {"chunk_simple_gla", "chunk_gla", "chunk_gsa", "chunk_gated_delta_rule", "chunk_rwkv7"}


def kernels(sample: Sample, size: tuple[int, int, int], packed: bool) -> dict[str, str]:
    B, T, H = size
    shape = Shape(B=B, T=T, H=H, packed=packed)
    jobs = trace(
        lambda device: sample.call(sample.inputs(shape, device, blank=True)), "sm_90", True
    )
    return {job.key: job.name for job in jobs}


def assert_same(sample: Sample, sizes: Sequence[tuple[int, int, int]], packed: bool) -> None:
    first = kernels(sample, sizes[0], packed)
    for size in sizes[1:]:
        new = {name for key, name in kernels(sample, size, packed).items() if key not in first}
        assert not new, f"{sample.op}: {size} after {sizes[0]} compiles {new}"


@pytest.mark.parametrize("sample", CHUNKED, ids=lambda x: x.op)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(which=lambda sample, way: way == "few programs" or sample.op in EACH)
def test_other_sizes_compile_nothing_new(sample: Sample, way: str) -> None:
    assert_same(sample, WAYS[way], False)


@pytest.mark.parametrize("sample", CHUNKED, ids=lambda x: x.op)
@pytest.mark.parametrize("way", PACKED)
@pytest.mark.sample(which=lambda sample, way: sample.op in EACH)
def test_other_packed_lengths_compile_nothing_new(sample: Sample, way: str) -> None:
    assert_same(sample, PACKED[way], True)
