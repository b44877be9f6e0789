"""Other numbers of sequences, tokens and heads, or other lengths packed, take the same kernels.

There are few ways that a call can go: with fewer programs than the card takes at once, or with
more, which some tiles are chosen by; with its sequences split over programs, where they are few and
long; where its workspace would be large, by rows of the batch or by spans of tokens, of packed
sequences too; the delta rule back in one walk, where it has many programs. The sizes say which.
Each is compiled when it is first wanted; within one nothing is compiled again.
"""

from collections.abc import Sequence

import pytest

from slipstream.compiler.trace import trace
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from slipstream.tools.catalog import SAMPLES, Sample, Shape

pytestmark = pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="wants Triton's JIT")
# Samples of X heads have a fixed number of them; the others take those kernels with many programs.
CHUNKED = [
    x
    for x in SAMPLES
    if x.op.startswith("chunk_") and x.op != "chunk_hgrn" and "BTX" not in x.tensors
]
WAYS = {
    "few programs": ((2, 300, 16), (1, 301, 33), (7, 64, 5), (1, 1, 1)),
    "many programs": ((1, 200, 128), (5, 99, 70), (2, 150, 80)),
    "split": ((1, 32768, 2), (1, 30001, 2), (2, 32000, 1)),
    "rows": ((2, 8000, 64), (2, 8050, 66), (2, 8100, 65)),
    "spans": ((1, 8192, 94), (1, 12345, 90), (1, 9000, 80)),
    "one walk back": ((1, 8192, 96), (1, 12345, 100), (1, 9000, 128)),
}
PACKED = ((2, 300, 16), (4, 133, 8), (16, 10, 2), (3, 64, 10))
PACKED_SPANS = ((4, 8192, 96), (3, 9001, 80), (5, 9000, 72))


def kernels(sample: Sample, size: tuple[int, int, int], packed: bool) -> dict[str, str]:
    B, T, H = size
    shape = Shape(B=B, T=T, H=H, packed=packed)
    jobs = trace(lambda device: sample.call(sample.inputs(shape, device)), "sm_90", True)
    return {job.key: job.name for job in jobs}


def assert_same(sample: Sample, sizes: Sequence[tuple[int, int, int]], packed: bool) -> None:
    first = kernels(sample, sizes[0], packed)
    for size in sizes[1:]:
        new = {name for key, name in kernels(sample, size, packed).items() if key not in first}
        assert not new, f"{sample.op}: {size} after {sizes[0]} compiles {new}"


@pytest.mark.parametrize("sample", CHUNKED, ids=lambda x: x.op)
@pytest.mark.parametrize("way", WAYS)
def test_other_sizes_compile_nothing_new(sample: Sample, way: str) -> None:
    assert_same(sample, WAYS[way], False)


@pytest.mark.parametrize("sample", CHUNKED, ids=lambda x: x.op)
def test_other_packed_lengths_compile_nothing_new(sample: Sample) -> None:
    assert_same(sample, PACKED, True)


@pytest.mark.parametrize("sample", CHUNKED, ids=lambda x: x.op)
def test_other_packed_spans_compile_nothing_new(sample: Sample) -> None:
    assert_same(sample, PACKED_SPANS, True)


def test_packed_sequences_of_these_sizes_go_in_spans() -> None:
    sample = next(x for x in CHUNKED if x.op == "chunk_kda")
    for size in PACKED_SPANS:
        assert "load_carry_kernel" in kernels(sample, size, True).values()
