"""fla.ops.cp: context parallelism under fla's names, on slipstream.parallel."""

from slipstream.compat.fixed import missing_names
from slipstream.compat.fla.ops.cp.context import FLACPContext as FLACPContext
from slipstream.compat.fla.ops.cp.context import build_cp_context as build_cp_context

__getattr__ = missing_names(
    __name__,
    (
        "all_gather_into_tensor",
        "all_reduce_sum",
        "conv_cp_send_recv_bwd",
        "conv_cp_send_recv_fwd",
        "send_recv_bwd",
        "send_recv_fwd",
    ),
)
