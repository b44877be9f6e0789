"""Which drafts the Gluon kernel takes, decided without importing it."""

import torch

from slipstream.kernels.mixer_step.inputs import StepInputs, StepOptions
from slipstream.runtime.backends import sm90_unsupported

WIDTHS = (64, 128)
ROWS = 16  # keys of all tokens, and queries of new ones


def drafts_on_sm90(inputs: StepInputs, options: StepOptions) -> bool:
    """Whether the kernel takes these drafts: in 16 bits, as float32 keeps the bits of a step."""
    _, T, _, _, K, V = inputs.sizes
    return (
        inputs.num_accepted is not None
        and 0 < options.pending < T
        and 2 * T - options.pending <= ROWS
        and inputs.q.dtype != torch.float32
        and (inputs.g is None or inputs.g.dim() == 3)
        and inputs.write is None
        and inputs.D is None
        and not options.dt_scales_v
        and K in WIDTHS
        and V in WIDTHS
        and options.norm_group_size == V
        and sm90_unsupported(inputs.q) is None
    )
