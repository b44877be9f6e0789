"""Calls that matrix.py alone compiles: of kernels that only layers launch, and of flags that
no row of catalog.py has, whose numbers tests hold elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import own_checkout  # noqa: F401
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.conv.inputs import ConvInputs
from slipstream.kernels.conv.op import convolution
from slipstream.kernels.elementwise import mamba_terms
from slipstream.kernels.elementwise.copy_states import copy_states
from slipstream.kernels.elementwise.place_tokens import place_tokens
from slipstream.kernels.linear.context_states import LocalSegments
from slipstream.kernels.linear.dispatch import plan_for
from slipstream.kernels.linear.inputs import ForwardCall, LinearInputs
from slipstream.kernels.linear.op import DEFAULT_CHUNK, Extras, forward_impl
from slipstream.kernels.mixer_step import block_inputs
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import op as norm_op
from slipstream.kernels.projection_step.inputs import WGMMA_COLUMNS, NormedInputs
from slipstream.kernels.time_mix import rwkv7, rwkv7_step
from slipstream.kernels.time_mix.rwkv7_step import LowRankInputs
from slipstream.kernels.time_mix.token_mix import mixed_projections
from slipstream.runtime.consistent import BLOCK
from slipstream.runtime.dispatch import TRITON_OR_EAGER
from slipstream.runtime.rows import row_sums
from slipstream.tools.catalog import (
    ATTENTION,
    EVERY,
    GATE,
    KL,
    LONGER,
    LOSS,
    NORM,
    QKV,
    ROTARY,
    SELECTIVE,
    STATE,
    UNIT,
)
from slipstream.tools.samples import Sample


@dataclass(frozen=True, kw_only=True)
class LayerSample(Sample):
    """A call that layers make and no public operator launches: only the matrix has it."""

    function: Callable[..., Any]

    @property
    def fn(self) -> Callable[..., Any]:
        return self.function


def _mixed(
    x: Tensor,
    mu: Tensor,
    weight: Tensor,
    before: Tensor | None = None,
    packed: bool = False,
    impl: str | None = None,
) -> list[Tensor] | None:
    starts = x.new_zeros(x.shape[1], dtype=torch.uint8) if packed else None
    return mixed_projections(x, before, mu, [[weight]] * len(mu), impl, starts)


def _mixes(count: int, before: bool = True, packed: bool = False) -> LayerSample:
    tensors = f"x=BTD {'before=BTD ' if before else ''}mu={count}D weight=DD"
    variant, options = str(count) if before else "whole", {}
    if packed:
        variant, options = "packed", {"packed": True}
    return LayerSample(
        "token_mix", tensors, variant=variant, tested=False, function=_mixed, options=options
    )


def _rwkv7_terms(
    w: Tensor,
    k: Tensor,
    a: Tensor,
    k_k: Tensor,
    k_a: Tensor,
    v: Tensor | None = None,
    v_gate: Tensor | None = None,
    first_value: Tensor | None = None,
    impl: str | None = None,
) -> list[Tensor]:
    heads = max(k.shape[-1] // 64, 1)
    inputs = rwkv7.TermsInputs(w, k, a, v, v_gate, first_value, k_k, k_a)
    return rwkv7.recurrence_terms(inputs, heads, impl)


def _rwkv7_output(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    r_k: Tensor,
    impl: str | None = None,
) -> Tensor:
    gate, weight, bias = (x.flatten(-2) for x in (gate, weight, bias))
    return rwkv7.output(rwkv7.OutputInputs(v, r, k, v, gate, weight, bias, r_k), 1e-5, impl)


def _low_rank_step(
    x: Tensor, g: Tensor, up: Tensor, g_up: Tensor, impl: str | None = None
) -> Tensor:
    """Of a later layer."""
    with torch.no_grad():
        return rwkv7_step.low_rank(LowRankInputs(x, x, g, x, up, up, g_up, up), impl)


def _projection_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    t = NormedInputs(x, weight, None, residual, norm_weight)
    return norm_op.run_norm(t, NormOptions(1e-5), impl)


@torch.no_grad()
def _projections_of_many(
    x: Tensor, gate: Tensor, up: Tensor, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """As wide as models have them: of few columns the tile is another."""
    weights = [w.repeat(WGMMA_COLUMNS // len(w) + 1, 1) for w in (gate, up)]
    gated = ops.projection_step(x, weights, activation="swiglu", impl=impl)
    return ops.projection_step(x, weights, impl=impl), gated


class _Sends(LocalSegments):
    """A rank's exchange without the messages."""

    @property
    def sends(self) -> bool:
        return True


