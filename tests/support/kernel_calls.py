"""Calls of kernel_families.py: small ones of public functions, and launches in plain torch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import ops
from slipstream.kernels.attention import latent
from slipstream.kernels.attention import op as attention_op
from slipstream.kernels.elementwise import (
    copy_states,
    decay_gate,
    embedding,
    mamba_terms,
    place_tokens,
)
from slipstream.kernels.elementwise import erase as erase_op
from slipstream.kernels.elementwise import rotation as rotation_op
from slipstream.kernels.linear import gated_delta_product, gsa
from slipstream.kernels.linear.eager.chunk import chunk_backward, chunk_forward
from slipstream.kernels.linear.eager.recurrent import recurrent_forward
from slipstream.kernels.loss import distill, shard
from slipstream.kernels.loss import eager as loss_eager
from slipstream.kernels.loss.fused import LossInputs
from slipstream.kernels.mixer_step import block_inputs
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import op
from slipstream.kernels.projection_step.inputs import NormedInputs
from slipstream.kernels.running_mean import op as running_mean_op
from slipstream.kernels.running_mean.inputs import MeanInputs
from slipstream.kernels.selective_scan import eager as selective_eager
from slipstream.kernels.time_mix import rwkv7, rwkv7_step, token_mix
from slipstream.runtime import rows
from slipstream.tools.catalog import OPERATORS, Shape
from tests.support import rwkv7_steps as rwkv7_args


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


SMALL = Shape(B=1, T=20, H=2, K=8, V=8, Z=10, dtype=torch.float32)


def sampled(name: str) -> Callable[[], list[Tensor]]:
    """A small call of a row of the catalogue: outputs and gradients."""
    (sample,) = (x for x in OPERATORS if x.name == name)

    def call() -> list[Tensor]:
        args = sample.inputs(SMALL)
        leaves = [
            x.requires_grad_()
            for n, x in args.items()
            if x.is_floating_point() and n not in sample.fixed.split()
        ]
        outs = sample.call(args)
        given = [torch.randn_like(x) for x in outs]
        grads = torch.autograd.grad(outs, leaves, given, allow_unused=True)
        return [*outs, *(x for x in grads if x is not None)]

    call.__name__ = name
    return call


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, inputs, torch.randn_like(out))]


def step() -> list[Tensor]:
    q, k, v = (torch.randn(2, 1, 2, 8) for _ in range(3))
    state = torch.randn(2, 2, 8, 8)
    return [ops.recurrent_step(q, k, v, state=state), state]


def selective() -> list[Tensor]:
    u, delta = leaf(1, 20, 8), leaf(1, 20, 8)
    A, B, C = -torch.rand(8, 4), torch.randn(1, 20, 4), torch.randn(1, 20, 4)
    return gradients(ops.selective_scan(u, delta, A, B, C, delta_softplus=True)[0], u, delta)


def selective_forward(inputs: Any, delta_softplus: bool, for_backward: bool) -> tuple[Tensor, ...]:
    return selective_eager.selective_scan_forward(inputs, delta_softplus)


def mixer_steps() -> list[Tensor]:
    q, k, v, z = (torch.randn(2, 1, 2, 8) for _ in range(4))
    state, g = torch.randn(2, 2, 8, 8), -torch.rand(2, 1, 2)
    return [ops.mixer_step(q, k, v, state=state, g=g, z=z, norm_eps=1e-5), state]


def placed_tokens() -> list[Tensor]:
    q, g, qs, gs = (torch.randn(3, *n) for n in ((1, 2, 8), (1, 2), (5, 2, 8), (5, 2)))
    place_tokens.place_tokens([q, g], [qs, gs], torch.tensor([4, 0, 2]))
    return [qs, gs]


def copied_states() -> list[Tensor]:
    pool, rows = torch.randn(5, 2, 7, 3), torch.empty(3, 2, 3, 7)
    copy_states.copy_states(pool, rows.mT, source_indices=torch.tensor([4, -1, 2]))
    return [rows]


def summed_rows() -> list[Tensor]:
    x, y, index = torch.randn(3, 7, 2).mT, torch.randn(4, 1, 7), torch.tensor([5, 0, -1, 2, 1])
    starts, windows = torch.tensor([0, 2, 2, 5]), torch.empty(2, 7, 2)
    rows.row_sums(x, index, starts, torch.tensor([3, 0, 1]), y, add=True)
    rows.row_sums(y, index[1:] - 1, None, None, windows.mT)
    return [y, windows]


def inputs_of_blocks() -> list[Tensor]:
    N, T, H, K = 3, 5, 2, 64
    sizes = [(N, 4, 3 * H * K), *[(N, T, H, K)] * 3, *[(N, T, H)] * 2]
    blocks = block_inputs.Blocks._make(torch.randn(size) for size in sizes)
    x, weight = torch.randn(N, 3 * H * K), torch.randn(3 * H * K, 4)
    g, A_log, beta = torch.randn(N, H), torch.randn(H), torch.rand(N, H)
    counts = torch.tensor([4, 0, 2])
    tokens = block_inputs.TokenInputs(
        x, weight, None, g, A_log, None, beta, counts, silu=True, doubled=True, lower_bound=None
    )
    block_inputs.block_inputs(tokens, blocks)
    return [*blocks]


def decay_gates() -> list[Tensor]:
    x, A_log, dt_bias = leaf(1, 20, 2, 8), leaf(2), leaf(16)
    return gradients(decay_gate.decay_gate(x, A_log, dt_bias, None), x, A_log, dt_bias)


def terms_of_mamba() -> list[Tensor]:
    u, dt, A_log, dt_bias, D = leaf(1, 20, 2, 8), leaf(1, 20, 2), leaf(2), leaf(2), leaf(2, 8)
    inputs = u, dt, A_log, dt_bias, D
    outs = mamba_terms.mamba_terms(*inputs)
    return [*outs, *torch.autograd.grad(outs, inputs, [torch.randn_like(x) for x in outs])]


def erased() -> list[Tensor]:
    g, k, b = leaf(1, 20, 2, 8), leaf(1, 20, 2, 8), leaf(1, 20, 2, 8)
    return gradients(erase_op.erase(g, k, b), g, k, b)


def rotations() -> list[Tensor]:
    q, k, theta = leaf(1, 20, 2, 1, 8), leaf(1, 20, 2, 1, 8), leaf(1, 20, 2, 3)
    outs = [x.flatten(2) for x in rotation_op.rotate_qk(q, k, theta)]
    return gradients(torch.cat(outs, 2), q, k, theta)


def running_means() -> list[Tensor]:
    k, v, w, u, start = leaf(1, 20, 8), leaf(1, 20, 8), leaf(8), leaf(8), leaf(1, 16)
    impl = running_mean_op.chosen(None, k, v) or "eager"
    o, after = running_mean_op.running_mean(MeanInputs(k, v, w, u, start, None), impl)
    return gradients(
        torch.cat([o, after[:, None].unflatten(2, (2, 8)).flatten(1, 2)], 1), k, v, w, u, start
    )


def token_mixes() -> list[Tensor]:
    x, before, mu, weight = leaf(1, 20, 8), leaf(1, 20, 8), leaf(2, 8), leaf(5, 8)
    found = token_mix.mixed_projections(x, before, mu, [[], [weight]])
    y = F.linear(token_mix.plain(x, before, None, mu)[1], weight) if found is None else found[0]
    return gradients(y, x, before, mu, weight)


def rwkv7_parts() -> list[Tensor]:
    w, k, a, k_k, k_a = leaf(1, 20, 8), leaf(1, 20, 8), leaf(1, 20, 8), leaf(8), leaf(8)
    inputs = rwkv7.TermsInputs(w, k, a, None, None, None, k_k, k_a)
    w_out, k_out, a_out, b_out, *_ = rwkv7.recurrence_terms(inputs, 2)
    read = rwkv7.OutputInputs(a_out, b_out, k_out, w_out, w, k_k, k_a, leaf(2, 4))
    y = rwkv7.output(read, 1e-5)
    return gradients(y, w, k, a, k_k, k_a)


def rwkv7_steps() -> list[Tensor]:
    dtype = torch.get_default_dtype()
    args = rwkv7_args.make(rwkv7_args.Sizes(K=4, dtype=dtype, pool_dtype=dtype))
    y = ops.rwkv7_step(**args, state_indices=torch.tensor(rwkv7_args.INDICES))
    return [y, args["state"]]


def low_rank_products() -> list[Tensor]:
    return [
        rwkv7_step.low_rank(
            rwkv7_args.low_rank_inputs(3, 8, (5, 3, 4, 2), torch.get_default_dtype())
        )
    ]


def token_mix_steps() -> list[Tensor]:
    state = torch.randn(3, 8)
    return [ops.token_mix_step(torch.randn(3, 8), torch.randn(2, 8), state=state), state]


def projections() -> list[Tensor]:
    x, weights = torch.randn(1, 16), [torch.randn(8, 16), torch.randn(5, 16)]
    return [ops.projection_step(x, weights, norm_eps=1e-5)]


def normed_projections() -> list[Tensor]:
    x, weight = torch.randn(40, 16).half(), torch.randn(8, 16).half()
    residual, norm_weight = torch.randn(40, 8), torch.rand(8).half()
    return [*op.run_norm(NormedInputs(x, weight, None, residual, norm_weight), NormOptions(1e-5))]


def conv_update() -> list[Tensor]:
    x, state, weight = torch.randn(3, 8), torch.randn(3, 8, 4), torch.randn(8, 4)
    return [ops.short_convolution_update(x, state, weight), state]


def decode() -> list[Tensor]:
    q, k, v = torch.randn(2, 1, 2, 8), torch.randn(2, 30, 2, 8), torch.randn(2, 30, 2, 8)
    lengths = torch.tensor([7, 30], dtype=torch.int32)
    out = ops.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    assert isinstance(out, Tensor)
    return [out]


def _rows(logits: Tensor, target: Tensor, terms: Any, **made: Any) -> None:
    grad, weight = made.get("grad"), made.get("weight")
    r = loss_eager.rows(logits.float().clone(), target, terms)
    if not made.get("has_lse"):
        made["loss"].copy_(r.loss)
        if made.get("lse") is not None:
            made["lse"].copy_(r.lse)
    if grad is not None:
        grad.copy_(loss_eager.dlogits(r, weight, terms))


LOSS = {
    "loss.triton.cross_entropy:cross_entropy": _rows,
    "loss.triton.cross_entropy:inverse_count": lambda t, i: 1 / (t != i).sum().float(),
    "loss.triton.cross_entropy:scale_": lambda x, s: x.mul_(s),
    "loss.triton.cross_entropy:linear_rows": lambda given, d, *rest: loss_eager.linear_rows(
        given, None if d is None else d.expand(given.target.shape), *rest
    ),
}

LINEAR = {
    "forward": lambda terms, scale, **_: chunk_forward(terms, scale, 16),
    "backward": lambda terms, do, dfinal, scale, **_: chunk_backward(terms, do, dfinal, scale, 16),
}


def update(terms: Any, state: Tensor, indices: Any, scale: float, unit: Any) -> Tensor:
    o, final = recurrent_forward(terms._replace(initial_state=state), scale)
    state.copy_(final)
    return o


def latents() -> list[Tensor]:
    q, cache = torch.randn(2, 1, 2, 40), torch.randn(2, 30, 40)
    lengths = torch.tensor([7, 30], dtype=torch.int32)
    return [latent.latent_attention(q, cache, lengths, width=32, scale=0.2)]


def indexed() -> list[Tensor]:
    return [ops.index(torch.randn(1, 20, 2, 8), torch.randn(1, 20, 8), topk=3, block=4)]


def append() -> list[Tensor]:
    k_cache, v_cache = torch.randn(2, 30, 2, 8), torch.randn(2, 30, 2, 8)
    k, v = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8)
    lengths = torch.tensor([5, 20], dtype=torch.int32)
    attention_op.append(k_cache, v_cache, k, v, lengths, None, None, "triton|eager")
    return [k_cache, v_cache]


def slot_rows() -> list[Tensor]:
    scores, dp, p = torch.randn(1, 6, 2, 6), torch.randn(1, 6, 2, 6), torch.empty(1, 6, 2, 6)
    gsa._softmax(scores, p, "triton|eager")
    gsa._softmax_backward(p, dp, "triton|eager")
    return [p, dp]


def householder_rows() -> list[Tensor]:
    q, out = torch.randn(1, 5, 2, 8), torch.empty(1, 5, 2, 8)
    do, sums = torch.randn(1, 5, 4, 8), torch.empty(1, 5, 4)
    rows, gates, late = gated_delta_product.interleave(
        q, torch.randn(1, 5, 4), do, 3, "triton|eager"
    )
    assert gates is not None and late is not None
    gated_delta_product.deinterleave(rows, gates, 3, out, sums, "triton|eager")
    return [rows, gates, late, out, sums]


def shards() -> list[Tensor]:
    logits, target = torch.randn(6, 10), torch.randint(0, 20, (6,))
    terms, part = LossInputs(-100, 0.1, 20.0, 1e-3, 0.9), shard.Shard(10, 10, 20, None)
    t = shard.RankRows(logits, target, terms, part)
    found = shard.columns(t, "triton|eager")
    given = found.lse + 1, torch.rand(6), torch.empty_like(logits)
    return [*found, shard.dlogits(t, *given, "triton|eager")]


class OnCuda(Tensor):
    """The embedding takes these for ids on a GPU."""

    is_cuda = True


def rows_of_table() -> list[Tensor]:
    ids = torch.randint(0, 9, (2, 5)).as_subclass(OnCuda)
    return [embedding._embedding(ids, torch.randn(9, 8)).as_subclass(Tensor)]


def sharded(logits: Tensor, target: Tensor, terms: Any, **made: Any) -> None:
    here = made["shard"]
    part = shard.Shard(here.first, logits.shape[1], here.size, None)
    t = shard.RankRows(logits, target, terms, part)
    if (grad := made.get("grad")) is not None:
        shard.eager_dlogits(t, made["lse"], made["weight"], grad)
        return
    found = shard.eager_columns(t)
    made["loss"].copy_(found.hit)
    made["lse"].copy_(found.lse)
    here.z_sum.copy_(found.z_sum)


def kl_rows(student: Any, teacher: Any, *rest: Any) -> tuple:
    return distill.kl_rows(student, teacher, *rest)
