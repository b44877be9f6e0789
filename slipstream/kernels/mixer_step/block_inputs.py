"""slipstream::_block_inputs: a delta rule's chunk kernels' inputs for one token a row, one launch.

They are computed from the token's projections and written into the row's block.
triton/block_inputs.py has the formulas. No gradients.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.mixer_step.inputs import MAX_TAPS, UNIT_EPS, Blocks, TokenInputs
from slipstream.runtime import backends, guarded_launch, kernel_pair
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.dispatch import TRITON_OR_EAGER

# of heads whose rows the norm's kernel loads with 8 numbers a thread
WIDTHS = (64, 128, 256)


def unsupported_reason(t: TokenInputs, K: int) -> str | None:
    """Why the kernel can't take a call with keys of K channels, or None if it can."""
    if reason := backends.triton_unsupported(t.x, "x"):
        return reason
    if t.x.dtype.itemsize != 2 or K not in WIDTHS:
        return f"it takes heads of {', '.join(map(str, WIDTHS))} channels in 16 bits"
    if t.weight.shape[1] > MAX_TAPS:
        return f"it takes at most {MAX_TAPS} taps"
    tensors = (t.weight, t.bias, t.A_log, t.dt_bias)
    if not all(x is None or x.is_contiguous() for x in tensors):
        return "a parameter is not contiguous"
    return guarded_launch.known_failure(lambda: _kind(t, K), t.x.device)


def block_inputs(t: TokenInputs, blocks: Blocks, impl: str = TRITON_OR_EAGER) -> None:
    """Writes the blocks, and moves the windows on."""
    _call(*blocks, *t, impl=impl)


def _kind(t: TokenInputs, K: int) -> KernelKey:
    rest = t.weight.shape[1], t.g.dim() == 3, t.lower_bound is not None
    return ("mixer_step.block_inputs", t.x.dtype, t.weight.dtype, K, *rest)


def _impl(*args: Any) -> None:
    blocks, t, impl = Blocks(*args[:6]), TokenInputs(*args[6:-1]), args[-1]
    kind = _kind(t, blocks.q.shape[-1])
    kernel = "slipstream.kernels.mixer_step.triton.block_inputs:block_inputs"
    mismatch = partial(_mismatch, t, blocks)
    kernel_pair.guarded(impl, t.x.device, kernel, _eager, (t, blocks), lambda: kind, mismatch)


def _eager(t: TokenInputs, blocks: Blocks) -> None:
    row = torch.arange(t.x.shape[0], device=t.x.device)
    blocks.window.copy_(torch.cat([blocks.window[:, 1:], t.x[:, None]], 1))
    x = (blocks.window.float() * t.weight.float().t()).sum(1)
    x = x if t.bias is None else x + t.bias
    x = (F.silu(x) if t.silu else x).to(t.x.dtype)
    heads = [y.shape[2:] for y in (blocks.q, blocks.k, blocks.v)]
    q, k, v = (y.unflatten(-1, n) for y, n in zip(x.split([n.numel() for n in heads], -1), heads))
    q, k = (y * (y.float().square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt() for y in (q, k))
    a, rate = t.g.float(), t.A_log.float().exp()
    if t.dt_bias is not None:
        a = a + t.dt_bias.view(a.shape[1:])
    rate = rate if a.dim() == 2 else rate[:, None]
    bound = t.lower_bound
    g = -rate * F.softplus(a) if bound is None else bound * torch.sigmoid(rate * a)
    beta = t.beta.float().sigmoid().to(t.beta.dtype) * (1 + t.doubled)
    for y, token in zip(blocks[1:], (q, k, v, g, beta)):
        y[row, t.counts] = token.to(y.dtype)


def _mismatch(t: TokenInputs, like: Blocks) -> str | None:
    """The probe: three rows, at other places of blocks of five tokens."""

    values = kernel_pair.random_like
    blocks = {name: values(x, 3, 5, *x.shape[2:]) for name, x in like._asdict().items()}
    blocks["window"] = values(like.window, 3, *like.window.shape[1:])
    tokens = {name: values(x, 3, *x.shape[1:]) for name, x in t._asdict().items() if name in _ROWS}
    counts = torch.tensor([4, 0, 2], device=t.x.device)

    def run(tensors: kernel_pair.Given, impl: str) -> tuple[Tensor, ...]:
        written = Blocks(*(tensors[f"block {name}"] for name in Blocks._fields))
        rows = {name: tensors[name] for name in _ROWS}
        block_inputs(t._replace(**rows, counts=counts), written, impl)
        return written

    probe_inputs = tokens | {f"block {name}": x for name, x in blocks.items()}
    return kernel_pair.mismatch(
        lambda t: run(t, TRITON_OR_EAGER), lambda t: run(t, "eager"), probe_inputs, gradients=False
    )


_ROWS = ("x", "g", "beta")
_call = KernelOp(
    "block_inputs",
    "(Tensor(a!) window, Tensor(b!) q_block, Tensor(c!) k_block, Tensor(d!) v_block, "
    f"Tensor(e!) g_block, Tensor(f!) beta_block, {schema_of(TokenInputs)}, str impl) -> ()",
    _impl,
    lambda *args: None,
    replay=True,
)
