"""What the modules that launch the linear family's kernels can do beyond `forward` and `backward`.

Each has a constant CAPABILITIES, which op.py and workspace.py read.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BackendCapabilities:
    """
    Attributes:
        writes_out: forward and backward take `out`, the memory of their results, so that a long
            call can be computed in slices.
        checkpoints: forward takes `checkpoints`, and leaves there the states between slices.
        skips_empty: both take `active`, how many of the packed sequences have tokens in a slice.
        fp32_out: forward takes `dtype`, that of o.
        overwrites_q: backward takes `overwrite_q`: q's memory may become a gradient's.
        skips_gate_grad: backward takes `gate_gradient`; False leaves the gate's gradient out.
        saves_wy: forward takes `save`, and then also returns what backward takes as `saved`.
    """

    writes_out: bool = False
    checkpoints: bool = False
    skips_empty: bool = False
    fp32_out: bool = False
    overwrites_q: bool = False
    skips_gate_grad: bool = False
    saves_wy: bool = False
