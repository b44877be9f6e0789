"""Erase and write by gates of channels (Gated DeltaNet-2): which kernels take them as they are, and
the same recurrence with free a and b for all others.

    S_t = D_t S_{t-1} + k_t (write_t v_t - (erase_t k_t)^T D_t S_{t-1})^T
    a = -exp(g) erase k        b = k        v' = write v

As they are, they cost what the delta rule costs and two tensors more to read. As a and b they cost
two tensors more to write and to read, and two more matrices of scores for each chunk.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.plan import sm90_unsupported_reason


def takes_as_they_are(terms: LinearInputs, impl: str | None) -> bool:
    """Whether a call in chunks with this `impl` needs no as_dplr."""
    if impl not in (None, "sm90") or not terms.q.is_cuda:
        return False
    dtype = checks.autocast_dtype(terms.q)
    if dtype is not None:
        names = ("q", "k", "v", "erase", "write")
        terms = terms._replace(
            **{n: getattr(terms, n).new_empty(()).expand(getattr(terms, n).shape).to(dtype)
               for n in names}
        )  # fmt: skip
    return sm90_unsupported_reason(terms) is None


def _erase(g: Tensor, k: Tensor, erase: Tensor) -> Tensor:
    return (-checks.widen(g).exp() * erase * k).to(k.dtype)


def as_dplr(
    terms: LinearInputs, erase: Callable[[Tensor, Tensor, Tensor], Tensor] = _erase
) -> LinearInputs:
    """With a and b in the place of erase and write, and q and k for each value head.

    Args:
        erase: a of g, k and erase; a kernel's, or plain torch, where kernels have failed.
    """
    assert terms.g is not None and terms.erase is not None and terms.write is not None
    group = checks.plain_int(terms.v.shape[2] // terms.q.shape[2])
    q, k = terms.q, terms.k
    if group > 1:
        q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    a, again = erase(terms.g, k, terms.erase), k
    if torch.compiler.is_compiling():
        _, again = checks.apart((k, k))
    v = (terms.write * terms.v).to(terms.v.dtype)
    return terms._replace(q=q, k=k, v=v, a=a, b=again, erase=None, write=None)


def gradients_of(terms: LinearInputs, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names of `terms`, from those of as_dplr(terms)."""
    assert terms.g is not None and terms.erase is not None and terms.write is not None
    H, group, wide = terms.q.shape[2], terms.v.shape[2] // terms.q.shape[2], terms.dtype
    k = terms.k.to(wide).repeat_interleave(group, dim=2)
    da = -grads["a"].to(wide) * terms.g.to(wide).exp()
    of_erase = da * terms.erase
    dk = grads["k"].to(wide) + grads["b"] + of_erase
    found = dict(grads)
    del found["a"], found["b"]
    found |= {"erase": da * k, "k": dk.unflatten(2, (H, group)).sum(3)}
    found["q"] = grads["q"].to(wide).unflatten(2, (H, group)).sum(3)
    found |= {"write": grads["v"].to(wide) * terms.v, "v": grads["v"].to(wide) * terms.write}
    if "g" in grads:
        found["g"] = grads["g"].to(wide) + of_erase * k
    return {name: x.to(getattr(terms, name).dtype) for name, x in found.items()}
