"""The closed list of an operator's kernel variants: those that any size of a call asks for."""

from collections.abc import Iterable
from dataclasses import replace

from slipstream.compiler.aot import Job
from slipstream.runtime.size_ladder import Size, sizes
from slipstream.tools.backend_query import trace_operator
from slipstream.tools.catalog import Sample, Shape


def with_size(shape: Shape, size: Size) -> Shape:
    """A shape of another size; packed sequences are of about one length."""
    if not size.sequences:
        return replace(shape, B=size.B, T=size.T, packed=False, lengths=None)
    each, more = divmod(size.T, size.sequences)
    lengths = (*[each + 1] * more, *[each] * (size.sequences - more))
    return replace(shape, B=1, T=size.T, packed=True, lengths=lengths)


def ladder(shape: Shape) -> list[Shape]:
    """The shapes of runtime/size_ladder.py that are packed, or not, as `shape` is."""
    return [with_size(shape, size) for size in sizes(shape.dims()["G"], shape.is_packed)]


def variants(
    sample: Sample, shapes: Iterable[Shape], arch: str, backward: bool = True
) -> dict[str, Job]:
    """By their keys, the variants that calls of these shapes ask for; of `ladder(shape)`, those
    that calls like `shape` ask for, whatever their sizes."""
    found: dict[str, Job] = {}
    for shape in shapes:
        got = trace_operator(sample, shape, arch, backward, impls=(None,))
        found |= {job.key: job for job in got.all}
    return found
