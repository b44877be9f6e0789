"""causal_conv1d.causal_conv1d_interface: the convolution of a sequence and of its next tokens."""

from slipstream.compat.fixed import fixed
from slipstream.ops import causal_conv1d as ops

_OPTIONS = "initial_states return_final_states final_states_out activation"
_NEXT = "x conv_state weight bias activation cache_seqlens"
causal_conv1d_fn = fixed(
    ops.causal_conv1d_fn,
    "causal_conv1d_fn",
    """slipstream.ops.causal_conv1d_fn by the arguments of causal_conv1d; x [B, D, T] -> [B, D, T],
    or that and the final states [B, D, W-1].""",
    order=f"x weight bias seq_idx {_OPTIONS}",
)
causal_conv1d_update = fixed(
    ops.causal_conv1d_update,
    "causal_conv1d_update",
    "slipstream.ops.causal_conv1d_update by the arguments of causal_conv1d.",
    order=f"{_NEXT} conv_state_indices",
)
causal_conv1d_ref = fixed(
    ops.causal_conv1d_fn,
    "causal_conv1d_ref",
    "causal_conv1d_fn by the formula, in plain torch.",
    order=f"x weight bias {_OPTIONS} seq_idx",
    impl="reference",
)
causal_conv1d_update_ref = fixed(
    ops.causal_conv1d_update,
    "causal_conv1d_update_ref",
    "causal_conv1d_update by the formula, in plain torch.",
    order=_NEXT,
    impl="reference",
)
