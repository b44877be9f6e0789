"""Mixes of one token each of N sequences with the one before, which is a row of a pool:
slipstream::_token_mix_step.

    y_m = x + (before - x) mu_m          m = 0 .. M-1
    before <- x

It has no gradient.
"""

import torch
from torch import Tensor

from slipstream.common import checks, pool_rows
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.time_mix.rwkv7 import wide
from slipstream.runtime import autograd, custom_op, dispatch, guarded_launch, token_ids


def run(x: Tensor, mu: Tensor, state: Tensor, indices: Tensor | None, impl: str | None) -> Tensor:
    """y [M, N, D]; the pool is updated."""
    checks.expect_rank("x", x, 2, "[N, D]")
    checks.expect_rank("mu", mu, 2, "[M, D]")
    N, D = x.shape
    checks.expect_shape("mu", mu, (mu.shape[0], D))
    checks.expect_rank("state", state, 2, "[slots, D]")
    checks.expect_shape("state", state, (N if indices is None else state.shape[0], D))
    checks.expect_index("state_indices", indices, (N,))
    tensors = {"x": x, "mu": mu, "state": state}
    checks.expect_one_device({**tensors, "state_indices": indices})
    checks.expect_floating(tensors)
    if autograd.wants_gradient(*tensors.values()):
        raise NotImplementedError(
            "token_mix_step: the state is overwritten, so there are no gradients; call it under "
            "torch.no_grad()"
        )
    impls = dispatch.choose(_CANDIDATES, (x, mu, state), impl, "token_mix_step", x).impls
    # in a graph that is captured it would be one more launch
    if not guarded_launch.is_capturing(x.device):
        token_ids.expect_below("state_indices", indices, state.shape[0], "slots")
    return _call(x, mu, state, indices, impl=impls)


def plain(x: Tensor, mu: Tensor, state: Tensor, indices: Tensor | None) -> Tensor:
    if indices is not None:
        token_ids.expect_unique("state_indices", indices, "slot")
    rows, token = pool_rows.PoolRows(indices, state.shape[0]), wide(x)
    before = rows.read(state).to(token.dtype)
    y = token + (before - token) * mu.to(token.dtype)[:, None]
    rows.write(state, x)
    return rows.or_zero(y.transpose(0, 1)).transpose(0, 1).to(x.dtype).contiguous()


def _kind(x: Tensor, mu: Tensor, state: Tensor) -> KernelKey:
    return ("token_mix_step.triton", x.dtype, mu.dtype, state.dtype, mu.shape[0])


def _unsupported_reason(x: Tensor, mu: Tensor, state: Tensor) -> str | None:
    if x.numel() == 0 or mu.numel() == 0:
        return "there are no tokens"
    if torch.float64 in (mu.dtype, state.dtype):
        return "it computes in float32, and a tensor is float64"
    if x.stride(1) != 1 or state.stride(1) != 1:
        return "rows of x or state are not contiguous"
    return None


_call = custom_op.KernelOp(
    "token_mix_step",
    "(Tensor x, Tensor mu, Tensor(a!) state, Tensor? state_indices, str impl) -> Tensor",
    fake=lambda x, mu, *_: x.new_empty(mu.shape[0], *x.shape),
    kernel="slipstream.kernels.time_mix.triton.token_mix_step:token_mix_step",
    plain=plain,
    kind=_kind,
    # three sequences of a pool of four, of as many channels
    probe={
        "x": (3, 0),
        "state": (4, 0),
        "state_indices": lambda x: torch.tensor([2, -1, 0], device=x.device),
    },
    replay=True,
)
_CANDIDATES = _call.candidates(_unsupported_reason)
