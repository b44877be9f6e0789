"""Calls of kernel_families.py: small ones of public functions, and launches in plain torch."""

from typing import Any

import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.mixer_step.eager import step_eager
from slipstream.tools.catalog import Shape
from tests.support import rwkv7_steps as rwkv7_args

SMALL = Shape(B=1, T=20, H=2, K=8, V=8, Z=10, dtype=torch.float32)


def rwkv7_steps() -> list[Tensor]:
    dtype = torch.get_default_dtype()
    args = rwkv7_args.make(rwkv7_args.Sizes(K=4, dtype=dtype, pool_dtype=dtype))
    y = ops.rwkv7_step(**args, state_indices=torch.tensor(rwkv7_args.INDICES))
    return [y, args["state"]]


def mixer_step(out: Tensor, inputs: Any, counter: Any, options: Any) -> None:
    step_eager(out, inputs, options)
