"""slipstream.compat.mamba_ssm beside the formulas, token by token; Mamba-3 beside its step."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compat import install
from slipstream.compat.mamba_ssm.ops import selective_scan_interface
from slipstream.compat.mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, mamba_inner_ref
from slipstream.compat.mamba_ssm.ops.tilelang.mamba3.mamba3_mimo import mamba3_mimo
from slipstream.compat.mamba_ssm.ops.triton import ssd_combined
from slipstream.compat.mamba_ssm.ops.triton.layernorm_gated import RMSNorm
from slipstream.compat.mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined
from slipstream.compat.mamba_ssm.ops.triton.selective_state_update import (
    selective_state_update,
    selective_state_update_ref,
)
from slipstream.compat.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_installs() -> None:
    with install("mamba_ssm"):
        import mamba_ssm  # pyright: ignore[reportMissingImports]

        assert mamba_ssm.selective_scan_fn is selective_scan_interface.selective_scan_fn
        with pytest.raises(ImportError, match=r"Slipstream has no mamba_ssm\.Mamba2"):
            from mamba_ssm import Mamba2  # noqa: F401
        with pytest.raises(ModuleNotFoundError, match=r"Slipstream has no mamba_ssm\.models"):
            import mamba_ssm.models


def scan_inputs(G: int | None, B: int = 2, D: int = 6, N: int = 3, T: int = 40) -> dict[str, Any]:
    groups = (N, T) if G is None else (G, N, T)
    args = {"u": (B, D, T), "delta": (B, D, T), "A": (D, N), "B": (B, *groups), "C": (B, *groups)}
    args |= {"D": (D,), "z": (B, D, T), "delta_bias": (D,)}
    made = {n: normal(*shape) for n, shape in args.items()}
    return {n: (-x.abs() if n == "A" else x).requires_grad_() for n, x in made.items()}


def test_selective_scan_refuses_by_name() -> None:
    args = scan_inputs(None)
    with pytest.raises(NotImplementedError, match="complex"):
        selective_scan_interface.selective_scan_fn(**{**args, "A": args["A"] * 1j})
    with pytest.raises(TypeError, match="cu_seqlens"):
        selective_scan_interface.selective_scan_fn(**args, cu_seqlens=torch.tensor([0, 40]))


@pytest.mark.parametrize("constant", ["B", "C", "BC"])
def test_inner_with_constant_b_or_c(constant: str) -> None:
    """x_proj has no rows of what is given."""
    D, N, R, M, W = 6, 3, 2, 5, 4
    rows = R + (2 - len(constant)) * N
    shapes = [(2, 2 * D, 30), (D, 1, W), (D,), (rows, D), (D, R), (M, D), (M,)]
    tensors = [normal(*x) for x in shapes]
    options = {"A": -normal(D, N).abs(), **{x: normal(D, N) for x in constant}}
    got, want = (inner(*tensors, **options) for inner in (mamba_inner_fn, mamba_inner_ref))
    torch.testing.assert_close(got, want)
    x_proj = torch.zeros(R + 2 * N, D, dtype=torch.float64)
    kept = [i for i in range(R + 2 * N) if i < R or ("B" if i < R + N else "C") not in constant]
    x_proj[kept] = tensors[3]
    other = mamba_inner_fn(*tensors[:3], x_proj, *tensors[4:], **options)
    torch.testing.assert_close(got, other)


@pytest.mark.parametrize("with_bias", [False, True])
def test_inner_matches_its_parts(with_bias: bool) -> None:
    D, N, R, M, W = 6, 3, 2, 5, 4
    shapes = [(2, 2 * D, 30), (D, 1, W), (D,), (R + 2 * N, D), (D, R), (M, D), (M,)]
    tensors = [normal(*x).requires_grad_() for x in shapes]
    options = {"A": -normal(D, N).abs(), "D": normal(D), "delta_bias": normal(D)}
    if with_bias:
        options |= {"B_proj_bias": normal(N), "C_proj_bias": normal(N)}
    got, want = (inner(*tensors, **options) for inner in (mamba_inner_fn, mamba_inner_ref))
    torch.testing.assert_close(got, want)
    assert got.shape == (2, 30, M)
    grads = [torch.autograd.grad(x.square().sum(), tensors) for x in (got, want)]
    torch.testing.assert_close(*grads)
    norms = {f"{x}_rms_weight": torch.ones(n).double() for x, n in zip("bc", (N, N))}
    other = mamba_inner_fn(*tensors, **options, **norms, dt_rms_weight=torch.ones(D).double())
    assert not torch.allclose(other, got)


@pytest.mark.parametrize("kind", ["mamba1", "heads", "mamba2"])
@pytest.mark.parametrize("unused", [None, -1, 5])
def test_state_update_matches_formula(
    kind: str, unused: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """unused: an index that names no state of the pool; a device finds one past it later."""
    monkeypatch.setattr(f"{selective_state_update.__module__}.expect_below", lambda *args: None)
    indexed = unused is not None
    B, H, P, N, G = 3, 4, 5, 3, 2
    own = (6,) if kind == "mamba1" else (H, P)
    groups = () if kind == "mamba1" else (G,)
    x, z, dt = (normal(B, *own) for _ in range(3))
    A, D, bias = -normal(*own, N).abs(), normal(*own), normal(*own)
    if kind == "mamba2":  # one number a head
        A = -normal(H, 1, 1).abs().expand(H, P, N)
        dt, bias, D = (y[..., :1].expand(y.shape) for y in (dt, bias, D))
    b, c = normal(B, *groups, N), normal(B, *groups, N)
    pool, indices = normal(5, *own, N), None
    states = pool[:B].clone()
    if indexed:
        indices = torch.tensor([4, unused, 0])
        states = pool[[4, 1, 0]]
    given = (x, dt, A, b, c, D, z, bias, True)
    want = selective_state_update_ref(states, *given)
    ours = pool.clone() if indexed else pool[:B].clone()
    got = selective_state_update(ours, *given, indices)
    if not indexed:
        torch.testing.assert_close((got, ours), (want, states))
        return
    torch.testing.assert_close((got[[0, 2]], ours[[4, 0]]), (want[[0, 2]], states[[0, 2]]))
    assert got[1].abs().max() == 0
    assert torch.equal(ours[1:4], pool[1:4])


def test_state_update_says_what_is_wrong() -> None:
    state, x, A, b = normal(2, 6, 3), normal(2, 6), -normal(6, 3).abs(), normal(2, 3)
    with pytest.raises(ValueError, match="state: want shape"):
        selective_state_update(state[:1], x, x, A, b, b)
    with pytest.raises(TypeError, match="state_batch_indices: want int32"):
        selective_state_update(state, x, x, A, b, b, state_batch_indices=torch.zeros(2))
    with pytest.raises(ValueError, match="state_batch_indices"):
        selective_state_update(state, x, x, A, b, b, state_batch_indices=torch.tensor([0, 2]))


def mamba2_inputs(B: int = 2, T: int = 40, H: int = 4, P: int = 5, N: int = 3) -> dict[str, Any]:
    x, z, dt = normal(B, T, H, P), normal(B, T, H, P), normal(B, T, H)
    A, bias = -normal(H).abs(), normal(H)
    b, c = normal(B, T, 2, N), normal(B, T, 2, N)
    return {"x": x, "dt": dt, "A": A, "B": b, "C": c, "D": normal(H), "z": z, "dt_bias": bias}


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 0.9)])
def test_chunk_scan_is_a_selective_scan(limit: tuple[float, float]) -> None:
    args = mamba2_inputs()
    got = mamba_chunk_scan_combined(**args, chunk_size=16, dt_softplus=True, dt_limit=limit)
    torch.testing.assert_close(
        got, ssd_combined.ssd_selective_scan(**args, dt_softplus=True, dt_limit=limit)
    )
    plain = ssd_combined.mamba_chunk_scan(**args, chunk_size=16, dt_softplus=True)
    assert torch.allclose(got, plain) == (limit[0] == 0)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("packed", [None, [0, 40], [0, 7, 25, 40], [0, 9, 40]])
def test_chunk_scan_and_states_follow_their_own_offsets(
    packed: list[int] | None, empty: bool
) -> None:
    """Both kinds of states at once, where seq_idx has the sequences of the offsets and others."""
    args, cuts = mamba2_inputs(B=1), [0, 7, 25, 40]
    options: dict[str, Any] = {"chunk_size": 16, "dt_softplus": True, "return_final_states": True}
    seq_idx = None
    if packed is not None:
        lengths = torch.tensor(packed).diff()
        seq_idx = torch.arange(len(lengths)).repeat_interleave(lengths)[None].int()
    offsets = torch.tensor([*cuts[:2], *cuts[1:], 40] if empty else cuts)
    y, last, states = mamba_chunk_scan_combined(
        **args, **options, seq_idx=seq_idx, cu_seqlens=offsets, return_varlen_states=True
    )
    want = mamba_chunk_scan_combined(**args, **options, seq_idx=seq_idx)
    torch.testing.assert_close((y, last), want)
    alone = mamba_chunk_scan_combined(
        **args, **(options | {"return_final_states": False}), seq_idx=seq_idx,
        cu_seqlens=offsets, return_varlen_states=True,
    )  # fmt: skip
    torch.testing.assert_close(alone, (y, states))
    for s, (begin, end) in enumerate(pairwise(offsets.tolist())):
        cut = {n: v[:, begin:end] if v.dim() > 2 else v for n, v in args.items()}
        alone, want = mamba_chunk_scan_combined(**cut, **options)
        torch.testing.assert_close(states[s : s + 1], want)
        if packed == cuts:
            torch.testing.assert_close(y[:, begin:end], alone)
    with pytest.raises(ValueError, match="cu_seqlens: want offsets"):
        mamba_chunk_scan_combined(**args, **options, return_varlen_states=True)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("mlp", [0, 3])
def test_split_conv1d_scan_is_its_parts(norm: bool, mlp: int) -> None:
    B, T, H, P, G, N, W, O = 2, 20, 4, 5, 2, 3, 4, 7
    dim, conv = H * P, H * P + 2 * G * N
    zxbcdt = normal(B, T, 2 * mlp + 2 * dim + 2 * G * N + H).requires_grad_()
    weight, bias, dt_bias, D = normal(conv, W), normal(conv), normal(H), normal(H)
    A, out, scale = -normal(H).abs(), normal(O, mlp + dim), normal(dim)
    state = normal(B, H, P, N)
    got, final = ssd_combined.mamba_split_conv1d_scan_combined(
        zxbcdt,
        weight,
        bias,
        dt_bias,
        A,
        D,
        16,
        state,
        return_final_states=True,
        rmsnorm_weight=scale if norm else None,
        outproj_weight=out,
        headdim=P,
        ngroups=G,
        norm_before_gate=False,
    )
    zx, z, xBC, dt = zxbcdt.split([2 * mlp, dim, conv, H], -1)
    xBC = F.silu(F.conv1d(F.pad(xBC.mT, (W - 1, 0)), weight[:, None], bias, groups=conv)).mT
    x, b, c = xBC.split([dim, G * N, G * N], -1)
    y, last = mamba_chunk_scan_combined(
        x.unflatten(-1, (H, P)), dt, A, b.unflatten(-1, (G, N)), c.unflatten(-1, (G, N)), 16, D,
        None if norm else z.unflatten(-1, (H, P)), dt_bias, state, dt_softplus=True,
        return_final_states=True,
    )  # fmt: skip
    y = y.flatten(2)
    if norm:
        module = RMSNorm(dim, 1e-6, dim // G, norm_before_gate=False, dtype=torch.float64)
        module.weight.data.copy_(scale)
        y = module(y, z)
    gate, up = zx.chunk(2, -1)
    want = torch.cat([F.silu(gate) * up, y], -1) @ out.T
    torch.testing.assert_close((got, final), (want, last))
    grads = [torch.autograd.grad(t.square().sum(), zxbcdt, retain_graph=True) for t in (got, want)]
    torch.testing.assert_close(*grads)
    with pytest.raises(ValueError, match="headdim: want it"):
        ssd_combined.mamba_split_conv1d_scan_combined(zxbcdt, weight, bias, dt_bias, A, D, 16)


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
