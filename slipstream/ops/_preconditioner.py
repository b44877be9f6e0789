"""The diagonal preconditioner of keys, a decayed sum of their squares, squashed; and the recurrence
of preconditioned keys, which both operators call.
"""

from typing import NamedTuple

from torch import Tensor

from slipstream.kernels.elementwise import preconditioner as op
from slipstream.kernels.elementwise.erase import erase
from slipstream.kernels.elementwise.inputs import PreconditionerInputs as Inputs
from slipstream.kernels.gated_scan.dispatch import run as gated_scan
from slipstream.kernels.linear.channel_gates import takes_as_they_are
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._fp32 import widen
from slipstream.ops._preprocess import expect_inputs, for_value_heads, l2_normalised, scan_impl
from slipstream.runtime.token_ids import expect_offsets

States = tuple[Tensor, Tensor]


class Preconditioner(NamedTuple):
    """g_atk, beta_atk [B, T, H]; centre [H]; the factors are in [1 / x, x]."""

    g_atk: Tensor
    beta_atk: Tensor
    centre: Tensor | None
    x: float
    eps: float

    def keys(
        self,
        k: Tensor,
        state: Tensor | None,
        options: LinearOptions,
        cu_seqlens: Tensor | None,
        inverse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """k by its factors, [B, T, H, K] in k's dtype, the final state [N, H, K], and 1 / the
        factors like k, if wanted."""
        B, T, H, K = k.shape
        if options.context is None and not options.reverse:
            tensors = k, self.g_atk, self.beta_atk, self.centre, state
            impl = op.chosen(scan_impl(options.impl), *tensors)
            if impl is not None:
                if cu_seqlens is not None:
                    expect_offsets("cu_seqlens", cu_seqlens, T)
                inputs = Inputs(*tensors, cu_seqlens, self.x, self.eps)
                return op.precondition(inputs, impl, inverse)
        wide = widen(k)
        squares = widen(self.beta_atk)[..., None] * wide.square()
        sums, final = gated_scan(
            squares.flatten(2),
            widen(self.g_atk)[..., None].expand_as(wide).flatten(2),
            None if state is None else state.flatten(1),
            options.output_final_state,
            options.reverse,
            cu_seqlens,
            scan_impl(options.impl),
            options.context,
        )
        factors = op.squashed(sums.view(B, T, H, K), self.centre, self.x, self.eps)
        by = factors.reciprocal().to(k.dtype) if inverse else None
        final = None if final is None else final.unflatten(1, (H, K))
        return (wide * factors).to(k.dtype), final, by


def run_preconditioned(
    terms: LinearInputs,
    initial_state: States | None,
    preconditioner: Preconditioner,
    options: LinearOptions,
    *,
    normalise: bool,
    recurrent: bool,
) -> tuple[Tensor, States | None]:
    """o, and S and A after the last token; terms: the arguments, without a state."""
    q, k, v, g, beta = terms.q, terms.k, terms.v, terms.g, terms.beta
    assert g is not None and beta is not None
    S, A = initial_state or (None, None)
    expect_inputs(
        terms.cu_seqlens, options.context, q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"),
        g=(g, "B T HV" if g.dim() == 3 else "B T HV K"), beta=(beta, "B T HV"),
        g_atk=(preconditioner.g_atk, "B T H"), beta_atk=(preconditioner.beta_atk, "B T H"),
        log_atk_scale=(preconditioner.centre, "H"),
        **{
            "initial_state[0]": (S, "N HV V K" if options.state_v_first else "N HV K V"),
            "initial_state[1]": (A, "N H K"),
        },
    )  # fmt: skip
    for name, value in (("x", preconditioner.x), ("eps", preconditioner.eps)):
        if not value > 0:
            raise ValueError(f"{name}: want a number above 0, got {value}")
    if normalise:
        q, k = l2_normalised(options.impl, q=q, k=k)
    by_channel = g.dim() == 4 and not recurrent and _as_gates(terms._replace(q=q, k=k), options)
    written, A, by = preconditioner.keys(k, A, options, terms.cu_seqlens, by_channel)
    if by is not None and by_channel:
        (by,) = for_value_heads(v, by)
        rate = beta[..., None].to(k.dtype)  # the same numbers erase and write
        terms = terms._replace(beta=None, erase=rate * by, write=rate.expand(v.shape))
    else:
        q, k, written = for_value_heads(v, q, k, written)
        # what is erased is read before the decay, so that its key has it
        if g.dim() == 3:
            terms = terms._replace(p=(widen(g).exp()[..., None] * k).to(k.dtype))
        else:
            a, b = erase(g, k, impl=options.impl), (beta[..., None] * written).to(k.dtype)
            terms = terms._replace(v=(beta[..., None] * v).to(v.dtype), beta=None, a=a, b=b)
    terms = terms._replace(q=q, k=written, initial_state=S)
    o, S = run(terms, options, recurrent=recurrent)
    return o, None if S is None or A is None else (S, A)


def _as_gates(terms: LinearInputs, options: LinearOptions) -> bool:
    """Whether kernels take erase and write by channel: with keys m k, erase is beta / m."""
    assert terms.beta is not None and terms.g is not None
    if options.context is not None:
        return False
    like = terms.k.new_empty(()).expand(terms.g.shape), terms.v.new_empty(()).expand(terms.v.shape)
    terms = terms._replace(beta=None, erase=like[0], write=like[1])
    return takes_as_they_are(terms, options.impl)
