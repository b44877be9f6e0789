"""mamba_ssm's name of Mamba-3 against its step, and in two calls."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compat.mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

B, T, G, H, N, P, A = 2, 11, 1, 4, 8, 6, 2


def arguments() -> dict[str, Tensor]:
    made = {"Q": (B, T, G, N), "K": (B, T, G, N), "V": (B, T, H, P), "ADT": (B, H, T)}
    made |= {"DT": (B, H, T), "Trap": (B, H, T), "Q_bias": (H, N), "K_bias": (H, N)}
    made |= {"Angles": (B, T, H, A), "D": (H,), "Z": (B, T, H, P)}
    given = {name: torch.randn(shape).double() for name, shape in made.items()}
    return given | {"ADT": -given["ADT"].abs(), "DT": given["DT"].sigmoid()}


def turned(x: Tensor, theta: Tensor) -> Tensor:
    first, second = x[..., : 2 * A].unflatten(-1, (A, 2)).unbind(-1)
    cos, sin = theta.cos(), theta.sin()
    pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return torch.cat([pairs.flatten(-2), x[..., 2 * A :]], -1)


def test_siso_is_its_steps() -> None:
    x: Any = arguments()
    theta, S = torch.zeros(B, H, A).double(), torch.zeros(B, H, P, N).double()
    key, value, found = torch.zeros(B, H, N).double(), torch.zeros(B, H, P).double(), []
    for t in range(T):
        dt, share, v = x["DT"][:, :, t], x["Trap"][:, :, t].sigmoid(), x["V"][:, t]
        theta = theta + math.pi * dt[..., None] * x["Angles"][:, t].tanh()
        q, k = (turned(x[n][:, t] + x[f"{n}_bias"], theta) for n in "QK")
        alpha = x["ADT"][:, :, t].exp()
        S = alpha[..., None, None] * S
        S = S + (alpha * dt * (1 - share))[..., None, None] * value[..., None] * key[..., None, :]
        S = S + (dt * share)[..., None, None] * v[..., None] * k[..., None, :]
        y = (S * q[..., None, :]).sum(-1) + x["D"][:, None] * v
        found.append(y * F.silu(x["Z"][:, t]))
        key, value = k, v
    got = mamba3_siso_combined(**x, return_final_states=True)
    want = (torch.stack(found, 1), theta, S, key, value)
    torch.testing.assert_close(list(got), list(want))
    torch.testing.assert_close(mamba3_siso_combined(**x), want[0])


def test_siso_goes_on_from_its_states() -> None:
    x = arguments()
    whole = mamba3_siso_combined(**x)

    def cut(begin: int, end: int) -> dict[str, Tensor]:
        timed = {n: y[:, begin:end] for n, y in x.items() if n in ("Q", "K", "V", "Angles", "Z")}
        return x | timed | {n: x[n][:, :, begin:end] for n in ("ADT", "DT", "Trap")}

    first, *states = mamba3_siso_combined(**cut(0, 4), return_final_states=True)
    second = mamba3_siso_combined(**cut(4, T), Input_States=tuple(states))
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    packed = {n: y[:1] if y.dim() > 2 else y for n, y in x.items()}
    offsets = torch.tensor([0, 4, T], dtype=torch.int32)
    got = mamba3_siso_combined(**packed, cu_seqlens=offsets)
    torch.testing.assert_close(got[:, :4], first[:1])
