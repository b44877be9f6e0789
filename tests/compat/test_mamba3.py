"""mamba_ssm's name of Mamba-3 against its step, and in two calls."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import layers
from slipstream.compat.mamba_ssm.modules.mamba3 import Mamba3
from slipstream.compat.mamba_ssm.ops.cute.mamba3.mamba3_step_fn import mamba3_step_fn
from slipstream.compat.mamba_ssm.ops.tilelang.mamba3.mamba3_mimo import mamba3_mimo
from slipstream.compat.mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step import (
    apply_rotary_qk_inference_fwd,
)
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
    """As Mamba-3's own decoding: turned halves of channels, then the step."""
    theta, S = torch.zeros(B, H, A).double(), torch.zeros(B, H, P, N).double()
    key, value, found = torch.zeros(B, R, H, N).double(), torch.zeros(B, H, P).double(), []
    names = "MIMO_V", "MIMO_Z", "MIMO_Out", "Q_bias", "K_bias"
    up, up_z, down, bias_q, bias_k = (x[n].transpose(0, 1) for n in names)
    for t in range(T):
        c, b = (x[n][:, t].expand(B, R, H, N) for n in "QK")
        dt, angles = x["DT"][:, :, t], x["Angles"][:, t]
        c, b, theta = apply_rotary_qk_inference_fwd(
            c, b, theta, angles, dt, bias_q, bias_k, rotate_pairwise=False
        )
        y = torch.empty(B, H, P).double() if gated else torch.empty(B, R, H, P).double()
        mamba3_step_fn(
            S, key, value, x["ADT"][:, :, t] / dt, b, c, x["D"], x["V"][:, t], dt,
            x["Trap"][:, :, t].sigmoid(), up, outproj=down if gated else None, out=y,
            z=x["Z"][:, t] if gated else None, zproj=up_z if gated else None,
        )  # fmt: skip
        key, value = b, x["V"][:, t]
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


def test_mimo_packed_is_its_sequences() -> None:
    x: Any = {n: y[:1] if y.shape[0] == B else y for n, y in mimo_arguments().items()}
    offsets = torch.tensor([0, 4, T], dtype=torch.int32)
    got, *after = mamba3_mimo(**x, **FIXED, return_state=True, cu_seqlens=offsets)
    for i, (begin, end) in enumerate([(0, 4), (4, T)]):
        timed = {n: x[n][:, begin:end] for n in ("Q", "K", "V", "Angles", "Z")}
        timed |= {n: x[n][:, :, begin:end] for n in ("ADT", "DT", "Trap")}
        y, *states = mamba3_mimo(**(x | timed), **FIXED, return_state=True)
        torch.testing.assert_close(got[:, begin:end], y)
        torch.testing.assert_close([s[i : i + 1] for s in after], states)


def test_turns_of_neighbours_with_biases() -> None:
    q, k = torch.randn(2, B, R, H, N).double()
    theta, angles, dt = (
        torch.randn(B, H, A).double(),
        torch.randn(B, H, A).double(),
        torch.rand(B, H),
    )
    bias = torch.randn(R, H, N).double()
    new = theta + math.pi * dt[..., None].double() * angles.tanh()
    for conjugate in (False, True):
        given = q.clone(), k.clone(), theta.clone()
        got = apply_rotary_qk_inference_fwd(
            *given, angles, dt.double(), bias, inplace=True, conjugate=conjugate
        )
        at = (-new if conjugate else new)[:, None]
        torch.testing.assert_close(got, (turned(q + bias, at), turned(k, at), new))
        assert all(x is y for x, y in zip(got, given))


# ---- the module

BLOCK: dict[str, Any] = {"d_model": 12, "d_state": 8, "headdim": 6, "layer_idx": 3}
KINDS = {"siso": {}, "mimo": {"is_mimo": True, "mimo_rank": 2}, "groups": {"ngroups": 2}}


def block(kind: str, normed: bool) -> Mamba3:
    torch.manual_seed(0)
    module = Mamba3(**BLOCK, **KINDS[kind], is_outproj_norm=normed).double()
    with torch.no_grad():
        for x in module.parameters():
            x.add_(0.3 * torch.randn_like(x))
    return module


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_block_is_its_steps(kind: str, normed: bool) -> None:
    """Also from a cache, and in packed sequences."""
    module, x = block(kind, normed), torch.randn(2, 7, 12).double()
    want = module(x)
    assert torch.autograd.grad(want.sum(), list(module.parameters()))
    want = want.detach()
    states = module.allocate_inference_cache(2, 7)
    for t in range(7):
        near(module.step(x[:, t], *states)[0].detach(), want[:, t])
    cache = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    first = module(x[:, :4], inference_params=cache)
    cache.seqlen_offset = 4
    rest = [module(x[:, t : t + 1], inference_params=cache) for t in range(4, 7)]
    near(torch.cat([first, *rest], 1), want)
    packed = module(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, 7, 14]))
    near(packed[0], want.flatten(0, 1))


def near(got: Tensor, want: Tensor) -> None:
    """Decays, steps and gates are float32 there."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_block_is_the_layer() -> None:
    """They have the same parameters, under mamba_ssm's names."""
    ours, theirs = layers.Mamba3(12, head_dim=6, state_size=8).double(), block("siso", False)
    names = {"B_norm.weight": "B_norm", "C_norm.weight": "C_norm"}
    ours.load_state_dict({names.get(n, n): x for n, x in theirs.state_dict().items()})
    x = torch.randn(2, 7, 12).double()
    near(theirs(x), ours(x)[0])
    with pytest.raises(ValueError, match="rope_fraction: want"):
        Mamba3(**BLOCK, rope_fraction=0.3)
    with pytest.raises(ValueError, match="layer_idx: want"):
        Mamba3(12, 8, headdim=6)(x.float(), inference_params=SimpleNamespace(seqlen_offset=0))
