"""Arguments of projection_step, and its formula in float64."""

from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.aot import Compiled, compile_kernel

# rows of x, their width, rows of the weights
SIZES = [(1, 40, (24,)), (1, 33, (20, 7, 70)), (1, 5000, (6, 3)), (3, 40, (24, 16, 5, 1, 64))]
SIZES += [(20, 136, (40,))]


def inputs(M: int, K: int, N: tuple[int, ...], dtype: torch.dtype, **on: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    args: dict[str, Any] = {
        "x": torch.randn(M, K).to(dtype),
        "weights": [(torch.randn(n, K) / K**0.5).to(dtype) for n in N],
    }
    if on.get("biases"):
        args["biases"] = [torch.randn(n).to(dtype) if i % 2 == 0 else None for i, n in enumerate(N)]
    if on.get("norm"):
        args |= {"norm_weight": torch.randn(K).to(dtype), "norm_eps": 1e-5}
    if on.get("zero_centered"):
        args["norm_options"] = {"zero_centered": True}
    if on.get("residual"):
        args["residual"] = torch.randn(M, sum(N))
    return args


def formula(x: Tensor, weights: list[Tensor], biases: Any = None, **options: Any) -> Tensor:
    x = x.double()
    if options.get("norm_eps") is not None:
        weight = options["norm_weight"].double()
        weight = weight + 1 if options.get("norm_options") else weight
        x = torch.rms_norm(x, x.shape[-1:], weight, options["norm_eps"])
    ys = [x @ w.double().t() for w in weights]
    if biases is not None:
        ys = [y if b is None else y + b.double() for y, b in zip(ys, biases)]
    if options.get("activation"):
        y = torch.nn.functional.silu(ys[0]) * ys[1]
    else:
        y = torch.cat(ys, 1)
    return y if options.get("residual") is None else y + options["residual"].double()


def compile_step(tile: Any, tensors: dict[str, str], arch: str = "sm_90", **more: Any) -> Compiled:
    """The kernel with a tile, of several rows of 1024 features; more: constants."""
    flags = {"K": 1024, "ONE": False, "BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GLU": False}
    flags |= {"COLUMNS": more.get("K", 1024), "X_LEFT": tile.x_left}
    flags |= {"NORM": False, "ZERO_CENTERED": False, **more}
    scalars = {"M": "i32", **dict.fromkeys(("row_x", "row_y", "row_residual"), "i32:16")}
    kernel = "slipstream.kernels.projection_step.triton_kernels:projection_step_kernel"
    pointers = {f"{name}_ptr": dtype for name, dtype in tensors.items()}
    return compile_kernel(kernel, pointers, flags, scalars, arch, tile.warps, tile.stages)
