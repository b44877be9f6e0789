"""Shared by the compilations of the linear family's kernels."""

from slipstream.compiler.aot import Job
from slipstream.tools.catalog import FURTHER, REPRESENTATIVE, Shape, chosen

# mma.sync of a warp in tril_inverse.py: nine products of blocks, each 8 columns at a time, and
# three times for the halves of its operands.
INVERSE = 9 * 2 * 3


# Pointers by bytes an element.
TYPES = {2: "*bf16", 4: "*fp32"}


SHAPES = {str(x): x for x in (*REPRESENTATIVE, *FURTHER)}


def jobs(operator: str, shape: Shape, arch: str, backward: bool = True) -> list[Job]:
    from slipstream.compiler.trace import trace

    sample, *_ = chosen([operator])  # of those with other gates the first
    return trace(lambda device: sample.call(sample.inputs(shape, device), "triton"), arch, backward)
