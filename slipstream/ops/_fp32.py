"""Runs whose result is worked on before it is rounded: float32 inside, one rounding at the end.

An operator that divides, or runs twice, would lose digits if 16-bit inputs gave 16-bit results in
between. It computes in float32 instead and rounds once, to what its user expects.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.common.checks import autocast_dtype, widen
from slipstream.kernels.linear import dispatch, inputs


def result_dtype(q: Tensor) -> torch.dtype:
    """The dtype of an output: q's, or under autocast the one that it casts to."""
    return autocast_dtype(q) or q.dtype


def alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Widens all of them to float64 if one is, else returns them as they are."""
    wide = any(x.dtype == torch.float64 for x in tensors)
    return tuple(x.double() for x in tensors) if wide else tensors


def run_wide(
    terms: inputs.LinearInputs,
    options: dispatch.LinearOptions,
    *,
    recurrent: bool,
    names: Mapping[str, str] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """run() with q, k and v in float32 at least, also under autocast; o is as wide as they are."""
    terms = terms._replace(q=widen(terms.q), k=widen(terms.k), v=widen(terms.v))
    if autocast_dtype(terms.q) is None:
        return dispatch.run(terms, options, recurrent=recurrent, names=names)
    with torch.autocast(terms.q.device.type, enabled=False):
        return dispatch.run(terms, options, recurrent=recurrent, names=names)
