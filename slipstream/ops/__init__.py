"""What users call: one module an operator."""

from slipstream.ops.gated_delta_rule import (
    chunk_gated_delta_rule as chunk_gated_delta_rule,
)
from slipstream.ops.gated_delta_rule import (
    fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule,
)