def _delta_across_ranks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    terms = LinearInputs(q, k, v, g=g, beta=beta)
    call = ForwardCall(q.shape[-1] ** -0.5, DEFAULT_CHUNK, plan_for(terms, impl).impls)
    o, final, *_ = forward_impl(*terms, *call, extras=Extras(exchange=_Sends(1024)))
    return o, final


def _consistent(
    rule: Callable[..., Any], *, impl: str | None = None, **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    return rule(**tensors, output_final_state=True, consistent=True, impl=impl)


def _prefix_states(
    rule: Callable[..., Any],
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    impl: str | None = None,
    **gates: Tensor,
) -> Any:
    rows = q.new_zeros(q.shape[0], -(-q.shape[1] // BLOCK), dtype=torch.int32)
    pool = q.new_zeros(1, *v.shape[2:], k.shape[-1], dtype=torch.float32)
    with torch.no_grad():
        prefix = ops.PrefixStates(pool, rows)
        return rule(q, k, v, **gates, impl=impl, prefix_states=prefix)


def _place_tokens(
    q: Tensor, g: Tensor, qs: Tensor, gs: Tensor, counts: Tensor, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    place_tokens([q[:, None], g[:, None]], [qs, gs], counts.long(), impl)
    return qs, gs


def _read_states(states: Tensor, slots: Tensor, impl: str | None = None) -> Tensor:
    """K first, as kernels index them."""
    rows = torch.empty(slots.shape[0], *states.mT.shape[1:], device=states.device)
    copy_states(states, rows.mT, source_indices=slots, impl=impl)
    return rows


def _write_states(rows: Tensor, states: Tensor, slots: Tensor, impl: str | None = None) -> Tensor:
    copy_states(rows.mT, states, target_indices=slots, impl=impl)
    return states


def _row_sums(x: Tensor, impl: str | None = None) -> Tensor:
    """Windows of rows, and their gradients into the rows."""
    rows, windows = x[0][:, None], x.new_empty(2, x.shape[2], 4)
    index = torch.zeros(8, dtype=torch.int64, device=x.device)
    starts = torch.zeros(x.shape[1] + 1, dtype=torch.int64, device=x.device)
    row_sums(rows, index, None, None, windows.mT, impl=impl)
    row_sums(windows.mT, index, index[:2], index[:1], rows, add=True, impl=impl)
    row_sums(rows, index, starts, None, torch.empty_like(rows), impl=impl)
    return windows


def _block_inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, counts: Tensor, impl: str = ""
) -> block_inputs.Blocks:
    x = torch.cat([y.flatten(1) for y in (q, k, v)], 1)
    weight, rate = x.new_ones(x.shape[1], 4), g.new_ones(g.shape[1], dtype=torch.float32)
    window = x.new_ones(x.shape[0], 4, x.shape[1])
    blocks = [y[:, None].repeat_interleave(BLOCK, 1) for y in (q, k, v, g.float(), beta)]
    tokens = block_inputs.TokenInputs(
        x, weight, None, g, rate, rate, beta, counts.long(), True, False, None
    )
    if impl != "eager" and (reason := block_inputs.unsupported_reason(tokens, q.shape[-1])):
        raise NotImplementedError(reason)
    made = block_inputs.Blocks(window, *blocks)
    block_inputs.block_inputs(tokens, made, impl or TRITON_OR_EAGER)
    return made


def _on_8_bits(q: Tensor, impl: str | None = None, **cache: Tensor) -> Any:
    return ops.flash_attn_with_kvcache(q, **cache, causal=True, impl=impl)  # pyright: ignore[reportArgumentType]


def _of_layer(name: str, function: Any, tensors: str, variant: str = "") -> LayerSample:
    return LayerSample(name, tensors, variant=variant, tested=False, function=function)


def _flagged(op: str, variant: str, tensors: str, states: Any = "", **row: Any) -> LayerSample:
    """A way to call an operator: doctor would take too long if it ran them all."""
    function = getattr(ops, op)
    return LayerSample(op, tensors, states, variant=variant, tested=False, function=function, **row)


def _convolved_heads(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None = None, impl: str | None = None
) -> list[Tensor]:
    """As KDA's layer: heads of q and k are divided by their norm."""
    inputs = ConvInputs(x, weight, None, None, None, cu_seqlens)
    sizes = (64, 64, x.shape[-1] - 128)
    if sizes[-1] <= 0:
        raise NotImplementedError("it has too few channels")
    return convolution(inputs, True, impl or TRITON_OR_EAGER, sizes, 64)


_RWKV7_OUTPUT = "r=BTHV k=BTHV v=BTHV gate=BTHV weight=HV bias=HV r_k=HV"
_RWKV7_TERMS = "w=BTD k=BTD a=BTD k_k=D k_a=D"
_8_BITS = "q=BTHK k_cache=BRHK:codes v_cache=BRHV:codes k_scale=BRH:sum v_scale=BRH:sum"
# as rwkv7's time and channel mix call it, a gated MLP, a context, engines' pools, consistent
# models, their steps, states of prefixes, caches in 8 bits, and flags that no other row has
LAYER_SAMPLES = [
    _mixes(6),
    _mixes(1),
    _of_layer("rwkv7_terms", _rwkv7_terms, _RWKV7_TERMS, "first"),
    _of_layer("rwkv7_terms", _rwkv7_terms, f"{_RWKV7_TERMS} v=BTD v_gate=BTD first_value=BTD"),
    _of_layer("rwkv7_output", _rwkv7_output, _RWKV7_OUTPUT),
    LayerSample(
        "low_rank_step",
        "x=B8 g=BK up=8D g_up=KD",
        tested=False,
        fixed="x g up g_up",
        function=_low_rank_step,
    ),
    LayerSample(
        "projection_step",
        "x=MD gate=CD up=CD",
        variant="many columns",
        tested=False,
        fixed="x gate up",
        function=_projections_of_many,
    ),
    LayerSample(
        "projection_norm_step",
        "x=MD weight=CD residual=MC norm_weight=C",
        tested=False,
        fixed="x weight residual norm_weight",
        function=_projection_norm,
    ),
    _of_layer("delta_rule_across_ranks", _delta_across_ranks, f"{UNIT} g=BTG:gate beta=BTG:beta"),
    _of_layer("place_tokens", _place_tokens, "q=BHK g=BG qs=BTHK gs=BTG counts=B:prefixes"),
    _of_layer("read_states", _read_states, "states=MGVK slots=B:rows"),
    _of_layer("row_sums", _row_sums, "x=BTD"),
    _of_layer("write_states", _write_states, "rows=BGKV:state states=MGVK slots=B:rows"),
    _of_layer(
        "block_inputs", _block_inputs, "q=BHK k=BHK v=BGV g=BG beta=BG:beta counts=B:prefixes"
    ),
    *(
        _of_layer(f"consistent_{x.__name__[6:]}", partial(_consistent, x), tensors)
        for x, tensors in (
            (ops.chunk_simple_gla, f"{QKV} g=BTG:gate"),
            (ops.chunk_gated_delta_rule, f"{UNIT} g=BTG:gate beta=BTG:beta"),
        )
    ),
    *(
        _of_layer(f"prefixes_of_{x.__name__}", partial(_prefix_states, x), tensors)
        for x, tensors in (
            (ops.chunk_gated_delta_rule, f"{UNIT} g=BTG:gate beta=BTG:beta"),
            (ops.chunk_kda, f"{UNIT} g=BTGK:gate beta=BTG:beta"),
            (ops.chunk_simple_gla, f"{QKV} g=BTG:gate"),
            (ops.chunk_gla, f"{QKV} g=BTGK:narrow"),
        )
    ),
    LayerSample(
        "attention_on_8_bits",
        f"{_8_BITS} cache_seqlens=B:prefixes",
        tested=False,
        grouped=False,
        fixed="q k_cache v_cache k_scale v_scale",
        function=_on_8_bits,
    ),
    LayerSample(
        "attention_on_8_bits",
        f"{_8_BITS} cache_seqlens=B:prefixes block_table=B1:rows"
        .replace("codes", "float8").replace("BR", "BM"),
        variant="float8",
        tested=False,
        grouped=False,
        fixed="q k_cache v_cache k_scale v_scale",
        function=_on_8_bits,
    ),
    _of_layer("convolved_heads", _convolved_heads, "x=BTZ weight=ZW"),
    _mixes(6, before=False),
    _mixes(6, before=False, packed=True),
    _flagged("attention", "softcap", f"{ATTENTION} sinks=G",
             options={"softcap": 30.0, "window_size": (60, 9), "causal": False}),
    _flagged("attention", "slopes", f"{ATTENTION} alibi_slopes=G:sum", options={"softcap": 30.0}),
    _flagged("attention", "lengths", f"{LONGER} key_lengths=B:used"),
    _flagged("flash_attn_with_kvcache", "pages",
             "q=BTHK k_cache=BMHK v_cache=BMHV cache_seqlens=B:prefixes block_table=B1:rows "
             "alibi_slopes=H:sum", options={"causal": True, "softcap": 30.0},
             grouped=False, fixed="q k_cache v_cache"),
    _flagged("flash_attn_with_kvcache", "odd pages",
             "q=BTHK k_cache=B9HK v_cache=B9HV cache_seqlens=B:prefixes block_table=B1:rows",
             options={"causal": True}, grouped=False, fixed="q k_cache v_cache"),
    _flagged("flash_attn_with_kvcache", "rows",
             "q=BTHK k_cache=BRHK v_cache=BRHV k=BTHK v=BTHV cache_seqlens=B:prefixes "
             "cache_batch_idx=B:rows cache_leftpad=B:prefixes sinks=H", grouped=False,
             options={"causal": True, "window_size": (60, 0)}, fixed="q k_cache v_cache k v"),
    _flagged("latent_attention", "pages", "q=BTHQ latent=BMQ lengths=B:prefixes table=B1:rows",
             options={"width": 512, "scale": 0.05}, grouped=False, fixed="q latent"),
    _flagged("attnres", "normed",
             "query=D residuals=9BTD rms_weight=D:one output_rms_weight=D:one"),
    _flagged("rms_norm", "residual", f"{NORM} residual=BTD",
             options={"prenorm": True, "zero_centered": True}),
    _flagged("rms_norm_gated", "mamba2", f"{GATE} residual=BTD",
             options={"norm_before_gate": False, "group_size": 64}),
    *[
        LayerSample("mamba_terms", f"u=BTGV dt=BTG A_log=G dt_bias=G{D}", variant=variant,
                    tested=False, grouped=False, function=mamba_terms.mamba_terms)
        for variant, D in (("", " D=GV"), ("again", ""))
    ],
    _flagged("short_convolution", "residual", "x=BTD weight=DW bias=D residual=BTD", "NDW",
             options={"activation": "silu"}),
    _flagged("short_convolution_update", "bias", "x=TD state=TDW weight=DW bias=D residual=TD",
             options={"activation": "silu"}, fixed="x state weight bias residual", written="state"),
    _flagged("selective_scan", "gated", f"{SELECTIVE} D=D z=BTD delta_bias=D", "ND4",
             options={"delta_softplus": True}),
    _flagged("cross_entropy", "every", LOSS, options={**EVERY, "reduction": "none"}),
    _flagged("linear_kl_div", "none", f"{KL} student_bias=Z", fixed="teacher teacher_weight",
             options={"reduction": "none"}),
    *[
        _flagged("matmul", f, "a=TD b=DC bias=C residual=TC scale_a=T:sum scale_b=C:sum",
                 options={"activation": f}, fixed="a b bias residual scale_a scale_b")
        for f in ("relu", "squared_relu", "sigmoid", "silu", "gelu", "gelu_tanh")
    ],
    _flagged("rotary_embedding", "interleaved", ROTARY, fixed="cos sin",
             options={"interleaved": True}),
    _flagged("chunk_kda", "bounded", f"{UNIT} g=BTGK beta=BTG:beta A_log=G dt_bias=GK", STATE,
             options={"use_gate_in_kernel": True, "lower_bound": -5.0}),
]  # fmt: skip
