"""mamba_ssm's name of Mamba-3 against its step, and in two calls."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compat.mamba_ssm.ops.tilelang.mamba3.mamba3_mimo import mamba3_mimo
from slipstream.compat.mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

B, T, G, H, N, P, A = 2, 11, 1, 4, 8, 6, 2


def arguments() -> dict[str, Any]:
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


def turned_halves(x: Tensor, theta: Tensor) -> Tensor:
    pairs = x.unflatten(-1, (2, -1)).mT.flatten(-2)
    return turned(pairs, theta).unflatten(-1, (-1, 2)).mT.flatten(-2)


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
    # mamba_ssm keeps angles below a turn
    want = (torch.stack(found, 1), torch.remainder(theta, 2 * math.pi), S, key, value)
    torch.testing.assert_close(list(got), list(want))
    torch.testing.assert_close(mamba3_siso_combined(**x), want[0])


def test_siso_goes_on_from_its_states() -> None:
    x = arguments()
    whole = mamba3_siso_combined(**x)

    def cut(begin: int, end: int) -> dict[str, Any]:
        timed = {n: y[:, begin:end] for n, y in x.items() if n in ("Q", "K", "V", "Angles", "Z")}
        return x | timed | {n: x[n][:, :, begin:end] for n in ("ADT", "DT", "Trap")}

    first, *states = mamba3_siso_combined(**cut(0, 4), return_final_states=True)
    second = mamba3_siso_combined(**cut(4, T), Input_States=tuple(states))
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    packed = {n: y[:1] if y.dim() > 2 else y for n, y in x.items()}
    offsets = torch.tensor([0, 4, T], dtype=torch.int32)
    got = mamba3_siso_combined(**packed, cu_seqlens=offsets)
    torch.testing.assert_close(got[:, :4], first[:1])


R = 3


def mimo_arguments() -> dict[str, Any]:
    x = arguments()
    made = {"Q": (B, T, R, G, N), "K": (B, T, R, G, N), "Q_bias": (H, R, N), "K_bias": (H, R, N)}
    made |= dict.fromkeys(("MIMO_V", "MIMO_Z", "MIMO_Out"), (H, R, P))
    return x | {name: torch.randn(shape).double() for name, shape in made.items()}


FIXED: Any = {"chunk_size": 16, "rotary_dim_divisor": 4, "dtype": torch.float64}


def mimo_by_steps(x: dict[str, Tensor], T: int, gated: bool) -> tuple[Tensor, list[Tensor]]:
    """As Mamba-3's own decoding: channels i and i + N / 2 are turned, then the step."""
    theta, S = torch.zeros(B, H, A).double(), torch.zeros(B, H, P, N).double()
    key, value, found = torch.zeros(B, R, H, N).double(), torch.zeros(B, H, P).double(), []
    names = "MIMO_V", "MIMO_Z", "MIMO_Out", "Q_bias", "K_bias"
    up, up_z, down, bias_q, bias_k = (x[n].transpose(0, 1) for n in names)
    for t in range(T):
        dt, share, v = x["DT"][:, :, t], x["Trap"][:, :, t].sigmoid(), x["V"][:, t]
        theta = theta + math.pi * dt[..., None] * x["Angles"][:, t].tanh()
        c, b = (
            turned_halves(x[n][:, t] + bias, theta[:, None])
            for n, bias in (("Q", bias_q), ("K", bias_k))
        )
        alpha = x["ADT"][:, :, t].exp()
        S = alpha[..., None, None] * S
        for factor, w, k in ((alpha * dt * (1 - share), value, key), (dt * share, v, b)):
            S = S + torch.einsum("nh,nrhp,nrhs->nhps", factor, w[:, None] * up, k)
        y = torch.einsum("nhps,nrhs->nrhp", S, c) + x["D"][:, None] * v[:, None] * up
        if gated:
            y = (y * F.silu(x["Z"][:, t, None] * up_z) * down).sum(1)
        key, value = b, v
        found.append(y)
    return torch.stack(found, 1), [theta.remainder(2 * math.pi), S, key, value]


def test_mimo_is_its_steps() -> None:
    x: Any = mimo_arguments()
    want, states = mimo_by_steps(x, T, True)
    got, *after = mamba3_mimo(**x, **FIXED, return_state=True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(after, states)
    want, _ = mimo_by_steps(x, T, False)
    bare = x | dict.fromkeys(("MIMO_Z", "MIMO_Out", "Z"))
    torch.testing.assert_close(mamba3_mimo(**bare, **FIXED), want)
    weight = torch.randn(H, P).double()
    y = want * (want.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    z = x["Z"][:, :, None] * x["MIMO_Z"].transpose(0, 1)
    y = (y * F.silu(z) * x["MIMO_Out"].transpose(0, 1)).sum(2)
    normed = {"fuse_pregate_headwise_rms_norm": True, "outproj_norm_weight": weight}
    torch.testing.assert_close(mamba3_mimo(**x, **FIXED, **normed), y)
