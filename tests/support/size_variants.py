"""The kernel variants of an operator's calls, by their keys."""

from dataclasses import replace

from slipstream.compiler.aot import Job
from slipstream.runtime.compile_ahead import Size, sizes
from slipstream.tools.backend_query import trace_operator
from slipstream.tools.catalog import Sample, Shape


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
