"""The kernel variants of an operator's calls, by their keys; sizes of calls that share kernels."""

from dataclasses import replace

from slipstream.compiler.aot import Job
from slipstream.runtime.compile_ahead import Size, sizes
from slipstream.tools.backend_query import trace_operator
from slipstream.tools.catalog import SAMPLES, Sample, Shape


def with_size(shape: Shape, size: Size) -> Shape:
    """A shape of another size; packed sequences are of about one length."""
    if not size.sequences:
        keys = size.keys or None
        return replace(shape, B=size.B, T=size.T, packed=False, lengths=None, keys=keys)
    each, more = divmod(size.T, size.sequences)
    lengths = (*[each + 1] * more, *[each] * (size.sequences - more))
    return replace(shape, B=1, T=size.T, packed=True, lengths=lengths)


def ladder(shape: Shape) -> list[Shape]:
    """The shapes of runtime/compile_ahead.py that are packed, or not, as `shape` is."""
    return [with_size(shape, size) for size in sizes(shape.dims()["G"], shape.is_packed)]


def variants(
    sample: Sample, shape: Shape, any_size: bool = False, arch: str = "sm_90"
) -> dict[str, Job]:
    """Those of calls of this shape, or of any size."""
    got = trace_operator(sample, shape, arch, impls=(None,), any_size=any_size)
    return {job.key: job for job in got.all}


# Samples of X or Y heads have a fixed number; the others take X's kernels with many programs.
# The scan of hgrn has a kernel for one sequence alone, which others take too.
SCANNING = ("chunk_hgrn", "chunk_mamba3")
FIXED = ("q=BTX", "q=BTY")
CHUNKED = [
    x
    for x in SAMPLES
    if x.op.startswith("chunk_") and not (x.op.startswith(SCANNING) or x.tensors.startswith(FIXED))
]

# There are few ways that a call can go: with fewer programs than the card takes at once, or with
# more, which some tiles are chosen by; with its sequences split over programs, where they are few
# and long; the delta rule back in one scan, where it has many programs; packed, with so few heads
# that a scan's programs have a multiprocessor each. The sizes say which. Each is compiled when it
# is first wanted; within one nothing is compiled again.
WAYS = {
    "few programs": ((2, 300, 16), (1, 301, 33), (7, 64, 5), (1, 1, 1)),
    "many programs": ((1, 200, 128), (5, 99, 70), (2, 150, 80)),
    "split": ((1, 32768, 4), (1, 30001, 4), (2, 32000, 2)),
    "rows": ((2, 8000, 64), (2, 8050, 66), (2, 8100, 65)),
    "many heads": ((1, 8192, 94), (1, 12345, 90), (1, 9000, 80)),
    "one scan back": ((1, 8192, 96), (1, 12345, 100), (1, 9000, 128)),
}

PACKED = {
    "few heads": ((4, 133, 8), (16, 10, 2), (3, 64, 7)),
    "more heads": ((2, 300, 20), (3, 133, 20), (2, 64, 30)),
}
