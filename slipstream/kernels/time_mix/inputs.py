"""The inputs of the operators around RWKV-7's recurrence, in the order of their schemas; rwkv7.py
has the formulas. B batch, T tokens, D channels, H heads of K channels, V = K."""

import math
from typing import NamedTuple

from torch import Tensor

# of the source: a decay is at least exp(-exp(-1/2)) = 0.545
SLOWEST_LOG_DECAY = -math.exp(-0.5)
# inside the root of the norm of keys
EPS = 1e-12


class TermsInputs(NamedTuple):
    """v, v_gate and first_value are all given, or none of them."""

    w: Tensor  # [B, T, D] up to first_value, as projected
    k: Tensor
    a: Tensor
    v: Tensor | None
    v_gate: Tensor | None
    first_value: Tensor | None
    k_k: Tensor  # [D], as all further ones
    k_a: Tensor
    w_bias: Tensor | None = None
    a_bias: Tensor | None = None
    v_bias: Tensor | None = None  # of v_gate


class TermsGrads(NamedTuple):
    """Gradients of the terms; those of k' and v' come once more from what `output` reads."""

    dw_out: Tensor  # [B, T, H, K], as all of them
    dk_out: Tensor
    da_out: Tensor
    db_out: Tensor
    dv_out: Tensor | None
    dk_read: Tensor | None
    dv_read: Tensor | None


class OutputInputs(NamedTuple):
    o: Tensor  # [B, T, H, K] up to v
    r: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor  # [B, T, D]
    weight: Tensor  # [D], of the norm
    bias: Tensor
    r_k: Tensor  # [H, K]


class StepInputs(NamedTuple):
    """N sequences, D channels, H heads of K. v_gate and first_value are both given, or neither."""

    r: Tensor  # [N, D] up to first_value
    w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    g: Tensor
    v_gate: Tensor | None
    first_value: Tensor | None
    w_bias: Tensor | None  # [D], as all further ones but r_k
    a_bias: Tensor | None
    v_bias: Tensor | None
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor  # [H, K]
    norm_weight: Tensor
    norm_bias: Tensor


TOKENS = StepInputs._fields[: StepInputs._fields.index("w_bias")]


class LowRankInputs(NamedTuple):
    """Behind the first matrices [N, rank], and the second ones [rank, D]; of one dtype."""

    w: Tensor
    a: Tensor
    g: Tensor
    v: Tensor | None
    w_up: Tensor
    a_up: Tensor
    g_up: Tensor
    v_up: Tensor | None
