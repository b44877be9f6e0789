"""A float32 tile as two of bf16, so that three products of tensor cores keep 16 bits of it."""

from slipstream.kernels.primitives.sm90 import gl, gluon


@gluon.jit
def halves(b):
    """b cut to bf16, and the rest of it, rounded."""
    # cut, not rounded: the rest is exact then, and one instruction does it
    high = (b.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (b - high).to(gl.bfloat16)
