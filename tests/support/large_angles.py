"""Rotations by large angles, in the interpreter and on a device."""

import torch

from slipstream.kernels.elementwise import rotation as op


def check_large_angles(device: str = "cpu") -> None:
    """Those of many tokens add up; cos and sin are as exact as of small ones."""
    q = torch.tensor([1.0, 0.0], device=device).repeat(64, 1, 64)
    for top in (1e5, 2.0**20, 2.0**24):
        angles = torch.cat([torch.linspace(-top, top, 4001), torch.linspace(-10, 10, 95)]).to(
            device
        )
        y, *_ = op._forward(q, q, angles.view(64, 64).contiguous(), "triton")
        want = torch.stack([angles.double().cos(), angles.double().sin()], -1)
        assert (y.view(-1, 2) - want).abs().max() < 4e-7, top
    # where float32 is too coarse for an angle, still of length 1; of what is no angle NaN
    for angle in (1e8, -3e9, 1e20, 3e38):
        y, *_ = op._forward(q, q, angle * torch.rand(64, 64, device=device), "triton")
        assert (y.view(-1, 2).norm(dim=1) - 1).abs().max() < 1e-4, angle
    y, *_ = op._forward(q, q, torch.full((64, 64), torch.inf, device=device), "triton")
    assert y.isnan().all()
