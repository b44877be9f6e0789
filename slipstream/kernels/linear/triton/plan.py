"""Which calls the Triton kernels take, decided without importing Triton."""

import torch

from slipstream.compiler.compiler_state import KernelKey, arch_of_device
from slipstream.kernels.linear.inputs import MAX_HEAD_DIM, LinearInputs, not_taken
from slipstream.runtime import backends, guarded_launch
from slipstream.runtime.backends import HAVE_TRITON as HAVE_TRITON
from slipstream.runtime.backends import INTERPRETED as INTERPRETED

# Of LinearInputs. erase and write come to the kernels as a and b (channel_gates.py).
TERMS_TAKEN = [
    *("q", "k", "v", "g", "gv", "beta", "p", "a", "b", "u", "erase", "write"),
    *("initial_state", "cu_seqlens"),
]


def unsupported_reason(terms: LinearInputs) -> str | None:
    """Why the kernels can't take this call, or None if they can."""
    if reason := backends.triton_unsupported(terms.q, "q") or not_taken(terms, TERMS_TAKEN):
        return reason
    if terms.v.dtype != terms.q.dtype or terms.k.dtype != terms.q.dtype:
        return "q, k and v differ in dtype"
    if terms.max_head_dim > MAX_HEAD_DIM:  # not split (wide_heads.py)
        return f"K of a recurrence that erases may be at most {MAX_HEAD_DIM}"
    if reason := _missing_kernel_reason(terms) or _shared_memory_reason(terms):
        return reason
    return guarded_launch.known_failure(lambda: kind(terms), terms.q.device)


def _missing_kernel_reason(terms: LinearInputs) -> str | None:
    """Why no kernel in chunks takes terms of these dtypes and shapes."""
    if only_by_token(terms):
        return None
    if any(x is not None and x.dtype != terms.q.dtype for x in (terms.a, terms.b)):
        return "q, a and b differ in dtype"
    if terms.beta is not None and terms.beta.dim() != 3:
        return "it takes one beta a token"
    if terms.p is not None and terms.p.dtype != terms.q.dtype:
        return "q and p differ in dtype"
    if terms.p is not None and terms.decay == "channel":
        return "it has no decay per channel with p"
    return None


def _shared_memory_reason(terms: LinearInputs) -> str | None:
    """Why float32 does not fit: a tile has all channels of at least 16 tokens."""
    if INTERPRETED or terms.q.dtype != torch.float32 or only_by_token(terms):
        return None
    if terms.max_head_dim <= 128:
        return None
    arch = arch_of_device(terms.q.device)
    if arch.shared > 1 << 16:  # sm_75 has no more, and its tiles exceed it
        return None
    return f"float32 of more than 128 channels wants more shared memory than {arch.name} has"


def kind(terms: LinearInputs, impl: str = "triton", by_token: bool = False) -> KernelKey:
    """The calls that share a verdict on the kernels."""
    q, v = terms.q, terms.v
    if by_token or only_by_token(terms):
        return ("linear.step", q.dtype, v.dtype, q.shape[-1], v.shape[-1], terms.decay)
    packed = terms.cu_seqlens is not None and "packed"
    extra = terms.u is not None and "u", terms.gv is not None and "gv"
    if terms.erase is not None:
        extra = (*extra, "channel gates")
    width = (q.dtype, q.shape[-1], v.shape[-1])
    return (f"linear.{impl}", terms.transition, terms.decay, *width, packed, *extra)


def only_by_token(terms: LinearInputs) -> bool:
    """Whether only the step kernel takes these terms: no kernel takes them in chunks."""
    if terms.beta is not None and terms.beta.dim() == 4:
        return True
    rest = (terms.g, terms.u, terms.beta, terms.a)
    return terms.gv is not None and any(x is not None for x in rest)
