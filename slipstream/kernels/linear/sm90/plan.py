"""Which calls the Gluon kernels take, decided without importing Triton."""

import torch

from slipstream.kernels.linear import inputs, segments
from slipstream.kernels.linear.triton.plan import kind
from slipstream.runtime import backends, guarded_launch

_DTYPES = (torch.bfloat16, torch.float16)
_WIDTHS, _WIDTHS_V = (64, 128), (64, 128, 256)  # a tile of the gradients' kernel is as wide as V
# Of K and of V without a transition: two warpgroups with half of the state each, or of 64 columns.
SCALAR_DECAY_WIDTHS = (128, 256)
# Of LinearInputs, those that the kernels read.
SCALAR_DECAY_TERMS = ["q", "k", "v", "g", "initial_state", "cu_seqlens"]
VECTOR_DECAY_TERMS = [*SCALAR_DECAY_TERMS, "u"]
TRANSITION_TERMS = [*SCALAR_DECAY_TERMS, "beta", "a", "b", "erase", "write"]


def per_channel(terms: inputs.LinearInputs) -> bool:
    """Whether the kernels of decays per channel, and of free a and b, take it."""
    return terms.transition == "dplr" or (terms.transition == "delta" and terms.decay == "channel")


def is_vector_decay(terms: inputs.LinearInputs) -> bool:
    """Whether a call without a transition is one of the vector decay's kernels."""
    return terms.decay == "channel" or terms.gv is not None or terms.u is not None


def unsupported_reason(terms: inputs.LinearInputs) -> str | None:
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
    if reason := inputs.not_taken(terms, taken) or its_reason(terms):
        return reason
    if tokens * v.shape[2] * 2 >= 2**31:
        return "it counts tokens and value heads in 32 bits"
    return guarded_launch.known_failure(lambda: kind(terms, "sm90"), q.device)


def _transition_reason(terms: inputs.LinearInputs) -> str | None:
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


def _channel_gates_reason(terms: inputs.LinearInputs) -> str | None:
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


def _scalar_decay_reason(terms: inputs.LinearInputs) -> str | None:
    """No decay, or one a token."""
    q, v = terms.q, terms.v
    if q.dtype not in _DTYPES or terms.k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v have to be bfloat16 or float16, and q is {q.dtype}"
    return _width_reason(terms, SCALAR_DECAY_WIDTHS)


def _vector_decay_reason(terms: inputs.LinearInputs) -> str | None:
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


def _width_reason(terms: inputs.LinearInputs, widths: tuple[int, ...]) -> str | None:
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    if K != V or K not in widths:
        return f"K and V have to be both {' or both '.join(str(x) for x in widths)}"
    return None
