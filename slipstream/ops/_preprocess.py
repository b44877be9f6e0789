"""What the delta operators may be asked to do to their arguments first: norms, gates, beta."""

import math

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.decay_gate.op import decay_gate
from slipstream.ops.norm import l2_norm


def l2_normalised(**tensors: Tensor) -> tuple[Tensor, ...]:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension of each."""
    for name, x in tensors.items():
        checks.expect_rank(name, x, 4, "[B, T, H, K]")
    checks.expect_floating(tensors)
    return tuple(l2_norm(x) for x in tensors.values())


def delta_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor:
    """Log decays from what a layer projects.

    -exp(A_log) * softplus(g + dt_bias), or, bounded below, lower_bound * sigmoid(exp(A_log) *
    (g + dt_bias)), where A_log None stands for 0.

    Args:
        g: [B, T, HV] or [B, T, HV, K], any float dtype; the result is float32 at least.
        A_log: [HV]. dt_bias: [HV], or [HV * K] for a gate of every channel.
        lower_bound: in [-5, 0).
    """
    checks.expect_lower_bound(lower_bound)
    given = {"g": g, "A_log": A_log, "dt_bias": dt_bias}
    checks.expect_floating(given)
    checks.expect_one_device(given)
    if dt_bias is not None:
        checks.expect_shape("dt_bias", dt_bias.flatten(), (math.prod(g.shape[2:]),))
    if A_log is not None:
        checks.expect_shape("A_log", A_log.flatten(), (g.shape[2],))
    elif lower_bound is None:
        raise ValueError("A_log: want a tensor [HV] with use_gate_in_kernel, got None")
    return decay_gate(g, A_log, dt_bias, lower_bound)


def beta_or_ones(beta: Tensor | None, v: Tensor) -> Tensor:
    checks.expect_rank("v", v, 4, "[B, T, HV, V]")
    return v.new_ones(v.shape[:3]) if beta is None else beta


def beta_sigmoid(beta: Tensor, is_raw: bool, allow_neg_eigval: bool) -> Tensor:
    """sigmoid(beta), or 2 sigmoid(beta): eigenvalues of the transition down to -1 instead of 0.

    In beta's dtype, the same bits as torch.sigmoid(beta) passed as beta; the gradient is that of
    the sigmoid before it is rounded.
    """
    if not is_raw:
        raise ValueError(
            "allow_neg_eigval: doubles the sigmoid of use_beta_sigmoid_in_kernel=True, "
            "which is off; pass beta in (0, 2) itself"
        )
    checks.expect_floating({"beta": beta})
    wide = beta.sigmoid() if beta.dtype == torch.float64 else beta.float().sigmoid()
    beta = wide.to(beta.dtype)
    return 2 * beta if allow_neg_eigval else beta
