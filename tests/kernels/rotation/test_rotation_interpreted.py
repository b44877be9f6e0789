"""The rotation's kernels under Triton's interpreter, against plain torch in float64."""

import torch

from slipstream.kernels.elementwise import rotation as op
from tests.support.interpreted import error, interpreted
from tests.support.large_angles import check_large_angles


def check(shape: tuple[int, ...], P: int, dtype: torch.dtype) -> None:
    """shape: [..., R, K]."""
    tensors = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    angles = 3 * torch.randn(*shape[:-2], P)
    found, douts = [], None
    for kernels in (True, False):
        leaves = [
            (x if kernels else x.double()).clone().requires_grad_() for x in (*tensors, angles)
        ]
        outs = op._Rotate.apply(*leaves, "triton") if kernels else op.plain(*leaves)
        douts = [torch.randn_like(x) for x in outs] if douts is None else douts
        grads = torch.autograd.grad(outs, leaves, [d.to(x.dtype) for d, x in zip(douts, outs)])
        found.append([*outs, *grads])
    assert found[0][0].dtype == dtype and found[0][2].dtype == torch.float32
    for got, want in zip(*found, strict=True):
        assert error(got.detach(), want.detach()) < (2e-6 if dtype == torch.float32 else 4e-3)


def check_sums() -> None:
    """Scores of tokens that all turn by the same angle do not change with it: of q and k rotated to
    16 bits and the exact gradient of what is made of them, nothing is left of angles' gradient."""
    q, k = (torch.randn(64, 1, 16).bfloat16() for _ in "qk")
    angle = (3 * torch.randn(8)).expand(64, 8).contiguous()
    y_q, y_k, dots = op._forward(q, k, angle, "triton")
    x_q, x_k = y_q.float()[:, 0], y_k.float()[:, 0]
    weights = torch.randn(64, 64)
    d_q, d_k = ((w @ x)[:, None] for w, x in ((weights, x_k), (weights.T, x_q)))
    of_scores = op._forward.backward(q, k, angle, d_q, d_k, torch.zeros_like(dots), "triton")[2]
    assert of_scores.sum(0).abs().max() < 1e-5 * of_scores.abs().sum(0).max()


@interpreted
def test_triton_rotation_matches_torch() -> None:
    check_sums()
    check_large_angles()
    for shape, P in (((2, 19, 1, 8), 4), ((1, 3, 2, 3, 11), 2), ((1, 1, 1, 2), 1)):
        check(shape, P, torch.float32)
        check(shape, P, torch.float16)
    q, k, theta = torch.randn(2, 1, 4), torch.randn(2, 1, 4), torch.randn(2, 2)
    assert op._forward._mismatch((q, q, theta, "triton")) is None
    torch.library.opcheck(op._forward.overload, (q, k, theta, "triton"))
    grads = torch.randn(2, 1, 4), torch.randn(2, 1, 4), torch.randn(2, 1, 1)
    torch.library.opcheck(op._forward.backward.overload, (q, k, theta, *grads, "triton"))
