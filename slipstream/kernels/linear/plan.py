"""Which calls the kernels in Triton and in Gluon take, decided without importing Triton."""

import torch

from slipstream.compiler.compiler_state import KernelKey, arch_of_device
from slipstream.kernels.linear import segments
from slipstream.kernels.linear.inputs import MAX_HEAD_DIM, LinearInputs, not_taken
from slipstream.runtime import backends, guarded_launch
from slipstream.runtime.backends import HAVE_TRITON as HAVE_TRITON
from slipstream.runtime.backends import INTERPRETED as INTERPRETED

# Of LinearInputs. erase and write come to the kernels as a and b (channel_gates.py).
TERMS_TAKEN = [
    *("q", "k", "v", "g", "gv", "beta", "p", "a", "b", "u", "erase", "write"),
    *("initial_state", "cu_seqlens"),
]


def triton_unsupported_reason(terms: LinearInputs) -> str | None:
    """Why the kernels in Triton can't take a call, or None if they can."""
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


_DTYPES = (torch.bfloat16, torch.float16)
_WIDTHS, _WIDTHS_V = (64, 128), (64, 128, 256)  # a tile of the gradients' kernel is as wide as V
# Of K and of V without a transition: two warpgroups with half of the state each, or of 64 columns.
SCALAR_DECAY_WIDTHS = (128, 256)
# Of LinearInputs, those that the kernels read.
SCALAR_DECAY_TERMS = ["q", "k", "v", "g", "initial_state", "cu_seqlens"]
VECTOR_DECAY_TERMS = [*SCALAR_DECAY_TERMS, "u"]
TRANSITION_TERMS = [*SCALAR_DECAY_TERMS, "beta", "a", "b", "erase", "write"]


def per_channel(terms: LinearInputs) -> bool:
    """Whether the kernels of decays per channel, and of free a and b, take it."""
    return terms.transition == "dplr" or (terms.transition == "delta" and terms.decay == "channel")


def is_vector_decay(terms: LinearInputs) -> bool:
    """Whether a call without a transition is one of the vector decay's kernels."""
    return terms.decay == "channel" or terms.gv is not None or terms.u is not None


def sm90_unsupported_reason(terms: LinearInputs) -> str | None:
    """Why the kernels in Gluon can't take a call, or None if they can."""
    q, v = terms.q, terms.v
    if reason := backends.sm90_unsupported(q):
        return reason
    tokens = q.shape[0] * q.shape[1]
    if not tokens:
        return "there are no tokens"
    if terms.transition != "none":
        taken, its_reason = TRANSITION_TERMS, _transition_reason
        tokens += segments.CHUNK * terms.sequences
    elif is_vector_decay(terms):
        taken, its_reason = VECTOR_DECAY_TERMS, _vector_decay_reason
    else:
        taken, its_reason = SCALAR_DECAY_TERMS, _scalar_decay_reason
    if reason := not_taken(terms, taken) or its_reason(terms):
        return reason
    if tokens * v.shape[2] * 2 >= 2**31:
        return "it counts tokens and value heads in 32 bits"
    return guarded_launch.known_failure(lambda: kind(terms, "sm90"), q.device)


def _transition_reason(terms: LinearInputs) -> str | None:
    q, v = terms.q, terms.v
    if terms.erase is not None and (reason := _channel_gates_reason(terms)):
        return reason
    if terms.beta is not None and terms.beta.dim() != 3:
        return "it takes one beta a token"
    others = (terms.k, v, terms.a, terms.b)
    if q.dtype not in _DTYPES or any(x is not None and x.dtype != q.dtype for x in others):
        return f"q, k, v, a and b have to be bfloat16 or float16, and q is {q.dtype}"
    if per_channel(terms) and not {q.shape[-1], v.shape[-1]} <= set(_WIDTHS):
        return f"K and V have to be of {_WIDTHS}"
    if q.shape[-1] not in _WIDTHS or v.shape[-1] not in _WIDTHS_V:
        return f"K has to be one of {_WIDTHS} and V of {_WIDTHS_V}"
    return None


def _channel_gates_reason(terms: LinearInputs) -> str | None:
    """The reason for erase and write, which Triton's kernels do not take: they may get no
    gradient."""
    q, g, v = terms.q, terms.g, terms.v
    if g is None or terms.decay != "channel" or g.dtype not in (*_DTYPES, torch.float32):
        return "it takes a gate a channel of K, of float32 or 16 bits"
    if any(x is not None and x.dtype != q.dtype for x in (terms.erase, terms.write)):
        return f"erase and write have to be of q's dtype, {q.dtype}"
    if v.numel() // max(v.shape[-1], 1) * 2 >= 2**31:
        return "it counts tokens and value heads in 32 bits"
    return None


def _scalar_decay_reason(terms: LinearInputs) -> str | None:
    """No decay, or one a token."""
    q, v = terms.q, terms.v
    if q.dtype not in _DTYPES or terms.k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v have to be bfloat16 or float16, and q is {q.dtype}"
    return _width_reason(terms, SCALAR_DECAY_WIDTHS)


def _vector_decay_reason(terms: LinearInputs) -> str | None:
    q, v, g = terms.q, terms.v, terms.g
    if g is None or terms.decay != "channel":
        return "it takes one gate a channel of K"
    for name, x in (("q", q), ("k", terms.k), ("v", v), ("g", g)):
        if x.dtype != torch.bfloat16:
            return f"q, k, v and g have to be bfloat16, and {name} is {x.dtype}"
    if reason := _width_reason(terms, SCALAR_DECAY_WIDTHS[:1]):
        return reason
    cut = segments.scalar_decay_tokens(terms, 2 * v.shape[2], segments.CHUNK, segments.FORWARD_UNIT)
    if cut is not None and segments.vector_decay_sm90(terms) is None:
        return "few heads of short sequences are faster in Triton's segments"
    return None


def _width_reason(terms: LinearInputs, widths: tuple[int, ...]) -> str | None:
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    if K != V or K not in widths:
        return f"K and V have to be both {' or both '.join(str(x) for x in widths)}"
    return None
