"""From checked terms to an implementation."""

import torch
from torch import Tensor

from slipstream.core.plan import Candidate, choose
from slipstream.kernels.softmax import eager, op
from slipstream.kernels.softmax.cache import Cache
from slipstream.kernels.softmax.reference import softmax_reference
from slipstream.kernels.softmax.terms import Options, Terms
from slipstream.kernels.softmax.triton.plan import refuses

CANDIDATES = (
    Candidate("triton", "kernels for any CUDA device", refuses=refuses),
    Candidate("eager", "plain torch, on any device"),
    Candidate("reference", "dense, the oracle of the tests", by_name_only=True),
)


def run(
    terms: Terms, options: Options, want_lse: bool, impl: str | None
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, H, DV] in q's dtype and, if wanted, lse [B, H, T], float32 or float64."""
    chosen = choose(CANDIDATES, terms[:3], impl).impl
    if chosen == "reference":
        o, lse = softmax_reference(_wide(terms), options)
        return o.to(terms.q.dtype), lse
    if chosen == "eager" and not want_lse and eager.torch_takes(terms, options):
        return eager.with_torch(terms, options), None
    o, lse = op.softmax(terms, options, chosen)
    return o, lse if want_lse else None


def _wide(terms: Terms) -> Terms:
    floating = {n: x for n, x in terms._asdict().items() if x is not None and x.is_floating_point()}
    return terms._replace(**{name: x.to(terms.dtype) for name, x in floating.items()})


def decode(call: Cache, options: Options, impl: str | None) -> tuple[Tensor, Tensor]:
    """As run, from a cache, without gradients."""
    with torch.no_grad():
        return op.decode(*call, *options, plan_cache(call.q, call.k, call.v, impl))


def plan_cache(q: Tensor, k: Tensor, v: Tensor, impl: str | None) -> str:
    """Which of "triton" and "eager" works on a cache."""
    return choose(CANDIDATES[:2], (q, k, v), impl).impl
