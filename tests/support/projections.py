"""Arguments of projection_step, and its formula in float64."""

from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.aot import Job
from slipstream.compiler.trace import trace
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import op
from slipstream.kernels.projection_step.inputs import NormedInputs
from slipstream.ops import projection_step

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


def job_of(
    rows: int, *N: int, K: int = 1024, arch: str = "sm_90", dtype: Any = torch.bfloat16, **on: Any
) -> Job:
    """What a call of `rows` rows launches, with weights of N rows each."""

    def call(device: torch.device) -> None:
        x, *weights = (torch.empty(n, K, device=device, dtype=dtype) for n in (rows, *N))
        projection_step(x, weights, **on)

    (job,) = trace(call, arch, backward=False)
    return job


def norm_jobs(K: int = 1024) -> list[Job]:
    """Of 64 rows by a weight of 1024: sums of shares of K, and all of it with its norm."""

    def call(device: torch.device) -> None:
        x, w, h = (
            torch.empty(n, device=device).bfloat16() for n in ((64, K), (1024, K), (64, 1024))
        )
        op.run_norm(NormedInputs(x, w, None, h, h[0]), NormOptions(1e-5), "triton")

    return trace(call, "sm_90", backward=False)
